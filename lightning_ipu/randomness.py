"""Randomness as a function of names, not of history: every stream is seeded from (seed, what it is for, where it stands).

A run that is interrupted, spread over other processes or loaded by other workers then draws the same numbers, and a checkpoint needs no
generator states. The alternative, carrying the states of all generators along, makes the numbers depend on how many were drawn before.
"""

import functools
import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

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


def torch_streams(device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States of torch's global streams, of the CPU and, if given, of one CUDA device, for `set_torch_streams`."""
    cuda = torch.cuda.default_generators[device.index or 0].get_state() if device is not None and device.type == "cuda" else None
    return torch.default_generator.get_state(), cuda


def set_torch_streams(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device | None = None) -> None:
    """Go on from `torch_streams` of the same device."""
    torch.default_generator.set_state(states[0])
    if states[1] is not None:
        torch.cuda.default_generators[device.index or 0].set_state(states[1])


def host_streams() -> tuple[Any, Any]:
    """States of the global streams of numpy and Python, for `set_host_streams`; 40 us, most of it numpy's."""
    return numpy.random.get_state(), random.getstate()


def set_host_streams(states: tuple[Any, Any]) -> None:
    """Go on from `host_streams`."""
    numpy.random.set_state(states[0])
    random.setstate(states[1])


def drawn_between(before: tuple[Any, Any], after: tuple[Any, Any]) -> str:
    """Which of two states of the host streams differ: "numpy.random", "random" or neither."""
    if before[1] != after[1]:
        return "random"
    return "numpy.random" if pickle.dumps(before[0]) != pickle.dumps(after[0]) else ""


@contextmanager
def preserved_streams(device: torch.device | None = None) -> Iterator[None]:
    """Leave the caller's global random streams (torch, numpy, Python) as they were, whatever is drawn inside."""
    of_torch, of_host = torch_streams(device), host_streams()
    try:
        yield
    finally:
        set_torch_streams(of_torch, device)
        set_host_streams(of_host)


def may_draw(module: nn.Module) -> bool:
    """Whether a module may draw random numbers of its own in its forward: torch's dropouts, and any leaf that is not torch's."""
    if isinstance(module, (_DropoutNd, nn.RReLU)):
        return True
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    return not is_torchs(module) and next(module.children(), None) is None


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is torch's own, which draw by torch alone."""
    return type(module).__module__.startswith("torch.nn.")
