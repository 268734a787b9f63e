"""``python -m resnet_ipu convert``: TFRecord shards from folders of images, in parallel, each whole or not at all, read back and compared.

The shards have the features of the original program's ImageNet files (those of Inception's build script), so that either can read them.
An image's bytes are copied as they are, whatever their kind; it is decoded once, since what is cut off or no image must not pass.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cifar_ipu.data import DataFileError, DataNotFoundError
from lightning_ipu.data.tf_example import encode_example, parse_example
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords, write_tfrecord
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write
from lightning_ipu.randomness import mix, name_word
from resnet_ipu.imagenet.dataset import ImageDataset
from resnet_ipu.imagenet.folders import FolderImages, synset_words
from resnet_ipu.imagenet.images import ImageError, decode, image_facts
from resnet_ipu.imagenet.layout import MANIFEST
from resnet_ipu.imagenet.module import ImageNetDataModule

BYTES_PER_SHARD, MOST_SHARDS = 100e6, 1024

_ORDER = name_word("shards")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file to be written: its path, and the numbers of its images in their order."""

    path: Path
    numbers: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Makes the shards of a split; sent to the processes once.

    Args:
        images: of the split.
        classes: names in the order of labels.
        words: what the classes are called in words.
        decodes: whether each image is decoded, which shows whether it is whole; else that has been done.
    """

    images: FolderImages
    classes: list[str]
    words: dict[str, str]
    decodes: bool

    def make(self, shard: Shard) -> tuple[Path, int, bool]:
        """Write a shard unless it is there already and right: its path, its number of records, and whether it was written.

        Raises:
            ImageError: an image cannot be read. TFRecordError: what was written does not read back.
        """
        if shard.path.exists() and self._fault(shard) is None:
            return shard.path, len(shard.numbers), False
        write_tfrecord(shard.path, self._records(shard))
        if (fault := self._fault(shard)) is not None:
            raise TFRecordError(shard.path, None, 0, f"it does not read back as it was written: {fault}")
        return shard.path, len(shard.numbers), True

    def _records(self, shard: Shard) -> Iterator[bytes]:
        for number in shard.numbers.tolist():
            data, label = self.images.read(number)
            name = self.classes[label]
            try:
                if self.decodes:
                    decode(data)
                height, width, kind = image_facts(data)
            except ValueError as error:
                raise ImageError(self.images.name(number), str(error)) from None
            yield encode_example(
                {
                    "image/encoded": data.tobytes(),
                    "image/format": kind.encode(),
                    "image/filename": os.fsencode(self.images.file_name(number)),
                    "image/height": np.array([height]),
                    "image/width": np.array([width]),
                    "image/channels": np.array([3]),
                    "image/colorspace": b"RGB",
                    "image/class/label": np.array([label + 1]),
                    "image/class/synset": os.fsencode(name),
                    "image/class/text": self.words.get(name, name).encode("utf-8", "surrogateescape"),
                    **{f"image/object/bbox/{side}": np.empty(0, np.float32) for side in ("xmin", "ymin", "xmax", "ymax")},
                }
            )

    def _fault(self, shard: Shard) -> str | None:
        """What is wrong with a shard that is there: checksums, number and order of its images, their labels and bytes."""
        try:
            records = TFRecords([shard.path])
            if len(records) != len(shard.numbers):
                return f"{len(records)} records in place of {len(shard.numbers)}"
            for place, number in enumerate(shard.numbers.tolist()):
                features, (data, label) = parse_example(records[place]), self.images.read(number)
                if features["image/class/label"].tolist() != [label + 1] or features["image/encoded"][0] != data.data:
                    return f"record {place} is not {self.images.name(number)}"
        except (TFRecordError, ValueError, KeyError) as error:
            return str(error)
        return None


_writer: Writer | None = None  # of this process, while shards are made


def _begin(writer: Writer) -> None:
    global _writer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to answer
    _writer = writer


def _make(shard: Shard) -> tuple[Path, int, bool]:
    assert _writer is not None
    return _writer.make(shard)


def convert(
    source: Path, target: Path, *, shards: dict[str, int | None], seed: int, workers: int, on_bad_image: Literal["raise", "skip"] = "raise"
) -> None:
    """Make shards of the training and validation images in `source`, and a list of classes and counts beside them.

    Args:
        source: folder with train/ and, perhaps, val/ or validation/.
        target: folder that gets the shards.
        shards: how many files each split becomes, at most one for each image; None goes by the images' bytes.
        seed: of the order in which images are spread over the files.
        workers: processes.
        on_bad_image: raise ends at an image that is none or not whole; skip decodes all images first, and leaves out and lists the bad ones.

    Raises:
        UserError: an image that is none, or a target that holds something else. OSError: a file that cannot be read or written.
    """
    data = ImageNetDataModule(data_dir=source, num_workers=workers, on_bad_image=on_bad_image)
    if "train" not in data.layout.folders:
        raise DataNotFoundError(f"{source} has no folder train/ to convert")
    parts = {split: data.part(split) for split in shards if split in data.layout.folders}
    shards = {split: shards[split] or _shards_for(part) for split, part in parts.items()}
    for split, part in parts.items():
        if shards[split] > len(part):
            raise UserError(f"--{split}-shards {shards[split]:,}: there are {len(part):,} {split} images, and no file may be empty")
    words = synset_words(source)
    manifest = {
        "classes": data.classes,
        "text": {name: words[name] for name in data.classes if name in words},
        "source": os.fspath(source.resolve()),
        "seed": seed,
        "shards": shards,
        "records": None,  # until all are there
    }
    _claim(target, manifest)
    counts: dict[str, int] = {}
    for split, part in parts.items():
        order = np.array(sorted(part.rows.tolist(), key=lambda number: mix(seed, _ORDER, number)))
        tasks = [
            Shard(path=target / f"{split}-{number:05}-of-{shards[split]:05}", numbers=numbers)
            for number, numbers in enumerate(np.array_split(order, shards[split]))
        ]
        counts |= _run(
            Writer(images=part.source, classes=data.classes, words=words, decodes=on_bad_image == "raise"),
            tasks,
            split=split,
            workers=workers,
        )
    with atomic_write(target / MANIFEST, "w") as file:
        file.write(json.dumps({**manifest, "records": counts}, indent=1) + "\n")
    total = sum((target / name).stat().st_size for name in counts)
    print(f"{target}: {sum(counts.values()):,} images in {len(counts):,} shards, {total / 1e6:,.1f} MB, {len(data.classes):,} classes")
    if data.caveat:
        print(data.caveat)


def _shards_for(part: ImageDataset) -> int:
    """Files for a split's images: one per 100 MB or so, at most 1,024 and at most one per image."""
    total = sum(part.source.stamp(number)[0] for number in part.rows.tolist())
    return min(max(1, round(total / BYTES_PER_SHARD)), MOST_SHARDS, len(part))


def _claim(target: Path, manifest: dict[str, Any]) -> None:
    """Note in the target what it gets; refuse it where it holds shards of something else."""
    target.mkdir(parents=True, exist_ok=True)
    path = target / MANIFEST
    before = json.loads(path.read_text()) if path.exists() else {}
    names = ("source", "seed", "shards", "classes")
    if {name: before.get(name) for name in names} != {name: manifest[name] for name in names}:
        found = sorted(name for name in os.listdir(target) if re.match(r"(train|validation)-\d+-of-\d+$", name))
        if found:
            raise DataFileError(f"{target} has shards of something else, such as {found[0]}: give another folder, or remove them")
    for part in target.glob(".*-of-*.part"):  # of a process that was killed
        part.unlink()
    with atomic_write(path, "w") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")


def _run(writer: Writer, tasks: list[Shard], *, split: str, workers: int) -> dict[str, int]:
    """Make the shards; returns how many records each has."""
    counts: dict[str, int] = {}
    kept = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=get_context("fork"), initializer=_begin, initargs=(writer,)) as pool:
        futures = [pool.submit(_make, shard) for shard in tasks]  # before the progress bar has a thread that a fork would lose
        console = Console(stderr=True)
        with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task(f"{split} shards", total=len(tasks))
            try:
                for done in as_completed(futures):
                    path, count, written = done.result()
                    counts[path.name] = count
                    kept += not written
                    progress.advance(bar)
            except BrokenProcessPool:
                raise OSError(
                    "a process that was writing shards was killed, perhaps for want of memory: the same command goes on"
                ) from None
            except BaseException:
                pool.shutdown(cancel_futures=True)  # the shards in hand are finished
                raise
    if kept:
        print(f"{kept:,} of {len(tasks):,} {split} shards were there already; they were compared and are right")
    return dict(sorted(counts.items()))
