"""What a pipeline and replicas on two processes gain: time per weight update against the bound, beside one process.

    python benchmarks/pipeline.py [--micro-batches 4 8 16 32] [--stage-ms 2 10 30] [--rounds 3] [--quick]

For every number of micro-batches M and length of a stage the same network of two equal stages is trained in turn, round after round, by one
process with one thread, one process with two threads, a 1F1B pipeline of two processes with one thread each, and two replicas (M / 2
micro-batches each) on two processes with one thread each. Beside them stands the same pipeline written by hand with
torch.distributed.pipelining. In the same round each stage is also trained alone, by one process with one thread. The bound of the pipeline
is (M + S - 1) micro-batches of the slower of the two stages, S = 2: the bubble makes it (M + S - 1) / M times the stages' work, and the
excess of the slower stage over the mean is their imbalance. Ratios are taken within a round; the median over rounds is shown. A quiet
machine with two cores is needed to say anything.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings

BY_HAND = "1F1B by hand"
VARIANTS = {"one thread": (1, 1), "two threads": (1, 2), "1F1B, 2 processes": (2, 1), BY_HAND: (2, 1), "replicas, 2 processes": (2, 1)}
ALONE = {"first stage": (1, 1), "second stage": (1, 1)}
PROCESSES_AND_THREADS = VARIANTS | ALONE


def measure_by_hand(micro_batches: int, width: int, updates: int) -> float | None:
    """What `measure` measures, of the pipeline that one writes with PyTorch alone; runs under torchrun."""
    import torch
    from torch import distributed, nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.utils.data import DataLoader, TensorDataset

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    network = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])
    stage = PipelineStage(network, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda outputs, _: outputs.square().mean())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    data, times = DataLoader(TensorDataset(torch.randn(64 * micro_batches, width)), batch_size=64 * micro_batches), []
    for _ in range(updates):
        (inputs,) = next(iter(data))
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs)
        optimizer.step()
        times.append(time.perf_counter())
    distributed.destroy_process_group()
    return None if rank else statistics.median(later - earlier for earlier, later in zip(times, times[1:], strict=False))


def measure(variant: str, micro_batches: int, width: int, updates: int) -> float | None:
    """Seconds per weight update of one variant, the first host step left out; None in the second process."""
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ipu import IPUStrategy

    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    processes, threads = PROCESSES_AND_THREADS[variant]
    torch.set_num_threads(threads)

    class Stack(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
            self.first, self.second = nn.Sequential(*blocks[:4]), nn.Sequential(*blocks[4:])
            if variant == "first stage":
                self.second = nn.Identity()
            if variant == "second stage":
                self.first = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if variant == "second stage":
                x = x.requires_grad_()  # as in the pipeline, where the gradient goes on to the first stage
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
        accelerator="cpu", devices=processes, max_epochs=updates, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[clock], strategy=IPUStrategy(**plan),
    )  # fmt: skip
    trainer.fit(Stack(), data)
    steps = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    return statistics.median(steps) if trainer.is_global_zero else None


def ratio(these: list[float], those: list[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--stage-ms", type=float, nargs="+", default=[2.0, 10.0, 30.0], help="forward and backward of a stage, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of M = 8 and stages of 10 ms: whether it runs, no figures")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # variant, M, width, updates: one measurement in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        variant, *numbers = arguments.one
        seconds = measure_by_hand(*map(int, numbers)) if variant == BY_HAND else measure(variant, *map(int, numbers))
        if seconds is not None:
            print("seconds", seconds)
        return

    if arguments.quick:
        arguments.micro_batches, arguments.stage_ms, arguments.rounds = [8], [10.0], 1

    from rich.console import Console
    from rich.table import Table

    def run(variant: str, micro_batches: int, width: int, updates: int) -> float:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if variant == BY_HAND else []
        command = [sys.executable, *launcher, __file__, "--one", variant, *map(str, (micro_batches, width, updates))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(PROCESSES_AND_THREADS[variant][1])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.exit(done.stderr)
        return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("seconds")))

    columns = ("bubble", "imbalance", "bound", "1F1B / bound", "1F1B / by hand", "replicas / two threads", "replicas / one thread")
    table = Table("stage", "M", *VARIANTS, *columns, title=f"ms per weight update, {os.cpu_count()} cores")
    for milliseconds in arguments.stage_ms:
        width = 512
        for _ in range(3):  # find the width whose stages take about so long
            stage = run("second stage", 4, width, 4) * 1000 / 4
            width = max(64, int(width * (milliseconds / stage) ** 0.5) // 16 * 16)
        for micro_batches in arguments.micro_batches:
            times: dict[str, list[float]] = {variant: [] for variant in PROCESSES_AND_THREADS}
            for _ in range(arguments.rounds):
                for variant in PROCESSES_AND_THREADS:
                    times[variant].append(1000 * run(variant, micro_batches, width, 8))
            stages = list(zip(*(times[variant] for variant in ALONE), strict=True))  # of M micro-batches each, round by round
            bounds = [max(pair) * (micro_batches + 1) / micro_batches for pair in stages]
            imbalance = statistics.median(max(pair) / statistics.mean(pair) - 1 for pair in stages)
            replicas = times["replicas, 2 processes"]
            table.add_row(
                f"{statistics.median(map(max, stages)) / micro_batches:.1f} ms",
                str(micro_batches),
                *(f"{statistics.median(times[variant]):.0f}" for variant in VARIANTS),
                f"{1 / (micro_batches + 1):.0%}",
                f"{imbalance:.0%}",
                f"{statistics.median(bounds):.0f}",
                f"{ratio(times['1F1B, 2 processes'], bounds):.2f}",
                f"{ratio(times['1F1B, 2 processes'], times[BY_HAND]):.2f}",
                f"{ratio(replicas, times['two threads']):.2f}",
                f"{ratio(replicas, times['one thread']):.2f}",
            )
    Console(width=190).print(table)


if __name__ == "__main__":
    main()
