"""A fingerprint of the training data, kept in checkpoints, to detect files that were added or removed before a run is resumed."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def fingerprint(*parts: Any) -> str:
    """16 hexadecimal digits that change when a part does: texts, numbers, arrays, None, and lists and dictionaries of them.

    Unlike Python's own hash it is the same in every process.
    """
    digest = hashlib.blake2b(digest_size=8)
    for piece in _pieces(parts):
        digest.update(len(piece).to_bytes(8, "big"))
        digest.update(piece)
    return digest.hexdigest()


def _pieces(part: Any) -> Iterable[bytes | memoryview]:
    if isinstance(part, np.ndarray):
        yield f"{part.dtype.str} {part.shape}".encode()
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
    elif isinstance(part, dict):
        yield from _pieces([piece for name in sorted(part) for piece in (name, part[name])])
    elif isinstance(part, Sequence) and not isinstance(part, (str, bytes)):
        yield f"{len(part)} parts".encode()
        for piece in part:
            yield from _pieces(piece)
    else:
        yield repr(part).encode()
