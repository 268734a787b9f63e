"""How often the host must look: what the events of a run do to its device iterations.

A host step may hold `device_iterations` weight updates, but it ends early where something is due after an update: an epoch's end, the
last update of the run, a validation, a checkpoint. Events therefore fall where they would with one update per host step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging

from lightning_ipu.plan import Plan

# Callbacks that act on every weight update, by the names of their classes (or of a base class).
_EVERY_UPDATE = ("WeightAveraging", "LearningRateFinder", "_LRCallback")


@dataclass
class HostEvents:
    """When the host must look, in weight updates.

    Args:
        device_iterations: the most weight updates of a host step.
        updates_per_epoch: None for a stream of unknown length.
        max_steps: weight updates after which the run ends; -1 for no such limit.
        in_run: (what, period): due after every so many updates of the run.
        in_epoch: (what, period): due after every so many updates of an epoch.
        before: (what, period): due before the last of every so many updates of the run.
    """

    device_iterations: int
    updates_per_epoch: int | None
    max_steps: int = -1
    in_run: list[tuple[str, int]] = field(default_factory=list)
    in_epoch: list[tuple[str, int]] = field(default_factory=list)
    before: list[tuple[str, int]] = field(default_factory=list)

    def updates_until_due(self, *, run_update: int, epoch_update: int) -> int:
        """Weight updates that the next host step may hold, after so many in the run and in the epoch."""
        bounds = [self.device_iterations]
        bounds += [period - run_update % period for _, period in self.in_run]
        bounds += [period - epoch_update % period for _, period in self.in_epoch]
        bounds += [period - (run_update + 1) % period for _, period in self.before]
        if self.updates_per_epoch is not None:
            bounds.append(self.updates_per_epoch - epoch_update)
        if self.max_steps >= 0:
            bounds.append(self.max_steps - run_update)
        return max(1, min(bounds))

    @property
    def reduction(self) -> str | None:
        """One line that says by what the device iterations are cut, None where nothing cuts them."""
        limits = [*self.in_run, *self.in_epoch, *self.before]
        if self.updates_per_epoch is not None:
            limits.append(("an epoch", self.updates_per_epoch))
        if self.max_steps >= 0:
            limits.append(("the run (max_steps)", self.max_steps))
        cutting = [(period, what) for what, period in limits if period < self.device_iterations]
        if not cutting:
            return None
        period, what = min(cutting)
        return f"device_iterations={self.device_iterations}: host steps hold at most {period}, since {what} is due after every {period} weight updates"


def events_of(trainer: Trainer, plan: Plan, updates_per_epoch: int | None) -> HostEvents:
    """Collect what a trainer does after so many weight updates: `max_steps`, validations, checkpoints and per-update callbacks."""
    events = HostEvents(plan.device_iterations, updates_per_epoch, trainer.max_steps)
    interval = validation_interval(trainer, updates_per_epoch)
    at_epoch_end = trainer.check_val_every_n_epoch is not None and interval == updates_per_epoch
    if trainer.enable_validation and interval is not None and not at_epoch_end:
        (events.in_run if trainer.check_val_every_n_epoch is None else events.in_epoch).append(("a validation", interval))
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps > 0:
            events.in_run.append(("a checkpoint", callback._every_n_train_steps))
        if every := getattr(callback, "every_n_updates", None):
            events.in_run.append(("a checkpoint", every))
        if any(base.__name__ in _EVERY_UPDATE for base in type(callback).__mro__) and not isinstance(callback, StochasticWeightAveraging):
            events.in_run.append((type(callback).__name__, 1))
        if isinstance(callback, LearningRateMonitor) and callback.logging_interval != "epoch" and trainer.log_every_n_steps > 0:
            events.before.append(("LearningRateMonitor", trainer.log_every_n_steps))
    if any(config.reduce_on_plateau and config.interval == "step" for config in trainer.strategy.lr_scheduler_configs):
        events.in_run.append(("a plateau schedule", 1))
    return events


def validation_interval(trainer: Trainer, updates_per_epoch: int | None) -> int | None:
    """`val_check_interval` in weight updates; a fraction is of an epoch; None where only an epoch's end validates."""
    interval = trainer.val_check_interval
    if isinstance(interval, int):
        return interval
    if updates_per_epoch is None or interval is None or trainer._val_check_time_interval is not None:
        return None
    return max(1, int(updates_per_epoch * interval))
