"""How fast images become training batches: decoding and cropping beside torchvision's stock pipeline, loader workers, the index.

    python benchmarks/images.py [--images 400] [--side 500] [--rounds 5] [--files 100000]

JPEGs of about 500 x 375 pixels (--side is the longer one) with the spectrum of photographs (amplitude falling as 1/frequency, 4:2:0, quality 90) are written to a
temporary folder. One thread, images per second of CPU time, the pipelines in turn, round after round: torchvision's ImageFolder with
Pillow, RandomResizedCrop(224), flip, ToTensor, Normalize and collation; and this package's data set, which leaves normalisation to the
device, the same with normalisation (--no-eight-bit-transfer), from TFRecord shards, and with --fast-decode. All of them have the allocator setting that the commands make, which helps Pillow most. Tables
show medians with the lowest and highest, and the median of the rounds' ratios to stock.

Then the loader's images per second of wall time over its workers, and the time to list so many files in 1,000 folders, and to start again.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from lightning_ipu import machine
from lightning_ipu.data.index import Index
from resnet_ipu.convert import convert
from resnet_ipu.imagenet.images import MEAN, STD
from resnet_ipu.imagenet.module import ImageNetDataModule
from resnet_ipu.throughput import Batches, loader_rate

BATCH = 32


def photograph(generator: np.random.Generator, *, height: int, width: int) -> Image.Image:
    """A picture with the spectrum of a photograph: three channels, alike for the most part."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    falling = 1 / np.maximum(np.hypot(rows, columns), 1 / max(height, width))
    common, *own = (np.fft.irfft2(falling * np.fft.rfft2(generator.standard_normal((height, width))), s=(height, width)) for _ in range(4))
    channels = [common / common.std() + 0.3 * channel / channel.std() for channel in own]
    return Image.fromarray((110 + 50 * np.stack(channels, axis=-1)).clip(0, 255).astype(np.uint8))


def write_tree(folder: Path, *, images: int, side: int) -> float:
    """Write a training and a validation folder of ten classes; returns kilobytes per training image."""
    generator, size = np.random.default_rng(0), 0
    for number in range(images):
        height, width = (side * 3 // 4, side) if number % 3 else (side, side * 3 // 4)
        path = folder / "train" / f"n{number % 10:08}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(generator, height=height, width=width).save(path, quality=90)
        size += path.stat().st_size
    return size / images / 1000


def stock(folder: Path) -> Callable[[], None]:
    """torchvision's pipeline, as its reference training script has it, over all images once."""
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    images = ImageFolder(folder / "train", transforms.Compose(steps))

    def read() -> None:
        for first in range(0, len(images), BATCH):
            default_collate([images[index] for index in range(first, min(first + BATCH, len(images)))])

    return read


def ours(folder: Path, **options: bool) -> Callable[[], None]:
    """This package's data set, over all images once."""
    part, epoch = ImageNetDataModule(data_dir=folder, **options).part("train"), 0

    def read() -> None:
        nonlocal epoch
        epoch += 1
        for first in range(0, len(part), BATCH):
            part.seeded_batch(range(first, min(first + BATCH, len(part))), seed=0, epoch=epoch)

    return read


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--side", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=100_000, help="that the index is made of")
    arguments = parser.parse_args()
    machine.keep_freed_memory()
    torch.set_num_threads(1)
    console = Console()

    with tempfile.TemporaryDirectory() as name:
        folder, shards = Path(name) / "tree", Path(name) / "shards"
        kilobytes = write_tree(folder, images=arguments.images, side=arguments.side)
        convert(folder, shards, shards={"train": 4, "validation": 1}, seed=0, workers=machine.usable_cores())
        pipelines = {"torchvision, ImageFolder with Pillow": stock(folder), "ours": ours(folder), "ours, TFRecords": ours(shards)}
        pipelines["ours, --no-eight-bit-transfer"] = ours(folder, eight_bit_transfer=False)
        try:
            pipelines["ours, --fast-decode"] = ours(folder, fast_decode=True)
        except ValueError as error:
            console.print(f"without --fast-decode: {error}")
        rates: dict[str, list[float]] = {which: [] for which in pipelines}
        for number in range(arguments.rounds + 1):
            for which, read in pipelines.items():
                begin = time.process_time()
                read()
                if number:  # the first round fills the page cache
                    rates[which].append(arguments.images / (time.process_time() - begin))
        table = Table(
            "pipeline",
            "images/s of a core",
            "beside stock",
            title=f"{arguments.images} JPEGs of {arguments.side} x {arguments.side * 3 // 4}, {kilobytes:.0f} kB each",
        )
        base = next(iter(rates.values()))
        for which, seen in rates.items():
            table.add_row(which, spread(seen, ",.0f"), spread([mine / theirs for mine, theirs in zip(seen, base, strict=True)], ".2f"))
        console.print(table)

        table = Table("workers", "images/s", title="loader, wall time")
        for workers in (0, 1, 2, 4):
            batches = Batches(ImageNetDataModule(data_dir=folder, num_workers=workers), seed=0)
            table.add_row(str(workers), f"{loader_rate(batches):,.0f}")
        console.print(table)

    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "train"
        for number in range(1000):
            (root / f"n{number:08}").mkdir(parents=True)
        for number in range(arguments.files):
            (root / f"n{number % 1000:08}" / f"n{number % 1000:08}_{number}.JPEG").touch()
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            found = len(Index(Path(name), "train").folder_images(root))
            seconds.append(time.perf_counter() - begin)
        console.print(f"{found:,} files in 1,000 folders: listed in {seconds[0]:.2f} s, from the index in {seconds[1]:.3f} s")


if __name__ == "__main__":
    main()
