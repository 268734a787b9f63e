"""Cubes kept in memory as they are read."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


class CubeCache:
    """Cubes and targets kept in memory as they are read, int16, the first `capacity` of them; worker processes forked later share it.

    Memory is taken as it is filled. In a process that was not forked but started anew the cache is empty and stays so.
    """

    def __init__(self, *, capacity: int, nbytes: int) -> None:
        self.capacity, self.nbytes = capacity, nbytes
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        self._slots = np.frombuffer(mmap.mmap(-1, max(1, capacity * (self.nbytes + 16))), dtype=np.uint8)[: capacity * (self.nbytes + 16)]
        self._slots = self._slots.reshape(capacity, self.nbytes + 16)
        self._filled = np.frombuffer(mmap.mmap(-1, max(1, capacity)), dtype=np.uint8)[:capacity]

    def get(self, number: int, into: np.ndarray) -> np.ndarray | None:
        """Copy cube `number` into a uint8 array and return its targets, or None where it is not here."""
        if number >= len(self._filled) or not self._filled[number]:
            return None
        into[:] = self._slots[number, : self.nbytes]
        return self._slots[number, self.nbytes :].view(np.float32)

    def put(self, number: int, cube: np.ndarray, targets: np.ndarray) -> None:
        """Keep a cube, if it is one of the first `capacity`."""
        if number < len(self._filled):
            self._slots[number, : self.nbytes] = cube
            self._slots[number, self.nbytes :] = targets.view(np.uint8)
            self._filled[number] = 1

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "nbytes": self.nbytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make(0)
