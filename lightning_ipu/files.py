"""Checkpoint files: written completely or not at all; read without running code in them, with errors that name the file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch


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
