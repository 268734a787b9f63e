"""Volumes of particle counts with the parameters of their universes: simulated here, or read from CosmoFlow's TFRecord files.

Simulated universes are written as the files that the real data set consists of and read back by the same reader. Counts stay int16 until they
are on the device. Records, not files, are what is shuffled and shared out, so any number of readers can share any number of files; training
and validation never have a universe in common.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from filelock import FileLock
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cosmoflow_ipu.universe import PARAMETERS, REDSHIFTS, Universes, cut
from lightning_ipu import machine
from lightning_ipu.data.fingerprint import fingerprint
from lightning_ipu.data.index import Index
from lightning_ipu.data.tf_example import encode_example, only_bytes, only_floats, parse_example
from lightning_ipu.data.tfrecord import TFRecordError, TFRecords, write_tfrecord
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write
from lightning_ipu.randomness import mix, name_word

CHANNELS = len(REDSHIFTS)  # in every file
SPLITS = ("train", "validation", "test")
FIRST_INDEX = {"train": 0, "validation": 1_000_000, "test": 2_000_000}  # of a split's universes: more of one never become another's
SETTINGS = "universes.json"  # what a folder of simulated universes holds

_AUGMENT, _SPLIT, _DUMMY = (name_word(name) for name in ("cube symmetry", "universe split", "dummy cube"))

Batch = tuple[Tensor, Tensor]  # counts [batch, channels, size, size, size] int16; targets [batch, 4] float32 from -1 to 1


class CosmoDataError(UserError):
    """Data that are not there or cannot be used together; the message names the folder or file and what would help."""


# -- simulated universes ------------------------------------------------------------------------------------------------------


def write_universes(
    folder: Path, universes: Universes, *, sample_size: int, indices: dict[str, range], pack: bool = False, workers: int | None = None
) -> None:
    """Simulate the universes that are not in `folder` yet, each to a file `SPLIT/universe-INDEX.tfrecord` of its cubes.

    An interrupted call leaves whole files only, and the next one goes on where it ended.

    Args:
        folder: is made where it is missing.
        universes: the family they belong to.
        sample_size: voxels along each side of the cubes that a box is cut into; divides `universes.cells`.
        indices: for each split the numbers of its universes.
        pack: write the files with gzip.
        workers: processes; None is one for each core that this one may use.

    Raises:
        CosmoDataError: a folder that holds universes of another family or cut.
        OSError: a file that cannot be written.
    """
    machine.check_processes(workers or 0, "num_workers")
    settings = {**asdict(universes), "sample_size": sample_size, "parameters": list(PARAMETERS), "redshifts": list(REDSHIFTS)}
    with _locked(folder):
        _check_settings(folder, settings)
        missing = []
        for split, numbers in indices.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            for part in (folder / split).glob(".*.part"):  # of a process that was killed
                part.unlink()
            there = set(os.listdir(folder / split))
            missing += [(folder / split / name, index) for index in numbers if (name := _file_name(index)) not in there]
        if not missing:
            return
        if not (folder / SETTINGS).exists():
            with atomic_write(folder / SETTINGS, "w") as file:
                file.write(json.dumps(settings, indent=1) + "\n")
        workers = min(workers if workers is not None else machine.usable_cores(), len(missing) // 4)
        writing = _Writing(missing, universes, sample_size, pack)
        loader = DataLoader(
            writing, batch_size=None, num_workers=workers if workers > 1 else 0, prefetch_factor=4 if workers > 1 else None,
            generator=torch.Generator(),
        )  # fmt: skip
        with _progress(f"simulating {len(missing):,} universes", len(missing)) as advance:
            for fault in loader:
                if fault is not None:
                    raise fault
                advance(1)


def _file_name(index: int) -> str:
    return f"universe-{index:07d}.tfrecord"


class _Writing(Dataset):
    """Writes a universe to its file when it is asked for; a DataLoader's workers make a pool of that. Gives what went wrong, or None."""

    def __init__(self, missing: list[tuple[Path, int]], universes: Universes, sample_size: int, pack: bool) -> None:
        self.missing, self.universes, self.sample_size, self.pack = missing, universes, sample_size, pack

    def __len__(self) -> int:
        return len(self.missing)

    def __getitem__(self, number: int) -> Exception | None:
        path, index = self.missing[number]
        try:
            targets = self.universes.targets(index)
            cubes = cut(self.universes.counts(index), self.sample_size).numpy()
            records = (encode_example({"x": cube.astype("<i2", copy=False).tobytes(), "y": targets}) for cube in cubes)
            write_tfrecord(path, records, pack=self.pack)
        except (OSError, ValueError) as error:  # handed over: raised in a worker it would arrive as a page of text
            return error
        return None


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    try:
        there = json.loads((folder / SETTINGS).read_text())
    except FileNotFoundError:
        return
    except ValueError as error:
        raise CosmoDataError(f"{folder / SETTINGS} cannot be read ({error}): choose another folder, or delete this one") from None
    if differing := [name for name in settings if there.get(name) != settings[name]]:
        name = differing[0]
        raise CosmoDataError(
            f"{folder} holds universes of {name} {there.get(name)}, not {settings[name]}: choose another folder, or delete this one"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes the universes of a folder; a second one waits, and finds them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".simulating.lock")
        lock.acquire()
    except OSError as error:
        raise CosmoDataError(f"cannot write simulated universes to {folder}: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere; gives the function to call with what has been done."""
    if sys.stdout.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield functools.partial(bar.advance, task)
        return
    done, shown = 0, time.monotonic()

    def advance(number: int) -> None:
        nonlocal done, shown
        done += number
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{what}: {done:,}/{total:,}", flush=True)

    yield advance


# -- files --------------------------------------------------------------------------------------------------------------------


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


# -- samples ------------------------------------------------------------------------------------------------------------------


class CubeCache:
    """Cubes and targets kept in memory as they are read, int16, the first `capacity` of them; worker processes forked later share it.

    Memory is taken as it is filled. In a process that was not forked but started anew the cache is empty and stays so.
    """

    def __init__(self, *, capacity: int, nbytes: int) -> None:
        self.capacity, self.nbytes = capacity, nbytes
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        self._slots = np.frombuffer(mmap.mmap(-1, max(1, capacity * (self.nbytes + 16))), dtype=np.uint8)[: capacity * (self.nbytes + 16)]
        self._slots = self._slots.reshape(capacity, self.nbytes + 16)
        self._filled = np.frombuffer(mmap.mmap(-1, max(1, capacity)), dtype=np.uint8)[:capacity]

    def get(self, number: int, into: np.ndarray) -> np.ndarray | None:
        """Copy cube `number` into a uint8 array and return its targets, or None where it is not here."""
        if number >= len(self._filled) or not self._filled[number]:
            return None
        into[:] = self._slots[number, : self.nbytes]
        return self._slots[number, self.nbytes :].view(np.float32)

    def put(self, number: int, cube: np.ndarray, targets: np.ndarray) -> None:
        """Keep a cube, if it is one of the first `capacity`."""
        if number < len(self._filled):
            self._slots[number, : self.nbytes] = cube
            self._slots[number, self.nbytes :] = targets.view(np.uint8)
            self._filled[number] = 1

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "nbytes": self.nbytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make(0)


class CubeDataset(Dataset):
    """Cubes of some records, with one of their 48 symmetries each where asked for.

    `__getitem__` draws from torch's global random stream, as any data set does; `seeded_batch` collates a whole micro-batch, whose
    randomness is a pure function of (seed, epoch, index).

    Args:
        records: the files' records.
        rows: which of them, in order.
        size: voxels along each side.
        channels: how many of the redshifts, the latest first.
        augment: turn and mirror each cube at random: a universe has no direction.
        cache: where cubes are kept once they were read; None without one.
    """

    def __init__(
        self, *, records: TFRecords, rows: np.ndarray, size: int, channels: int, augment: bool, cache: CubeCache | None = None
    ) -> None:
        self.records, self.rows, self.size, self.channels, self.augment, self.cache = records, rows, size, channels, augment, cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Counts (channels, size, size, size) int16 and targets (4,) float32."""
        counts, targets = self._read([index], lambda _: int(torch.randint(48, ())))
        return counts[0], targets[0]

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> Batch | TFRecordError:
        """Counts (batch, channels, size, size, size) int16 and targets (batch, 4) float32 of the samples `indices`.

        In a loader's worker a bad record is returned, not raised: the data module raises it where it arrives as one line.
        """
        try:
            return self._read(indices, lambda index: mix(seed, _AUGMENT, epoch, index) % 48)
        except TFRecordError as error:
            if get_worker_info() is None:
                raise
            return error

    def _read(self, indices: Sequence[int], symmetry: Callable[[int], int]) -> Batch:
        shape = (self.size, self.size, self.size, CHANNELS)
        counts = np.empty((len(indices), *shape), dtype="<i2")
        targets = np.empty((len(indices), 4), dtype=np.float32)
        turned = np.empty(shape, dtype="<i2") if self.augment else None
        for place, index in enumerate(indices):
            cube = counts[place] if turned is None else turned
            into = cube.reshape(-1).view(np.uint8)
            found = None if self.cache is None else self.cache.get(index, into)
            if found is None:
                found = read_cube(self.records, int(self.rows[index]), into)
                if self.cache is not None:
                    self.cache.put(index, into, found)
            targets[place] = found
            if turned is not None:
                turn(turned, symmetry(index), into=counts[place])
        return torch.from_numpy(counts[..., : self.channels]).permute(0, 4, 1, 2, 3), torch.from_numpy(targets)


_ORDERS = ((0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2), (0, 2, 1), (2, 1, 0))


def turn(cube: np.ndarray, symmetry: int, *, into: np.ndarray) -> None:
    """Write one of the 48 turned and mirrored forms of a cube (n, n, n, 4) int16, all channels alike; number 0 is the cube itself."""
    # A voxel's four counts are moved as one number of eight bytes.
    cube, into = cube.view(np.int64)[..., 0], into.view(np.int64)[..., 0]
    flips = tuple(slice(None, None, -1 if symmetry >> axis & 1 else 1) for axis in range(3))
    into[...] = cube.transpose(_ORDERS[symmetry >> 3])[flips]


class DummyDataset(Dataset):
    """One cube of random counts with one random target, over and over: loading costs nothing, and there is nothing to learn."""

    def __init__(self, *, samples: int, size: int, channels: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(mix(seed, _DUMMY))
        cube = torch.poisson(torch.ones(size, size, size, channels), generator=generator).to(torch.int16)
        self.samples, self.counts = samples, cube.permute(3, 0, 1, 2)
        self.targets = 2 * torch.rand(4, generator=generator) - 1

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.counts, self.targets

    def seeded_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> Batch:
        return self.counts.expand(len(indices), -1, -1, -1, -1), self.targets.expand(len(indices), -1)


class CosmoFlowDataModule(pl.LightningDataModule):
    """Volumes of particle counts (int16) and the four parameters of their universes, each from -1 to 1 over its range.

    What a model needs to know (`input_size`, `in_channels`, `physical_spread`) is known from construction on.

    Args:
        dataset: synthetic (simulated universes), tfrecord (CosmoFlow's files in `data_dir`) or dummy (one random cube over and over).
        data_dir: folder of the TFRecord files: with sub-folders train, validation and, if there is one, test; or without, where universes
            are then held out by `validation_split`. For synthetic data: where folders of universes are made.
        micro_batch_size: cubes in a training batch of the loader.
        eval_batch_size: cubes in a validation, test or prediction batch; null is `micro_batch_size`.
        num_workers: processes that read; 0 reads in the training process.
        n_train: training cubes; null is 2,000 synthetic or dummy ones, all there are in files.
        n_valid: validation cubes, test cubes as well; null is a tenth of the training cubes, all there are in files.
        sample_size: voxels along each side of a cube; null is 32, in files whatever the cubes have.
        channels: how many of the four redshifts 0, 0.5, 1.5 and 3, from the first on.
        augment: turn and mirror every training cube into one of its 48 symmetric forms, another in each epoch.
        validation_split: share of the universes to hold out where files lie in one folder; null is 0.1.
        on_bad_record: raise ends the run with the file, record and byte; skip reads everything once before the run and leaves out what is bad.
        index_dir: folder in which skip keeps the list of what is good for the next start; null keeps none.
        cache_gb: memory in GB in which cubes are kept as int16 once they were read, for all parts and all of this machine's processes together;
            null is the size of packed files, up to half of the free memory. Other files are left to the operating system's cache.
        cells: voxels along each side of the simulated box, which is cut into cubes; null is `sample_size`.
        voxel_size: side of a simulated voxel in Mpc/h where H_0 = 70; null is 4.
        oversample: particles along each side of a simulated voxel; null is 2.
        fixed_mpc: the simulated box has one size in Mpc, as the real one has, not in Mpc/h; null is true.
        spread: simulated parameters lie within this share of 0.3, 0.8, 0.96 and 70, null is 0.3. Of files from elsewhere: what they were
            made with, if it is known, so that errors can be given in physical units.
        pack: write simulated universes with gzip.
        seed: of the simulated universes, and of those that are held out.

    Raises:
        UserError: an option that is out of range or means nothing to the data set.
        CosmoDataError: a folder without files, or with universes of other settings.
        TFRecordError: a file that is damaged or not CosmoFlow's.
    """

    def __init__(
        self,
        *,
        dataset: Literal["synthetic", "tfrecord", "dummy"] = "synthetic",
        data_dir: str | Path = "data",
        micro_batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        n_train: int | None = None,
        n_valid: int | None = None,
        sample_size: int | None = None,
        channels: int = 4,
        augment: bool = False,
        validation_split: float | None = None,
        on_bad_record: Literal["raise", "skip"] = "raise",
        index_dir: str | Path | None = None,
        cache_gb: float | None = None,
        cells: int | None = None,
        voxel_size: float | None = None,
        oversample: int | None = None,
        fixed_mpc: bool | None = None,
        spread: float | None = None,
        pack: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if dataset not in ("synthetic", "tfrecord", "dummy"):
            raise UserError(f"dataset={dataset!r} is unknown: choose from synthetic, tfrecord, dummy")
        for name, value, least in (
            ("micro_batch_size", micro_batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("n_train", n_train, 1),
            ("n_valid", n_valid, 0),
            ("num_workers", num_workers, 0),
            ("sample_size", sample_size, 1),
            ("cache_gb", cache_gb, 0),
        ):
            if value is not None and value < least:
                raise UserError(f"{name}={value} must be at least {least}")
        machine.check_processes(num_workers, "num_workers")
        if not 1 <= channels <= CHANNELS:
            raise UserError(f"channels={channels} must lie between 1 and {CHANNELS}")
        if on_bad_record not in ("raise", "skip"):
            raise UserError(f"on_bad_record={on_bad_record!r} is unknown: choose from raise, skip")
        if validation_split is not None and not 0 < validation_split < 1:
            raise UserError(f"validation_split={validation_split} must lie between 0 and 1")
        self._refuse_what_means_nothing(
            dataset,
            synthetic={"cells": cells, "voxel_size": voxel_size, "oversample": oversample, "fixed_mpc": fixed_mpc, "pack": pack or None},
            files={"validation_split": validation_split, "on_bad_record": None if on_bad_record == "raise" else on_bad_record},
        )
        if index_dir is not None and on_bad_record == "raise":
            raise UserError(
                f"index_dir={index_dir} means nothing with on_bad_record='raise', which looks for no bad records before the run"
            )
        if dataset == "dummy" and augment:
            raise UserError("augment=True means nothing to dataset='dummy', which is one cube over and over")
        self.dataset_name, self.data_dir = dataset, Path(data_dir).expanduser()
        self.micro_batch_size, self.eval_batch_size = micro_batch_size, eval_batch_size or micro_batch_size
        self.num_workers, self.in_channels, self.augment, self.seed = num_workers, channels, augment, seed
        self.validation_split, self.on_bad_record, self.cache_gb, self.pack = validation_split or 0.1, on_bad_record, cache_gb, pack
        self.index_dir = None if index_dir is None else Path(index_dir)
        self.n_train, self.n_valid = n_train, n_valid
        self.universes: Universes | None = None
        self.physical_spread = spread
        if dataset == "tfrecord":
            self._files = find_files(self.data_dir)
            self.input_size = self._size_of_files(skipping=on_bad_record == "skip")
            if sample_size not in (None, self.input_size):
                raise UserError(f"sample_size={sample_size}, but the cubes in {self.data_dir} have {self.input_size} voxels a side")
            if spread is None:
                self.physical_spread = _spread_of(self.data_dir)
            return
        self.n_train = n_train or 2000
        self.n_valid = max(1, self.n_train // 10) if n_valid is None else n_valid
        self.input_size = sample_size or 32
        if dataset == "synthetic":
            self.physical_spread = 0.3 if spread is None else spread
            self.universes = Universes(
                cells=cells or self.input_size,
                voxel_size=voxel_size or 4.0,
                oversample=oversample or 2,
                fixed_mpc=True if fixed_mpc is None else fixed_mpc,
                spread=self.physical_spread,
                seed=seed,
            )
            if self.universes.cells % self.input_size:
                raise UserError(f"cells={cells} must be a multiple of sample_size={self.input_size}")

    def _size_of_files(self, *, skipping: bool) -> int:
        """Voxels a side of the first file's cubes; where bad ones are to be skipped, of the first good file's."""
        faults = []
        for path in self._files["train"]:
            try:
                return sample_size_of(path)
            except TFRecordError as error:
                if not skipping:
                    raise
                faults.append(error)
        raise CosmoDataError(f"{self.data_dir}: no train record is good; the first fault is {faults[0]}")

    @staticmethod
    def _refuse_what_means_nothing(dataset: str, *, synthetic: dict[str, Any], files: dict[str, Any]) -> None:
        for kind, options in (("synthetic", synthetic), ("tfrecord", files)):
            for name, value in options.items():
                if value is not None and dataset != kind:
                    raise UserError(f"{name}={value} means nothing to dataset={dataset!r}; it belongs to dataset={kind!r}")

    @property
    def description(self) -> str:
        """The data in a few words, for people."""
        size = f"{self.input_size}^3 x {self.in_channels}"
        if self.universes is None:
            return f"{size} from {self.data_dir}" if self.dataset_name == "tfrecord" else f"{size}, one random cube over and over"
        family = self.universes
        box = "" if family.cells == self.input_size else f", cut from {family.cells}^3"
        return f"{size}{box} of simulated universes, voxels of {family.voxel_size:g} Mpc/h, parameters within {100 * family.spread:g} %"

    @property
    def num_train_samples(self) -> int:
        """Training cubes; files are looked through for it."""
        return self.n_train if self.dataset_name != "tfrecord" else len(self.part("train"))

    @property
    def num_validation_samples(self) -> int:
        """Validation cubes; files are looked through for it."""
        if self.dataset_name != "tfrecord":
            return self.n_valid
        return 0 if self.part("validation") is None else len(self.part("validation"))

    @property
    def folder(self) -> Path:
        """Where the TFRecord files are; of simulated universes a folder for each family and cut."""
        if self.universes is None:
            return self.data_dir
        settings = json.dumps([asdict(self.universes), self.input_size, self.pack], sort_keys=True)
        return self.data_dir / f"universes-{self.input_size}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def fingerprint(self) -> str:
        """Fingerprint of the training data: the files and records, or the family of universes, without those left out or held out.

        Two data modules with the same fingerprint draw the same samples in the same order for one seed; a checkpoint can keep it. Packing does not
        change it: the cubes are the same.
        """
        if self.dataset_name == "dummy":
            return fingerprint(self.input_size, self.seed, self.n_train)
        part = self.part("train")
        source = asdict(self.universes) if self.universes is not None else part.records.fingerprint()
        return fingerprint(self.input_size, source, part.rows)

    def indices(self, splits: Iterable[str]) -> dict[str, range]:
        """Numbers of the simulated universes that the splits need: whole universes, so that none is shared."""
        cubes = (self.universes.cells // self.input_size) ** 3
        wanted = {"train": self.n_train, "validation": self.n_valid, "test": self.n_valid}
        return {split: range(FIRST_INDEX[split], FIRST_INDEX[split] - (-wanted[split] // cubes)) for split in splits}

    def prepare_data(self) -> None:
        """Simulate the universes that are missing: those for training and validation, or for the test, as the Trainer needs them."""
        if self.universes is not None:
            self._simulate(self._needed())

    def _needed(self) -> tuple[str, ...]:
        running = None if self.trainer is None else self.trainer.state.fn
        return {"fit": SPLITS[:2], "validate": SPLITS[1:2], "test": SPLITS[2:], "predict": SPLITS[2:]}.get(running, SPLITS)

    def _simulate(self, splits: Iterable[str]) -> None:
        write_universes(self.folder, self.universes, sample_size=self.input_size, indices=self.indices(splits), pack=self.pack)

    def setup(self, stage: str | None = None) -> None:
        """Find the records (once); files are read from then on."""
        for split in self._needed():
            self.part(split)

    def part(self, split: str) -> Dataset | None:
        """The data set `train`, `validation` or `test`; None where there is no such part."""
        return self._parts(split)

    @functools.cached_property
    def _parts(self) -> Callable[[str], Dataset | None]:
        return functools.cache(self._make_part)  # of this object alone

    def _make_part(self, split: str) -> Dataset | None:
        training = split == "train"
        wanted = self.n_train if training else self.n_valid
        if wanted == 0:
            return None
        if self.dataset_name == "dummy":
            return DummyDataset(samples=wanted, size=self.input_size, channels=self.in_channels, seed=self.seed)
        if self.universes is not None:
            paths = [self.folder / split / _file_name(index) for index in self.indices([split])[split]]
            records = TFRecords(paths)
            rows = np.arange(wanted)
            if len(records) < wanted:
                raise CosmoDataError(
                    f"{self.folder / split} has {len(records):,} cubes in {len(paths):,} files; {wanted:,} should be there"
                )
        else:
            records, rows = self._records_of(split)
            if records is None:
                return None
            if wanted is not None:
                if wanted > len(rows):
                    option = "n_train" if training else "n_valid"
                    raise UserError(f"{option}={wanted}, but {self.data_dir} has {len(rows):,} {split} cubes")
                rows = rows[np.linspace(0, len(rows) - 1, wanted).round().astype(np.int64)]  # from all universes alike
        return CubeDataset(records=records, rows=rows, size=self.input_size, channels=self.in_channels, augment=self.augment and training)

    @cached_property
    def _cache_left(self) -> list[float]:
        """Bytes of cache that no part has taken yet, in a list of one: each process has an equal share of the machine's memory for it.

        It is computed when the first loader is made, since the number of processes is known then.
        """
        processes = 1 if self.trainer is None else max(1, self.trainer.world_size // self.trainer.num_nodes)
        return [(machine.free_memory() / 2 if self.cache_gb is None else self.cache_gb * 1e9) / processes]

    def _let_keep(self, part: CubeDataset) -> None:
        """Give a part a cache for as many cubes as fit into memory, once; files that are not packed get one only on request."""
        if part.cache is not None or self.cache_gb is None and not part.records.packed:
            return
        nbytes = self.input_size**3 * CHANNELS * 2
        capacity = min(len(part), int(self._cache_left[0] // (nbytes + 16)))
        self._cache_left[0] -= capacity * (nbytes + 16)
        part.cache = CubeCache(capacity=capacity, nbytes=nbytes) if capacity else None

    # -- files from elsewhere

    def _records_of(self, split: str) -> tuple[TFRecords | None, np.ndarray]:
        held_out_here = "validation" not in self._files and self.n_valid != 0
        if split not in self._files and not (split == "validation" and held_out_here):
            return None, np.arange(0)
        if not held_out_here:
            records, rows = self._good_records(split)
            if split == "validation":
                self._warn_of_shared_universes()
            return records, rows
        records, rows = self._good_records("train" if split == "validation" else split)
        if split == "test":
            return records, rows
        held_out = self._held_out_universes
        inside = np.array([universe_of(records.paths[records.file_of(int(row))]) in held_out for row in rows], dtype=bool)
        return records, rows[inside if split == "validation" else ~inside]

    @functools.cached_property
    def _good_records(self) -> Callable[[str], tuple[TFRecords, np.ndarray]]:
        return functools.cache(self._look_through)

    def _look_through(self, split: str) -> tuple[TFRecords, np.ndarray]:
        """A split's records and the numbers of those to use: all of them, or with on_bad_record skip those that are good."""
        paths, skipping = self._files[split], self.on_bad_record == "skip"
        with _progress(f"looking through {len(paths):,} {split} files", len(paths)) as advance:
            records = TFRecords(paths, tolerant=skipping, progress=advance)
        if not skipping:
            return records, np.arange(len(records))
        stamps = [[os.fspath(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
        index = Index(self.index_dir, f"cubes-{split}", shared=True)
        with index.alone():
            if index.content.get("files") != stamps or not {"good", "bad"} <= index.content.keys():
                good, bad = self._good_of(records, split)
                index.content = {"files": stamps, "good": good, "bad": bad}
                index.save()
            good, bad = index.content["good"], index.content["bad"]
        if bad:
            shown = "; ".join(bad[:3]) + ("; ..." if len(bad) > 3 else "")
            rank_zero_warn(f"{len(bad):,} bad {split} records or files are left out, {len(good):,} records are good: {shown}")
        if not len(good):
            raise CosmoDataError(f"{self.data_dir}: no {split} record is good; the first fault is {bad[0]}")
        return records, good

    def _good_of(self, records: TFRecords, split: str) -> tuple[np.ndarray, list[str]]:
        """Read all records: the numbers of the good ones, and what is wrong with the others and with files."""
        bad, good, cube = [str(fault) for fault in records.damage], [], np.empty(self.input_size**3 * CHANNELS * 2, dtype=np.uint8)
        with _progress(f"reading {len(records):,} {split} records", len(records)) as advance:
            for number in range(len(records)):
                try:
                    read_cube(records, number, cube)
                    good.append(number)
                except TFRecordError as error:
                    bad.append(str(error))
                advance(1)
        return np.array(good, dtype=np.int64), bad

    @cached_property
    def _held_out_universes(self) -> set[str]:
        universes = sorted({universe_of(path) for path in self._files["train"]})
        if len(universes) < 2:
            raise CosmoDataError(f"{self.data_dir} has the cubes of one universe, so none can be held out for validation; set n_valid to 0")
        ordered = sorted(universes, key=lambda name: mix(self.seed, _SPLIT, name_word(name)))
        return set(ordered[: min(max(1, round(self.validation_split * len(universes))), len(universes) - 1)])

    def _warn_of_shared_universes(self) -> None:
        shared = {universe_of(path) for path in self._files["train"]} & {universe_of(path) for path in self._files["validation"]}
        if shared:
            rank_zero_warn(
                f"{len(shared):,} universes have cubes both in {self.data_dir}/train and in validation ({min(shared)}, for example): the"
                " validation's score is not that of universes never seen"
            )

    def sample_counts(self) -> Tensor:
        """Counts (n, channels, size, size, size) int16 of up to 64 training cubes from all over the set, to measure their distribution."""
        part = self.part("train")
        places = np.unique(np.linspace(0, len(part) - 1, min(64, len(part))).round().astype(int))
        return torch.stack([part[int(place)][0] for place in places])

    # -- loaders

    def train_dataloader(self) -> DataLoader:
        """Training cubes, shuffled; the last batch may be smaller."""
        return self._loader(self.part("train"), batch_size=self.micro_batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader | list:
        """Validation cubes in order, every one of them; an empty list without validation."""
        return self._loader(self.part("validation"), batch_size=self.eval_batch_size)

    def test_dataloader(self) -> DataLoader | list:
        """Test cubes in order, of universes that neither training nor validation has; the validation's where files have no others."""
        part = self.part("test")
        if part is None and self.dataset_name == "tfrecord":
            rank_zero_info(f"{self.data_dir} has no test cubes: the validation cubes take their place.")
            part = self.part("validation")
        return self._loader(part, batch_size=self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader | list:
        """The test cubes, for predictions."""
        return self.test_dataloader()

    def _loader(self, part: Dataset | None, *, batch_size: int, shuffle: bool = False) -> DataLoader | list:
        if part is None:
            return []
        if isinstance(part, CubeDataset):
            self._let_keep(part)
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(part, batch_size=batch_size, shuffle=shuffle, pin_memory=torch.cuda.is_available(), **workers)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Raise here what a loader's worker found wrong with a record."""
        if isinstance(batch, TFRecordError):
            raise TFRecordError(*batch.__reduce__()[1])
        return batch


class _Batches(Dataset):
    """A part's micro-batches in one order; a loader's workers read whole ones."""

    def __init__(self, part: CubeDataset, order: list[list[int]]) -> None:
        self.part, self.order = part, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> Any:
        return self.part.seeded_batch(self.order[number], seed=0, epoch=0)


def reading_rates(data: CosmoFlowDataModule, *, epochs: int) -> Iterator[tuple[float, float]]:
    """Read the training set in a random order and do nothing else: (GB/s of counts, samples/s) of each epoch."""
    part, size = data.train_dataloader().dataset, data.micro_batch_size
    for epoch in range(epochs):
        order = torch.randperm(len(part), generator=torch.Generator().manual_seed(epoch)).tolist()
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        loader = DataLoader(_Batches(part, batches), batch_size=None, num_workers=data.num_workers, generator=torch.Generator())
        start, nbytes = time.perf_counter(), 0
        for batch in loader:
            counts, _ = data.on_before_batch_transfer(batch, 0)
            nbytes += counts.nbytes
        seconds = time.perf_counter() - start
        yield nbytes / seconds / 1e9, len(order) / seconds


def _spread_of(folder: Path) -> float | None:
    """The spread that a folder of simulated universes was made with; None for files from elsewhere."""
    try:
        return json.loads((folder / SETTINGS).read_text())["spread"]
    except (OSError, ValueError, KeyError):
        return None
