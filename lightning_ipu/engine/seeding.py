"""Seed every random draw of a training step by its names: weight update, replica, micro-batch and module."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ipu.cutting.call_wrappers import CallWrappers, called_modules, is_one_piece
from lightning_ipu.randomness import is_torchs, may_draw, mix, name_word, seed_all, seed_torch, set_torch_streams, torch_streams

_STEP, _AFTER, _UPDATE, _HOOK = (name_word(name) for name in ("step", "after the forward", "update", "hook"))


class _MicroBatch:
    """The module calls of one micro-batch so far: for each name, the positions of its calls in their order."""

    def __init__(self, base: int) -> None:
        self.base, self.places, self.calls = base, {}, 0


StreamState = tuple[_MicroBatch, int, tuple[torch.Tensor, torch.Tensor | None]]


class NamedRandomness:
    """Seeds every random draw of a training step from (seed, weight update, replica, micro-batch, qualified module name).

    The step as a whole starts from the first four; each module that may draw is seeded anew by its name at each of its calls, so that
    its numbers do not depend on what ran before it, on which stage it sits in, or on whether a block before it was recomputed.

    A call repeated in a backward pass (by torch.utils.checkpoint, or anything else that restores torch's random state before a
    recomputation) gets the seed of the call that it repeats: the seed in the restored state identifies it.

    A compiled module (torch.compile, torch.jit) is seeded as a whole, by its own name: nothing can be seeded inside it.
    """

    def __init__(self, module: nn.Module, *, seed: int, device: torch.device, steps_are_compiled: bool = False) -> None:
        self._seed, self._device = mix(seed, _STEP), device
        self.wrappers = CallWrappers()
        drawing = [(name, child) for name, child in called_modules(module) if is_one_piece(child) or may_draw(child)]
        if steps_are_compiled:
            drawing = []
        for name, child in drawing:
            seed_streams = seed_torch if is_torchs(child) else seed_all
            self.wrappers.add(child, partial(self._seeded, child, name_word(name), seed_streams))
        if drawing:
            self.wrappers.add(module, partial(self._seeded_after, module))
        self._round: tuple[int, int] | None = None
        # Whose call a seed was taken for, and after how many calls of that micro-batch it left the step.
        self._after_seed: dict[int, tuple[_MicroBatch, int]] = {}
        self._micro_batch = _MicroBatch(self._seed)
        self._returned_to = self._micro_batch, 0

    def begin_forward(self, update: int, replica: int, micro_batch: int) -> None:
        """From now on modules are seeded for this micro-batch of this replica in this weight update, each by its own name."""
        if self._round != (update, replica):  # the backward passes of another are over
            self._round = update, replica
            self._after_seed.clear()
        self._micro_batch = _MicroBatch(mix(self._seed, update, replica << 32 | micro_batch))
        self._after_seed[self._micro_batch.base] = self._returned_to = self._micro_batch, 0
        self.wrappers.begin()
        seed_torch(self._micro_batch.base, self._device)

    def begin(self, update: int, replica: int, micro_batch: int) -> None:
        """The same, and seed the global streams, from which the step itself draws."""
        self.begin_forward(update, replica, micro_batch)
        seed_all(self._micro_batch.base, self._device)

    def end(self) -> None:
        """Called after the micro-batches of a replica: modules are no longer seeded by their names."""
        self.wrappers.end()

    def begin_update(self, update: int) -> None:
        """Seed the global streams for an optimizer that draws."""
        seed_all(mix(self._seed, _UPDATE, update), self._device)

    def begin_hook(self, update: int, name: str) -> None:
        """Seed the global streams for a hook in a weight update, whatever was drawn before it."""
        seed_all(mix(self._seed, _HOOK, update, name_word(name)), self._device)

    def _seeded(
        self, module: nn.Module, word: int, seed: Callable[[int, torch.device], None], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if module.training:
            self._seed_call(word, seed)
        return call(*args, **kwargs)

    def _seeded_after(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Seed the step again after its forward: in a pipeline the forward draws in other processes, so later draws must not depend on it."""
        output = call(*args, **kwargs)
        if module.training:
            self._seed_call(_AFTER, seed_all)
        return output

    def _seed_call(self, word: int, seed: Callable[[int, torch.device], None]) -> None:
        micro_batch, place = self._here()
        earlier = micro_batch.places.setdefault(word, [])
        number = bisect_left(earlier, place)
        if number == len(earlier):
            earlier.append(micro_batch.calls)
            micro_batch.calls += 1
        seeded = mix(micro_batch.base, word, number)
        self._after_seed[seeded] = micro_batch, earlier[number] + 1
        seed(seeded, self._device)

    def _here(self) -> tuple[_MicroBatch, int]:
        """The micro-batch, and the number of its calls so far."""
        if torch._C._current_graph_task_id() == -1:
            return self._micro_batch, self._micro_batch.calls
        # A call in a backward pass is a repeated one.
        return self._after_seed.get(torch.default_generator.initial_seed(), self._returned_to)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the network be run on trial in the middle of a step: its calls are seeded as usual, and do not count."""
        micro_batch, self._micro_batch = self._micro_batch, _MicroBatch(self._seed)
        active = nullcontext() if self.wrappers.is_active else self.wrappers.active()
        try:
            with active:
                yield
        finally:
            self._micro_batch = micro_batch

    def stream_state(self) -> StreamState:
        """The present state of the step's random streams, for `return_to`."""
        return *self._here(), torch_streams(self._device)

    def return_to(self, state: StreamState) -> None:
        """Restore a `stream_state` in a backward pass; other micro-batches may have begun since."""
        self._returned_to = state[:2]
        set_torch_streams(state[2], self._device)
