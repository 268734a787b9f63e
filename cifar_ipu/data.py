"""CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST, each held whole in memory as one uint8 tensor.

A data set is read from the files as they are distributed, checked against their published digests, and downloaded when it is missing.
Images stay uint8 until they are on the device. Random crops and flips are applied to a whole micro-batch at once, with offsets that are a
pure function of (seed, epoch, sample index): no composition of a batch, number of loader workers or of replicas changes an image.

The alternative, a transform and a collation step per image, costs a loader worker or two; batch by batch, none is needed.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import pickle
import queue
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from filelock import FileLock
from jsonargparse import Namespace
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cifar_ipu.augment import ImageAugmentation
from lightning_ipu import machine
from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.errors import UserError

PADDING = 4  # pixels of zero border around an image before its random crop, where nothing else is said
NETWORK_TIMEOUT = 10.0  # seconds without an answer after which a server counts as not there


class DataNotFoundError(UserError, FileNotFoundError):
    """A data set is neither on disk nor to be downloaded; the message says which files to put where."""


class DataFileError(UserError):
    """A file of a data set is there but is not what it should be; the message names it and how to place a right one."""


# --- What is known about each data set before a byte of it is read ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One form in which a data set is distributed: its files, by split, and how their bytes become images.

    ``parse`` takes the contents of one split's files, in order, and returns images (N, H, W, C) uint8 and labels (N,) int64, both numpy.
    """

    folder: str
    archive: str | None
    train: tuple[str, ...]
    test: tuple[str, ...]
    parse: Callable[[list[bytes]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class DataSetFacts:
    """Shape, constants, digests and origin of one data set.

    ``mean`` and ``std`` are those of all pixels of the training set, scaled to [0, 1] (the .2023 often given for CIFAR-10 is a mean of
    per-image deviations). ``published`` holds (bytes, md5) of files as downloaded, ``contents`` the md5 of uncompressed ones.
    """

    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_counts: tuple[int, ...]  # images of each class
    test_counts: tuple[int, ...]
    flip: bool  # whether a mirrored image still shows the same class
    layouts: tuple[Layout, ...] = ()  # the first one is the one that is downloaded
    urls: tuple[str, ...] = ()
    published: dict[str, tuple[int, str]] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)

    @property
    def num_classes(self) -> int:
        return len(self.train_counts)


def _parse_pickles(raw: list[bytes], *, labels: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Python-pickle CIFAR batches: a dictionary with `data` (n, 3072), colour planes one after the other, and a list of labels."""
    batches = [_ArraysOnly(io.BytesIO(batch), encoding="bytes").load() for batch in raw]
    planes = np.concatenate([np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32) for batch in batches])
    return _channels_last(planes), np.concatenate([np.asarray(batch[labels], dtype=np.int64) for batch in batches])


def _parse_records(raw: list[bytes], *, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Binary CIFAR batches: records of 1 label byte (CIFAR-100: coarse, then fine) and 3072 bytes of colour planes."""
    records = np.concatenate([np.frombuffer(batch, dtype=np.uint8).reshape(-1, label_bytes + 3072) for batch in raw])
    return _channels_last(records[:, label_bytes:].reshape(-1, 3, 32, 32)), records[:, label_bytes - 1].astype(np.int64)


def _parse_idx(raw: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """A pair of IDX files: images (magic 2051: count, rows, columns) and labels (magic 2049: count), big-endian headers."""
    (image_magic, count, rows, columns), (label_magic, label_count) = np.frombuffer(raw[0], ">u4", 4), np.frombuffer(raw[1], ">u4", 2)
    if (image_magic, label_magic) != (2051, 2049):
        raise UserError(f"IDX magic numbers {image_magic} and {label_magic}, expected 2051 (images) and 2049 (labels)")
    images, labels = np.frombuffer(raw[0], np.uint8, offset=16), np.frombuffer(raw[1], np.uint8, offset=8)
    if (len(images), len(labels)) != (int(count) * int(rows) * int(columns), label_count):
        raise UserError(f"headers of {count} images and {label_count} labels before {len(images)} and {len(labels)} bytes")
    return images.reshape(count, rows, columns, 1).copy(), labels.astype(np.int64)


def _channels_last(planes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and plain containers; a pickle that asks for anything else is refused, since loading it could run any code."""

    _rebuild_array = np.empty(0).__reduce__()[0]
    _ALLOWED = {("multiarray", "_reconstruct"): _rebuild_array, ("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}

    def find_class(self, module: str, name: str) -> Any:
        package, _, leaf = module.rpartition(".")
        known = self._ALLOWED.get((leaf if package in ("numpy.core", "numpy._core") else module, name))
        if known is None:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which no CIFAR batch contains")
        return known


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

_CIFAR_10 = DataSetFacts(
    channels=3,
    image_size=32,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    train_counts=(5000,) * 10,
    test_counts=(1000,) * 10,
    flip=True,
    layouts=(
        Layout(
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            train=_BATCHES,
            test=("test_batch",),
            parse=partial(_parse_pickles, labels=b"labels"),
        ),
        Layout(
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            train=tuple(f"{batch}.bin" for batch in _BATCHES),
            test=("test_batch.bin",),
            parse=partial(_parse_records, label_bytes=1),
        ),
    ),
    urls=("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
    published={
        "cifar-10-python.tar.gz": (170_498_071, "c58f30108f718f92721af3b95e74349a"),
        "cifar-10-binary.tar.gz": (170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
    },
    contents={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)

_CIFAR_100 = DataSetFacts(
    channels=3,
    image_size=32,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
    train_counts=(500,) * 100,
    test_counts=(100,) * 100,
    flip=True,
    layouts=(
        Layout(
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            train=("train",),
            test=("test",),
            parse=partial(_parse_pickles, labels=b"fine_labels"),
        ),
        Layout(
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            train=("train.bin",),
            test=("test.bin",),
            parse=partial(_parse_records, label_bytes=2),
        ),
    ),
    urls=_CIFAR_10.urls,
    published={
        "cifar-100-python.tar.gz": (169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),
        "cifar-100-binary.tar.gz": (168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
    },
    contents={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
)

_MNIST = DataSetFacts(
    channels=1,
    image_size=28,
    mean=(0.1307,),
    std=(0.3081,),
    train_counts=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test_counts=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    flip=False,
    layouts=(Layout(folder="MNIST/raw", archive=None, train=_IDX_TRAIN, test=_IDX_TEST, parse=_parse_idx),),
    urls=("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    published={
        "train-images-idx3-ubyte.gz": (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        "train-labels-idx1-ubyte.gz": (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        "t10k-images-idx3-ubyte.gz": (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        "t10k-labels-idx1-ubyte.gz": (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    },
    contents={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)

_FASHION_MNIST = DataSetFacts(
    channels=1,
    image_size=28,
    mean=(0.2860,),
    std=(0.3530,),
    train_counts=(6000,) * 10,
    test_counts=(1000,) * 10,
    flip=True,
    layouts=(Layout(folder="FashionMNIST/raw", archive=None, train=_IDX_TRAIN, test=_IDX_TEST, parse=_parse_idx),),
    urls=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    published={
        "train-images-idx3-ubyte.gz": (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        "train-labels-idx1-ubyte.gz": (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        "t10k-images-idx3-ubyte.gz": (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        "t10k-labels-idx1-ubyte.gz": (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    },
    # Distributions compress these files anew (the .gz then has another digest), so that it is the contents that are checked.
    contents={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
)

_SAMPLE = DataSetFacts(
    channels=1,
    image_size=28,
    mean=_FASHION_MNIST.mean,
    std=_FASHION_MNIST.std,
    train_counts=(200,) * 10,
    test_counts=(50,) * 10,
    flip=True,
)

DATA_SETS: dict[str, DataSetFacts] = {
    "CIFAR-10": _CIFAR_10,
    "CIFAR-100": _CIFAR_100,
    "MNIST": _MNIST,
    "FASHION-MNIST": _FASHION_MNIST,
    "SAMPLE": _SAMPLE,
}


def known_data_set(name: str) -> str:
    """Return the table's spelling of a data set's name (case does not matter); raise `ValueError` with the legal names otherwise."""
    if name.upper() not in DATA_SETS:
        raise UserError(f"dataset: {name!r} is unknown; legal are {', '.join(DATA_SETS)}")
    return name.upper()


# --- Files: finding, checking, reading, downloading ---------------------------------------------------------------------------------------


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
            files = {}
            for file in layout.train + layout.test:
                for spelling in (file, f"{file}.gz", file.replace("-idx", ".idx")):
                    if (folder / spelling).is_file():
                        files.setdefault(file, folder / spelling)
            if len(files) == len(layout.train + layout.test):
                return _Source(layout=layout, files=files)
        if layout.archive is not None and (data_dir / layout.archive).is_file():
            return _Source(layout=layout, archive=data_dir / layout.archive)
    return None


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
        with np.load(Path(__file__).parent / "sample" / "fashion_mnist_sample.npz", allow_pickle=False) as arrays:
            return {
                split: _to_tensors(arrays[f"{split}_images"][..., np.newaxis], arrays[f"{split}_labels"].astype(np.int64))
                for split in ("train", "test")
            }
    facts, source = DATA_SETS[name], _find(name, data_dir)
    if source is None:
        raise DataNotFoundError(f"{name} is not in {data_dir}; {_how_to_place(name, data_dir)}")
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
    return DataFileError(
        f"{path}: {what}. Move it away to have {name} downloaded, or replace it: {_how_to_place(name, folder, files=only)}"
    )


def _downloads(layout: Layout) -> list[str]:
    """The files in which a layout is distributed."""
    return [layout.archive] if layout.archive else [f"{file}.gz" for file in layout.train + layout.test]


def _how_to_place(name: str, folder: Path, *, files: list[str] | None = None) -> str:
    """The files to fetch by hand, with size and digest, and where they belong."""
    facts = DATA_SETS[name]
    described = [
        f"{file} ({facts.published[file][0]:,} bytes, md5 {facts.published[file][1]})" for file in files or _downloads(facts.layouts[0])
    ]
    unpacked = " (or its unpacked folder)" if facts.layouts[0].archive else ""
    return f"put {', '.join(described)} from {facts.urls[0]} into {folder}{unpacked}"


def fetch(name: str, *, data_dir: str | Path) -> None:
    """Download a data set that is not on disk: by one process at a time, each file whole and right or not at all.

    Raises `DataNotFoundError` when no server gives the right bytes or `data_dir` cannot be written to.
    """
    name, data_dir = known_data_set(name), Path(data_dir).expanduser()
    if is_on_disk(name, data_dir=data_dir):
        return
    layout = DATA_SETS[name].layouts[0]
    folder = data_dir if layout.archive else data_dir / layout.folder
    try:
        _answering(name, _downloads(layout)[0])  # before anything is written: a run without a network leaves no empty folder behind
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):  # a second process waits here, and then finds the files
            if is_on_disk(name, data_dir=data_dir):
                return
            for file in _downloads(layout):
                if not (folder / file).exists():
                    _download(name, file, folder)
    except OSError as error:
        raise DataNotFoundError(f"{name} is not in {data_dir} and was not downloaded ({error}); {_how_to_place(name, folder)}") from error


def available_data_set(*, data_dir: str | Path, download: bool | None = None) -> str:
    """The data set to use where none is named: CIFAR-10, or the embedded sample where that is not to be had, with a warning.

    Args:
        data_dir: where CIFAR-10 is looked for.
        download: whether it is downloaded where it is missing; None is no, and says how to have it downloaded.
    """
    if is_on_disk("CIFAR-10", data_dir=data_dir):
        return "CIFAR-10"
    reason = "is downloaded only where it is named" if download is None else "must not be downloaded"
    if download:
        try:
            fetch("CIFAR-10", data_dir=data_dir)
            return "CIFAR-10"
        except DataNotFoundError:
            reason = "cannot be downloaded"
    rank_zero_warn(
        f"no data set is named, CIFAR-10 is not in {data_dir} and {reason}: this run uses a sample, 2,000 + 500 Fashion-MNIST images"
    )
    return "SAMPLE"


def settle_data_set(settings: Namespace) -> None:
    """Name the data set in an `ImageDataModule`'s settings where they leave it open: a command downloads CIFAR-10 where it can."""
    if settings.dataset is None and settings.synthetic is None:
        settings.dataset = available_data_set(data_dir=Path(settings.data_dir).expanduser(), download=settings.download)


def _answering(name: str, file: str) -> None:
    """Raise `OSError` with each server's reason if none of a data set's servers offers the file."""
    failures = []
    for base in DATA_SETS[name].urls:
        try:
            return _open_url(base + file).close()
        except (OSError, http.client.HTTPException) as error:
            failures.append(_failure(base, error))
    raise OSError("; ".join(failures))


def _failure(base: str, error: Exception) -> str:
    reason = error.reason if type(error) is urllib.error.URLError else error  # without the "<urlopen error ...>" around it
    return f"{urllib.parse.urlsplit(base).netloc}: {reason}"


def _download(name: str, file: str, folder: Path) -> None:
    """Fetch one file from the first server that gives the right bytes; `OSError` says what each of them did instead."""
    facts = DATA_SETS[name]
    size, expected = facts.published[file]
    partial_file = folder / f"{file}.part"  # in the same folder, so that the final rename is atomic; written under the lock
    failures = []
    for base in facts.urls:
        digest, received = hashlib.md5(usedforsecurity=False), 0
        try:
            with _open_url(base + file) as response, partial_file.open("wb") as out:
                rank_zero_info(f"Downloading {base + file} ({size / 1e6:.1f} MB) into {folder}")
                while block := response.read(1 << 18):
                    out.write(block)
                    digest.update(block)
                    received += len(block)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != expected:
                raise OSError(f"{received:,} bytes with md5 {digest.hexdigest()} came instead of {size:,} bytes with md5 {expected}")
            os.replace(partial_file, folder / file)
            return
        except (OSError, http.client.HTTPException) as error:
            failures.append(_failure(base, error))
        finally:
            partial_file.unlink(missing_ok=True)
    raise OSError("; ".join(failures))


def _open_url(url: str) -> Any:
    """Open a URL within the timeout, the look-up of the host's name included (which urllib's own timeout does not cover)."""
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0"}), timeout=NETWORK_TIMEOUT))
        except Exception as error:  # handed over to the waiting thread
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=NETWORK_TIMEOUT)
    except queue.Empty:
        raise TimeoutError(f"no answer within {NETWORK_TIMEOUT:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


# --- Randomness as a function of names ----------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def _mix(state: Any) -> Any:
    """Finalise a 64-bit state, a Python int or a uint64 array, as splitmix64 does (Steele, Lea and Flood, OOPSLA 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def random_words(*key: int, indices: np.ndarray) -> np.ndarray:
    """64 random bits for each index, a pure function of the integers in `key` and the index: (N,) integers -> (N,) uint64."""
    state = 0
    for part in key:
        state = _mix(state ^ (part & _MASK))
    return _mix(indices.astype(np.uint64) ^ np.uint64(state))


_SPLIT, _PATTERNS, _NOISE, _OFFSETS, _LABELS = range(5)  # what a word is drawn for: keeps the streams of one seed apart


def random_crop_and_flip(images: Tensor, words: np.ndarray, *, flip: bool, padding: int = PADDING) -> Tensor:
    """Shift every image of a micro-batch by up to `padding` pixels each way and mirror half of them.

    images: (B, C, H, W) uint8, raw pixels: the border that a shift brings in is black (0), as it would not be after normalisation.
    words: (B,) uint64, 64 random bits for each image: bits 0-23 choose the row, 24-47 the column of the crop, bit 63 the mirror.
    Returns (B, C, H, W) uint8 in channels_last order.
    """
    pixels = images.permute(0, 2, 3, 1).numpy()
    batch, height, width, channels = pixels.shape
    padded = np.zeros((batch, height + 2 * padding, width + 2 * padding, channels), dtype=np.uint8)
    padded[:, padding : padding + height, padding : padding + width] = pixels
    positions = np.uint64(2 * padding + 1)
    rows, columns = (((words >> np.uint64(shift)) & np.uint64(0xFFFFFF)) * positions >> np.uint64(24) for shift in (0, 24))
    # All crops of all images as a view; indexing it copies, for each image, the one that was drawn.
    per_image, per_row, per_column, per_channel = padded.strides
    windows = np.lib.stride_tricks.as_strided(
        padded,
        (batch, 2 * padding + 1, 2 * padding + 1, height, width, channels),
        (per_image, per_row, per_column, per_row, per_column, per_channel),
        writeable=False,
    )
    cropped = windows[np.arange(batch), rows.astype(np.intp), columns.astype(np.intp)]
    if flip:
        mirrored = np.flatnonzero(words >> np.uint64(63))
        as_planes = torch.from_numpy(cropped[mirrored]).permute(0, 3, 1, 2)  # the form that torch.flip is vectorised for
        cropped[mirrored] = as_planes.flip(3).permute(0, 2, 3, 1).numpy()
    return torch.from_numpy(cropped).permute(0, 3, 1, 2)


# --- Data sets ----------------------------------------------------------------------------------------------------------------------------


class ImageDataset(Dataset):
    """Rows of one uint8 image tensor, with random crops and flips if asked for.

    `__getitem__` draws from torch's global random stream, as any data set does; `seeded_batch` collates a whole micro-batch, whose
    randomness is a pure function of (seed, epoch, index).
    """

    def __init__(
        self,
        *,
        images: Tensor,
        labels: Tensor,
        rows: np.ndarray,
        augment: bool,
        flip: bool,
        padding: int = PADDING,
        augmentation: ImageAugmentation | None = None,
    ) -> None:
        self.images = images  # (N, C, H, W) uint8, channels_last; shared by the training and the validation part
        self.labels = labels  # (N,) int64
        self.rows = torch.from_numpy(rows)  # this data set's sample i is row rows[i]
        self.augment = augment
        self.flip = flip
        self.padding = padding
        self.augmentation = augmentation  # of single images, after crop and flip

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image (C, H, W) uint8 and its label (int64, no dimensions)."""
        row = self.rows[index]
        image = self.images[row]
        if self.augment:
            word = torch.randint(-(1 << 63), (1 << 63) - 1, (1,)).numpy().view(np.uint64)
            image = random_crop_and_flip(image.unsqueeze(0), word, flip=self.flip, padding=self.padding)[0]
            if self.augmentation:
                image = self.augmentation(image, seed=int(torch.randint(1 << 62, ())), epoch=0, index=int(index))
        return image, self.labels[row]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) uint8 and labels (B,) int64 of the samples `indices`."""
        indices = np.asarray(indices, dtype=np.int64)
        rows = self.rows.numpy()[indices]
        # numpy copies whole images where torch's indexing kernel goes element by element
        images = torch.from_numpy(self.images.permute(0, 2, 3, 1).numpy()[rows]).permute(0, 3, 1, 2)
        if self.augment:
            words = random_words(seed, epoch, indices=indices)
            images = random_crop_and_flip(images, words, flip=self.flip, padding=self.padding)
            if self.augmentation:
                augmented = (
                    self.augmentation(image, seed=seed, epoch=epoch, index=index)
                    for image, index in zip(images, indices.tolist(), strict=True)
                )
                images = torch.stack(list(augmented)).contiguous(memory_format=torch.channels_last)
        return images, self.labels[torch.from_numpy(rows)]


class Synthesis:
    """Makes images out of hashed bits: the same ones on every device, in any order, with nothing stored per image.

    "pattern": image = its class's 4 x 4 mosaic of random colours + noise, both uniform over 0..127; a network learns to tell the classes.
    "noise": plain noise over 0..255 and random labels, with nothing to learn.
    An image's noise is a window, at a hashed offset, into one bank of noise, so that making a micro-batch costs one gather.
    """

    _OFFSETS_IN_BANK = 1 << 24

    def __init__(self, *, kind: Literal["pattern", "noise"], classes: int, channels: int, image_size: int, seed: int) -> None:
        self.kind = kind
        self.classes = classes
        self.channels = channels
        self.image_size = image_size
        self.seed = seed
        levels = 128 if kind == "pattern" else 256
        variance = (levels**2 - 1) / 12 * (2 if kind == "pattern" else 1)  # of uniform integers; a pattern adds two of them
        self.mean = ((127.0 if kind == "pattern" else 127.5) / 255,) * channels
        self.std = (variance**0.5 / 255,) * channels
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def labels(self, indices: np.ndarray) -> Tensor:
        """Labels (B,) int64: classes in turn for patterns, at random for noise."""
        drawn = indices if self.kind == "pattern" else random_words(self.seed, _LABELS, indices=indices) >> np.uint64(1)
        return torch.from_numpy(np.asarray(drawn, dtype=np.int64) % self.classes)

    def offsets(self, indices: np.ndarray) -> Tensor:
        """Where in the bank of noise each image begins: (B,) int64."""
        words = random_words(self.seed, _OFFSETS, indices=indices)
        return torch.from_numpy((words % np.uint64(self._OFFSETS_IN_BANK)).astype(np.int64))

    def images(self, offsets: Tensor, labels: Tensor) -> Tensor:
        """Images (B, C, H, W) uint8, channels_last, on the device on which `offsets` and `labels` (B,) lie."""
        mosaics, bank = self._tensors(offsets.device)
        size = self.image_size
        noise = bank.unfold(0, size * size * self.channels, 1)[offsets].view(-1, size, size, self.channels)
        if self.kind == "pattern":
            tiles = torch.arange(size, device=offsets.device) * 4 // size
            noise += mosaics[labels].index_select(1, tiles).index_select(2, tiles)
        return noise.permute(0, 3, 1, 2)

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Class mosaics (classes, 4, 4, C) and the bank of noise, both uint8; made once and kept on each device that asks."""
        if device not in self._on_device:

            def random_bytes(what: int, count: int) -> np.ndarray:
                return random_words(self.seed, what, indices=np.arange(-(-count // 8))).astype("<u8").view(np.uint8)[:count]

            shape = (self.classes, 4, 4, self.channels)
            mosaics = random_bytes(_PATTERNS, int(np.prod(shape))).reshape(shape) & 127
            bank = random_bytes(_NOISE, self._OFFSETS_IN_BANK + self.image_size**2 * self.channels)
            if self.kind == "pattern":
                bank = bank & 127
            self._on_device[device] = (torch.from_numpy(mosaics).to(device), torch.from_numpy(bank).to(device))
        return self._on_device[device]


class SyntheticDataset(Dataset):
    """Synthetic images, or (for `on_device`) the offsets from which the data module makes them once they are on the device."""

    def __init__(self, *, synthesis: Synthesis, rows: np.ndarray, on_device: bool) -> None:
        self.synthesis = synthesis
        self.rows = torch.from_numpy(rows)
        self.on_device = on_device

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image (C, H, W) uint8, or its offset into the bank of noise (int64, no dimensions), and its label."""
        images, labels = self.seeded_batch([index], seed=0, epoch=0)
        return images[0], labels[0]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) uint8 or offsets (B,) int64, and labels (B,) int64; an image is the same in every epoch."""
        rows = self.rows.numpy()[np.asarray(indices, dtype=np.int64)]
        labels, offsets = self.synthesis.labels(rows), self.synthesis.offsets(rows)
        return (offsets if self.on_device else self.synthesis.images(offsets, labels)), labels


class ImageDataModule(pl.LightningDataModule):
    """Training, validation and test images of a small-image data set, normalised on the device.

    The test set is not the validation set unless asked for: by default a tenth of the training images, drawn class by class from `seed`,
    is held out for validation. The embedded sample has 500 validation images of its own, which serve as its test set too.
    What a model needs to know (`num_classes`, `in_channels`, `image_size`) is known from construction on; images are read in `setup`.

    Args:
        dataset: CIFAR-10, CIFAR-100 (fine labels), MNIST, FASHION-MNIST, or SAMPLE for the 2,000 + 500 Fashion-MNIST images in this
            package. None is CIFAR-10 if it is in `data_dir`, else SAMPLE with a warning; `available_data_set` tries to download it.
        data_dir: Folder with the data set's files, as distributed or unpacked; where missing ones are downloaded to.
        micro_batch_size: Images in a training batch of the loader.
        eval_batch_size: Images in a validation, test or prediction batch; None is `micro_batch_size`.
        num_workers: Processes that load training and evaluation data; with the data set in memory 0 is usually the fastest.
        augment: Random crops from a black border and, MNIST's digits excepted, horizontal flips of training images.
            None is on for real images and off for synthetic ones, which cannot be augmented.
        crop_padding: Width of that border in pixels; 0 leaves the flips alone.
        scaling: "standard" brings the pixels of each channel to mean 0 and deviation 1 over the training set, "unit" to 0 to 1.
        auto_augment: After crop and flip, randaugment (two random operations) or trivialaugment (one).
        randaugment_magnitude: Of randaugment's operations, 0 to 30; None is 9.
        auto_augment_fill: What moves in where it shifts or turns an image, mean (colour) or black; None is mean.
        color_jitter: By what share brightness, contrast and saturation vary each.
        random_erasing: Probability that a rectangle is filled with the data set's mean colour.
        validation_split: How much of the training set to hold out: a fraction below 1 or a number of images; 0 holds out none, and unless
            `validation_on_test` is given there is then no validation. None is 0.1 (0 for SAMPLE and with `validation_on_test`).
        validation_on_test: Validate on the test set. Its score is then no longer that of unseen data if anything is chosen by it.
        synthetic: Make images up in the shape of `dataset`: on the "host", or straight on the "ipu", that is on the device that trains.
        synthetic_kind: Class "pattern"s that can be learnt, or plain "noise" with random labels.
        synthetic_samples: Training images to make up (a fifth as many for the test); None is as many as the data set has.
        synthetic_classes: Number of classes to make up; None is as many as the data set has.
        synthetic_image_size: Height and width in pixels; None is the data set's.
        download: Whether a missing data set may be downloaded.
        seed: Decides which images are held out for validation, and the synthetic images.

    Raises:
        UserError: for an unknown data set, a split that cannot be, or options that exclude each other.
        DataNotFoundError: from `prepare_data` or `setup`, for files neither on disk nor to be downloaded.
        DataFileError: from `setup`, for a file that is cut off, damaged or not of this data set.
    """

    def __init__(
        self,
        *,
        dataset: str | None = None,
        data_dir: str | Path = "data",
        micro_batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        augment: bool | None = None,
        crop_padding: int = PADDING,
        scaling: Literal["standard", "unit"] = "standard",
        auto_augment: Literal["randaugment", "trivialaugment"] | None = None,
        randaugment_magnitude: int | None = None,
        auto_augment_fill: Literal["mean", "black"] | None = None,
        color_jitter: float | None = None,
        random_erasing: float | None = None,
        validation_split: int | float | None = None,
        validation_on_test: bool = False,
        synthetic: Literal["host", "ipu"] | None = None,
        synthetic_kind: Literal["pattern", "noise"] = "pattern",
        synthetic_samples: int | None = None,
        synthetic_classes: int | None = None,
        synthetic_image_size: int | None = None,
        download: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"samples": synthetic_samples, "classes": synthetic_classes, "image_size": synthetic_image_size}
        sizes = {f"synthetic_{what}": value for what, value in sizes.items() if value is not None}
        for option, value in {"micro_batch_size": micro_batch_size, "eval_batch_size": eval_batch_size, **sizes}.items():
            if value is not None and value < 1:
                raise UserError(f"{option}: {value} is not possible; at least 1 is")
        if num_workers < 0:
            raise UserError(f"num_workers: {num_workers} is not possible; 0 loads in the training process")
        machine.check_processes(num_workers, "num_workers")
        if crop_padding < 0:
            raise UserError(f"crop_padding: {crop_padding} is not possible; 0 does not crop")
        if scaling not in ("standard", "unit"):
            raise UserError(f"scaling: {scaling!r} is unknown; legal are 'standard' and 'unit'")
        if synthetic not in (None, "host", "ipu"):
            raise UserError(f"synthetic: {synthetic!r} is unknown; legal are 'host' and 'ipu', or None for real images")
        if synthetic_kind not in ("pattern", "noise"):
            raise UserError(f"synthetic_kind: {synthetic_kind!r} is unknown; legal are 'pattern' and 'noise'")
        if synthetic_kind == "noise":
            sizes["synthetic_kind"] = "noise"
        if synthetic is None and sizes:
            option, value = next(iter(sizes.items()))
            raise UserError(f"{option}: {value!r} needs synthetic='host' or 'ipu'; real images have their own")
        if synthetic is not None and augment:
            raise UserError("augment: synthetic images cannot be augmented; leave it out or set it to false")
        single = {"auto_augment": auto_augment, "color_jitter": color_jitter, "random_erasing": random_erasing}
        single["auto_augment_fill"] = auto_augment_fill
        for option, value in single.items():
            if value is not None and (synthetic is not None or augment is False):
                why = "synthetic images cannot be augmented" if synthetic else "augment is false, which switches all augmentation off"
                raise UserError(f"{option}: {value} makes no sense: {why}")
        self.data_dir = Path(data_dir).expanduser()
        self.micro_batch_size = micro_batch_size
        self.eval_batch_size = eval_batch_size or micro_batch_size
        self.num_workers = num_workers
        self.augment = synthetic is None if augment is None else augment
        self.crop_padding = crop_padding
        self.validation_on_test = validation_on_test
        self.synthetic = synthetic
        self.download = download
        self.seed = seed
        self.dataset_name = self._resolve(dataset)
        facts = DATA_SETS[self.dataset_name]
        self.used_sample = self.dataset_name == "SAMPLE" and synthetic is None
        self.num_classes = synthetic_classes or facts.num_classes
        self.in_channels = facts.channels
        self.image_size = synthetic_image_size or facts.image_size
        self.synthesis = None
        self.mean, self.std = facts.mean, facts.std
        self.augmentation = ImageAugmentation(**single, magnitude=randaugment_magnitude, fill=facts.mean)
        available, self.num_test_samples = sum(facts.train_counts), sum(facts.test_counts)
        if synthetic is not None:
            self.synthesis = Synthesis(
                kind=synthetic_kind, classes=self.num_classes, channels=self.in_channels, image_size=self.image_size, seed=seed
            )
            self.mean, self.std = self.synthesis.mean, self.synthesis.std
            if synthetic_samples is not None:
                available, self.num_test_samples = synthetic_samples, max(1, synthetic_samples // 5)
        if scaling == "unit":
            self.mean, self.std = (0.0,) * self.in_channels, (1.0,) * self.in_channels
        self._validates_on_test = validation_on_test or (self.used_sample and validation_split is None)
        self._held_out = 0 if self._validates_on_test and validation_split is None else _held_out(validation_split, available)
        if self._held_out and validation_on_test:
            raise UserError(f"validation_split: {validation_split} holds out images that validation_on_test leaves unused; give only one")
        self.num_train_samples = available - self._held_out
        self.num_validation_samples = self.num_test_samples if self._validates_on_test else self._held_out
        self._normalisation: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _resolve(self, dataset: str | None) -> str:
        """The data set to use; where none is named, one that is here already."""
        if dataset is not None:
            return known_data_set(dataset)
        return "CIFAR-10" if self.synthetic is not None else available_data_set(data_dir=self.data_dir)

    @property
    def description(self) -> str:
        """The data in a few words, for people."""
        if self.synthesis is not None:
            kind = {"pattern": "class patterns", "noise": "noise"}[self.synthesis.kind]
            facts, size = DATA_SETS[self.dataset_name], self.image_size
            shape = self.dataset_name
            if (size, self.num_classes) != (facts.image_size, facts.num_classes):
                shape = f"{self.in_channels} x {size} x {size} images of {self.num_classes:,} classes"
            return f"synthetic {kind} from the {self.synthetic}, in the shape of {shape}"
        return "SAMPLE (2,000 + 500 Fashion-MNIST images)" if self.used_sample else self.dataset_name

    @property
    def mirrors(self) -> bool:
        """Whether a mirrored image still shows its class."""
        return self.synthesis is None and DATA_SETS[self.dataset_name].flip

    @property
    def caveat(self) -> str | None:
        """What figures from these images are not, in one line; None where nothing needs to be said."""
        if not self.used_sample:
            return None
        return "These figures are from the embedded sample (2,000 + 500 Fashion-MNIST images), not from CIFAR-10."

    def fingerprint(self) -> str:
        """Fingerprint of the training data: the data set, or how it is synthesised, and which of its images are not held out.

        Two data modules with the same fingerprint draw the same samples in the same order for one seed; a checkpoint can keep it.
        """
        made = self.synthesis and [self.synthesis.kind, self.synthesis.classes, self.image_size, self.synthesis.seed]
        return fingerprint(self.dataset_name, self.in_channels, made, self._parts["train"].rows.numpy())

    def prepare_data(self) -> None:
        """Download the data set if it is missing and may be downloaded."""
        if self.synthesis is None and self.download:
            fetch(self.dataset_name, data_dir=self.data_dir)

    def setup(self, stage: str | None = None) -> None:
        """Read the images (once) and choose those that are held out."""
        _ = self._parts  # read on first access, whichever hook comes first

    @cached_property
    def _parts(self) -> dict[str, Dataset]:
        """The data sets `train`, `validation` (absent without validation) and `test`."""
        train_total = self.num_train_samples + self._held_out
        train_rows, test_rows = np.arange(train_total), np.arange(self.num_test_samples)
        if self.synthesis is not None:
            make = partial(SyntheticDataset, synthesis=self.synthesis, on_device=self.synthetic == "ipu")
            labels = self.synthesis.labels(train_rows)
            test = make(rows=train_rows[-1] + 1 + test_rows)
            make_train = make_validation = make
        else:
            splits = load_images(self.dataset_name, data_dir=self.data_dir)
            images, labels = splits["train"]
            make = partial(ImageDataset, flip=DATA_SETS[self.dataset_name].flip, padding=self.crop_padding)
            test = make(images=splits["test"][0], labels=splits["test"][1], rows=test_rows, augment=False)
            make_train = partial(make, images=images, labels=labels, augment=self.augment, augmentation=self.augmentation)
            make_validation = partial(make, images=images, labels=labels, augment=False)
        kept, held_out = _split(labels.numpy(), self._held_out, seed=self.seed)
        parts = {"train": make_train(rows=kept), "test": test}
        if self._validates_on_test:
            parts["validation"] = test
        elif len(held_out):
            parts["validation"] = make_validation(rows=held_out)
        return parts

    def train_dataloader(self) -> DataLoader:
        """Training images, shuffled; the last batch may be smaller."""
        return self._loader("train", batch_size=self.micro_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Validation images in order, every one of them; an empty list without validation."""
        return self._loader("validation", batch_size=self.eval_batch_size) if "validation" in self._parts else []

    def test_dataloader(self) -> DataLoader:
        """Test images in order, every one of them."""
        return self._loader("test", batch_size=self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader:
        """The test images, for predictions."""
        return self.test_dataloader()

    def sample_images(self, count: int) -> Tensor:
        """The first training images, at most `count`, as training sees them in epoch 0: (B, C, H, W) float32, normalised."""
        training = self._parts["train"]
        return self.on_after_batch_transfer(training.seeded_batch(range(min(count, len(training))), seed=self.seed, epoch=0), 0)[0]

    def _loader(self, part: str, *, batch_size: int, shuffle: bool = False) -> DataLoader:
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(self._parts[part], batch_size=batch_size, shuffle=shuffle, **workers)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """On the device: uint8 images (B, C, H, W), or offsets of synthetic ones (B,), to normalised float32 in channels_last order."""
        images, labels = batch
        if self.synthesis is not None and images.dim() == 1:
            images = self.synthesis.images(images, labels)
        if images.device not in self._normalisation:
            mean, std = (torch.tensor(values, device=images.device).view(1, -1, 1, 1) for values in (self.mean, self.std))
            self._normalisation[images.device] = (1 / (255 * std), -mean / std)
        scale, shift = self._normalisation[images.device]
        return images.to(torch.float32, memory_format=torch.channels_last).mul_(scale).add_(shift), labels


def _held_out(split: int | float | None, available: int) -> int:
    """Number of images that `validation_split` takes out of `available` training images."""
    split = 0.1 if split is None else split
    if isinstance(split, bool) or not (0 <= split < 1 if isinstance(split, float) else 0 <= split < available):
        raise UserError(f"validation_split: {split} is not possible; give a fraction from 0 to below 1, or 0 to {available - 1:,} images")
    return split if isinstance(split, int) else min(max(round(split * available), int(split > 0)), available - 1)


def _split(labels: np.ndarray, count: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to keep and rows to hold out: `count` of them, each class by its share, which ones decided by `seed` alone."""
    if count == 0:
        return np.arange(len(labels)), np.arange(0)
    shuffled = np.argsort(random_words(seed, _SPLIT, indices=np.arange(len(labels))), kind="stable")
    place = np.empty(len(labels))  # of each row among its class, from 0 to 1: the lowest places of all classes together are held out
    members = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class
    sizes = np.bincount(labels)
    place[members] = (np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 0.5) / np.repeat(sizes, sizes)
    held_out = np.sort(np.argsort(place, kind="stable")[:count])
    kept = np.ones(len(labels), dtype=bool)
    kept[held_out] = False
    return np.flatnonzero(kept), held_out
