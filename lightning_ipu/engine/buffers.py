"""Buffers of a network: each replica has its own within a weight update; after it there is one value for all."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_BITS = 22  # of a whole number, which float32 holds exactly


class ReplicaBuffers:
    """Buffers of a network. Every replica has its own within a weight update; after it all have the same.

    Each replica starts an update from the common values. At its end floating-point buffers (BatchNorm's running statistics) take the
    mean over replicas, the others (its counter) the values of replica 0. What is infinite before anything has been seen (the ranges that
    quantisation observes) takes the mean of what it has become. A buffer that was None or empty at first, or that is given another shape, takes
    the mean over the replicas in which it has the same shape as in replica 0.

    `moves` are the sums over replicas of the changes of floating-point buffers, `counts` the other buffers of replica 0 (none if it runs
    elsewhere); `renewed` has for each replica the buffers, by name, that it has filled, emptied or given another shape. With replicas elsewhere,
    these must hold all of them before `end_update`.

    Args:
        module: the network.
        replicas: how many there are in all; with one there is nothing to average.
        names: the buffers' names; by default all.
    """

    def __init__(self, module: nn.Module, replicas: int, names: Container[str] | None = None) -> None:
        self._module, self._replicas = module, replicas
        # By place, not by tensor: a forward may put a new tensor in a buffer's place.
        self._places: list[tuple[nn.Module, str]] = []
        self._names: list[str] = []  # of the places
        self._late: set[int] = set()  # places of buffers that a forward has registered
        self._others_names: set[str] = set()
        for name, owner, key in _buffers(module):
            if names is None or name in names:
                self._add(name, owner, key)
            else:
                self._others_names.add(name)
        self._owners = list(module.modules())
        self._common: list[torch.Tensor | None] = []
        self._shapes: list[torch.Size | None] = []
        self._floats, self._others = [], []  # numbers of buffers
        self._open = {number for number, buffer in enumerate(self._at(range(len(self._places)))) if not _is_finite(buffer)}

    def _add(self, name: str, owner: nn.Module, key: str) -> None:
        self._places.append((owner, key))
        self._names.append(name)

    def _add_late(self, name: str, owner: nn.Module, key: str) -> None:
        self._late.add(len(self._places))
        self._add(name, owner, key)
        self._common.append(None)
        self._shapes.append(None)

    def _find_late(self) -> None:
        """Take in buffers that a forward has registered."""
        held = sum(len(owner._buffers) for owner in self._owners)
        gone = sum(key not in owner._buffers for owner, key in map(self._places.__getitem__, self._late))
        if held != len(self._places) + len(self._others_names) - gone:
            for name, owner, key in _buffers(self._module):
                if name not in self._others_names and name not in self._names:
                    self._add_late(name, owner, key)

    def _at(self, numbers: Iterable[int]) -> list[torch.Tensor | None]:
        return [owner._buffers.get(key) for owner, key in map(self._places.__getitem__, numbers)]

    def _put(self, numbers: Iterable[int], values: Iterable[torch.Tensor | None]) -> None:
        """Copy values into buffers; one that is None, or whose buffer has another shape, takes the buffer's place."""
        targets, sources = [], []
        for number, value in zip(numbers, values, strict=True):
            owner, key = self._places[number]
            buffer = owner._buffers.get(key)
            if value is None and number in self._late:
                owner._buffers.pop(key, None)  # for the forward to register it again
            elif value is None or buffer is None or buffer.shape != value.shape:
                owner._buffers[key] = None if value is None else value.clone()
            else:
                targets.append(buffer)
                sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def begin_update(self) -> None:
        self._common = [None if buffer is None else buffer.clone() for buffer in self._at(range(len(self._places)))]
        self._shapes = [None if buffer is None else buffer.shape for buffer in self._common]
        held = [number for number, buffer in enumerate(self._common) if buffer is not None]
        self._floats = [number for number in held if _is_averaged(self._common[number])]
        self._others = sorted(set(held).difference(self._floats))
        self.moves: list[torch.Tensor] = []
        self.counts: list[torch.Tensor] = []
        self.renewed: list[dict[str, torch.Tensor | None]] = []

    @torch.no_grad()
    def begin_replica(self) -> None:
        self._put(range(len(self._common)), self._common)

    @torch.no_grad()
    def end_replica(self, replica: int) -> None:
        if self._replicas == 1:
            return
        self._find_late()
        ends, common = self._at(range(len(self._places))), self._common
        shapes = [None if end is None else end.shape for end in ends]
        renewed = {k: ends[k] for k, (shape, before) in enumerate(zip(shapes, self._shapes, strict=True)) if shape != before}
        self.renewed.append({self._names[k]: None if end is None else end.detach().clone() for k, end in renewed.items()})
        if self._floats:
            # Sums of differences, so that a buffer that no replica changes keeps its value to the last bit.
            starts = [self._start(k) for k in self._floats]
            ended = [start if k in renewed else ends[k] for k, start in zip(self._floats, starts, strict=True)]
            moved = torch._foreach_sub(ended, starts)
            self.moves = torch._foreach_add(self.moves, moved) if self.moves else moved
        if replica == 0:
            self.counts = [common[k] if k in renewed else ends[k].clone() for k in self._others]

    @property
    def no_counts(self) -> list[torch.Tensor]:
        """Zeros in place of `counts`."""
        return [torch.zeros_like(self._common[k]) for k in self._others]

    @torch.no_grad()
    def end_update(self) -> None:
        if self._replicas == 1:
            return  # the one replica's values, to the last bit
        self._put(self._floats, [self._start(k) + total / self._replicas for k, total in zip(self._floats, self.moves, strict=True)])
        self._put(self._others, self.counts)
        for name in sorted(set().union(*self.renewed)):
            if name not in self._names:  # it was registered in another process
                path, _, key = name.rpartition(".")
                self._add_late(name, self._module.get_submodule(path), key)
            number = self._names.index(name)
            self._put([number], [self._of_all(number)])
            if not _is_finite(self._at([number])[0]):
                self._open.add(number)

    def _of_all(self, number: int) -> torch.Tensor | None:
        """What a buffer becomes that a replica has filled, emptied or given another shape."""
        common, name, first = self._common[number], self._names[number], self.renewed[0]
        if name in first:
            ends = [of[name] for of in self.renewed if name in of and _shape(of[name]) == _shape(first[name])]
            return sum(ends[1:], ends[0]) / len(ends) if ends[0] is not None and _is_averaged(ends[0]) else ends[0]
        if common is None or not _is_averaged(common):
            return self._at([number])[0] if common is not None else None
        return self._start(number) + self.moves[self._floats.index(number)] / sum(name not in of for of in self.renewed)

    def _start(self, number: int) -> torch.Tensor:
        """The value from which a floating-point buffer changes: the common one, or 0 where that is infinite."""
        common = self._common[number]
        return torch.where(common.isfinite(), common, 0) if number in self._open else common


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for key in owner._buffers:
            yield f"{path}.{key}" if path else key, owner, key


def _is_finite(buffer: torch.Tensor | None) -> bool:
    return buffer is None or bool(buffer.isfinite().all())


def _is_averaged(buffer: torch.Tensor) -> bool:
    """Whether a buffer takes the mean over replicas."""
    return buffer.is_floating_point() or buffer.is_complex()


def _shape(buffer: torch.Tensor | None) -> torch.Size | None:
    return None if buffer is None else buffer.shape


class BackwardWatch:
    """Notices backward passes that change buffers: a checkpoint of the network's own runs its layers again in them.

    `changed` is the name of such a buffer, empty while there is none. Layers may write to a buffer without a new version of it, as norms do to
    their statistics (but not to their counters), so that in the first pass the values are compared as well.
    """

    def __init__(self, module: nn.Module, names: Container[str]) -> None:
        self._places = [place for place in _buffers(module) if place[0] in names]
        self._is_first, self.changed = True, ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a backward pass."""
        buffers = [owner._buffers[key] for _, owner, key in self._places]
        versions = [None if buffer is None else buffer._version for buffer in buffers]
        values = [buffer.clone() if self._is_first and buffer is not None else None for buffer in buffers]
        self._is_first = False
        yield
        for (name, owner, key), buffer, version, value in zip(self._places, buffers, versions, values, strict=True):
            now = owner._buffers[key]
            if now is not buffer or now is not None and (now._version != version or value is not None and not _same(now, value)):
                self.changed = self.changed or name


def _same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    return bool(((buffer == value) | (buffer != buffer) & (value != value)).all())


def whole_as_floats(values: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whole numbers in float32, so that they can be sent with gradients: added to those of zeros, they are kept to the last bit."""
    flat = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *(value.reshape(-1).to(torch.int64) for value in values)])
    return torch.stack([flat >> shift & (1 << _BITS) - 1 for shift in (0, _BITS, 2 * _BITS)]).float()


def floats_as_whole(floats: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """What `whole_as_floats` was given, in the shapes and types of other tensors."""
    low, middle, high = floats.long()
    parts = (low | middle << _BITS | high << 2 * _BITS).split([value.numel() for value in like])
    return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, like, strict=True)]


def make_room(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Fill buffers that are None or empty in a new module, but not in a `state_dict`, so that it can be loaded: a forward had filled them."""
    for path, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            saved = state.get(f"{path}.{key}" if path else key)
            if isinstance(saved, torch.Tensor) and (buffer is None or buffer.numel() == 0):
                device = next((tensor.device for tensor in module.parameters()), saved.device)
                owner._buffers[key] = torch.empty_like(saved, device=device)
