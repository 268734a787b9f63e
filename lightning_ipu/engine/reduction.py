"""What processes exchange in a weight update: sums over replicas, results over stages, and whether to stop after it.

All that is known at the same time travels in one reduction, flags with the gradients.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_ipu.engine.buffers import ReplicaBuffers, floats_as_whole, whole_as_floats
from lightning_ipu.engine.processes import Processes, map_tensors
from lightning_ipu.plan import PlanError


class Stopping:
    """Lets processes stop after the same weight update, whichever of them received a signal or wants to.

    What comes up after processes have agreed waits for the next update.

    Args:
        received: number of a signal that this process received, 0 without one.
        wanted: whether something in this process wants the run to end.
        on_signal: called with a signal that any process received, at the end of the same weight update in each.
    """

    def __init__(self, *, received: Callable[[], int], wanted: Callable[[], bool], on_signal: Callable[[int], None]) -> None:
        self._received, self._wanted, self._on_signal = received, wanted, on_signal
        self.asked = False
        self._agreed: tuple[int, bool] | None = None

    def begin_update(self) -> None:
        """Called at the beginning of a weight update."""
        self._agreed = None

    def facts(self) -> list[float]:
        """What this process received and wants, as numbers whose sums over processes are for `agree`."""
        number, stops = self._agreed or (self._received(), self._wanted())
        return [float(stops), *(float(place == number) for place in range(1, signal.NSIG))]

    def agree(self, sums: list[float]) -> None:
        """Called in all processes with the sums of their `facts`; of different signals the largest counts, SIGTERM rather than SIGINT."""
        self.asked = sums[0] > 0
        number = max((place for place, count in enumerate(sums[1:], start=1) if count), default=0)
        self._agreed = number, self.asked
        if number:
            self._on_signal(number)


class ReplicaSums:
    """Adds up what replicas in different processes have summed.

    Args:
        processes: who holds which replicas.
        stopping: its facts travel along.
    """

    def __init__(self, processes: Processes, *, stopping: Stopping) -> None:
        self._processes, self._stopping = processes, stopping

    def over_processes(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor | None], buffers: ReplicaBuffers
    ) -> list[torch.Tensor | None]:
        """Sum gradients, and what `buffers` has summed; a parameter without a gradient anywhere keeps none.

        Raises:
            PlanError: a gradient is sparse.
        """
        processes = self._processes
        if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
            raise PlanError("sparse gradients cannot be averaged over processes; build the layer without, e.g. nn.Embedding(sparse=False)")
        # Whether there is a gradient here, whether buffers were renewed, and whether to stop.
        facts = [*(float(gradient is not None) for gradient in gradients), float(any(buffers.renewed)), *self._stopping.facts()]
        facts = torch.tensor(facts, device=processes.device)
        sums = [
            torch.zeros_like(parameter, dtype=parameter.grad_dtype) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        values = buffers.counts or buffers.no_counts
        counts = whole_as_floats(values, processes.device)
        all_reduce_flat([*sums, *buffers.moves, counts, facts], group=processes.same_stages)
        buffers.counts = floats_as_whole(counts, values)
        facts = facts.tolist()
        present, renewed = facts[: len(gradients)], facts[len(gradients)]
        if renewed:
            everyone = processes.gathered(map_tensors(torch.Tensor.cpu, buffers.renewed), processes.same_stages)
            buffers.renewed = map_tensors(lambda tensor: tensor.to(processes.device), [of for theirs in everyone for of in theirs])
        self._stopping.agree(facts[len(gradients) + 1 :])
        return [gradient if here else None for gradient, here in zip(sums, present, strict=True)]


class StageResults:
    """Lets the stages of a replica act as one at the end of a weight update.

    Args:
        processes: who holds which stages.
        stopping: its facts travel along.
    """

    def __init__(self, processes: Processes, *, stopping: Stopping) -> None:
        self._processes, self._stopping = processes, stopping

    def share(self, loss: torch.Tensor, outputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The last stage's loss and outputs, in every stage."""
        processes = self._processes
        results = [loss.item(), float(bool(outputs))] if processes.is_last else [0.0, 0.0]
        facts = torch.tensor([*results, *self._stopping.facts()], dtype=torch.float64).to(processes.device)
        dist.all_reduce(facts, group=processes.same_replica)
        total, has_outputs, *stops = facts.tolist()
        self._stopping.agree(stops)
        if has_outputs:
            everyone = processes.gathered(map_tensors(torch.Tensor.cpu, outputs), processes.same_replica)
            outputs = map_tensors(lambda tensor: tensor.to(processes.device), everyone[-1])
        return torch.tensor(total, device=processes.device), outputs

    def all_finite(self, finite: bool) -> bool:
        """Whether the gradients of all stages are finite; those of all replicas have been added up."""
        overflows = torch.tensor(float(not finite), device=self._processes.device)
        dist.all_reduce(overflows, group=self._processes.same_replica)
        return not overflows

    def clip_norm(self, parameters: list[nn.Parameter], largest: float) -> None:
        """Clip gradients by their norm over all stages."""
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        squares = torch.zeros((), device=self._processes.device)
        if parameters:
            squares = nn.utils.get_total_norm([parameter.grad for parameter in parameters]) ** 2
        dist.all_reduce(squares, group=self._processes.same_replica)
        nn.utils.clip_grads_with_norm_(parameters, largest, squares.sqrt())


def all_reduce_flat(tensors: list[torch.Tensor], *, group: dist.ProcessGroup) -> None:
    """Sum tensors over a group in place, in one reduction for each of their types."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(alike)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(alike, list(_unflatten_dense_tensors(flat, alike)))
