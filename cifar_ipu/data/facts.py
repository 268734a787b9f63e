"""What is known about each data set before a byte of it is read: its shape, constants, digests, origin, and how its bytes become images."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from lightning_ipu.errors import UserError


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
