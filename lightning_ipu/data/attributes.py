"""Fingerprints of an object's attributes, to detect that they have changed: state that the object keeps in memory alone."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Container, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch

_MOST = 1 << 20  # bytes of an attribute that are looked at
_NO_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
OPAQUE = "?"  # for an attribute whose state cannot be read: an open file, a generator


class _Enough(Exception):
    pass


class _Hash:
    """A file that hashes what is written to it, up to a limit."""

    def __init__(self) -> None:
        self._hash, self._left = hashlib.blake2b(digest_size=8), _MOST

    def write(self, data: Any) -> None:
        data = memoryview(data)[: self._left]
        self._hash.update(data)
        self._left -= len(data)
        if not self._left:
            raise _Enough

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _Pickler(pickle.Pickler):
    """Writes what an object holds, but nothing of the objects in `apart`; notes where it holds something that cannot be written."""

    def __init__(self, digest: _Hash, apart: Container[int]) -> None:
        super().__init__(digest, protocol=4)
        self._apart, self.is_opaque = apart, False

    def reducer_override(self, value: Any) -> Any:
        if value is str:
            return NotImplemented
        if id(value) in self._apart or isinstance(value, _NO_STATE):
            return str, (type(value).__name__,)
        if isinstance(value, torch.Tensor):
            return str, (f"{tuple(value.shape)} {value._version} {_first(value).tolist()}",)
        if isinstance(value, numpy.ndarray):  # without a copy of the whole
            return str, (f"{value.shape} {value.dtype}", value.flat[: _MOST // 8].tobytes())
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            self.is_opaque = True
            return str, (type(value).__name__,)
        return reduced if isinstance(reduced, tuple) else (str, (reduced,))


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """The first 64 values of a tensor, without a copy of the whole; a smaller tensor itself."""
    if tensor.numel() <= 64:
        return tensor
    tensor = tensor.detach()
    while tensor[0].numel() >= 64:
        tensor = tensor[0]
    return tensor[:64].flatten()[:64]


def attribute_fingerprints(attributes: Mapping[str, Any], *, apart: Container[int] = ()) -> dict[str, str]:
    """A fingerprint for each of an object's attributes, `OPAQUE` for those whose state cannot be read.

    Args:
        attributes: by name.
        apart: ids of objects that are not looked into.
    """
    return {name: _fingerprint(value, apart) for name, value in attributes.items()}


def _fingerprint(value: Any, apart: Container[int]) -> str:
    digest = _Hash()
    pickler = _Pickler(digest, apart)
    try:
        pickler.dump(value)
    except _Enough:
        pass
    except Exception:
        return OPAQUE
    return OPAQUE if pickler.is_opaque else digest.hexdigest()
