"""How fast universes are made: milliseconds for one, with its four redshifts, on one core.

    python benchmarks/universe.py [--rounds 5]

The table shows the median of the rounds with the lowest and highest.
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from cosmoflow_ipu.universe import Universes
from lightning_ipu import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    machine.keep_freed_memory()
    torch.set_num_threads(1)
    table = Table("voxels", "particles per voxel", "ms per universe", title="one thread")
    for cells, oversample in ((32, 1), (32, 2), (64, 1), (64, 2), (128, 1)):
        universes = Universes(cells=cells, oversample=oversample, voxel_size=4.0 if oversample == 2 else 1.0)
        universes.counts(0)
        times = []
        for index in range(arguments.rounds):
            start = time.perf_counter()
            universes.counts(index)
            times.append((time.perf_counter() - start) * 1e3)
        table.add_row(f"{cells}^3", str(oversample**3), f"{statistics.median(times):.1f} ({min(times):.1f} - {max(times):.1f})")
    Console().print(table)


if __name__ == "__main__":
    main()
