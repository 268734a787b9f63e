"""The distributed engine: carries a plan out on several processes with torch.distributed, with the numbers of one process.

A weight update ends in one flattened reduction over the processes that hold other replicas of the same stages: gradients, BatchNorm's
moves and a flag for signals travel together. Where a replica is spread over processes, the user's step runs around the forward: on the first
stage up to its call of `self(...)`, on the last stage with that call answered by the output that arrived.
"""

from __future__ import annotations

import itertools
import pickle
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from lightning_ipu.cutting.call import arguments_of_call, step_around
from lightning_ipu.cutting.partition import Partition, cut
from lightning_ipu.engine.buffers import ReplicaBuffers, floats_as_whole, whole_as_floats
from lightning_ipu.engine.local import LocalEngine
from lightning_ipu.engine.pipeline import Kinds, Pipeline, Slice, turns
from lightning_ipu.placement import Placement
from lightning_ipu.plan import PlanError

_pipelines = itertools.count()  # numbers the pipelines, alike in all processes
_SMALL = 8192  # bytes of a packed value that travel with its length


@cache
def process_groups(device_type: str, groups: int, parts: int, everyone: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of processes with the same stages as this one, and with the same replicas: made once and used by all runs of this process.

    Args:
        groups: processes among which the replicas are divided.
        parts: processes per replica.
        everyone: the group of all processes, with which these end.
    """
    mesh = init_device_mesh(device_type, (groups, parts), mesh_dim_names=("replicas", "stages"))
    return mesh.get_group("replicas"), mesh.get_group("stages")


@cache
def groups_beside(count: int, parts: int, everyone: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two more groups of the processes with the same replicas as this one: one for the device, one for tensors on the CPU; made once."""
    rows = [list(range(start, start + parts)) for start in range(0, count, parts)]
    return tuple(dist.new_subgroups_by_enumeration(rows, backend=backend)[0] for backend in (None, "gloo"))


class Processes:
    """This process among those that carry a plan out: its replicas, its stages, and whom it shares them with.

    Args:
        placement: of the plan.
        device: this process's.
    """

    def __init__(self, placement: Placement, *, device: torch.device) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.replicas, self.stages = placement.replicas_of(self.rank), placement.stages_of(self.rank)
        self.parts = placement.processes_per_replica
        self.group, self.part = divmod(self.rank, self.parts)
        self.same_stages, self.same_replica = process_groups(device.type, self.count // self.parts, self.parts, dist.group.WORLD)
        self.device = device

    def pipeline(self) -> Pipeline:
        """The connection between the stages of this replica; all processes must call this."""
        groups = (self.same_replica,) * 2
        if self.device.type != "cpu":
            groups = groups_beside(self.count, self.parts, dist.group.WORLD)
        groups = (self.same_replica, *groups)
        return Pipeline(self.part, self.parts, self.peer, groups=groups, device=self.device, number=next(_pipelines))

    @property
    def is_first(self) -> bool:
        """Whether the first stage is here."""
        return self.part == 0

    @property
    def is_last(self) -> bool:
        """Whether the last stage is here."""
        return self.part == self.parts - 1

    def gathered(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every process's value, in the order of ranks.

        Small values take one collective: torch's all_gather_object takes two, and 1.4 to 3.7 ms on two cores where this takes 0.4.
        """
        packed = pickle.dumps(value)
        starts = self._exchanged(len(packed).to_bytes(8, "little") + packed[:_SMALL], size=8 + _SMALL, group=group)
        longest = max(int.from_bytes(start[:8], "little") for start in starts)
        if longest <= _SMALL:
            return [pickle.loads(start[8:]) for start in starts]
        return [pickle.loads(whole) for whole in self._exchanged(packed, size=longest, group=group)]

    def _exchanged(self, data: bytes, *, size: int, group: dist.ProcessGroup | None) -> list[memoryview]:
        """Every process's bytes, filled up to a common size."""
        filled = bytearray(size)
        filled[: len(data)] = data
        mine = torch.frombuffer(filled, dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        return [memoryview(theirs.cpu().numpy()) for theirs in everyone]

    def largest(self, number: int) -> int:
        """The largest of every process's numbers."""
        shared = torch.tensor(number, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    @torch.no_grad()
    def check_alike(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, holds: Callable[[str], bool]) -> None:
        """Check that the replicas still hold the same weights, to the last bit, and learning rates.

        Raises:
            PlanError: something but the optimizer has changed them by what only one process saw.
        """
        if dist.get_world_size(self.same_stages) == 1:
            return
        # Sums of the bits as whole numbers: exact, in whatever order they are added.
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.numel() and holds(name)]
        bits = [torch.view_as_real(value) if value.is_complex() else value for value in (parameter.detach() for _, parameter in named)]
        sums = [value.contiguous().view(kinds[value.element_size()]).sum(dtype=torch.int64) for value in bits]
        rates = [torch.tensor(float(group.get("lr", 0.0)), dtype=torch.float64).view(torch.int64) for group in optimizer.param_groups]
        mine = torch.stack([value.to(self.device) for value in [*sums, *rates]])
        low, high = mine.clone(), mine.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.same_stages)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.same_stages)
        apart = (low != high).nonzero().flatten().tolist()
        if apart:
            what = named[apart[0]][0] if apart[0] < len(named) else "the learning rate"
            raise PlanError(
                f"{what!r} is no longer the same in all replicas: something but the optimizer changes it by what only one process has seen (a"
                " moving average of weights, an initialisation by data, a scheduler that follows a local value). Make it depend on what all"
                " share, or use one process"
            )

    def peer(self, part: int) -> int:
        """Rank of the process that holds a part of the same replica."""
        return self.group * self.parts + part


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
        facts = [float(gradient is not None) for gradient in gradients] + _signal_facts(self._stop_signal())
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
        present, self._heard = facts[: len(gradients)], _signal_in(facts[len(gradients) :])
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
        if self._buffers is not None:
            own = partition.buffers[processes.stages.start : processes.stages.stop]
            self._buffers = ReplicaBuffers(self._module, self._plan.replication_factor, set().union(*own))
        if self._scaling is not None:
            self._scaling.agree = self._all_finite
        ahead = {"Sequential": 1, "GPipe": accumulation, "1F1B": min(accumulation, processes.parts - processes.part)}[schedule]
        self._turns, self._pipeline = list(turns(accumulation, ahead)), processes.pipeline()

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partition:
            with self._randomness.aside():
                return state.cut(args, kwargs, training=True, context=self._context or nullcontext)

        self._kinds = Kinds(make, processes.stages, first=state.partition, device=processes.device, remark=remark)

    def _run_replica(self, take: Callable[[], Any], update: int, replica: int, number: int) -> tuple[torch.Tensor, dict[str, Any]]:
        self._take, self._update, self._replica, self._number = take, update, replica, number
        self._result: tuple[torch.Tensor, dict[str, Any]] = torch.zeros((), device=self._processes.device), {}
        if not self._processes.is_first:
            self._pipeline.listen()
        self._pipeline.run(self._turns, kind=self._kind, forward=self._stages_forward, loss=self._loss)
        return self._result

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
        facts = torch.tensor([*told, float(stops), *_signal_facts(received)], dtype=torch.float64).to(self._processes.device)
        dist.all_reduce(facts, group=self._processes.same_replica)
        total, has_extra, stops, *signals = facts.tolist()
        self.asked_to_stop = stops > 0
        if heard := _signal_in(signals):
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


class EvaluationPipeline:
    """Forward only, one batch at a time: the stages work on successive batches, since none waits for those behind it.

    Args:
        module: the network.
        processes: who holds which stages.
        state: what of the network is here.
        context: makes the context of a step (autocast).
        remark: told what the user should know.
    """

    def __init__(
        self, module: nn.Module, processes: Processes, *, state: StageState, context: Callable[[], Any], remark: Callable[[str], None]
    ) -> None:
        self._module, self._processes, self._context = module, processes, context

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partition:
            return state.cut(args, kwargs, training=False, context=context)

        self._pipeline, self._kinds = (
            processes.pipeline(),
            Kinds(make, processes.stages, first=None, device=processes.device, remark=remark),
        )

    def step(self, step: Callable[[], Any]) -> Any:
        """Run the user's step on a batch; returns its result on the last stage, None elsewhere."""
        with self._context():
            args, kwargs = arguments_of_call(self._module, step, "a step of pipeline_validation")
        number = self._kinds.find(args, kwargs)
        piece = self._kinds.add(self._kinds.described(args, kwargs)) if number is None else self._kinds[number]
        results: tuple[torch.Tensor, ...] = ()
        piece.partition.check_unchanged()

        def forward(_: int, piece: Slice, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            nonlocal results
            with self._context():
                results = piece.stage(*(piece.partition.flatten(*args, **kwargs) if self._processes.is_first else values))
            return results

        self._pipeline.run([(True, 0)], kind=lambda _: piece, forward=forward)
        if not self._processes.is_last:
            return None
        return step_around(self._module, piece.partition.restore(results), step, "a step of pipeline_validation")


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class StageState:
    """Parameters and buffers of the stages that live elsewhere: given up while training, fetched when the whole network is needed.

    Buffers that the forward does not use (what a step normalises its input by) stay everywhere.

    Args:
        module: the whole network.
        partition: the network cut into stages.
        processes: who holds which stages.
    """

    def __init__(self, module: nn.Module, partition: Partition, processes: Processes) -> None:
        self._module, self.partition, self._processes = module, partition, processes
        self.owners: dict[str, int] = {}  # parameters and buffers by name to the part that holds them
        held = len(partition) // processes.parts
        for names in (partition.parameters, partition.buffers):
            for stage, of_stage in enumerate(names):
                self.owners |= dict.fromkeys(of_stage, stage // held)
        # By place, not by tensor: a step or a forward may put a new tensor in a buffer's place.
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for path, child in module.named_modules():
            for place in (child._parameters, child._buffers):
                self._places |= {f"{path}.{key}" if path else key: (place, key) for key in place}
        self._layouts = {name: self._layout(name) for name in sorted(self.owners)}
        self._elsewhere = [name for name in self._layouts if not self.here(name) and name not in partition.unused_buffers]
        self.is_whole = True

    def _tensor(self, name: str) -> torch.Tensor | None:
        place, key = self._places[name]
        return place[key]

    def _layout(self, name: str) -> Layout | None:
        """Shape, strides and type of a tensor, None for a buffer that is None."""
        tensor = self._tensor(name)
        return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)

    def here(self, name: str) -> bool:
        """Whether this process holds a parameter or buffer."""
        return self.owners[name] == self._processes.part

    @torch.no_grad()
    def give_up(self) -> None:
        """Free what other processes hold; a single number stands for each tensor, NaN, so that whoever reads it by mistake sees it."""
        for name in self._elsewhere:
            if (tensor := self._tensor(name)) is None:
                continue
            real = tensor.is_floating_point() or tensor.is_complex()
            nothing = float("nan") if real else False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
            tensor.data = torch.full((), nothing, dtype=tensor.dtype, device=tensor.device).expand(self._layouts[name][0])
            tensor.grad = None
        self.is_whole = False

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool, context: Callable[[], Any]) -> Partition:
        """Cut the network at the same places for another call of `self(...)`, or for evaluation.

        Raises:
            PlanError: a stage would use a parameter or buffer that another process holds.
        """
        gave_up = not self.is_whole
        if gave_up:
            self._lay_out()  # allocated, without values: memory layouts of results follow from it
        try:
            partition = cut(self._module, args, kwargs, splits=self.partition.splits, training=training, context=context)
        finally:
            if gave_up:
                self.give_up()
        held = len(partition) // self._processes.parts
        for stage, names in enumerate(map(set.union, partition.parameters, partition.buffers)):
            for name in sorted(names - partition.unused):
                if self.owners[name] != stage // held:
                    raise PlanError(
                        f"the network uses {name!r} in stage {stage} {'for some shapes' if training else 'in evaluation'}, but another process holds"
                        " it, as decided by the first training micro-batch; choose pipeline_splits that keep all its uses in one stage"
                    )
        return partition

    @torch.no_grad()
    def _lay_out(self) -> None:
        for name in self._elsewhere:
            self._make_room(name)

    def _make_room(self, name: str) -> None:
        """Give a tensor memory, without values."""
        tensor, layout = self._tensor(name), self._layouts[name]
        made = None if layout is None else torch.empty_strided(*layout[:2], dtype=layout[2], device=self._processes.device)
        if tensor is None or made is None or tensor.dtype != made.dtype:
            place, key = self._places[name]
            place[key] = made
        else:
            tensor.data = made

    @torch.no_grad()
    def fetch(self) -> None:
        """Have the whole network in every process, each stage from the process that trains it."""
        # A forward may have filled or emptied a buffer, or given it another shape.
        renewed = {name: layout for name in self._layouts if self.here(name) and (layout := self._layout(name)) != self._layouts[name]}
        for theirs in self._processes.gathered(renewed, self._processes.same_replica):
            self._layouts |= theirs
            for name in theirs:
                if not self.here(name):
                    self._make_room(name)
        self._lay_out()
        for name, layout in self._layouts.items():
            if layout is not None:
                dist.broadcast(self._tensor(name).data, self._processes.peer(self.owners[name]), group=self._processes.same_replica)
        self.is_whole = True

    def own(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Of a state_dict, what this process holds; for what is no parameter or buffer, the process with the module's stage answers."""
        return {name: value for name, value in tensors.items() if self._answers_for(name)}

    def _answers_for(self, name: str) -> bool:
        if name in self.owners:
            return self.here(name)
        module = name.rpartition(".")[0]
        owners = {owner for tensor, owner in self.owners.items() if module and tensor.startswith(module + ".")}
        return self._processes.is_last if not owners else self._processes.part == max(owners)

    def merged(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """The parts that the processes of a replica hold of a dictionary of tensors, as one dictionary in each."""
        everyone = self._processes.gathered(own, self._processes.same_replica)
        return {key: value for part in everyone for key, value in part.items()}


def _signal_facts(number: int) -> list[float]:
    """The signal that a process received, 0 for none, encoded so that `_signal_in` can read the sum over processes."""
    return [float(place == number) for place in range(1, signal.NSIG)]


def _signal_in(sums: list[float]) -> int:
    """The signal that processes received, 0 for none; of different ones the largest number, SIGTERM rather than SIGINT."""
    return max((place for place, count in enumerate(sums, start=1) if count), default=0)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply a function to the tensors in nested tuples, lists and dicts."""
    return tree_map(lambda value: function(value) if isinstance(value, torch.Tensor) else value, values)


def all_reduce_flat(tensors: list[torch.Tensor], *, group: dist.ProcessGroup) -> None:
    """Sum tensors over a group in place, in one reduction for each of their types."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(alike)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(alike, list(_unflatten_dense_tensors(flat, alike)))


@torch.no_grad()
def broadcast_state(module: nn.Module, *, source: int = 0) -> None:
    """Give every process the parameters and buffers of one, so that all replicas start alike."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, source)
