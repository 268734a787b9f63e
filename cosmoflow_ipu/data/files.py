"""CosmoFlow's TFRecord files: found, and read cube by cube."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from cosmoflow_ipu.universe import REDSHIFTS
from lightning_ipu.data.tf_example import only_bytes, only_floats, parse_example
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords
from lightning_ipu.errors import UserError

CHANNELS = len(REDSHIFTS)  # in every file
SPLITS = ("train", "validation", "test")


class CosmoDataError(UserError):
    """Data that are not there or cannot be used together; the message names the folder or file and what would help."""


def find_files(folder: Path) -> dict[str, list[Path]]:
    """TFRecord files by split: those of the sub-folders train, validation and test, or, as train alone, those in the folder itself.

    Hidden files, which operating systems leave behind, are passed over. Raises CosmoDataError where there are none.
    """
    if not folder.is_dir():
        raise CosmoDataError(f"data_dir {folder} is not there; give the folder that holds train/ and validation/ with .tfrecord files")
    found = {split: _tfrecords(folder / split) for split in SPLITS}
    if not any(found.values()):
        found = {"train": _tfrecords(folder)}
    if not found["train"]:
        raise CosmoDataError(f"data_dir {folder} has no .tfrecord files, neither in train/ nor directly")
    return {split: paths for split, paths in found.items() if paths}


def _tfrecords(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    names = sorted(name for name in os.listdir(folder) if re.search(r"\.tfrecords?(\.gz|\.gzip)?$", name) and not name.startswith("."))
    return [folder / name for name in names]


def universe_of(path: str | os.PathLike[str]) -> str:
    """The universe that a file's cubes are from: its name without the three digits that number the cubes of one."""
    return re.sub(r"(_\d{3})?\.tfrecords?(\.gz|\.gzip)?$", "", os.path.basename(path))


def read_cube(records: TFRecords, index: int, into: np.ndarray) -> np.ndarray:
    """Copy the counts of a record into a uint8 array and return its targets (4,) float32.

    Raises TFRecordError for a record that is damaged or not of CosmoFlow's form: `x` the bytes of int16 counts, `y` four floats within 1.
    """
    record = records[index]
    try:
        features = parse_example(record)
        into[:] = np.frombuffer(only_bytes(features, "x", length=into.size), dtype=np.uint8)
        targets = only_floats(features, "y", count=4)
        if np.abs(targets).max() > 1:
            raise UserError(f"feature 'y' must lie between -1 and 1, not {targets.tolist()}")
        if (least := into.view("<i2").min()) < 0:
            raise UserError(f"feature 'x' has a count of {least}: these are no particle counts in int16")
    except ValueError as error:
        raise records.error(index, str(error)) from None
    return targets


def sample_size_of(path: Path) -> int:
    """Voxels along each side of the cubes in a file. Raises TFRecordError where its first record is not of CosmoFlow's form."""
    records = TFRecords([path])
    try:
        features = parse_example(records[0])
        length = len(only_bytes(features, "x")) // (2 * CHANNELS)
    except TFRecordError:
        raise
    except ValueError as error:
        raise records.error(0, str(error)) from None
    size = round(length ** (1 / 3))
    if size**3 != length:
        raise records.error(0, f"feature 'x' has {2 * CHANNELS * length:,} bytes, which are no cube of {CHANNELS} int16 counts a voxel")
    return size
