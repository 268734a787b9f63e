"""The processes that carry a plan out: who holds which replicas and stages, and what they exchange."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from lightning_ipu.placement import Placement
from lightning_ipu.plan import PlanError

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

    def pipeline_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
        """Groups of the processes with a replica's stages, for what goes forward, for what goes back, and for tensors on the CPU.

        Three where a group does one thing at a time (NCCL); all processes must call this.
        """
        if self.device.type == "cpu":
            return (self.same_replica,) * 3
        return self.same_replica, *groups_beside(self.count, self.parts, dist.group.WORLD)

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


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply a function to the tensors in nested tuples, lists and dicts."""
    return tree_map(lambda value: function(value) if isinstance(value, torch.Tensor) else value, values)


@torch.no_grad()
def broadcast_state(module: nn.Module) -> None:
    """Give every process the parameters and buffers of the first, so that all replicas start from the same."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, 0)
