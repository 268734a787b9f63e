"""What a batch holds: how many samples, and whether a hook has changed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from pytorch_lightning.utilities.data import extract_batch_size
from pytorch_lightning.utilities.exceptions import MisconfigurationException


def samples_in(batch: Any, drawn: int | None) -> int:
    """Samples in a batch: the number that was drawn, if anything in the batch has this length, else Lightning's guess.

    A collate_fn may leave samples out. Lightning's guess, the length of the first tensor, would be the number of time steps where these come
    first.
    """
    if drawn is not None and any(length == drawn for length in _lengths(batch)):
        return drawn
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # the batch holds no tensor
        if drawn is None:
            raise
        return drawn


def _lengths(value: Any, *, outermost: bool = True) -> Iterator[int]:
    """Lengths of the tensors in a batch, and of the lists inside it."""
    if isinstance(value, torch.Tensor):
        yield len(value) if value.dim() else 1
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _lengths(item, outermost=False)
    elif isinstance(value, (list, tuple)):
        if not outermost:
            yield len(value)
        for item in value:
            yield from _lengths(item, outermost=False)
    elif is_dataclass(value):
        for place in fields(value):
            yield from _lengths(getattr(value, place.name), outermost=False)


def contents(batch: Any) -> tuple[list[Any], list[Any]]:
    """What the objects in a batch are and hold, for a later comparison; and the objects, to keep them alive."""
    things = list(_things(batch))
    return [(id(thing), getattr(thing, "_version", None), _checksum(thing)) for thing in things], things


def _checksum(thing: Any) -> int | None:
    """Of a tensor's or array's numbers on the host, which may change without a new version: through `.data`, or a NumPy view."""
    if isinstance(thing, torch.Tensor) and thing.layout is torch.strided and thing.is_cpu and not thing.is_quantized:
        thing = thing.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return crc32(thing.tobytes()) if isinstance(thing, np.ndarray) and thing.dtype != object else None


def _things(value: Any, depth: int = 8) -> Iterator[Any]:
    yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        value = list(vars(value).values())
    if isinstance(value, (list, tuple)) and depth:
        for item in value:
            yield from _things(item, depth - 1)
