"""Lightning's checkpoint files, written atomically and read with errors that name the file; hyperparameters may hold harmless types."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from pytorch_lightning.plugins import CheckpointIO
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_ipu.files import atomic_write, harmless_types, load


def unloadable_types(values: dict[str, Any]) -> dict[str, str]:
    """The values of a checkpoint that `AtomicCheckpointIO` could not load again, each with the types that prevent it."""
    found = {}
    for name, value in values.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
        except Exception:
            continue  # writing the checkpoint itself will raise a clearer error
        file.seek(0)
        if others := harmless_types(file)[1]:
            found[name] = ", ".join(others)
    return found


def _is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, which Lightning opens by fsspec."""
    return "://" in str(path)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own checkpoint files, written atomically on local disks, and read with errors that name the file."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None) -> None:
        if _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_write(path) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Lightning does; on local disks by `files.load`, so that hyperparameters may also be paths, enumerations and numpy's numbers."""
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only)
        return load(path, map_location=map_location, weights_only=weights_only)


def completed(io: CheckpointIO | None) -> CheckpointIO:
    """The user's checkpoint plugin; this package's if there is none, or inside of one that wraps none."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, _WrappingCheckpointIO) and io.checkpoint_io is None:
        io.checkpoint_io = AtomicCheckpointIO()
    return io
