"""Simulated universes, written as the files that the real data set consists of, each once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset

from cosmoflow_ipu.data.files import CosmoDataError
from cosmoflow_ipu.data.progress import progress
from cosmoflow_ipu.universe import PARAMETERS, REDSHIFTS, Universes, cut
from lightning_ipu import machine
from lightning_ipu.data.tf_example import encode_example
from lightning_ipu.data.tfrecord import write_tfrecord
from lightning_ipu.files import atomic_write

FIRST_INDEX = {"train": 0, "validation": 1_000_000, "test": 2_000_000}  # of a split's universes: more of one never become another's
SETTINGS = "universes.json"  # what a folder of simulated universes holds


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
            missing += [(folder / split / name, index) for index in numbers if (name := file_name(index)) not in there]
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
        with progress(f"simulating {len(missing):,} universes", len(missing)) as advance:
            for fault in loader:
                if fault is not None:
                    raise fault
                advance(1)


def file_name(index: int) -> str:
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


def spread_of(folder: Path) -> float | None:
    """The spread that a folder of simulated universes was made with; None for files from elsewhere."""
    try:
        return json.loads((folder / SETTINGS).read_text())["spread"]
    except (OSError, ValueError, KeyError):
        return None
