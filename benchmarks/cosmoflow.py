"""Training speed of `cosmoflow_ipu` beside PyTorch as it is by default: float32, contiguous volumes, glibc's own allocator setting.

    python benchmarks/cosmoflow.py [--size 64 128] [--network cosmoflow-mlperf] [--rounds 3]

The module of `python -m cosmoflow_ipu` with the settings that the command makes (channels last, bfloat16 autocast where the CPU is fast at it, kept
memory) and a hand-written loop train the same network on one random micro-batch, in turn, round after round, each in a fresh process with one
thread. Samples per second of CPU time, so that a busy machine blurs less; the first two weight updates, in which memory is touched for the
first time, are left out. What the loop of the strategy costs: benchmarks/loop_overhead.py. How fast universes are made and files are read:
benchmarks/universe.py and benchmarks/tfrecord.py.
"""

import argparse
import statistics
import subprocess
import sys
import time

SETTINGS = {"64": (4, 6), "128": (1, 5)}  # voxels a side: (micro-batch, weight updates)


def measure(variant: str, size: int, name: str) -> float:
    """Train in this process; returns samples per second of CPU time."""
    import torch
    from torch.nn import functional as F

    from cosmoflow_ipu.module import CosmoFlowModule
    from cosmoflow_ipu.networks import cosmoflow
    from lightning_ipu import machine
    from lightning_ipu.precision.names import resolve

    torch.set_num_threads(1)
    torch.manual_seed(0)
    micro_batch, updates = SETTINGS[str(size)]
    ours = variant == "ours"
    if ours:
        machine.keep_freed_memory()
    model = CosmoFlowModule(network=name, input_size=size) if ours else cosmoflow(name, input_size=size)
    counts = torch.poisson(torch.ones(micro_batch, size, size, size, 4)).to(torch.int16).permute(0, 4, 1, 2, 3)
    counts = counts if ours else counts.contiguous()  # the files' order is channels last already
    targets = 2 * torch.rand(micro_batch, 4) - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    bfloat16 = ours and resolve("auto", accelerator="cpu") == "16.32"
    for update in range(updates):
        if update == 2:
            start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            predictions = model(counts) if ours else model(counts.float().log1p())
        F.mse_loss(predictions.float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (updates - 2) * micro_batch / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--network", default="cosmoflow-mlperf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=("plain", "ours"), help=argparse.SUPPRESS)  # one measurement, in a process of its own
    arguments = parser.parse_args()
    if arguments.variant:
        print(measure(arguments.variant, int(arguments.size[0]), arguments.network))
        return

    from rich.console import Console
    from rich.table import Table

    columns = ("volume", "micro-batch", "PyTorch, float32", "cosmoflow_ipu", "ratio")
    table = Table(*columns, title=f"{arguments.network}, one thread, samples per second of CPU time")
    for size in arguments.size:
        rates: dict[str, list[float]] = {"plain": [], "ours": []}
        for _ in range(arguments.rounds):
            for variant, values in rates.items():
                words = [sys.executable, __file__, "--variant", variant, "--size", size, "--network", arguments.network]
                values.append(float(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
        ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates["plain"], strict=True)]
        cells = [f"{statistics.median(v):.2f} ({min(v):.2f} - {max(v):.2f})" for v in (*rates.values(), ratios)]
        table.add_row(f"{size}^3 x 4", str(SETTINGS[size][0]), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
