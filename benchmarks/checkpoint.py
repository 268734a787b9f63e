"""What a checkpoint costs: a save through the strategy beside a bare torch.save of weights and optimizer state, and beside a weight update.

    python benchmarks/checkpoint.py [--size 20 50] [--rounds 5]

Both write to the same directory, in turn in one process; ours also writes the position, averages and settings, waits until the file is on the
disk (fsync) and gives it its name only then. A weight update is of batch 16 on 32 x 32 images, with the threads this process may use.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu import IPUStrategy
from resnet_ipu.module import ResNetModule

UPDATES = 8


class Saves(pl.Callback):
    """Times weight updates, and at the end saves in both ways in turn."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.ours, self.bare, self.updates, self._begun = [], [], [], 0.0

    def on_train_batch_start(self, *args) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer, module, *args) -> None:
        self.updates.append(time.perf_counter() - self._begun)
        if trainer.global_step < UPDATES:
            return
        for _ in range(self.rounds):
            begun = time.perf_counter()
            trainer.save_checkpoint(self.folder / "ours.ckpt")
            between = time.perf_counter()
            torch.save([module.state_dict(), trainer.optimizers[0].state_dict()], self.folder / "bare.ckpt")
            self.ours.append(between - begun)
            self.bare.append(time.perf_counter() - between)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["20", "50", "x50"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    table = Table(title=f"one checkpoint, {torch.get_num_threads()} threads")
    for column in ("size", "MB", "torch.save, ms", "ours, ms", "ratio", "a weight update, ms"):
        table.add_column(column)
    for size in arguments.size:
        data = TensorDataset(torch.randn(16 * UPDATES, 3, 32, 32), torch.randint(10, (16 * UPDATES,)))
        with tempfile.TemporaryDirectory() as folder:
            saves = Saves(Path(folder), arguments.rounds)
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = pl.Trainer(strategy=IPUStrategy(), accelerator="cpu", devices=1, max_epochs=1, callbacks=saves, **quiet)
            trainer.fit(ResNetModule(size=size), DataLoader(data, batch_size=16))
            megabytes = (Path(folder) / "ours.ckpt").stat().st_size / 1e6
        bare, ours = ([1000 * value for value in values] for values in (saves.bare, saves.ours))
        table.add_row(
            size,
            f"{megabytes:.1f}",
            f"{statistics.median(bare):.1f} ({min(bare):.1f} - {max(bare):.1f})",
            f"{statistics.median(ours):.1f} ({min(ours):.1f} - {max(ours):.1f})",
            f"{statistics.median(ours) / statistics.median(bare):.2f}",
            f"{1000 * statistics.median(saves.updates[1:]):.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
