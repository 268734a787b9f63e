"""A data set's files: found where they lie, checked against their published digests, and read."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cifar_ipu.data.facts import DATA_SETS, Layout, known_data_set
from lightning_ipu.errors import UserError


class DataNotFoundError(UserError, FileNotFoundError):
    """A data set is neither on disk nor to be downloaded; the message says which files to put where."""


class DataFileError(UserError):
    """A file of a data set is there but is not what it should be; the message names it and how to place a right one."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where one layout of a data set lies: either its archive, or the path of each of its files."""

    layout: Layout
    archive: Path | None = None
    files: dict[str, Path] = field(default_factory=dict)


def _find(name: str, data_dir: Path) -> _Source | None:
    """Look for a whole set of files in `data_dir` and its usual sub-folders; touches no file's contents."""
    for layout in DATA_SETS[name].layouts:
        for folder in (data_dir / layout.folder, data_dir):
            files = {file: path for file in layout.train + layout.test if (path := _spelled(file, folder)) is not None}
            if len(files) == len(layout.train + layout.test):
                return _Source(layout=layout, files=files)
        if layout.archive is not None and (data_dir / layout.archive).is_file():
            return _Source(layout=layout, archive=data_dir / layout.archive)
    return None


def _spelled(file: str, folder: Path) -> Path | None:
    """A file as it is distributed, packed or unpacked, or under the name that other programs give it; None where it is not there."""
    paths = (folder / spelling for spelling in (file, f"{file}.gz", file.replace("-idx", ".idx")))
    return next((path for path in paths if path.is_file()), None)


def is_on_disk(name: str, *, data_dir: str | Path) -> bool:
    """Whether all files of a data set are there (not whether they are right: that is for `load_images` to find out)."""
    return name == "SAMPLE" or _find(name, Path(data_dir).expanduser()) is not None


def load_images(name: str, *, data_dir: str | Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Read a data set from disk and check it.

    Returns ``{"train": (images, labels), "test": (images, labels)}``: images (N, C, H, W) uint8 in channels_last order, labels (N,) int64.
    Raises `DataNotFoundError` if files are missing and `DataFileError` if one is cut off, damaged or of another data set.
    """
    name, data_dir = known_data_set(name), Path(data_dir).expanduser()
    if name == "SAMPLE":
        with np.load(Path(__file__).parent.parent / "sample" / "fashion_mnist_sample.npz", allow_pickle=False) as arrays:
            return {
                split: _to_tensors(arrays[f"{split}_images"][..., np.newaxis], arrays[f"{split}_labels"].astype(np.int64))
                for split in ("train", "test")
            }
    facts, source = DATA_SETS[name], _find(name, data_dir)
    if source is None:
        raise DataNotFoundError(f"{name} is not in {data_dir}; {how_to_place(name, data_dir)}")
    where = source.archive or next(iter(source.files.values())).parent
    contents = dict(_contents(name, source))
    for file, raw in contents.items():
        expected = facts.contents.get(file)
        if expected is not None and (found := hashlib.md5(raw, usedforsecurity=False).hexdigest()) != expected:
            owners = [other for other, their in DATA_SETS.items() if found == their.contents.get(file)]
            what = f"this is {owners[0]}'s file" if owners else f"contents of {len(raw):,} bytes with md5 {found}, not {expected}"
            raise _bad_file(name, source.files.get(file, where), what)
    splits = {}
    for split, files, counts in (
        ("train", source.layout.train, facts.train_counts),
        ("test", source.layout.test, facts.test_counts),
    ):
        try:
            images, labels = source.layout.parse([contents[file] for file in files])
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise _bad_file(name, where, f"{', '.join(files)}: {error}") from error
        if images.shape != (sum(counts), facts.image_size, facts.image_size, facts.channels) or len(labels) != sum(counts):
            raise _bad_file(name, where, f"{split} images of shape {images.shape} with {len(labels)} labels, {sum(counts):,} expected")
        if not np.array_equal(np.bincount(labels, minlength=len(counts)), counts):
            raise _bad_file(name, where, f"its {split} labels are not those of {name} (images per class differ)")
        splits[split] = _to_tensors(images, labels)
    return splits


def _to_tensors(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def _contents(name: str, source: _Source) -> Iterator[tuple[str, bytes]]:
    """Yield (file name, uncompressed contents) of every file of a source."""
    if source.archive is None:
        for file, path in source.files.items():
            try:
                yield file, gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise _bad_file(name, path, f"cut off or damaged after {path.stat().st_size:,} bytes ({error})") from error
        return
    size, digest = DATA_SETS[name].published[source.archive.name]
    if (found := source.archive.stat().st_size) != size:
        raise _bad_file(name, source.archive, f"{found:,} bytes long, not {size:,}: {'cut off' if found < size else 'another file'}")
    if (found := _md5_of_file(source.archive)) != digest:
        raise _bad_file(name, source.archive, f"md5 {found}, not {digest}")
    wanted = source.layout.train + source.layout.test
    members = {}
    with tarfile.open(source.archive, "r:gz") as archive:
        for member in archive:
            if member.isfile() and (file := Path(member.name).name) in wanted:
                members[file] = archive.extractfile(member).read()
    if missing := [file for file in wanted if file not in members]:
        raise _bad_file(name, source.archive, f"without its member {missing[0]}")
    yield from members.items()


def _md5_of_file(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _bad_file(name: str, path: Path, what: str) -> DataFileError:
    folder = path if path.is_dir() else path.parent
    published = path.name.removesuffix(".gz").replace(".idx", "-idx") + ".gz"
    only = [published] if published in DATA_SETS[name].published else None
    return DataFileError(f"{path}: {what}. Move it away to have {name} downloaded, or replace it: {how_to_place(name, folder, files=only)}")


def distributed_files(layout: Layout) -> list[str]:
    """The files in which a layout is distributed."""
    return [layout.archive] if layout.archive else [f"{file}.gz" for file in layout.train + layout.test]


def how_to_place(name: str, folder: Path, *, files: list[str] | None = None) -> str:
    """The files to fetch by hand, with size and digest, and where they belong."""
    facts = DATA_SETS[name]
    described = [
        f"{file} ({facts.published[file][0]:,} bytes, md5 {facts.published[file][1]})"
        for file in files or distributed_files(facts.layouts[0])
    ]
    unpacked = " (or its unpacked folder)" if facts.layouts[0].archive else ""
    return f"put {', '.join(described)} from {facts.urls[0]} into {folder}{unpacked}"
