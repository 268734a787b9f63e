"""One stage at work: seeded randomness by module name, and recomputation that leaves everything but activations alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import (
    drawn_between,
    host_streams,
    mix,
    name_word,
    seed_all,
    seed_torch,
    set_host_streams,
    set_torch_streams,
    torch_streams,
)
from lightning_ipu.user_step import LogRecorder, metrics_of, unchanged_metrics

_STEP, _AFTER, _UPDATE = name_word("step"), name_word("after the forward"), name_word("update")
Place = tuple[int, dict[int, int], tuple[torch.Tensor, torch.Tensor | None]]


def _may_draw(module: nn.Module) -> bool:
    """Whether a module may draw random numbers of its own in its forward: torch's dropouts, and any leaf that is not torch's."""
    if isinstance(module, (_DropoutNd, nn.RReLU)):
        return True
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    return not _is_torchs(module) and next(module.children(), None) is None


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is torch's own, which draw by torch alone."""
    return type(module).__module__.startswith("torch.nn.")


class NamedRandomness:
    """Seeds every random draw of a training step from (seed, weight update, replica, micro-batch, qualified module name).

    The step as a whole starts from the first four; each module that may draw is seeded anew by its name at each of its calls, so that
    its numbers do not depend on what ran before it, on which stage it sits in, or on whether a block before it was recomputed.
    """

    def __init__(self, module: nn.Module, *, seed: int, device: torch.device) -> None:
        self._seed, self._device = mix(seed, _STEP), device
        self._base = 0
        self.calls: dict[int, int] = {}
        self._hooks = [
            child.register_forward_pre_hook(partial(self._seed_call, name_word(name), seed_torch if _is_torchs(child) else seed_all))
            for name, child in module.named_modules()
            if child is not module and _may_draw(child)
        ]
        if self._hooks:
            # What the step draws after its forward must not depend on what the forward drew, which in a pipeline happens elsewhere.
            self._hooks.append(module.register_forward_hook(lambda module, *_: self._seed_call(_AFTER, seed_all, module, None)))

    def begin_forward(self, update: int, replica: int, micro_batch: int) -> None:
        """Name the streams of one micro-batch of one replica in one weight update, for the modules that are seeded by their own names."""
        self._base = mix(self._seed, update, replica << 32 | micro_batch)
        self.calls.clear()

    def begin(self, update: int, replica: int, micro_batch: int) -> None:
        """Seed the global streams for such a micro-batch, which the step draws from."""
        self.begin_forward(update, replica, micro_batch)
        seed_all(self._base, self._device)

    def begin_update(self, update: int) -> None:
        """Seed the global streams for what follows the micro-batches of a weight update: hooks, and an optimizer that draws."""
        seed_all(mix(self._seed, _UPDATE, update), self._device)

    def _seed_call(self, word: int, seed: Callable[[int, torch.device], None], module: nn.Module, _arguments: Any) -> None:
        if module.training:
            call = self.calls.get(word, 0)
            self.calls[word] = call + 1
            seed(mix(self._base, word, call), self._device)

    def place(self) -> Place:
        """Where in its streams the step stands, for `return_to`."""
        return self._base, dict(self.calls), torch_streams(self._device)

    def return_to(self, place: Place) -> None:
        """Go on from a place; other micro-batches may have begun since."""
        self._base, self.calls = place[0], dict(place[1])
        set_torch_streams(place[2], self._device)

    def remove(self) -> None:
        """Take the hooks off the network."""
        for hook in self._hooks:
            hook.remove()


def recompute_blocks(module: nn.Module, recompute: bool | list[str]) -> list[str]:
    """Names of the submodules whose activations are recomputed.

    True takes the network's blocks: the members of Sequential or ModuleList containers that are built of further modules with parameters.
    A list holds regular expressions, each of which must match the full names of some submodules.

    Raises:
        PlanError: a pattern that is no regular expression or matches nothing, or True for a network without such blocks.
    """
    names = {name: child for name, child in module.named_modules() if name}
    if recompute is True:
        blocks = [name for name, child in module.named_children() for name in _blocks(child, name)]
        if not blocks:
            raise PlanError("recompute=True found no blocks in the network; name submodules, e.g. recompute=['network.features.0']")
        return blocks
    if not recompute:
        return []
    chosen: set[str] = set()
    for pattern in recompute:
        try:
            matches = {name for name in names if re.fullmatch(pattern, name)}
        except re.error as error:
            raise PlanError(f"recompute pattern {pattern!r} is no regular expression: {error}") from None
        if not matches:
            raise PlanError(f"recompute pattern {pattern!r} matches none of the submodules {', '.join(list(names)[:12])}, ...")
        chosen |= matches
    # A block inside a recomputed block is recomputed with it.
    return [name for name in names if name in chosen and not any(name.startswith(outer + ".") for outer in chosen)]


def _is_composite(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def _blocks(module: nn.Module, name: str) -> Iterator[str]:
    """Outermost blocks in a module; a container made of composite members alone is looked into, not taken whole."""
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child_name, child in module.named_children():
        qualified = f"{name}.{child_name}"
        inner = list(_blocks(child, qualified)) if isinstance(child, (nn.Sequential, nn.ModuleList)) or not is_container else []
        if inner:
            yield from inner
        elif is_container and _is_composite(child):
            yield qualified


class Recomputation:
    """Recomputes the activations of chosen blocks in the backward pass instead of storing them.

    torch.utils.checkpoint alone repeats the block's side effects: BatchNorm's statistics move twice (pytorch issue 96136), buffers are
    read after the first run changed them, values are logged and metrics updated twice. Here the second run starts from the random streams
    and buffers that the first one started from, moves neither, and is not heard. The streams of numpy and Python take 0.1 ms to keep and
    are so only for blocks that moved one of them at their first call.
    """

    def __init__(self, module: nn.Module, blocks: list[str], *, randomness: NamedRandomness, recorder: LogRecorder) -> None:
        self._randomness, self._recorder = randomness, recorder
        self._wrapped = [module.get_submodule(name) for name in blocks]
        self._draws_on_host: dict[nn.Module, bool] = {}
        for block in self._wrapped:
            block.forward = partial(self._run, block, metrics_of(block), block.forward)

    def _run(self, block: nn.Module, metrics: list[Metric], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not block.training:
            return forward(*args, **kwargs)
        place = self._randomness.place()
        host = host_streams() if self._draws_on_host.get(block, True) else None
        buffers = [
            (child, name, buffer, buffer._version, buffer.clone())
            for child in block.modules()
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]
        output = checkpoint(
            partial(forward, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._second_run(place, host, buffers, metrics)),
        )
        if block not in self._draws_on_host:
            self._draws_on_host[block] = bool(drawn_between(host, host_streams()))
        # Only what the first run changed must be put back for the second; norms move their statistics without a new version.
        buffers[:] = [
            (child, name, buffer, version, before)
            for child, name, buffer, version, before in buffers
            if isinstance(child, _NormBase) or child._buffers[name] is not buffer or buffer._version != version
        ]
        return output

    @contextmanager
    def _second_run(self, place: Place, host: tuple[Any, Any] | None, buffers: list, metrics: list[Metric]) -> Iterator[None]:
        now = self._randomness.place(), [child._buffers[name] for child, name, *_ in buffers], self._recorder.muted
        host_now = None if host is None else host_streams()
        self._randomness.return_to(place)
        if host is not None:
            set_host_streams(host)
        self._recorder.muted = True
        for child, name, _, _, before in buffers:
            child._buffers[name] = before.clone()  # a graph that is run backward twice is recomputed twice
        try:
            with unchanged_metrics(metrics):
                yield
        finally:
            for (child, name, *_), buffer in zip(buffers, now[1], strict=True):
                child._buffers[name] = buffer
            self._randomness.return_to(now[0])
            if host is not None:
                set_host_streams(host_now)
            self._recorder.muted = now[2]

    def remove(self) -> None:
        """Give the blocks their own forward back."""
        for block in self._wrapped:
            del block.forward
