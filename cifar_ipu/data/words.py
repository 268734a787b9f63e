"""64 random bits for each sample, a pure function of names and its index."""

from __future__ import annotations

from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


def _mix(state: Any) -> Any:
    """Finalise a 64-bit state, a Python int or a uint64 array, as splitmix64 does (Steele, Lea and Flood, OOPSLA 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def random_words(*key: int, indices: np.ndarray) -> np.ndarray:
    """64 random bits for each index, a pure function of the integers in `key` and the index: (N,) integers -> (N,) uint64."""
    state = 0
    for part in key:
        state = _mix(state ^ (part & _MASK))
    return _mix(indices.astype(np.uint64) ^ np.uint64(state))


SPLIT, PATTERNS, NOISE, OFFSETS, LABELS = range(5)  # what a word is drawn for: keeps the streams of one seed apart
