"""Your own LightningModule and loader, trained under a plan: 2 replicas x 4 accumulated micro-batches of 8 = 64 samples per weight update.

Neither the module nor the loader knows of it. The plan decides the numbers: the same weights come out of one process, as here, or two.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import IPUStrategy


class Classifier(pl.LightningModule):
    """Tells whether a point of the plane lies in the unit circle."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, points):
        return self.network(points)

    def training_step(self, batch, batch_idx):
        points, inside = batch
        loss = nn.functional.cross_entropy(self(points), inside)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        points, inside = batch
        self.log("val_accuracy", (self(points).argmax(1) == inside).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loader(samples: int, *, shuffle: bool) -> DataLoader:
    points = torch.empty(samples, 2).uniform_(-1.5, 1.5)
    inside = (points.norm(dim=1) < 1).long()
    return DataLoader(TensorDataset(points, inside), batch_size=8, shuffle=shuffle)  # the micro-batch


if __name__ == "__main__":
    pl.seed_everything(1)
    plan = IPUStrategy(replication_factor=2, gradient_accumulation_factor=4, device_iterations=16)
    trainer = pl.Trainer(strategy=plan, accelerator="cpu", devices=1, max_epochs=6, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), loader(2048, shuffle=True), loader(500, shuffle=False))
    print(f"{trainer.global_step} weight updates of 64 samples")  # 6 epochs x 2048 / 64
    print(f"accuracy on 500 other points: {trainer.callback_metrics['val_accuracy']:.3f}")
