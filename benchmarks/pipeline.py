"""What a pipeline and replicas on two processes gain: time per weight update against the bound, beside one process.

    python benchmarks/pipeline.py [--micro-batches 4 8 16 32] [--stage-ms 2 10 30] [--rounds 3] [--quick]

For every number of micro-batches M and length of a stage the same network of two equal stages is trained by one process with one thread, one
process with two threads, a 1F1B pipeline of two processes with one thread each, and two replicas (M / 2 micro-batches each) on two
processes with one thread each, all in host steps of 4 weight updates. Two processes keep to a core each, as they do by default. The
processes of the pipeline also train, in turn with it, as many updates of the same pipeline written by hand with
torch.distributed.pipelining, and each its own stage alone in a plain loop that exchanges nothing. The bound of the pipeline is (M + S - 1)
micro-batches of the slower of the two stages so trained, S = 2: the bubble makes it (M + S - 1) / M times the stages' work, and the excess of
the slower stage over the mean is their imbalance. Ratios are taken within a round; the median over rounds is shown with the lowest and
highest. A quiet machine with two cores is needed to say anything.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

DEVICE_ITERATIONS = 4
PIPELINE = "1F1B, 2 processes"
VARIANTS = {"one thread": (1, 1), "two threads": (1, 2), PIPELINE: (2, 1), "replicas, 2 processes": (2, 1)}  # processes, threads in each


class Others:
    """What the two processes of the pipeline do besides: the same by hand with PyTorch alone, and their stages apart."""

    def __init__(self, micro_batches: int, width: int) -> None:
        import torch
        from torch import distributed, nn
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        from torch.utils.data import DataLoader, TensorDataset

        self.rank, self.micro_batches, self.barrier = distributed.get_rank(), micro_batches, distributed.barrier
        self.stage = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=1e-3)
        self.data = DataLoader(TensorDataset(torch.randn(64 * micro_batches, width)), batch_size=64 * micro_batches)
        pipeline_stage = PipelineStage(self.stage, self.rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(pipeline_stage, micro_batches, loss_fn=lambda outputs, _: outputs.square().mean())

    def apart(self) -> None:
        """A weight update of this process's stage, with the gradient of its input where another stage would need it."""
        self.optimizer.zero_grad()
        (inputs,) = next(iter(self.data))
        for micro_batch in inputs.split(64):
            loss = self.stage(micro_batch.detach().requires_grad_(self.rank == 1)).square().mean()
            (loss / self.micro_batches).backward()
        self.optimizer.step()

    def by_hand(self) -> None:
        """A weight update of the pipeline by hand."""
        self.optimizer.zero_grad()
        (inputs,) = next(iter(self.data))
        if self.rank == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=inputs)
        self.optimizer.step()

    def seconds(self, update: Callable[[], None]) -> float:
        """How long one takes, the mean of as many as a host step holds, which both processes begin together."""
        self.barrier()
        start = time.perf_counter()
        for _ in range(DEVICE_ITERATIONS):
            update()
        return (time.perf_counter() - start) / DEVICE_ITERATIONS


def measure(variant: str, micro_batches: int, width: int, host_steps: int) -> list[float] | None:
    """Seconds per weight update of one variant, the first host step left out; for the pipeline then by hand and of the first and second stage apart.

    None in the second process.
    """
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ipu import IPUStrategy
    from lightning_ipu.machine import keep_freed_memory

    keep_freed_memory()  # as our commands do
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    processes, threads = VARIANTS[variant]
    torch.set_num_threads(threads)

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
        def __init__(self) -> None:
            self.times: list[list[float]] = []

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.others = Others(micro_batches, width) if variant == PIPELINE else None
            self.start = time.perf_counter()

        def on_train_batch_end(self, *arguments: object) -> None:
            self.times.append([(time.perf_counter() - self.start) / DEVICE_ITERATIONS])
            if self.others is not None:
                self.times[-1] += [self.others.seconds(self.others.by_hand), self.others.seconds(self.others.apart)]
                self.others.barrier()
            self.start = time.perf_counter()

    plan = {"gradient_accumulation_factor": micro_batches, "device_iterations": DEVICE_ITERATIONS}
    if variant == PIPELINE:
        plan["pipeline_splits"] = ["second"]
    elif variant.startswith("replicas"):
        plan |= {"gradient_accumulation_factor": micro_batches // 2, "replication_factor": 2}
    clock = Clock()
    data = DataLoader(TensorDataset(torch.randn(64 * micro_batches, width).repeat(DEVICE_ITERATIONS * host_steps, 1)), batch_size=64)
    trainer = pl.Trainer(
        accelerator="cpu", devices=processes, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[clock], strategy=IPUStrategy(**plan),
    )  # fmt: skip
    trainer.fit(Stack(), data)
    medians = [statistics.median(of_one) for of_one in zip(*clock.times[1:], strict=True)]
    if variant == PIPELINE:
        medians[2:] = trainer.strategy._processes.gathered(medians[2])
    return medians if trainer.is_global_zero else None


def ratio(these: list[float], those: list[float]) -> str:
    """Ratio within a round: median over the rounds, lowest and highest."""
    ratios = [this / that for this, that in zip(these, those, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--stage-ms", type=float, nargs="+", default=[2.0, 10.0, 30.0], help="forward and backward of a stage, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of M = 8 and stages of 10 ms: whether it runs, no figures")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # variant, M, width, host steps: one measurement in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        variant, *numbers = arguments.one
        seconds = measure(variant, *map(int, numbers))
        if seconds is not None:
            print("seconds", *seconds)
        return

    if arguments.quick:
        arguments.micro_batches, arguments.stage_ms, arguments.rounds = [8], [10.0], 1

    from rich.console import Console
    from rich.table import Table

    def run(variant: str, micro_batches: int, width: int, host_steps: int) -> list[float]:
        command = [sys.executable, __file__, "--one", variant, *map(str, (micro_batches, width, host_steps))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(VARIANTS[variant][1])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.exit(done.stderr)
        return [1000 * float(word) for word in next(line for line in done.stdout.splitlines() if line.startswith("seconds")).split()[1:]]

    columns = ("1F1B by hand", "bubble", "imbalance", "bound", "1F1B / bound", "by hand / bound", "replicas / two threads")
    table = Table("stage", "M", *VARIANTS, *columns, title=f"ms per weight update, {os.cpu_count()} cores")
    for milliseconds in arguments.stage_ms:
        width = 512
        for _ in range(3):  # find the width whose stages take about so long
            stage = max(run(PIPELINE, 4, width, 3)[2:]) / 4
            width = max(64, int(width * (milliseconds / stage) ** 0.5) // 16 * 16)
        for micro_batches in arguments.micro_batches:
            rounds = [{variant: run(variant, micro_batches, width, 7) for variant in VARIANTS} for _ in range(arguments.rounds)]
            times = {variant: [one[variant][0] for one in rounds] for variant in VARIANTS}
            by_hand = [one[PIPELINE][1] for one in rounds]
            stages = [one[PIPELINE][2:] for one in rounds]  # of M micro-batches each
            bounds = [max(pair) * (micro_batches + 1) / micro_batches for pair in stages]
            imbalance = statistics.median(max(pair) / statistics.mean(pair) - 1 for pair in stages)
            table.add_row(
                f"{statistics.median(map(max, stages)) / micro_batches:.1f} ms",
                str(micro_batches),
                *(f"{statistics.median(of_one):.0f}" for of_one in (*times.values(), by_hand)),
                f"{1 / (micro_batches + 1):.0%}",
                f"{imbalance:.0%}",
                f"{statistics.median(bounds):.0f}",
                ratio(times[PIPELINE], bounds),
                ratio(by_hand, bounds),
                ratio(times["replicas, 2 processes"], times["two threads"]),
            )
    Console(width=190).print(table)


if __name__ == "__main__":
    main()
