"""One stage at work: seeded randomness by module name, and recomputation that leaves everything but activations alone."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from lightning_ipu.cutting.stand_ins import StandIns, called_modules, is_one_piece
from lightning_ipu.loop.user_step import LogRecorder, metrics_of, unchanged_metrics
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import (
    drawn_between,
    host_streams,
    is_torchs,
    may_draw,
    mix,
    name_word,
    seed_all,
    seed_torch,
    set_host_streams,
    set_torch_streams,
    torch_streams,
)

_STEP, _AFTER, _UPDATE, _HOOK = (name_word(name) for name in ("step", "after the forward", "update", "hook"))


class _MicroBatch:
    """The module calls of one micro-batch so far: for each name, the positions of its calls in their order."""

    def __init__(self, base: int) -> None:
        self.base, self.places, self.calls = base, {}, 0


Place = tuple[_MicroBatch, int, tuple[torch.Tensor, torch.Tensor | None]]


class NamedRandomness:
    """Seeds every random draw of a training step from (seed, weight update, replica, micro-batch, qualified module name).

    The step as a whole starts from the first four; each module that may draw is seeded anew by its name at each of its calls, so that
    its numbers do not depend on what ran before it, on which stage it sits in, or on whether a block before it was recomputed.

    A call repeated in a backward pass (by torch.utils.checkpoint, or anything else that restores torch's random state before a
    recomputation) gets the seed of the call that it repeats: the seed in the restored state identifies it.

    A compiled module (torch.compile, torch.jit) is seeded as a whole, by its own name: nothing can be seeded inside it.
    """

    def __init__(self, module: nn.Module, *, seed: int, device: torch.device) -> None:
        self._seed, self._device = mix(seed, _STEP), device
        self.stand_ins = StandIns()
        drawing = [(name, child) for name, child in called_modules(module) if is_one_piece(child) or may_draw(child)]
        if getattr(module, "_compiler_ctx", None) is not None:
            drawing = []  # a LightningModule whose steps are compiled
        for name, child in drawing:
            seed_streams = seed_torch if is_torchs(child) else seed_all
            self.stand_ins.add(child, partial(self._seeded, child, name_word(name), seed_streams))
        if drawing:
            self.stand_ins.add(module, partial(self._seeded_after, module))
        self._round: tuple[int, int] | None = None
        # Whose call a seed was taken for, and after how many calls of that micro-batch it left the step.
        self._after_seed: dict[int, tuple[_MicroBatch, int]] = {}
        self._micro_batch = _MicroBatch(self._seed)
        self._returned_to = self._micro_batch, 0

    def begin_forward(self, update: int, replica: int, micro_batch: int) -> None:
        """Name the streams of one micro-batch of one replica in one weight update, for the modules that are seeded by their own names."""
        if self._round != (update, replica):  # the backward passes of another are over
            self._round = update, replica
            self._after_seed.clear()
        self._micro_batch = _MicroBatch(mix(self._seed, update, replica << 32 | micro_batch))
        self._after_seed[self._micro_batch.base] = self._returned_to = self._micro_batch, 0
        self.stand_ins.begin()
        seed_torch(self._micro_batch.base, self._device)

    def begin(self, update: int, replica: int, micro_batch: int) -> None:
        """Seed the global streams for such a micro-batch, which the step draws from."""
        self.begin_forward(update, replica, micro_batch)
        seed_all(self._micro_batch.base, self._device)

    def end(self) -> None:
        """Called after the micro-batches of a replica: modules are no longer seeded by their names."""
        self.stand_ins.end()

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
        stood = nullcontext() if self.stand_ins.standing else self.stand_ins.stood()
        try:
            with stood:
                yield
        finally:
            self._micro_batch = micro_batch

    def place(self) -> Place:
        """The present state of the step's random streams, for `return_to`."""
        return *self._here(), torch_streams(self._device)

    def return_to(self, place: Place) -> None:
        """Restore a `place` in a backward pass; other micro-batches may have begun since."""
        self._returned_to = place[:2]
        set_torch_streams(place[2], self._device)


def recompute_blocks(module: nn.Module, recompute: bool | list[str], splits: Sequence[str] = ()) -> list[str]:
    """Names of the submodules whose activations are recomputed.

    True takes the network's blocks: its outermost submodules that are built of other submodules with parameters. Blocks are looked for inside
    containers of blocks, inside modules that hold such a container, and inside a module that is most of its parent (an encoder beside a small
    head). A network of bare layers has none. A list holds regular expressions, each of which must match the full names of some submodules;
    a submodule that is never called, such as a ModuleList, stands for its members.

    Args:
        splits: where pipeline stages begin; with True, blocks with a split inside are replaced by their parts.

    Raises:
        PlanError: a pattern that is no regular expression, matches nothing, or matches what lies inside a compiled module.
    """
    if recompute is True:
        return _blocks_of_network(module, splits)
    if not recompute:
        return []
    names = {name: child for name, child in module.named_modules() if name}
    called = {name for name, _ in called_modules(module)}
    chosen: set[str] = set()
    for pattern in recompute:
        try:
            matches = {name for name in names if re.fullmatch(pattern, name)}
        except re.error as error:
            raise PlanError(f"recompute pattern {pattern!r} is no regular expression: {error}") from None
        if not matches:
            raise PlanError(f"recompute pattern {pattern!r} matches none of the submodules {', '.join(list(names)[:12])}, ...")
        if not matches & called:
            raise PlanError(
                f"recompute pattern {pattern!r} matches {min(matches)!r} inside a compiled module, whose parts cannot be recomputed one by"
                " one; name the compiled module"
            )
        chosen |= matches & called
    for name in names:  # outer ones first
        if name in chosen and type(names[name]).forward is nn.Module.forward:
            chosen.remove(name)
            chosen |= {f"{name}.{member}" for member, _ in names[name].named_children()}
    # A block inside a recomputed block is recomputed with it.
    return [name for name in names if name in chosen and not any(name.startswith(outer + ".") for outer in chosen)]


_CONTAINERS = (nn.Sequential, nn.ModuleList)


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module, for a compiled one those of the original; parametrizations are left out."""
    inner = module._orig_mod if isinstance(module, OptimizedModule) else module
    return {name: child for name, child in inner.named_children() if name != "parametrizations"}


def _size(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())


def _is_composite(module: nn.Module) -> bool:
    return any(_size(child) for child in _parts(module).values())


def _holds_blocks_in_a_container(module: nn.Module) -> bool:
    """Whether there is a container of composite members in a module, outside of any other container."""
    if isinstance(module, _CONTAINERS):
        return any(map(_is_composite, _parts(module).values()))
    return not is_one_piece(module) and any(map(_holds_blocks_in_a_container, _parts(module).values()))


def _blocks_of_network(module: nn.Module, splits: Sequence[str]) -> list[str]:
    """The blocks of a network; empty if the only block would be the whole network, built of bare layers."""
    whole, path = _size(module), ""
    while True:
        blocks = _blocks(module.get_submodule(path), path, splits)
        if len(blocks) != 1 or _size(module.get_submodule(blocks[0])) < whole:
            return blocks
        path = blocks[0]
        if is_one_piece(module.get_submodule(path)):
            return []


def _blocks(module: nn.Module, path: str, splits: Sequence[str]) -> list[str]:
    """Names of the blocks in the module called `path`."""
    found: list[str] = []
    size, is_member = _size(module), isinstance(module, _CONTAINERS)
    for name, child in _parts(module).items():
        qualified = f"{path}.{name}" if path else name
        if not _is_composite(child):
            continue
        inner = [] if is_one_piece(child) else _blocks(child, qualified, splits)
        share = _size(child) / size
        covered = sum(_size(child.get_submodule(block[len(qualified) + 1 :])) for block in inner) / _size(child)
        opened = inner and (
            isinstance(child, _CONTAINERS) or (not is_member and (_holds_blocks_in_a_container(child) or (share > 0.5 and covered > 0.5)))
        )
        if opened or any(split.startswith(qualified + ".") for split in splits):
            found += inner
        else:
            found.append(qualified)
    return found


def _in_a_checkpoint() -> bool:
    """Whether the present call is inside a torch.utils.checkpoint of the network's own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


def _moves_unseen(module: nn.Module) -> bool:
    """Whether a module may change its buffers without a new version of them: norms do, and observers for quantisation."""
    return isinstance(module, _NormBase) or type(module).__module__.startswith("torch.ao.")


class Recomputation:
    """Recomputes the activations of chosen blocks in the backward pass instead of storing them.

    torch.utils.checkpoint alone repeats the block's side effects: BatchNorm's statistics move twice (pytorch issue 96136), buffers are
    read after the first run changed them, values are logged and metrics updated twice. Here the second run starts from the random streams
    and buffers that the first one started from, moves neither, and is not heard. The streams of numpy and Python take 0.1 ms to keep and
    are so only for blocks that moved one of them at their first call.
    """

    def __init__(self, module: nn.Module, blocks: list[str], *, randomness: NamedRandomness, recorder: LogRecorder) -> None:
        self._module, self._randomness, self._recorder = module, randomness, recorder
        self._draws_on_host: dict[nn.Module, bool] = {}
        self._chosen: list[Callable[..., Any]] = []
        self.choose(blocks)

    def choose(self, blocks: list[str]) -> None:
        """Recompute these blocks instead of those before."""
        stand_ins = self._randomness.stand_ins
        for around in self._chosen:
            stand_ins.leave_out(around)
        self._chosen = []
        for block in dict.fromkeys(self._module.get_submodule(name) for name in blocks):
            metrics = metrics_of(block)
            self._chosen.append(partial(self._call, block, metrics, self._run if is_one_piece(block) else self._run_forward))
            stand_ins.add(block, self._chosen[-1])

    def _call(
        self, block: nn.Module, metrics: list[Metric], run: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled() or not block.training or _in_a_checkpoint():
            return call(*args, **kwargs)
        return run(block, metrics, call, *args, **kwargs)

    def _run_forward(self, block: nn.Module, metrics: list[Metric], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block so that its forward is recomputed, but not its hooks."""
        own = {name: vars(block)[name] for name in ("forward",) if name in vars(block)}
        object.__setattr__(block, "forward", partial(self._run, block, metrics, block.forward))
        try:
            return call(*args, **kwargs)
        finally:
            vars(block).pop("forward")
            vars(block).update(own)

    def _run(self, block: nn.Module, metrics: list[Metric], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place, dtype = self._randomness.place(), torch.get_default_dtype()
        host = host_streams() if self._draws_on_host.get(block, True) else None
        buffers = [
            (child, name, buffer, getattr(buffer, "_version", 0), None if buffer is None else buffer.clone())
            for child in block.modules()
            for name, buffer in child._buffers.items()
        ]
        output = checkpoint(
            partial(forward, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._second_run(place, dtype, host, buffers, metrics)),
        )
        if block not in self._draws_on_host:
            self._draws_on_host[block] = bool(drawn_between(host, host_streams()))
        # Only what the first run changed must be put back for the second; some modules change buffers without a new version.
        buffers[:] = [
            (child, name, buffer, version, before)
            for child, name, buffer, version, before in buffers
            if _moves_unseen(child) or child._buffers[name] is not buffer or getattr(buffer, "_version", 0) != version
        ]
        return output

    @contextmanager
    def _second_run(
        self, place: Place, dtype: torch.dtype, host: tuple[Any, Any] | None, buffers: list, metrics: list[Metric]
    ) -> Iterator[None]:
        dtype_now = torch.get_default_dtype()  # another one in the forward of double precision
        now = self._randomness.place(), [child._buffers[name] for child, name, *_ in buffers], self._recorder.muted
        host_now = None if host is None else host_streams()
        self._randomness.return_to(place)
        torch.set_default_dtype(dtype)
        if host is not None:
            set_host_streams(host)
        self._recorder.muted = True
        for child, name, _, _, before in buffers:
            child._buffers[name] = None if before is None else before.clone()  # for each of two backward passes over a graph
        try:
            with unchanged_metrics(metrics):
                yield
        finally:
            for (child, name, *_), buffer in zip(buffers, now[1], strict=True):
                child._buffers[name] = buffer
            self._randomness.return_to(now[0])
            torch.set_default_dtype(dtype_now)
            if host is not None:
                set_host_streams(host_now)
            self._recorder.muted = now[2]
