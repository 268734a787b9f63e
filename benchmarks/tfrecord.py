"""How fast TFRecord files are read: bytes per second of one thread, files in the page cache, every checksum compared.

    python benchmarks/tfrecord.py [--rounds 5]

Records of CosmoFlow's two sizes, 16.8 MB (128^3 x 4 counts) and 2.1 MB (64^3 x 4), plain and packed with gzip, are read into one array
over and over; the table shows the median of the rounds with the lowest and highest, with the data's checksum compared and without.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_ipu.data import tfrecord
from lightning_ipu.data.tf_example import encode_example, parse_example
from lightning_ipu.data.tfrecord import TFRecords, write_tfrecord


def rate(records: TFRecords, into: np.ndarray) -> float:
    """Read all records once, as training does: checksum, parse, copy; GB/s of counts."""
    start = time.perf_counter()
    for index in range(len(records)):
        into[:] = np.frombuffer(parse_example(records[index])["x"][0], dtype=np.uint8)
    return len(records) * len(into) / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    unpacker = tfrecord._gunzip.__module__
    table = Table("records", "checksum compared, GB/s", "not compared, GB/s", title=f"one thread; gzip by {unpacker}")
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for side, files in ((128, 4), (64, 32)):
            for pack in (False, True):
                paths = [Path(folder) / f"{side}-{pack}-{number}.tfrecord" for number in range(files)]
                for path in paths:
                    counts = generator.poisson(1.0, side**3 * 4).astype("<i2")
                    write_tfrecord(path, [encode_example({"x": counts.tobytes(), "y": np.zeros(4)})], pack=pack)
                into = np.empty(side**3 * 8, dtype=np.uint8)
                cells = []
                for check in (True, False):
                    records = TFRecords(paths, check=check)
                    rate(records, into)  # into the page cache
                    rates = [rate(records, into) for _ in range(arguments.rounds)]
                    cells.append(f"{statistics.median(rates):.2f} ({min(rates):.2f} - {max(rates):.2f})")
                table.add_row(f"{files} of {side}^3 x 4{', gzip' if pack else ''}", *cells)
                for path in paths:
                    path.unlink()
    Console().print(table)


if __name__ == "__main__":
    main()
