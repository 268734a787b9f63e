"""Files that a run writes and reads: written completely or not at all, loaded without running code in them, with errors that name the file."""

from __future__ import annotations

import contextlib
import enum
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

from lightning_ipu.errors import UserError


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file, for bytes or with "w" for text, that takes its name only once it is complete and on the disk; what was there stays until then.

    Raises:
        OSError: the file cannot be written (a full disk, say); the message names it, and no part of it is left behind.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with open(descriptor, mode) as file:
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


def load(
    path: str | os.PathLike[str], *, option: str = "", map_location: Any = "cpu", mmap: bool = False, weights_only: bool | None = True
) -> Any:
    """What torch.save wrote into a file: tensors, settings, paths, enumerations of modules in use, and numpy's numbers.

    Args:
        option: that gave the file; messages begin with it.
        map_location, mmap, weights_only: as in torch.load.

    Raises:
        UserError: it cannot be read; the message names the file and a type in it that is none of these.
    """
    harmless: list[Any] = []
    if weights_only is not False:
        with contextlib.suppress(Exception):  # a missing or foreign file is reported below
            harmless = harmless_types(path)[0]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(harmless):
            warnings.simplefilter("ignore")  # torch's warnings on foreign pickles: the error is enough
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=weights_only)
    except OSError as error:
        raise UserError(f"{option}{path} cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a wrong byte can raise nearly anything in torch
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"holds a {found[1]}, not only tensors and settings" if found else "is cut off, damaged or another kind of file"
        raise UserError(f"{option}{path} is not a complete file of torch.save: it {what}") from None


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint of a run, in host memory; tensors are read from the file when they are used.

    Raises:
        UserError: the file cannot be read, or is not a checkpoint; the message names it.
    """
    checkpoint = load(path, mmap=True)
    if not isinstance(checkpoint, dict) or not {"state_dict", "global_step"} <= checkpoint.keys():
        raise UserError(f"{path} is no checkpoint of a run: it has no state_dict and global_step")
    return checkpoint


def _is_harmless(kind: Any) -> bool:
    """Whether a type that torch does not load by itself is safe to load: paths, enumerations, numpy's numbers and arrays."""
    if isinstance(kind, type):
        return issubclass(kind, (pathlib.PurePath, enum.Enum, np.generic, np.ndarray, np.dtype))
    return getattr(kind, "__module__", "").partition(".")[0] == "numpy" and kind.__name__ in ("scalar", "_reconstruct")


def harmless_types(file: Any) -> tuple[list[Any], list[str]]:
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


class OutputDirectoryError(UserError):
    """The output directory cannot be used; the message names it and says what would help."""


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Make a directory, and add its name to errors of what is done in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputDirectoryError(f"cannot write in the output directory {directory}: {error.strerror}") from None


def check_writable(directory: str | Path) -> None:
    """Raise OutputDirectoryError if a directory cannot be made or written to; called before the work rather than after it."""
    with writing_to(Path(directory)), tempfile.TemporaryFile(dir=directory):
        pass
