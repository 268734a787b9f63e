"""Run a replica's micro-batches over stages in a row of processes: each makes its passes in the order of a schedule.

The user's step runs around the forward: on the first stage up to its call of `self(...)`, on the last stage as a whole, where that call returns
the output that arrived. The schedules of torch.distributed.pipelining are not used: they send one shape only, and reserve memory for
all micro-batches of a weight update instead of those in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_ipu.cutting.call import arguments_of_call, step_around
from lightning_ipu.cutting.partition import Partition
from lightning_ipu.engine.buffers import BackwardWatch
from lightning_ipu.engine.kinds import Kinds, Slice
from lightning_ipu.engine.links import Links
from lightning_ipu.engine.processes import Processes
from lightning_ipu.engine.replica import MicroBatch, TrainingStep
from lightning_ipu.engine.stages import StageState
from lightning_ipu.plan import PlanError
from lightning_ipu.precision.loss_scaling import LossScaling


def passes(count: int, ahead: int) -> Iterator[tuple[bool, int]]:
    """The order of a process's work on `count` micro-batches, as (is forward, number): `ahead` forward passes, then backward and forward in turn."""
    for number in range(ahead):
        yield True, number
    for number in range(count):
        yield False, number
        if ahead + number < count:
            yield True, ahead + number


def passes_ahead(schedule: str, *, accumulation: int, part: int, parts: int) -> int:
    """Forward passes that a process makes before its first backward pass.

    Args:
        schedule: 1F1B, GPipe or Sequential (one micro-batch after the other, no overlap).
        accumulation: micro-batches of a replica.
        part, parts: the process's place in the row, and how many there are.
    """
    return {"Sequential": 1, "GPipe": accumulation, "1F1B": min(accumulation, parts - part)}[schedule]


class _InFlight(NamedTuple):
    """What a micro-batch's backward pass needs: what arrived, what was made of it (on the last stage the loss), and how it is sent."""

    arrived: Sequence[torch.Tensor]
    made: Sequence[torch.Tensor]
    piece: Slice


class PipelinedReplica:
    """Runs the stages of a replica that are in this process.

    Args:
        step: the user's.
        module: the network.
        state: the network cut into stages, and what of it is here.
        processes: who holds which stages.
        accumulation: micro-batches of a replica.
        per_update: micro-batches of a weight update, over all replicas.
        schedule: as for `passes_ahead`.
        scaling: of the loss, None without.
        on_micro_batch: called after each micro-batch that has gone through.
        remark: called with what the user should know.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        module: nn.Module,
        state: StageState,
        processes: Processes,
        accumulation: int,
        per_update: int,
        schedule: str,
        scaling: LossScaling | None,
        on_micro_batch: Callable[[], None],
        remark: Callable[[str], None],
    ) -> None:
        self._step, self._module, self._scaling, self._on_micro_batch = step, module, scaling, on_micro_batch
        self._is_first, self._is_last, self._device = processes.is_first, processes.is_last, processes.device
        self._per_update = per_update
        ahead = passes_ahead(schedule, accumulation=accumulation, part=processes.part, parts=processes.parts)
        self._passes, self._links = list(passes(accumulation, ahead)), Links(processes)
        self._schedule, self._processes = schedule, processes
        self._watch = BackwardWatch(module, state.own_buffers) if ahead > 1 else None
        self._is_checked = schedule == "Sequential"  # by all processes together

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partition:
            with step.randomness.aside():
                return state.cut(args, kwargs, training=True, context=step.context)

        self._kinds = Kinds(make, processes.stages, first=state.partition, device=processes.device, remark=remark)

    def run(
        self, take: Callable[[], Any], *, update: int, replica: int, first_micro_batch: int, before_backward: Sequence[Callable[..., Any]]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Add up the gradients of a replica's micro-batches; as for WholeReplica, but the results are on the last stage only."""
        self._kinds.check_unchanged()
        result = torch.zeros((), device=self._device), {}
        in_flight: dict[int, _InFlight] = {}
        try:
            for is_forward, place in self._passes:
                if not is_forward:
                    self._backward(in_flight.pop(place))
                    continue
                at = MicroBatch(update, replica, place, first_micro_batch + place)
                in_flight[place] = self._forward(take, at)
                if self._is_last:
                    first = self._add_loss(in_flight, take(), at, before_backward if place == 0 else ())
                    result = first if place == 0 else result
                self._on_micro_batch()
            self._links.finish()
        finally:
            self._step.randomness.end()
        self._check_order()
        return result

    def _forward(self, take: Callable[[], Any], at: MicroBatch) -> _InFlight:
        """A micro-batch through this process's stages, from what arrived to what is handed on."""
        step, links, arrived = self._step, self._links, []
        if self._is_first:
            batch, before = take(), self._kinds.latest
            args, kwargs = arguments_of_call(self._module, lambda: step.run(batch, at))
            kind, values = self._kinds.find(args, kwargs)
            links.announce(before, kind)
            piece = self._kinds.cut(kind)
        else:
            before, piece, arrived = links.receive(self._kinds)
            if torch.is_grad_enabled():
                for value, trained in zip(arrived, piece.arriving.trained, strict=True):
                    value.requires_grad_(trained)
            values = piece.arriving.restored(arrived)
            step.randomness.begin_forward(at.update, at.replica, at.place)
        with step.context():
            made = piece.stage(*values)
        if not self._is_last:
            made = piece.leaving.laid_out(made)
            links.send(before, piece, [value.detach() for value in made])
        return _InFlight(arrived, made, piece)

    def _add_loss(
        self, in_flight: dict[int, _InFlight], batch: Any, at: MicroBatch, before_backward: Sequence[Callable[..., Any]]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """On the last stage: put the loss in the place of the output that arrived, with the user's step around it; returns what it returned."""
        _, made, piece = in_flight[at.place]
        loss, outputs = step_around(self._module, piece.partition.restore(made), lambda: self._step.loss(batch, at))
        scaled = loss / self._per_update
        for hook in before_backward:
            hook(scaled)
        scaled = scaled if self._scaling is None else self._scaling.scale(scaled)
        in_flight[at.place] = in_flight[at.place]._replace(made=[scaled])
        return loss.detach(), outputs

    def _backward(self, micro_batch: _InFlight) -> None:
        """A micro-batch back through this process's stages: from the loss, or the gradients that arrive, to those that are handed on."""
        arrived, made, piece = micro_batch
        gradients = [] if self._is_last else self._links.receive_back(piece.leaving)
        with nullcontext() if self._watch is None else self._watch.watching():
            if self._is_last:
                made[0].backward()
            else:
                trained = [value for value, trained in zip(made, piece.leaving.trained, strict=True) if trained]
                pairs = [(value, gradient) for value, gradient in zip(trained, gradients, strict=True) if value.requires_grad]
                if pairs:
                    torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        if not self._is_first:
            leaves = [value for value in arrived if value.requires_grad]
            self._links.send_back([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])

    def _check_order(self) -> None:
        """Refuse buffers that change in backward passes: of several micro-batches in flight, the order of changes is the schedule's."""
        changed = self._watch.changed if self._watch is not None else ""
        if not self._is_checked:
            self._is_checked = True
            changed = next(filter(None, self._processes.gathered(changed, self._processes.same_replica)), "")
        if changed:
            raise PlanError(
                f"the buffer {changed!r} changes again in the backward pass, in a torch.utils.checkpoint of the network's own; under"
                f" pipeline_schedule={self._schedule} the order of these changes would depend on the stages. Give IPUStrategy(recompute=...) in"
                " place of the checkpoint, which changes it once, or pipeline_schedule=Sequential"
            )
