"""Choose the cuts that make a network's slowest stage fastest, by the measured cost of its blocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ipu.cutting.partition import Partition
from lightning_ipu.cutting.tensors import example
from lightning_ipu.cutting.trace import MakeContext, Trace
from lightning_ipu.cutting.tracer import Untraceable, called_as_a_whole
from lightning_ipu.cutting.trial import borrowed
from lightning_ipu.plan import PlanError


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What one stage of a balanced pipeline holds and costs for one micro-batch.

    Args:
        begins_at: the submodule that it begins with; empty for the first stage.
        blocks: blocks between which it could have been cut further, each measured by itself.
        parameters: elements of its parameters.
        seconds: forward and backward.
        time_share: of all stages' seconds.
        boundary_bytes: what it hands on to the next stage in the forward.
        activation_bytes: what it keeps for the backward.
    """

    begins_at: str
    blocks: int
    parameters: int
    seconds: float
    time_share: float
    boundary_bytes: int
    activation_bytes: int


def balanced_splits(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    num_stages: int,
    context: MakeContext = nullcontext,
    bandwidth: float = 2e9,
) -> tuple[list[str], list[StageCost]]:
    """Measure a network in training block by block and choose the cuts that make its slowest stage fastest.

    A cut is possible before a submodule with parameters (one that evaluation calls too) where no more values cross than at the beginning
    of the block around it: between residual blocks, not inside them. Neither gradients, buffers, mode nor random streams are changed.

    Args:
        module, args, kwargs, context: as in `cut`; the example's data is used, zeros where it is on the meta device.
        num_stages: stages to make.
        bandwidth: bytes per second between stages; a stage's time includes what it receives and sends, there and back.

    Returns:
        The names for `splits`, and a row for each stage.

    Raises:
        PlanError: the network has too few places to cut, or its forward cannot be cut at all.
    """
    trace = _deep_trace(module, args, kwargs or {}, context, training=True)
    evaluated = _deep_trace(module, args, kwargs or {}, context, training=False).called
    candidates = {name: place for name, place in _candidates(trace).items() if evaluated[name] == 1}
    if num_stages > len(candidates) + 1:
        places = ", ".join(candidates) or "none"
        raise PlanError(
            f"num_stages={num_stages} needs {num_stages - 1} cuts, but {type(module).__name__} has {len(candidates)} places for one: {places}"
        )
    parts = Partition(trace, list(candidates), list(candidates.values()))
    seconds, activations = _measure(parts, args, kwargs or {}, context)
    sent = [sum(trace.spec(node).bytes for node in nodes) for nodes in parts._crossings[1:-1]]
    returned = [sum(trace.spec(node).bytes for node in nodes if trace.spec(node).requires_grad) for nodes in parts._crossings[1:-1]]
    cuts = choose_cuts(seconds, [(there + back) / bandwidth for there, back in zip(sent, returned, strict=True)], num_stages)

    sizes = dict(module.named_parameters(remove_duplicate=False))
    rows = []
    for begin, end in zip([0, *cuts], [*cuts, len(parts)], strict=True):
        names = set().union(*parts.parameters[begin:end])
        rows.append(
            StageCost(
                begins_at=parts.splits[begin - 1] if begin else "",
                blocks=end - begin,
                parameters=sum(tensor.numel() for tensor in {id(sizes[name]): sizes[name] for name in names}.values()),
                seconds=sum(seconds[begin:end]),
                time_share=sum(seconds[begin:end]) / sum(seconds),
                boundary_bytes=sent[end - 1] if end < len(parts) else 0,
                activation_bytes=sum(activations[begin:end]),
            )
        )
    return [parts.splits[place - 1] for place in cuts], rows


def stage_table(costs: list[StageCost]) -> list[str]:
    """Lines that show the stages of a balanced pipeline."""
    rows = [("stage", "begins at", "blocks", "parameters", "time", "hands on", "keeps")]
    for number, cost in enumerate(costs):
        sizes = [f"{bytes_ / 2**20:.2f} MiB" for bytes_ in (cost.boundary_bytes, cost.activation_bytes)]
        rows.append(
            (str(number), cost.begins_at or "the input", str(cost.blocks), f"{cost.parameters:,}", f"{cost.time_share:.1%}", *sizes)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def choose_cuts(seconds: list[float], transfer: list[float], num_stages: int) -> list[int]:
    """Cut a chain of blocks into contiguous stages so that the slowest is as fast as can be, and then so that least is transferred.

    Args:
        seconds: of each block.
        transfer: seconds that a cut costs on both of its sides, one for each place between two blocks.
        num_stages: at most as many as there are blocks.

    Returns:
        The numbers of the blocks that begin the second and later stages.
    """
    count = len(seconds)
    sums = [0.0, *itertools.accumulate(seconds)]
    at = [0.0, *transfer, 0.0]

    def stage(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + at[begin] + at[end]

    # By dynamic programming over (stages so far, blocks so far): first the least possible slowest stage, then the least transfer under it.
    slowest = [0.0] + [float("inf")] * count
    for _ in range(num_stages):
        slowest = [float("inf")] + [min(max(slowest[begin], stage(begin, end)) for begin in range(end)) for end in range(1, count + 1)]
    best: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * count
    for _ in range(num_stages):
        last, best = best, [None] * (count + 1)
        for end in range(1, count + 1):
            fitting = [begin for begin in range(end) if last[begin] is not None and stage(begin, end) <= slowest[count]]
            if fitting:
                begin = min(fitting, key=lambda place: last[place][0] + at[place])
                best[end] = last[begin][0] + at[begin], [*last[begin][1], begin]
    return best[count][1][1:]


def _deep_trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: MakeContext, *, training: bool) -> Trace:
    """Trace a forward as deep as possible; modules of a type whose inside cannot be traced are one node each."""
    whole: set[type] = {nn.MultiheadAttention}

    def goes_into(name: str, child: nn.Module) -> bool:
        return next(child.children(), None) is not None and type(child) not in whole and not called_as_a_whole(child)

    while True:
        try:
            return Trace(module, args, kwargs, goes_into, training=training, context=context)
        except Untraceable as refusal:
            if refusal.module is module or type(refusal.module) in whole:
                raise
            whole.add(type(refusal.module))


def _candidates(trace: Trace) -> dict[str, int]:
    """The submodules before which a network may be cut, and their places in the order of execution."""
    module, begins = trace.module, dict(reversed(trace.entries))
    tied = [(min(places), max(places)) for key, places in trace.uses.items() if isinstance(key, str) or key in trace.names]
    state_from = min((places[0] for key, places in trace.uses.items() if key in trace.names), default=0)
    found: dict[int, str] = {}
    for name, place in trace.entries:
        crossing = trace.crossing(place)
        around = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
        if (
            place not in found
            and place > state_from
            and trace.called[name] == 1
            and next(module.get_submodule(name).parameters(), None) is not None
            and not any(first < place <= last for first, last in tied)
            and not trace.aliased(place)
            and all(len(crossing) <= len(trace.crossing(begins[outer])) for outer in around if outer in begins)
        ):
            found[place] = name
    return {name: place for place, name in sorted(found.items())}


def _measure(parts: Partition, args: tuple[Any, ...], kwargs: dict[str, Any], context: MakeContext) -> tuple[list[float], list[int]]:
    """Seconds (forward and backward) and bytes kept for the backward of each part of a network, for one micro-batch.

    Once to warm up, then up to three times or for five seconds; the fastest counts.
    """
    module = parts._trace.module
    device = next(module.parameters()).device
    stages = parts.stages
    parameters = [[tensor for tensor in stage.parameters() if tensor.requires_grad] for stage in stages]
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    clock = _clock(device)
    seconds, kept = [float("inf")] * len(stages), [0] * len(stages)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(borrowed(module, training=True, fake=None))
        stack.enter_context(torch.enable_grad())
        values = [example(tensor, device, with_data=True) for tensor in parts.flatten(*args, **kwargs)]
        started = time.perf_counter()
        for turn in range(4):
            spent = [0.0] * len(stages)
            runs, arriving = [], values
            for place, stage in enumerate(stages):
                leaves = [value.detach().requires_grad_(spec.requires_grad) for value, spec in zip(arriving, stage.inputs, strict=True)]
                saved: dict[int, int] = {}

                def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
                    storage = tensor.untyped_storage()
                    saved[storage.data_ptr()] = storage.nbytes()
                    return tensor

                count = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor) if turn == 0 else nullcontext()
                begin = clock()
                with context(), count:
                    arriving = stage(*leaves)
                spent[place] += clock() - begin
                runs.append((leaves, arriving))
                if turn == 0:
                    kept[place] = sum(size for pointer, size in saved.items() if pointer not in own)
            gradients = [torch.ones_like(value) if value.requires_grad else None for value in arriving]
            for place in reversed(range(len(stages))):
                leaves, results = runs.pop()
                pairs = [(value, gradient) for value, gradient in zip(results, gradients, strict=True) if value.requires_grad]
                wanted = [leaf for leaf in leaves if leaf.requires_grad] + parameters[place]
                begin = clock()
                made: tuple[Tensor | None, ...] = ()
                if pairs and wanted:  # torch.autograd.grad, because a backward would touch the parameters' gradients
                    made = torch.autograd.grad(
                        [value for value, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True
                    )
                spent[place] += clock() - begin
                flowing = iter(made)
                gradients = [next(flowing, None) if leaf.requires_grad else None for leaf in leaves]
            if turn:
                seconds = list(map(min, seconds, spent))
                if time.perf_counter() - started > 5:
                    break
    return seconds, kept


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once a device has finished what it was given."""
    if device.type != "cuda":
        return time.perf_counter

    def finished() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return finished
