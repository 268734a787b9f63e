"""A pipeline of two processes: each holds one of the network's two stages, and the micro-batches flow through both.

python examples/pipeline.py      # two processes
python examples/pipeline.py 1    # the same plan in one: it ends with the same weights
"""

import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import ImageClassifier, IPUStrategy


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)),
    )


def data() -> DataLoader:
    """Images whose class is the quarter that is bright."""
    labels = torch.arange(256) % 4
    images = 0.3 * torch.randn(256, 1, 16, 16)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    return DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=True)


def train(processes: int) -> None:
    pl.seed_everything(1)
    module = ImageClassifier(network=network(), learning_rate=0.1)
    strategy = IPUStrategy(pipeline_splits=["network.1"], gradient_accumulation_factor=8, pipeline_schedule="1F1B")  # 2 stages
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=processes,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data())
    if trainer.is_global_zero:
        total = sum(parameter.double().abs().sum() for parameter in module.parameters())
        print(
            f"{processes} process{'es' if processes > 1 else ''}: loss {trainer.callback_metrics['train_loss_epoch']:.4f}, sum of |weights| {total:.5f}"
        )


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
