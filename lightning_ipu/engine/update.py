"""One weight update, read from top to bottom: micro-batches through replicas, their mean gradient, one optimizer step.

Two things differ from placement to placement, and are handed in: how a replica runs its micro-batches (in this process, or over stages in
several) and how replicas are summed (here in turn, or over processes). The order of additions is the same for all: micro-batches within a
replica, then replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ipu.engine.buffers import ReplicaBuffers
from lightning_ipu.engine.reduction import ReplicaSums, Stopping
from lightning_ipu.engine.seeding import NamedRandomness
from lightning_ipu.precision.loss_scaling import LossScaling

Hook = Callable[..., Any]
Outputs = dict[str, Any]


class Hooks(NamedTuple):
    """The functions to call around the steps of a weight update, mostly none."""

    before_zero_grad: Sequence[Hook] = ()
    before_backward: Sequence[Hook] = ()
    after_backward: Sequence[Hook] = ()
    before_optimizer_step: Sequence[Hook] = ()


class Replica(Protocol):
    """How a replica runs its micro-batches."""

    def run(
        self, take: Callable[[], Any], *, update: int, replica: int, first_micro_batch: int, before_backward: Sequence[Hook]
    ) -> tuple[torch.Tensor, Outputs]:
        """Add up the gradients of a replica's micro-batches, of which the first gives the results."""


class Engine:
    """Makes weight updates.

    The network is one object; what replicas hold apart from each other within an update (gradients, buffers) is kept beside it.

    Args:
        accumulation: micro-batches of a replica.
        replicas: those that run here, in turn.
        replica: runs one of them.
        optimizer: steps once per weight update.
        randomness: seeded for an optimizer that draws.
        hooks: what to call in between.
        held: ids of the parameters that are here; None for all.
        buffers: of the network, where replicas hold them apart or an update may be undone.
        sums: adds what replicas in other processes have summed; None where all run here.
        share: gives all stages what the last one returned; None where a replica is in one process.
        stopping: lets processes stop after the same update; None in one process.
        zero_grad, clip: in place of the optimizer's own and of no clipping.
        scaling: of the loss, which decides whether an update is made.
        update_weights: makes update number k in place of the optimizer's own `step`.
    """

    def __init__(
        self,
        *,
        accumulation: int,
        replicas: range,
        replica: Replica,
        optimizer: Optimizer,
        randomness: NamedRandomness,
        hooks: Hooks,
        held: set[int] | None = None,
        buffers: ReplicaBuffers | None = None,
        sums: ReplicaSums | None = None,
        share: Callable[[torch.Tensor, Outputs], tuple[torch.Tensor, Outputs]] | None = None,
        stopping: Stopping | None = None,
        zero_grad: Callable[[], None] | None = None,
        clip: Callable[[list[nn.Parameter]], None] | None = None,
        scaling: LossScaling | None = None,
        update_weights: Callable[[int], None] | None = None,
    ) -> None:
        self._accumulation, self._replicas, self._replica = accumulation, replicas, replica
        self._optimizer, self._randomness = optimizer, randomness
        self._hooks, self._held, self._buffers, self._sums, self._share = hooks, held, buffers, sums, share
        self._stopping, self._zero_grad, self._clip, self._scaling = stopping, zero_grad or optimizer.zero_grad, clip, scaling
        self._update_weights = update_weights
        self._optimizer_may_draw = not type(optimizer).__module__.startswith("torch.")
        self._under_way = False

    def weight_update(self, take: Callable[[], Any], *, update: int, first_micro_batch: int) -> tuple[torch.Tensor, Outputs, bool]:
        """Make one weight update.

        Args:
            take: gives the next micro-batch.
            update: its number in the run, from 0.
            first_micro_batch: number in the epoch of the first micro-batch.

        Returns:
            The loss of the first micro-batch here, whatever else its step returned, and whether the update was made: not where scaled
            gradients have overflowed. Then weights, optimizer and BatchNorm's statistics are as before.
        """
        buffers, stopping = self._buffers, self._stopping
        for hook in self._hooks.before_zero_grad:
            hook(self._optimizer)
        self._zero_grad()
        if stopping is not None:
            stopping.begin_update()
        if buffers is not None:
            buffers.begin_update()
            self._under_way = True

        gradients = result = None
        for replica in self._replicas:
            if buffers is not None:
                buffers.begin_replica()
            number = first_micro_batch + replica * self._accumulation
            hooks = self._hooks.before_backward if result is None else ()
            outputs = self._replica.run(take, update=update, replica=replica, first_micro_batch=number, before_backward=hooks)
            result = result or outputs
            if buffers is not None:
                buffers.end_replica(replica)
                gradients = _add_gradients(self._parameters(), gradients)

        parameters = self._parameters()
        if buffers is not None:
            if self._sums is not None:
                gradients = self._sums.over_processes(parameters, gradients, buffers)
            buffers.end_update()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        made = self._scaling is None or self._scaling.unscale_and_check(parameters)
        if self._scaling is not None:
            self._scaling.update(made)
        if made:
            self._step(parameters, update)
        else:
            buffers.begin_replica()
        if self._share is not None:
            result = self._share(*result)
        self._under_way = False
        return *result, made

    def _step(self, parameters: list[nn.Parameter], update: int) -> None:
        """Let the optimizer move the weights by the mean gradient."""
        for hook in self._hooks.after_backward:
            hook()
        for hook in self._hooks.before_optimizer_step:
            hook(self._optimizer)
        if self._clip is not None:
            self._clip(parameters)
        if self._optimizer_may_draw:
            self._randomness.begin_update(update)
        if self._update_weights is None:
            self._optimizer.step()
        else:
            self._update_weights(update)

    def undo(self) -> None:
        """After an error within a weight update: set BatchNorm's statistics back to where it began."""
        if self._under_way:
            self._buffers.begin_replica()
            self._under_way = False

    @property
    def asked_to_stop(self) -> bool:
        """After a weight update, the same in all processes: whether one of them wanted to stop."""
        return self._stopping is not None and self._stopping.asked

    def _parameters(self) -> list[nn.Parameter]:
        """What the optimizer trains here; a callback may have added to it."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return parameters if self._held is None else [parameter for parameter in parameters if id(parameter) in self._held]


def _add_gradients(parameters: list[nn.Parameter], totals: list[torch.Tensor | None] | None) -> list[torch.Tensor | None]:
    """Add the gradients of the replica that has just run to those of the replicas before it, and take them off the parameters."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    if totals is None:
        return gradients
    both = [(total, gradient) for total, gradient in zip(totals, gradients, strict=True) if total is not None and gradient is not None]
    if both:
        torch._foreach_add_([total for total, _ in both], [gradient for _, gradient in both])
    return [gradient if total is None else total for total, gradient in zip(totals, gradients, strict=True)]
