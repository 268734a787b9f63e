"""Randomness as a function of names, not of history: every stream is seeded from (seed, what it is for, where it stands).

A run that is interrupted, spread over other processes or loaded by other workers then draws the same numbers, and a checkpoint needs no
generator states. The alternative, carrying the states of all generators along, makes the numbers depend on how many were drawn before.
"""

import functools
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """Hash whole numbers to one of 63 bits: a chain of SplitMix64 finalisers (Steele, Lea and Flood, 2014)."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


@functools.cache
def name_word(name: str) -> int:
    """A 64-bit number for a name, the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's generator of the CPU and, if given, of one CUDA device; 1 us, a hundredth of torch.manual_seed."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed the global streams of torch, numpy and Python."""
    seed_torch(seed, device)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserved_streams(device: torch.device | None = None) -> Iterator[None]:
    """Leave the caller's global random streams (torch, numpy, Python) as they were, whatever is drawn inside."""
    cuda = torch.cuda.default_generators[device.index or 0] if device is not None and device.type == "cuda" else None
    states = torch.default_generator.get_state(), numpy.random.get_state(), random.getstate(), cuda.get_state() if cuda else None
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])
        if cuda:
            cuda.set_state(states[3])
