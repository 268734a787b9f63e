"""What the training loop costs: CPU microseconds per weight update of a tiny CNN, ours beside a plain loop and stock Lightning.

    python benchmarks/loop_overhead.py [--rounds 7] [--updates 1024]

All variants train the same network on the same DataLoader (batch 8, one thread) and run in turn, round after round, in one process, each
between two runs of the plain loop; the table shows medians over rounds with the lowest and highest, and each variant's ratio to the two
runs around it, since the speed of a shared machine drifts. CPU time, so that a busy machine blurs less. "stripped" is Lightning without
bar, logger, checkpoints; every Lightning variant logs one value per step.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial

import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import IPUStrategy


class TinyCNN(pl.LightningModule):
    """A network small enough for the loop around it to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def loader(updates: int, batch: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(updates * batch, 1, 16, 16, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(0, 10, (len(images),), generator=generator)), batch_size=batch, shuffle=True)


def plain_loop(module: TinyCNN, data: DataLoader) -> float:
    """Train for an epoch; returns CPU seconds."""
    network, optimizer = module.network, torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    start = time.process_time()
    for images, labels in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return time.process_time() - start


class Stopwatch(pl.Callback):
    """CPU seconds from the start of training to its end: what a Trainer needs to set up and tear down is not the loop's cost."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = time.process_time()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.process_time() - self.start


def lightning(module: TinyCNN, data: DataLoader, **options: object) -> float:
    """Train for an epoch under a Trainer; returns CPU seconds."""
    stopwatch = Stopwatch()
    stripped = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[stopwatch], **{**stripped, **options}).fit(module, data)
    return stopwatch.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    folder = tempfile.TemporaryDirectory()
    usual = {"default_root_dir": folder.name, "logger": True, "enable_checkpointing": True, "enable_progress_bar": True}
    variants = {
        "stock Lightning, stripped": lightning,
        "stock Lightning, usual defaults": partial(lightning, **usual),
        "IPUStrategy, D = 1": lambda *run: lightning(*run, strategy=IPUStrategy()),
        "IPUStrategy, D = 64": lambda *run: lightning(*run, strategy=IPUStrategy(device_iterations=64)),
    }

    def microseconds(run: Callable[[TinyCNN, DataLoader], float]) -> float:
        torch.manual_seed(0)
        return run(TinyCNN(), loader(arguments.updates)) / arguments.updates * 1e6

    for run in (plain_loop, *variants.values()):  # each once before its time counts
        microseconds(run)
    plain = [microseconds(plain_loop)]
    times: dict[str, list[float]] = {name: [] for name in variants}
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, run in variants.items():
            times[name].append(microseconds(run))
            plain.append(microseconds(plain_loop))
            ratios[name].append(2 * times[name][-1] / (plain[-2] + plain[-1]))

    columns = ("loop", "us per weight update", "lowest - highest", "ratio to plain", "lowest - highest")
    table = Table(*columns, title="tiny CNN, batch 8, one thread, CPU time")
    for name, values in {"plain PyTorch loop": plain, **times}.items():
        median, relative = statistics.median(values), ratios.get(name, [1.0])
        spread = f"{min(relative):.2f} - {max(relative):.2f}"
        table.add_row(name, f"{median:.0f}", f"{min(values):.0f} - {max(values):.0f}", f"{statistics.median(relative):.2f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
