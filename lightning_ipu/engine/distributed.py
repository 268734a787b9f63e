"""The distributed engine: carries a plan out on several processes with torch.distributed, with the numbers of one process.

A weight update ends in one flattened reduction over the processes that hold other replicas of the same stages: gradients, BatchNorm's
moves and a flag for signals travel together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh

from lightning_ipu.engine.local import LocalEngine
from lightning_ipu.placement import Placement


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
        groups = self.count // self.parts
        self.group, self.part = divmod(self.rank, self.parts)
        mesh = init_device_mesh(device.type, (groups, self.parts), mesh_dim_names=("replicas", "stages"))
        self.same_stages, self.same_replica = mesh.get_group("replicas"), mesh.get_group("stages")
        self.device = device

    def gathered(self, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        values = [None] * self.count
        dist.all_gather_object(values, value)
        return values


class DistributedEngine(LocalEngine):
    """The local engine with some of the replicas in other processes.

    Args:
        processes: who holds which.
        stop_signal: number of a signal that this process received, 0 without one.
        on_stop: told of a signal that any process received, at the end of the same weight update in each.
        local: as for LocalEngine.
    """

    def __init__(self, *, processes: Processes, stop_signal: Callable[[], int], on_stop: Callable[[int], None], **local: Any) -> None:
        super().__init__(**local)
        self._processes, self._stop_signal, self._on_stop = processes, stop_signal, on_stop
        self._replicas = processes.replicas

    def _gather(self, gradients: list[torch.Tensor | None], moves: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Sum gradients and moves over the processes with other replicas; a parameter without a gradient anywhere keeps none."""
        parameters = self._parameters()
        signal = self._stop_signal()
        # Whether there is a gradient here, then how many processes received a signal and the sum of the signals' numbers.
        facts = torch.tensor(
            [float(gradient is not None) for gradient in gradients] + [float(signal > 0), float(signal)], device=self._processes.device
        )
        sums = [
            torch.zeros_like(parameter) if gradient is None else gradient for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        all_reduce_flat([*sums, *moves, facts], group=self._processes.same_stages)
        *present, signalled, signals = facts.tolist()
        if signalled:
            self._on_stop(round(signals / signalled))
        return [gradient if here else None for gradient, here in zip(sums, present, strict=True)]


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
