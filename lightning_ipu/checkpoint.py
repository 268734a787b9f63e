"""Checkpoint files: written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

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
        if isinstance(cause, OSError) and cause.filename is None:
            raise OSError(cause.errno, f"{cause.strerror}, while writing", os.fspath(target)) from cause
        raise
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


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


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own checkpoint files, written atomically where they lie on a local disk."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None) -> None:
        if not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_write(path) as file:
            torch.save(checkpoint, file)
