"""What a pipeline and replicas on two processes gain: time per weight update against the bound, beside one process.

    python benchmarks/pipeline.py [--micro-batches 4 8 16] [--stage-ms 2 10 25] [--rounds 3]

For every number of micro-batches M and length of a stage the same network of two equal stages is trained in turn, round after round, by one
process with one thread, one process with two threads, a 1F1B pipeline of two processes with one thread each, and two replicas (M / 2
micro-batches each) on two processes with one thread each. The bound of the pipeline is (M + S - 1) / (M S) of the one thread's time, S = 2:
its bubble, for stages that are exactly equal. Medians over rounds; a quiet machine with two cores is needed to say anything.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings

VARIANTS = {"one thread": (1, 1), "two threads": (1, 2), "1F1B, 2 processes": (2, 1), "replicas, 2 processes": (2, 1)}


def measure(variant: str, micro_batches: int, width: int, updates: int) -> float | None:
    """Seconds per weight update of one variant, the first host step left out; None in the second process."""
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ipu import IPUStrategy

    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(VARIANTS[variant][1])

    class Stack(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
            self.first, self.second = nn.Sequential(*blocks[:4]), nn.Sequential(*blocks[4:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Clock(pl.Callback):
        def on_train_batch_end(self, *args: object) -> None:
            self.times = [*getattr(self, "times", []), time.perf_counter()]

    plan = {"gradient_accumulation_factor": micro_batches}
    if variant.startswith("1F1B"):
        plan["pipeline_splits"] = ["second"]
    elif variant.startswith("replicas"):
        plan = {"gradient_accumulation_factor": micro_batches // 2, "replication_factor": 2}
    clock = Clock()
    data = DataLoader(TensorDataset(torch.randn(64 * micro_batches, width)), batch_size=64)
    trainer = pl.Trainer(
        accelerator="cpu", devices=VARIANTS[variant][0], max_epochs=updates, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[clock], strategy=IPUStrategy(**plan),
    )  # fmt: skip
    trainer.fit(Stack(), data)
    steps = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    return statistics.median(steps) if trainer.is_global_zero else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--stage-ms", type=float, nargs="+", default=[2.0, 10.0, 25.0], help="forward and backward of a stage, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # variant, M, width, updates: one measurement in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        variant, *numbers = arguments.one
        seconds = measure(variant, *map(int, numbers))
        if seconds is not None:
            print("seconds", seconds)
        return

    from rich.console import Console
    from rich.table import Table

    def run(variant: str, micro_batches: int, width: int, updates: int) -> float:
        command = [sys.executable, __file__, "--one", variant, *map(str, (micro_batches, width, updates))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(VARIANTS[variant][1]), "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.exit(done.stderr)
        return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("seconds")))

    table = Table("stage", "M", *VARIANTS, "1F1B / bound", "replicas / two threads", title=f"ms per weight update, {os.cpu_count()} cores")
    for milliseconds in arguments.stage_ms:
        width = 512
        for _ in range(3):  # find the width whose stages take about so long
            stage = run("one thread", 4, width, 4) * 1000 / 8
            width = max(64, int(width * (milliseconds / stage) ** 0.5) // 16 * 16)
        for micro_batches in arguments.micro_batches:
            times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            for _ in range(arguments.rounds):
                for variant in VARIANTS:
                    times[variant].append(run(variant, micro_batches, width, 8))
            bound = (micro_batches + 1) / (2 * micro_batches)
            ratios = [pipeline / (alone * bound) for pipeline, alone in zip(times["1F1B, 2 processes"], times["one thread"], strict=True)]
            gains = [two / threads for two, threads in zip(times["replicas, 2 processes"], times["two threads"], strict=True)]
            stage = statistics.median(times["one thread"]) * 1000 / (2 * micro_batches)
            cells = [f"{1000 * statistics.median(values):.0f}" for values in times.values()]
            table.add_row(
                f"{stage:.1f} ms", str(micro_batches), *cells, f"{statistics.median(ratios):.2f}", f"{statistics.median(gains):.2f}"
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
