"""A cache of what is known about a data set's files, for the next start and for a run's other processes."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_ipu import machine
from lightning_ipu.files import atomic_write


class Index:
    """Values by name, numpy arrays or JSON, cached in a file; the caller checks that they still fit the data.

    A damaged file counts as missing, and a folder that cannot be written to is no error.

    Args:
        folder: where the file is kept for the next start; None keeps nothing beyond the run.
        name: of the file, without its suffix.
        shared: without a folder, share the values with the other processes that a launcher starts on this machine, until the run ends.
    """

    def __init__(self, folder: Path | None, name: str, *, shared: bool = False) -> None:
        if folder is None and shared:
            folder = _folder_of_this_run()
        self.path = None if folder is None else folder / f"{name}.npz"
        self.content: dict[str, Any] = {}
        self._stamp: tuple[int, int] | None = None  # of the file when it was read
        self._read()

    def _read(self) -> None:
        """Read the file, unless it has not changed since it was last read."""
        try:
            found = os.stat(self.path) if self.path is not None else None
            if found is None or (found.st_ino, found.st_mtime_ns) == self._stamp:
                return
            with np.load(self.path, allow_pickle=False) as arrays:
                self.content = {**arrays, **json.loads(str(arrays["meta"]))}
            self._stamp = found.st_ino, found.st_mtime_ns
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            pass

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let one process search while the others wait and then use its results: the processes of a run start at the same time.

        Where no file can be kept, each process searches by itself.
        """
        with ExitStack() as held:
            if self.path is not None:
                with suppress(OSError, NotImplementedError):  # no folder to write to, or a file system without locks
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    held.enter_context(FileLock(self.path.with_name(f".{self.path.name}.lock")))
            self._read()
            yield

    def save(self) -> None:
        """Write it, as a whole or not at all."""
        if self.path is None:
            return
        arrays = {name: value for name, value in self.content.items() if isinstance(value, np.ndarray) and name != "meta"}
        meta = {name: value for name, value in self.content.items() if not isinstance(value, np.ndarray)}
        try:
            with atomic_write(self.path) as file:
                np.savez(file, meta=json.dumps(meta), **arrays)
        except OSError as error:
            rank_zero_warn(f"the index of the data is not kept: {error}")


@cache
def _folder_of_this_run() -> Path | None:
    """A folder that the processes of this run on this machine have in common, removed when the run ends; None where there can be none."""
    is_first = not machine.is_launched()
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"lightning_ipu-{user}-{os.getpid() if is_first else machine.LAUNCHED_BY or os.getppid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == user or not hasattr(os, "getuid"):
            if is_first or os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID")) == "0":
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder
    return None
