"""Run a replica's micro-batches in this process, and the user's training step on one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from lightning_ipu.engine.seeding import NamedRandomness
from lightning_ipu.plan import PlanError
from lightning_ipu.precision.loss_scaling import LossScaling


class MicroBatch(NamedTuple):
    """Where a micro-batch stands: weight update in the run, replica, place in the replica, and number in the epoch."""

    update: int
    replica: int
    place: int
    number: int


class TrainingStep:
    """The user's training step under the seeds of a micro-batch and in the context of the precision.

    Args:
        step: the user's, called as step(batch, number in the epoch).
        context: makes what it runs in (autocast); None where that is nothing.
        randomness: seeds what it draws.
    """

    def __init__(
        self, step: Callable[[Any, int], Any], *, context: Callable[[], AbstractContextManager] | None, randomness: NamedRandomness
    ) -> None:
        self.step, self._has_context, self.context, self.randomness = step, context is not None, context or nullcontext, randomness

    def run(self, batch: Any, at: MicroBatch) -> Any:
        """Whatever the user's step returns."""
        self.randomness.begin(at.update, at.replica, at.place)
        if not self._has_context:
            return self.step(batch, at.number)
        with self.context():
            return self.step(batch, at.number)

    def loss(self, batch: Any, at: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss, and whatever else the step returned beside it.

        Raises:
            PlanError: it returned no loss.
        """
        output = self.run(batch, at)
        if isinstance(output, torch.Tensor):
            return output, {}
        if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
            return output["loss"], {name: value for name, value in output.items() if name != "loss"}
        raise PlanError(
            f"training_step returned {type(output).__name__}{'' if output is None else ' without a loss'} for micro-batch {at.number};"
            " under IPUStrategy every micro-batch counts in its weight update, so it must return a loss or a dict with one"
        )


class WholeReplica:
    """Runs a replica whose network is in this process: forward and backward of one micro-batch after the other.

    Args:
        step: the user's.
        accumulation: micro-batches of a replica.
        per_update: micro-batches of a weight update, over all replicas.
        scaling: of the loss, None without.
        backward: in place of the loss's own, None where that is called.
        on_micro_batch: called after each finished micro-batch.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        accumulation: int,
        per_update: int,
        scaling: LossScaling | None,
        backward: Callable[[torch.Tensor], None] | None,
        on_micro_batch: Callable[[], None],
    ) -> None:
        self._step, self._accumulation, self._per_update, self._scaling = step, accumulation, per_update, scaling
        self._backward, self._on_micro_batch = backward, on_micro_batch

    def run(
        self, take: Callable[[], Any], *, update: int, replica: int, first_micro_batch: int, before_backward: Sequence[Callable[..., Any]]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Add up the gradients of a replica's micro-batches, of which the first gives the results.

        Args:
            take: gives the next micro-batch.
            update, replica: their numbers in the run and in the update.
            first_micro_batch: number in the epoch.
            before_backward: called with the first loss.
        """
        result = None
        try:
            for place in range(self._accumulation):
                loss, outputs = self._step.loss(take(), MicroBatch(update, replica, place, first_micro_batch + place))
                scaled = loss / self._per_update if self._per_update > 1 else loss
                if place == 0:
                    result = loss.detach(), outputs
                    for hook in before_backward:
                        hook(scaled)
                if self._scaling is not None:
                    scaled = self._scaling.scale(scaled)
                if self._backward is None:
                    scaled.backward()
                else:
                    self._backward(scaled)
                del loss, outputs, scaled  # the next micro-batch needs the memory
                self._on_micro_batch()
        finally:
            self._step.randomness.end()
        return result
