"""Cut a network by what the user's training step calls `self(...)` with, and refuse a step that stages could not carry out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_ipu.cutting.balance import StageCost, balanced_splits
from lightning_ipu.cutting.call import arguments_of_call, step_around
from lightning_ipu.cutting.partition import Partition, cut
from lightning_ipu.cutting.trace import MakeContext
from lightning_ipu.cutting.trial import Uses
from lightning_ipu.plan import PlanError


def cut_by_step(
    module: nn.Module,
    step: Callable[[Any, int], Any],
    *,
    example: Callable[[], Any],
    splits: Callable[[tuple[Any, ...], dict[str, Any]], list[str]],
    parts: int,
    device: torch.device,
    context: MakeContext,
    seeded: MakeContext,
) -> Partition:
    """Cut a network into stages by its first micro-batch. The step runs twice: up to its call of `self(...)`, and whole, with zeros as that call's result.

    Args:
        module: the network.
        step: called as step(micro-batch, number); gives a loss, or a dict with one.
        example: fetches the micro-batch.
        splits: gives the submodules that begin stages, by what `self(...)` is called with.
        parts: processes per replica, whose first and last run the step.
        device: where the last stage's results are.
        context: makes what the step runs in (autocast).
        seeded: makes what the network is called in, as it will be in training.

    Raises:
        PlanError: the network cannot be cut there, or the step uses what other stages hold.
    """
    with context(), Uses(module) as before:
        batch = example()
        args, kwargs = arguments_of_call(module, lambda: step(batch, 0))
    names = splits(args, kwargs)
    with seeded():
        partition = cut(module, args, kwargs, splits=names, training=True, context=context)
    zeros = [torch.zeros_like(result, device=device) for result in partition.boundaries[-1]]
    # No leaves: the step may change them in place.
    results = [zero.requires_grad_(like.requires_grad).clone() for zero, like in zip(zeros, partition.boundaries[-1], strict=True)]
    last = len(partition) // parts * (parts - 1)
    output = None
    with context(), Uses(module) as whole:
        try:
            output = step_around(module, partition.restore(results), lambda: step(batch, 0))
        except AttributeError:
            partition.check_step(before, whole, last=last)
            if not whole.attributes & partition.left:  # else the step reads what the last stage will leave on a module
                raise
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor):  # else the first weight update says what is wrong
        _check_loss(module, loss, partition)
    partition.check_step(before, whole, last=last)
    return partition


def measured_splits(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    num_stages: int,
    context: MakeContext,
    seeded: MakeContext,
    may_cut_blocks: bool,
) -> tuple[list[str], list[StageCost]]:
    """Balanced cuts between the blocks that are recomputed or, where there are too few of them and these may be cut, inside them."""
    try:
        with seeded():
            return balanced_splits(module, args, kwargs, num_stages=num_stages, context=context)
    except PlanError:
        if not may_cut_blocks:
            raise
    return balanced_splits(module, args, kwargs, num_stages=num_stages, context=context)


def _check_loss(module: nn.Module, loss: torch.Tensor, partition: Partition) -> None:
    """Refuse a loss that reaches parameters of a stage before the last: they are not where the loss is computed."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    last, nodes, seen = partition.parameters[-1], [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None and name not in last:
            raise PlanError(
                f"the loss of {type(module).__name__} uses the parameter {name!r} of an earlier stage directly; in a pipeline a loss can"
                " reach it through the forward's output only (weight decay belongs to the optimizer)"
            )
        nodes += [following for following, _ in node.next_functions]
