"""The distributed engine: carries a plan out on several processes with torch.distributed, with the numbers of one process.

A weight update ends in one flattened reduction over the processes that hold other replicas of the same stages: gradients, BatchNorm's
moves and a flag for signals travel together. Where a replica is spread over processes, the user's step runs around the forward: on the first
stage up to its call of `self(...)`, on the last stage with that call answered by the output that arrived.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_ipu.cutting.call import arguments_of_call, step_around
from lightning_ipu.cutting.partition import Partition
from lightning_ipu.engine.buffers import BackwardWatch, ReplicaBuffers, floats_as_whole, whole_as_floats
from lightning_ipu.engine.local import LocalEngine
from lightning_ipu.engine.pipeline import Kinds, Slice, turns
from lightning_ipu.engine.processes import Processes, all_reduce_flat, map_tensors, signal_facts, signal_in
from lightning_ipu.engine.stages import StageState
from lightning_ipu.plan import PlanError

_pipelines = itertools.count()  # numbers the pipelines, alike in all processes
_SMALL = 8192  # bytes of a packed value that travel with its length


class DistributedEngine(LocalEngine):
    """The local engine with some of the replicas in other processes.

    Args:
        processes: who holds which.
        stop_signal: number of a signal that this process received, 0 without one.
        on_stop: told of a signal that any process received, at the end of the same weight update in each.
        should_stop: whether something in this process wants the run to end.
        local: as for LocalEngine.

    `asked_to_stop` says after a weight update, alike in all processes, whether one of them wanted to stop.
    """

    def __init__(
        self,
        *,
        processes: Processes,
        stop_signal: Callable[[], int],
        on_stop: Callable[[int], None],
        should_stop: Callable[[], bool],
        **local: Any,
    ) -> None:
        super().__init__(**local)
        self._processes, self._stop_signal, self._on_stop, self._should_stop = processes, stop_signal, on_stop, should_stop
        self.asked_to_stop = False
        self._replicas = processes.replicas
        self._heard: int | None = None  # the signal that the replicas agreed on in this weight update; None before they have

    def _gather(self, gradients: list[torch.Tensor | None], buffers: ReplicaBuffers) -> list[torch.Tensor | None]:
        """Sum gradients and moves over the processes with other replicas; a parameter without a gradient anywhere keeps none."""
        parameters, processes = self._parameters(), self._processes
        if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
            raise PlanError("sparse gradients cannot be averaged over processes; build the layer without, e.g. nn.Embedding(sparse=False)")
        # Whether there is a gradient here, which signal this process received, whether it wants to stop, and whether buffers were renewed.
        facts = [float(gradient is not None) for gradient in gradients] + signal_facts(self._stop_signal())
        facts = torch.tensor([*facts, float(self._should_stop()), float(any(buffers.renewed))], device=processes.device)
        sums = [
            torch.zeros_like(parameter, dtype=parameter.grad_dtype) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        values = buffers.counts or buffers.no_counts
        counts = whole_as_floats(values, processes.device)
        all_reduce_flat([*sums, *buffers.moves, counts, facts], group=processes.same_stages)
        buffers.counts = floats_as_whole(counts, values)
        *facts, stops, renewed = facts.tolist()
        if renewed:
            everyone = processes.gathered(map_tensors(torch.Tensor.cpu, buffers.renewed), processes.same_stages)
            buffers.renewed = map_tensors(lambda tensor: tensor.to(processes.device), [of for theirs in everyone for of in theirs])
        self.asked_to_stop = stops > 0
        present, self._heard = facts[: len(gradients)], signal_in(facts[len(gradients) :])
        if self._heard:
            self._on_stop(self._heard)
        return [gradient if here else None for gradient, here in zip(sums, present, strict=True)]


class PipelineEngine(DistributedEngine):
    """The distributed engine where this process holds some of the stages of one replica.

    Args:
        state: the network cut into stages, and what of it is here.
        schedule: 1F1B, GPipe or Sequential (one micro-batch after the other, no overlap).
        clip_norm, clip_value: to what gradients are clipped, by their norm over all stages or one by one; None for neither.
        remark: told what the user should know.
        distributed: as for DistributedEngine.
    """

    def __init__(
        self,
        *,
        state: StageState,
        schedule: str,
        clip_norm: float | None,
        clip_value: float | None,
        remark: Callable[[str], None],
        **distributed: Any,
    ) -> None:
        super().__init__(clip=self._clip_gradients if clip_norm or clip_value else None, **distributed)
        processes, self._clip_norm, self._clip_value = self._processes, clip_norm, clip_value
        self._module, accumulation, partition = distributed["module"], self._plan.gradient_accumulation_factor, state.partition
        names = set().union(*partition.parameters[processes.stages.start : processes.stages.stop])
        self._held = {id(parameter) for name, parameter in self._module.named_parameters() if name in names}
        own = set().union(*partition.buffers[processes.stages.start : processes.stages.stop])
        if self._buffers is not None:
            self._buffers = ReplicaBuffers(self._module, self._plan.replication_factor, own)
        if self._scaling is not None:
            self._scaling.agree = self._all_finite
        ahead = {"Sequential": 1, "GPipe": accumulation, "1F1B": min(accumulation, processes.parts - processes.part)}[schedule]
        self._turns, self._pipeline = list(turns(accumulation, ahead)), processes.pipeline()
        self._schedule, self._watch = schedule, BackwardWatch(self._module, own) if ahead > 1 else None
        self._is_checked = schedule == "Sequential"  # by all processes together

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partition:
            with self._randomness.aside():
                return state.cut(args, kwargs, training=True, context=self._context or nullcontext)

        self._kinds = Kinds(make, processes.stages, first=state.partition, device=processes.device, remark=remark)

    def _run_replica(self, take: Callable[[], Any], update: int, replica: int, number: int) -> tuple[torch.Tensor, dict[str, Any]]:
        self._take, self._update, self._replica, self._number = take, update, replica, number
        self._result: tuple[torch.Tensor, dict[str, Any]] = torch.zeros((), device=self._processes.device), {}
        if not self._processes.is_first:
            self._pipeline.listen()
        around = {} if self._watch is None else {"around_backward": self._watch.watching}
        self._pipeline.run(self._turns, kind=self._kind, forward=self._stages_forward, loss=self._loss, **around)
        self._check_order()
        return self._result

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

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in super()._parameters() if id(parameter) in self._held]

    def _kind(self, micro_batch: int) -> Slice:
        """The network cut for a micro-batch; on the first stage, fetch it and run the step up to its call of `self(...)`."""
        if not self._processes.is_first:
            piece = self._pipeline.hear(self._kinds)
            if micro_batch + 1 < self._plan.gradient_accumulation_factor:
                self._pipeline.listen()
            return piece
        batch = self._take()  # which draws under seeds of its own
        self._randomness.begin(self._update, self._replica, micro_batch)
        with (self._context or nullcontext)():
            self._called = arguments_of_call(self._module, lambda: self._step(batch, self._number + micro_batch))
        return self._pipeline.tell(self._kinds, *self._called)

    def _stages_forward(self, micro_batch: int, piece: Slice, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """One micro-batch through this process's stages."""
        if self._processes.is_first:
            values = piece.partition.flatten(*self._called[0], **self._called[1])
            del self._called
        else:
            self._randomness.begin_forward(self._update, self._replica, micro_batch)
        with (self._context or nullcontext)():
            results = piece.stage(*values)
        if not self._processes.is_last:
            self._on_micro_batch()
        return results

    def _loss(self, place: int, piece: Slice, results: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """On the last stage: the user's step around the output that arrived; its share of the update's loss."""
        batch = self._take()
        loss, extra = step_around(
            self._module,
            piece.partition.restore(results),
            lambda: self._forward(batch, self._number + place, self._update, self._replica, place),
        )
        scaled = loss / self._plan.micro_batches_per_update
        if self._replica == self._replicas.start and place == 0:
            for hook in self._hooks["before_backward"]:
                hook(scaled)
        if place == 0:
            self._result = loss.detach(), extra
        self._on_micro_batch()
        return scaled if self._scaling is None else self._scaling.scale(scaled)

    def weight_update(self, take: Callable[[], Any], *, update: int, first_micro_batch: int) -> tuple[torch.Tensor, dict[str, Any], bool]:
        self._kinds.check_unchanged()
        self._heard = None
        loss, extra, made = super().weight_update(take, update=update, first_micro_batch=first_micro_batch)
        # Every stage learns of signals that any received, and of the loss. What came after the replicas have agreed waits for the next update.
        received = self._stop_signal() if self._heard is None else self._heard
        stops = self._should_stop() if self._heard is None else self.asked_to_stop
        told = [loss.item(), float(bool(extra))] if self._processes.is_last else [0.0, 0.0]
        facts = torch.tensor([*told, float(stops), *signal_facts(received)], dtype=torch.float64).to(self._processes.device)
        dist.all_reduce(facts, group=self._processes.same_replica)
        total, has_extra, stops, *signals = facts.tolist()
        self.asked_to_stop = stops > 0
        if heard := signal_in(signals):
            self._on_stop(heard)
        if has_extra:  # whatever else the step returned, which hooks get as its outputs
            everyone = self._processes.gathered(map_tensors(torch.Tensor.cpu, extra), self._processes.same_replica)
            extra = map_tensors(lambda tensor: tensor.to(self._processes.device), everyone[-1])
        return torch.tensor(total, device=self._processes.device), extra, made

    def _all_finite(self, finite: bool) -> bool:
        """Whether the gradients of all stages are finite; those of all replicas have been added up."""
        overflows = torch.tensor(float(not finite), device=self._processes.device)
        dist.all_reduce(overflows, group=self._processes.same_replica)
        return not overflows

    def _clip_gradients(self) -> None:
        parameters = [parameter for parameter in self._parameters() if parameter.grad is not None]
        if self._clip_value:
            nn.utils.clip_grad_value_(parameters, self._clip_value)
            return
        squares = torch.zeros((), device=self._processes.device)
        if parameters:
            squares = nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
        dist.all_reduce(squares, group=self._processes.same_replica)
        nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, squares.sqrt())
