"""A run that is stopped and resumed ends with the weights of a run that was not, bit for bit: order, dropout and optimizer go on."""

import tempfile
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import ImageClassifier, IPUStrategy


class StopAfter(pl.Callback):
    """Stops training after a weight update, in the middle of an epoch, and leaves a checkpoint."""

    def __init__(self, update: int, path: Path):
        self.update, self.path = update, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.update:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def train(*callbacks: pl.Callback, checkpoint: Path | None = None) -> tuple[int, dict[str, torch.Tensor]]:
    """Weight updates done, and the weights."""
    pl.seed_everything(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
    data = TensorDataset(torch.randn(128, 1, 8, 8), torch.randint(10, (128,)))
    trainer = pl.Trainer(
        strategy=IPUStrategy(replication_factor=2, gradient_accumulation_factor=2),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(ImageClassifier(network=network), DataLoader(data, batch_size=4, shuffle=True), ckpt_path=checkpoint)
    return trainer.global_step, network.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "stopped.ckpt")
        _, whole = train()
        stopped_at, stopped = train(StopAfter(11, checkpoint))
        updates, resumed = train(checkpoint=checkpoint)
    print(f"stopped after weight update {stopped_at}, resumed until {updates}")
    for what, weights in (("stopped", stopped), ("resumed", resumed)):
        same = all(torch.equal(value, whole[name]) for name, value in weights.items())
        print(f"{what}: weights {'are' if same else 'are not'} those of the run that was not stopped")
