"""Recompute activations in the backward pass and leave everything else alone: buffers, random streams, logs and metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_ipu.cutting.call import replaced_forward
from lightning_ipu.cutting.call_wrappers import called_modules, is_one_piece
from lightning_ipu.cutting.trace import MakeContext
from lightning_ipu.engine.seeding import NamedRandomness, StreamState
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import drawn_between, host_streams, set_host_streams


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
    and buffers that the first one started from, moves neither, and logs nothing. Saving the streams of numpy and Python takes 0.1 ms; it is
    done only for blocks that drew from one of them at their first call.

    Args:
        module: the network.
        blocks: names of its submodules that are recomputed.
        randomness: seeds the calls of its modules.
        without_logs: returns, for a block, a factory of contexts in which what it logs and adds to metrics is dropped.
    """

    def __init__(
        self, module: nn.Module, blocks: list[str], *, randomness: NamedRandomness, without_logs: Callable[[nn.Module], MakeContext]
    ) -> None:
        self._module, self._randomness, self._without_logs = module, randomness, without_logs
        self._draws_on_host: dict[nn.Module, bool] = {}
        self._chosen: list[Callable[..., Any]] = []
        self.choose(blocks)

    def choose(self, blocks: list[str]) -> None:
        """Recompute these blocks instead of those before."""
        wrappers = self._randomness.wrappers
        for around in self._chosen:
            wrappers.leave_out(around)
        self._chosen = []
        for block in dict.fromkeys(self._module.get_submodule(name) for name in blocks):
            self._chosen.append(partial(self._call, block, partial(self._run, block, self._without_logs(block))))
            wrappers.add(block, self._chosen[-1])

    def _call(self, block: nn.Module, run: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block so that its forward is recomputed, but not its hooks; a compiled one with all that it does."""
        if not torch.is_grad_enabled() or not block.training or _in_a_checkpoint():
            return call(*args, **kwargs)
        if is_one_piece(block):
            return run(call, *args, **kwargs)
        with replaced_forward(block, partial(run, block.forward)):
            return call(*args, **kwargs)

    def _run(self, block: nn.Module, without_logs: MakeContext, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        streams, dtype = self._randomness.stream_state(), torch.get_default_dtype()
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
            context_fn=lambda: (nullcontext(), self._second_run(streams, dtype, host, buffers, without_logs)),
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
        self, streams: StreamState, dtype: torch.dtype, host: tuple[Any, Any] | None, buffers: list, without_logs: MakeContext
    ) -> Iterator[None]:
        dtype_now = torch.get_default_dtype()  # another one in the forward of double precision
        streams_now, buffers_now = self._randomness.stream_state(), [child._buffers[name] for child, name, *_ in buffers]
        host_now = None if host is None else host_streams()
        self._randomness.return_to(streams)
        torch.set_default_dtype(dtype)
        if host is not None:
            set_host_streams(host)
        for child, name, _, _, before in buffers:
            child._buffers[name] = None if before is None else before.clone()  # for each of two backward passes over a graph
        try:
            with without_logs():
                yield
        finally:
            for (child, name, *_), buffer in zip(buffers, buffers_now, strict=True):
                child._buffers[name] = buffer
            self._randomness.return_to(streams_now)
            torch.set_default_dtype(dtype_now)
            if host is not None:
                set_host_streams(host_now)
