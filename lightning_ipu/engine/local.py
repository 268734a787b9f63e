"""The local engine: carries a plan out in one process, every virtual IPU in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ipu.engine.buffers import ReplicaBuffers
from lightning_ipu.engine.seeding import NamedRandomness
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.precision.loss_scaling import LossScaling

Hook = Callable[..., Any]


class LocalEngine:
    """Makes weight updates: A micro-batches on each of R replicas in turn, their mean gradient, one optimizer step.

    Micro-batches are summed in order within a replica, then replicas in order. The network is one object; what replicas hold apart
    from each other within an update (gradients, buffers) is kept beside it.

    Args:
        plan: how many replicas and micro-batches.
        module: whose buffers are kept apart by replica.
        optimizer: steps once per weight update.
        step: the user's `training_step`, called as step(micro-batch, number in the epoch).
        context: makes the context of a step (autocast), None where there is none.
        randomness: seeded for every micro-batch.
        hooks: for each of before_zero_grad, before_backward, after_backward, before_optimizer_step the functions to call, mostly none.
        zero_grad, backward, clip: stand-ins for the optimizer's, the loss's own and for no clipping; None where nothing is to be called.
        on_micro_batch: told of each finished micro-batch.
        scaling: scales the loss and decides whether an update is made; None without loss scaling.
        update_weights: makes update number k in place of the optimizer's own `step`; None where that does.
        undoes: keep what `undo` needs.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        module: nn.Module,
        optimizer: Optimizer,
        step: Callable[[Any, int], Any],
        context: Callable[[], AbstractContextManager] | None,
        randomness: NamedRandomness,
        hooks: Mapping[str, list[Hook]],
        zero_grad: Hook | None,
        backward: Hook | None,
        clip: Hook | None,
        on_micro_batch: Callable[[], None],
        scaling: LossScaling | None = None,
        update_weights: Callable[[int], None] | None = None,
        undoes: bool = False,
    ) -> None:
        self._plan, self._optimizer, self._step, self._context = plan, optimizer, step, context
        self._randomness, self._hooks, self._on_micro_batch = randomness, hooks, on_micro_batch
        self._zero_grad, self._backward, self._clip = zero_grad or optimizer.zero_grad, backward, clip
        self._scaling, self._update_weights = scaling, update_weights
        self._buffers = (
            ReplicaBuffers(module, plan.replication_factor) if plan.replication_factor > 1 or scaling is not None or undoes else None
        )
        self._replicas = range(plan.replication_factor)  # those that run here
        self._optimizer_may_draw = not type(optimizer).__module__.startswith("torch.")

    def weight_update(self, take: Callable[[], Any], *, update: int, first_micro_batch: int) -> tuple[torch.Tensor, dict[str, Any], bool]:
        """Make one weight update.

        Args:
            take: gives the next micro-batch.
            update: its number in the run, from 0.
            first_micro_batch: number in the epoch of the first micro-batch.

        Returns:
            The loss of the first micro-batch here, whatever else its step returned, and whether the update was made: not where scaled
            gradients have overflowed. Then weights, optimizer and BatchNorm's statistics are as before.
        """
        hooks, buffers, gradients, first = self._hooks, self._buffers, None, None
        for hook in hooks["before_zero_grad"]:
            hook(self._optimizer)
        self._zero_grad()
        if buffers:
            buffers.begin_update()

        for replica in self._replicas:
            if buffers:
                buffers.begin_replica()
            try:
                result = self._run_replica(take, update, replica, first_micro_batch + replica * self._plan.gradient_accumulation_factor)
            finally:
                self._randomness.end()
            first = first or result
            if buffers:
                buffers.end_replica(replica)
                gradients = self._add_gradients(gradients)
        loss, extra = first

        if buffers:
            gradients = self._gather(gradients, buffers)
            buffers.end_update()
            for parameter, gradient in zip(self._parameters(), gradients, strict=True):
                parameter.grad = gradient
        if self._scaling is not None:
            finite = self._scaling.unscale_and_check(self._parameters())
            self._scaling.update(finite)
            if not finite:
                if buffers:
                    buffers.begin_replica()
                return loss, extra, False
        for hook in hooks["after_backward"]:
            hook()
        for hook in hooks["before_optimizer_step"]:
            hook(self._optimizer)
        if self._clip is not None:
            self._clip()
        if self._optimizer_may_draw:
            self._randomness.begin_update(update)
        if self._update_weights is None:
            self._optimizer.step()
        else:
            self._update_weights(update)
        return loss, extra, True

    def undo(self) -> None:
        """Set BatchNorm's statistics back to where the weight update in flight began, after an error within it."""
        if self._buffers:
            self._buffers.begin_replica()

    def _run_replica(self, take: Callable[[], Any], update: int, replica: int, number: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Add up the gradients of a replica's micro-batches, of which the first has this number in the epoch and gives the results."""
        share, first = self._plan.micro_batches_per_update, None
        for micro_batch in range(self._plan.gradient_accumulation_factor):
            loss, extra = self._forward(take(), number + micro_batch, update, replica, micro_batch)
            scaled = loss / share if share > 1 else loss
            if replica == self._replicas.start and micro_batch == 0:
                for hook in self._hooks["before_backward"]:
                    hook(scaled)
            if self._scaling is not None:
                scaled = self._scaling.scale(scaled)
            if self._backward is None:
                scaled.backward()
            else:
                self._backward(scaled)
            first = first or (loss.detach(), extra)
            del loss, extra, scaled
            self._on_micro_batch()
        return first

    def _gather(self, gradients: list[torch.Tensor | None], buffers: ReplicaBuffers) -> list[torch.Tensor | None]:
        """Add what replicas elsewhere have summed, also to `buffers`: none run elsewhere."""
        return gradients

    def _forward(self, batch: Any, number: int, update: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, dict[str, Any]]:
        self._randomness.begin(update, replica, micro_batch)
        if self._context is None:
            output = self._step(batch, number)
        else:
            with self._context():
                output = self._step(batch, number)
        if isinstance(output, torch.Tensor):
            return output, {}
        if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
            return output["loss"], {name: value for name, value in output.items() if name != "loss"}
        raise PlanError(
            f"training_step returned {type(output).__name__}{'' if output is None else ' without a loss'} for micro-batch {number};"
            " under IPUStrategy every micro-batch counts in its weight update, so it must return a loss or a dict with one"
        )

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _add_gradients(self, totals: list[torch.Tensor | None] | None) -> list[torch.Tensor | None]:
        """Add the gradients of the replica that has just run to those of the replicas before it, and take them off the parameters."""
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        if totals is None:
            return gradients
        both = [(total, gradient) for total, gradient in zip(totals, gradients, strict=True) if total is not None and gradient is not None]
        if both:
            torch._foreach_add_([total for total, _ in both], [gradient for _, gradient in both])
        return [gradient if total is None else total for total, gradient in zip(totals, gradients, strict=True)]
