"""Lightning's checkpoint files, written atomically and read with errors that name the file; hyperparameters may hold harmless types."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pathlib
import sys
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.cloud_io import _is_local_file_protocol
from pytorch_lightning.plugins import CheckpointIO
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_ipu.files import atomic_write, named_when_damaged


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


def completed(io: CheckpointIO | None) -> CheckpointIO:
    """The user's checkpoint plugin, with this package's inside where it is none or wraps none."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, _WrappingCheckpointIO) and io.checkpoint_io is None:
        io.checkpoint_io = AtomicCheckpointIO()
    return io
