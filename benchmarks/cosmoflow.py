"""Training speed of `python -m cosmoflow_ipu` beside PyTorch as it is by default: float32, contiguous volumes, glibc's own allocator setting.

    python benchmarks/cosmoflow.py [--size 64 128] [--network cosmoflow-mlperf] [--rounds 3]

For each size the command and a hand-written loop run in turn, round after round, each in a fresh process, on one random cube over and over:
the same network, micro-batch, optimizer and number of threads, counted from the first weight update to the last. The table shows medians over rounds with the lowest and highest, and the
median of the rounds' ratios. How fast universes are made and files are read: benchmarks/universe.py and benchmarks/tfrecord.py.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

SETTINGS = {"64": (4, 24), "128": (1, 16)}  # voxels a side: (micro-batch, weight updates)


def plain_loop(size: str, name: str) -> float:
    """Train with PyTorch's defaults; returns samples per second."""
    import torch

    from cosmoflow_ipu.networks import network
    from lightning_ipu import machine

    machine.set_threads()
    torch.manual_seed(0)
    micro_batch, updates = SETTINGS[size]
    built = network(name, input_size=int(size))
    optimizer = torch.optim.SGD(built.parameters(), lr=1e-3, momentum=0.9)
    counts = torch.poisson(torch.ones(micro_batch, 4, *[int(size)] * 3)).to(torch.int16)
    targets = 2 * torch.rand(micro_batch, 4) - 1
    start = time.perf_counter()
    for _ in range(updates):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(built(counts.float().log1p()), targets).backward()
        optimizer.step()
    return updates * micro_batch / (time.perf_counter() - start)


def command(size: str, name: str) -> float:
    """Train through the command; returns the samples per second that it reports."""
    micro_batch, updates = SETTINGS[size]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--dataset", "dummy", "--sample-size", size, "--network", name, "--micro-batch-size", str(micro_batch), "--n-valid", "0"]
        options += ["--n-train", str(updates * micro_batch), "--max-steps", str(updates), "--optimizer", "SGD", "--output-dir", folder]
        if name != "resnet":
            options += ["--conv-size", "32" if name == "cosmoflow-mlperf" else "16"]
        words = [sys.executable, "-m", "cosmoflow_ipu", *options]
        run = subprocess.run(words, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"python -m cosmoflow_ipu {' '.join(options)} failed:\n{run.stderr}")
    return float(re.search(r"throughput: ([\d.]+) samples/sec", run.stdout)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--network", default="cosmoflow-mlperf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)  # the hand-written loop, in a process of its own
    arguments = parser.parse_args()
    if arguments.plain:
        print(plain_loop(arguments.size[0], arguments.network))
        return

    from rich.console import Console
    from rich.table import Table

    threads = os.environ.get("OMP_NUM_THREADS", "all")
    columns = ("volume", "micro-batch", "PyTorch, float32, samples/s", "python -m cosmoflow_ipu, samples/s", "ratio")
    table = Table(*columns, title=f"{arguments.network}, OMP_NUM_THREADS {threads}, {os.cpu_count()} cores")
    for size in arguments.size:
        ours, plain = [], []
        for _ in range(arguments.rounds):
            words = [sys.executable, __file__, "--plain", "--size", size, "--network", arguments.network]
            plain.append(float(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
            ours.append(command(size, arguments.network))
        ratios = [mine / theirs for mine, theirs in zip(ours, plain, strict=True)]
        cells = [f"{statistics.median(v):.2f} ({min(v):.2f} - {max(v):.2f})" for v in (plain, ours)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        table.add_row(f"{size}^3 x 4", str(SETTINGS[size][0]), *cells, ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
