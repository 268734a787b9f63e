"""Checkpoint files: written completely or not at all; read without running code in them, with errors that name the file."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pathlib
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from lightning_fabric.utilities.cloud_io import _is_local_file_protocol
from pytorch_lightning.plugins.io import TorchCheckpointIO
from typing_extensions import override


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that takes its name only once it is complete and on the disk; whatever was there stays until then.

    Raises:
        OSError: the file cannot be written (a full disk, say); the message names it, and no part of it is left behind.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes it private; the file should look like any other
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save hides a full disk behind its own error
        with named_when_full(target):
            raise cause if isinstance(cause, OSError) else error  # noqa: B904 - the same error
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def named_when_full(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to errors of writes to an open file, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{error.strerror}, while writing", os.fspath(path)) from error


@contextlib.contextmanager
def named_when_damaged(path: str | os.PathLike[str], option: str = "") -> Iterator[None]:
    """Turn errors of reading a file of torch.save into one that names it; messages begin with the `option` that gave the file.

    Raises:
        ValueError: it cannot be read; the message names the file and a type in it that is neither a tensor nor a setting.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings on foreign pickles: the error is enough
            yield
    except OSError as error:
        raise ValueError(f"{option}{path} cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a wrong byte can raise nearly anything in torch
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"holds a {found[1]}, not only tensors and settings" if found else "is cut off, damaged or another kind of file"
        raise ValueError(f"{option}{path} is not a complete file of torch.save: it {what}") from None


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint of a run, in host memory; tensors are read from the file when they are used.

    Raises:
        ValueError: the file cannot be read, or is not a checkpoint; the message names it.
    """
    with named_when_damaged(path):
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(checkpoint, dict) or not {"state_dict", "global_step"} <= checkpoint.keys():
        raise ValueError(f"{path} is no checkpoint of a run: it has no state_dict and global_step")
    return checkpoint


def link(source: Path, name: Path) -> None:
    """Let ``name`` stand for the same file as ``source``, at once; a copy of it where the file system has no links."""
    draft = name.with_name(f".{name.name}.link.part")
    draft.unlink(missing_ok=True)
    try:
        os.link(source, draft)
    except OSError:
        with atomic_write(name) as file, open(source, "rb") as original:
            shutil.copyfileobj(original, file)
    else:
        os.replace(draft, name)


def _is_harmless(kind: Any) -> bool:
    """Whether a type that torch does not load by itself is safe to load: paths, enumerations, numpy's numbers and arrays."""
    if isinstance(kind, type):
        return issubclass(kind, (pathlib.PurePath, enum.Enum, np.generic, np.ndarray, np.dtype))
    return getattr(kind, "__module__", "").partition(".")[0] == "numpy" and kind.__name__ in ("scalar", "_reconstruct")


def _harmless_types(file: Any) -> tuple[list[Any], list[str]]:
    """Types in a checkpoint that torch does not load by itself: the safe ones, for `safe_globals`, and the names of the others.

    Nothing is imported: a run cannot need a type from a module that is not loaded.
    """
    plain: list[Any] = [
        kind for kind in vars(np.dtypes).values() if isinstance(kind, type)
    ]  # numpy's dtypes, which the pickle does not list
    others = []
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(file):
        module, _, attribute = name.rpartition(".")
        kind = getattr(sys.modules.get(module), attribute, None)
        if kind is not None and _is_harmless(kind):
            plain.append((kind, name))
        else:
            others.append(name)
    return plain, others


def loads_not(values: dict[str, Any]) -> dict[str, str]:
    """The values of a checkpoint that `AtomicCheckpointIO` could not load again, each with the types that prevent it."""
    found = {}
    for name, value in values.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
        except Exception:
            continue  # writing the checkpoint itself will raise a clearer error
        file.seek(0)
        if others := _harmless_types(file)[1]:
            found[name] = ", ".join(others)
    return found


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own checkpoint files, written atomically on local disks, and read with errors that name the file."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None) -> None:
        if not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_write(path) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Lightning does; hyperparameters may also be paths, enumerations of modules in use, and numpy's numbers."""
        plain = []
        if weights_only is not False and _is_local_file_protocol(path):
            with contextlib.suppress(Exception):  # a missing or foreign file is reported below
                plain = _harmless_types(path)[0]
        with torch.serialization.safe_globals(plain), named_when_damaged(path):
            return super().load_checkpoint(path, map_location, weights_only)
