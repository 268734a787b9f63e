"""What recomputation saves and costs: peak memory and time per weight update, in one process and in a pipeline of two.

    python benchmarks/recompute.py [--batch 64] [--micro-batches 4] [--rounds 2]

A ResNet-20 on 32 x 32 images is trained with and without `recompute=True` in turn, each run in fresh processes with one thread. Memory is the
peak resident size of the first process (VmHWM) above what it had when its first weight update began.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings

PLACES = {"one process": {}, "1F1B, 2 processes": {"pipeline_schedule": "1F1B"}, "GPipe, 2 processes": {"pipeline_schedule": "GPipe"}}


def resident(field: str) -> float:
    """This process's VmRSS or VmHWM in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))


def measure(place: str, recompute: bool, batch: int, micro_batches: int) -> None:
    """Train four weight updates and print MiB and seconds per update from the first process."""
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ipu import IPUStrategy
    from resnet_ipu.networks import resnet

    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    class Network(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = resnet("20", num_classes=10).to(memory_format=torch.channels_last)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.network(images)

        def training_step(self, images: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self(images[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Watch(pl.Callback):
        def on_train_batch_start(self, *args: object) -> None:
            if not hasattr(self, "times"):
                self.before, self.times = resident("VmRSS"), []

        def on_train_batch_end(self, *args: object) -> None:
            self.times.append(time.perf_counter())

    watch = Watch()
    splits = {} if place == "one process" else {"pipeline_splits": ["network.layer2"]}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if place == "one process" else 2, max_epochs=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
        strategy=IPUStrategy(gradient_accumulation_factor=micro_batches, recompute=recompute, **PLACES[place], **splits),
    )  # fmt: skip
    trainer.fit(Network(), DataLoader(TensorDataset(torch.randn(batch * micro_batches, 3, 32, 32)), batch_size=batch))
    if trainer.is_global_zero:
        steps = [later - earlier for earlier, later in zip(watch.times, watch.times[1:], strict=False)]
        print("measured", resident("VmHWM") - watch.before, statistics.median(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # place, recompute: one measurement in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one[0], arguments.one[1] == "1", arguments.batch, arguments.micro_batches)
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("placement", "peak, MiB", "recomputed", "ratio", "s per update", "recomputed", "ratio", title="ResNet-20, first process")
    for place in PLACES:
        found: dict[str, list[tuple[float, float]]] = {"0": [], "1": []}
        for _ in range(arguments.rounds):
            for recompute, values in found.items():
                command = [sys.executable, __file__, "--one", place, recompute, "--batch", str(arguments.batch)]
                command += ["--micro-batches", str(arguments.micro_batches)]
                done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
                if done.returncode:
                    sys.exit(done.stderr)
                words = next(line.split() for line in done.stdout.splitlines() if line.startswith("measured"))
                values.append((float(words[1]), float(words[2])))
        (memory, seconds), (less, more) = (map(statistics.median, zip(*found[which], strict=True)) for which in ("0", "1"))
        table.add_row(
            place, f"{memory:.0f}", f"{less:.0f}", f"{less / memory:.2f}", f"{seconds:.2f}", f"{more:.2f}", f"{more / seconds:.2f}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
