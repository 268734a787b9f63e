"""After which weight updates the host must act: how the events of a run limit its device iterations.

A host step may hold `device_iterations` weight updates, but it ends early where something is due after an update: an epoch's end, the
last update of the run, a validation, a checkpoint. Events therefore fall where they would with one update per host step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import (
    Callback,
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_ipu.errors import UserError
from lightning_ipu.plan import Plan

# Callbacks that act on every weight update, by the names of their classes (or of a base class).
_EVERY_UPDATE = ("WeightAveraging", "LearningRateFinder", "_LRCallback", "SpikeDetection", "ThroughputMonitor")
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
KNOWN_HOOKS = ("pytorch_lightning", "lightning_fabric", __name__.partition(".")[0])  # packages whose hooks are treated one by one


def batch_hooks(owner: Callback | LightningModule) -> list[str]:
    """The hooks around a batch that a user has written for a callback or module; those of progress bars do not count."""
    if isinstance(owner, ProgressBar):
        return []
    overridden = [name for name in _BATCH_HOOKS if is_overridden(name, owner)]
    return [name for name in overridden if (getattr(getattr(owner, name), "__module__", None) or "").split(".")[0] not in KNOWN_HOOKS]


@dataclass
class HostEvents:
    """After which weight updates something is due.

    Args:
        device_iterations: the most weight updates of a host step.
        updates_per_epoch: None for a stream of unknown length.
        max_steps: weight updates after which the run ends; -1 for no such limit.
        in_run: (what, update, period): due after weight update number `update` of the run, and after every `period` more.
        in_epoch: (what, period): due after every `period` updates of an epoch.
        before: (what, period): due just before every `period`-th update of the run.
        logs_are_given: whether the frequency of logs was given; an epoch may then end without a row.
    """

    device_iterations: int
    updates_per_epoch: int | None
    max_steps: int = -1
    in_run: list[tuple[str, int, int]] = field(default_factory=list)
    in_epoch: list[tuple[str, int]] = field(default_factory=list)
    before: list[tuple[str, int]] = field(default_factory=list)
    logs_are_given: bool = False

    def updates_until_due(self, *, run_update: int, epoch_update: int) -> int:
        """Weight updates that the next host step may hold, after so many in the run and in the epoch."""
        bounds = [self.device_iterations]
        bounds += [first - run_update if run_update < first else period - (run_update - first) % period for _, first, period in self.in_run]
        bounds += [period - epoch_update % period for _, period in self.in_epoch]
        bounds += [period - (run_update + 1) % period for _, period in self.before]
        if self.updates_per_epoch is not None:
            bounds.append(self.updates_per_epoch - epoch_update)
        if self.max_steps >= 0:
            bounds.append(self.max_steps - run_update)
        return max(1, min(bounds))

    @property
    def bound(self) -> tuple[int, str] | None:
        """The largest number of weight updates in a host step and the event that limits it; None if only the device iterations do."""
        limits = [*((what, period) for what, _, period in self.in_run), *self.in_epoch, *self.before]
        if self.updates_per_epoch is not None:
            limits.append(("an epoch", self.updates_per_epoch))
        if self.max_steps >= 0:
            limits.append(("the run (max_steps)", self.max_steps))
        return min(((period, what) for what, period in limits if period < self.device_iterations), default=None)

    @property
    def reduction(self) -> str | None:
        """One line that says what makes host steps shorter than `device_iterations`; None if nothing does."""
        if self.bound is None:
            return None
        period, what = self.bound
        often = f"every {period} weight updates" if period > 1 else "every weight update"
        return f"device_iterations={self.device_iterations}: host steps hold at most {period}, since {what} is due after {often}"


def nearest_divisor(number: int, wanted: Fraction) -> int:
    """The divisor of `number` that is nearest to `wanted`; of two as near, the larger."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return min((*small, *(number // divisor for divisor in small)), key=lambda divisor: (abs(divisor - wanted), -divisor))


def updates_between(
    per_epoch: Fraction, *, what: str, updates_per_epoch: int, epochs: int | None, exact: bool = False
) -> tuple[int | None, str | None]:
    """The weight updates from one event to the next, and a warning where the frequency asked for is not possible.

    Several events in an epoch divide its weight updates evenly; one event in several epochs falls at the end of an epoch, and the epochs of
    the run are divided evenly. Where that is not possible, the nearest possible frequency is taken. Graphcore's TensorFlow 2 CNNs have the same
    rule, and round the number of events in a run down, too.

    Args:
        per_epoch: events in an epoch; below 1: one in several epochs; 0: none.
        what: the events, for messages: "logs".
        updates_per_epoch: weight updates in an epoch.
        epochs: of the run; None where they have no bound.
        exact: refuse one event in several epochs where these do not divide the run's.

    Raises:
        UserError: a frequency that is not possible; the message names it and the epochs.
    """
    if per_epoch == 0:
        return None, None
    if per_epoch >= 1:
        chosen = Fraction(nearest_divisor(updates_per_epoch, per_epoch))
        updates = updates_per_epoch // int(chosen)
    elif epochs is None:
        if per_epoch.numerator != 1:
            raise UserError(f"{per_epoch} {what} per epoch of a run without a number of epochs: give 1/n, or set the epochs")
        chosen, updates = per_epoch, updates_per_epoch * per_epoch.denominator
    else:
        wanted = per_epoch * epochs
        if exact and wanted.denominator != 1:
            raise UserError(
                f"{per_epoch} {what} per epoch cannot be in {epochs} epochs: {epochs} is no multiple of {_number(1 / per_epoch)}"
            )
        events = nearest_divisor(epochs, Fraction(int(wanted)))
        chosen, updates = Fraction(events, epochs), updates_per_epoch * epochs // events
    if chosen == per_epoch:
        return updates, None
    whole = f"{updates_per_epoch:,} weight updates of an epoch" if per_epoch >= 1 else f"{epochs} epochs of the run"
    return updates, (
        f"{_number(per_epoch)} {what} per epoch do not divide the {whole} evenly; the nearest number that does is taken: {chosen} per epoch,"
        f" one every {updates:,} weight updates"
    )


def _number(value: Fraction) -> str:
    return str(value) if value.denominator < 100 else f"{float(value):g}"


class EventsPerEpoch(Callback):
    """How often a run under IPUStrategy logs, saves and validates, given per epoch: numbers, or fractions such as "1/2"; 0 is never.

    A host step ends where one of them is due. A frequency that cannot be met exactly is announced in a warning.

    Args:
        logs: rows with a training loss for the loggers; 0 gives one at the run's end. With a row every k epochs, the run's epochs must be a
            multiple of k. None leaves that to the Trainer's `log_every_n_steps`.
        checkpoints: for the commands, which name each by its number of weight updates; they keep the last state in any case.
        first_checkpoint_epoch: epochs before the first checkpoint; 0: it comes after the same interval as the others.
        validations: during training; 0: none. None leaves them to the Trainer's `val_check_interval` and `check_val_every_n_epoch`.

    Raises:
        UserError: a value that is no frequency; when training starts: a frequency that is not possible.
    """

    def __init__(
        self,
        *,
        logs: str | float | None = None,
        checkpoints: str | float | None = None,
        first_checkpoint_epoch: float = 0.0,
        validations: str | float | None = None,
    ) -> None:
        self.logs = _frequency("logs", logs)
        self.checkpoints = _frequency("checkpoints", checkpoints)
        self.validations = _frequency("validations", validations)
        if not 0 <= first_checkpoint_epoch < float("inf"):
            raise UserError(f"first_checkpoint_epoch={first_checkpoint_epoch} must be at least 0")
        if first_checkpoint_epoch and not self.checkpoints:
            raise UserError(f"first_checkpoint_epoch={first_checkpoint_epoch:g} needs checkpoints per epoch")
        self.first_checkpoint_epoch = first_checkpoint_epoch
        self.log_every: int | None = None  # weight updates, from here on, once training starts
        self.first_checkpoint: int = 0
        self.checkpoint_every: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.validations == 0:
            trainer.check_val_every_n_epoch, trainer.val_check_interval = 1 << 30, 1.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.logs is None and not self.checkpoints and not self.validations:
            return
        updates = trainer.strategy.progress.updates_per_epoch
        if updates is None:
            raise UserError("logs, checkpoints or validations per epoch need epochs of a known length, which a stream has not")
        epochs = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None
        if self.logs is not None:
            self.log_every = self._every(self.logs, "logs", updates, epochs, exact=True)
            if self.log_every is None:
                ends = [trainer.max_steps] if trainer.max_steps > 0 else []
                ends += [epochs * updates] if epochs else []
                self.log_every = min(ends, default=1 << 62)
            trainer.log_every_n_steps = self.log_every
        if self.checkpoints:
            within = epochs
            if epochs is not None and (within := int(epochs - self.first_checkpoint_epoch)) < 0:
                raise UserError(
                    f"first_checkpoint_epoch={self.first_checkpoint_epoch:g} lies after the last of {epochs} epochs, so that there is never one of"
                    f" the {self.checkpoints} checkpoints per epoch"
                )
            self.checkpoint_every = self._every(self.checkpoints, "checkpoints", updates, within or epochs)
            self.first_checkpoint = round(self.first_checkpoint_epoch * updates) or self.checkpoint_every
        if self.validations:
            every = self._every(self.validations, "validations", updates, epochs)
            trainer.check_val_every_n_epoch = max(1, every // updates)
            trainer.val_check_interval = every if every < updates else 1.0

    def _every(self, per_epoch: Fraction, what: str, updates: int, epochs: int | None, *, exact: bool = False) -> int | None:
        every, remark = updates_between(per_epoch, what=what, updates_per_epoch=updates, epochs=epochs, exact=exact)
        if remark:
            rank_zero_warn(remark)
        return every

    def checkpoint_due(self, update: int) -> bool:
        """Whether one of the checkpoints is due after so many weight updates of the run."""
        return (
            bool(self.checkpoint_every)
            and update >= self.first_checkpoint
            and (update - self.first_checkpoint) % self.checkpoint_every == 0
        )


def _frequency(name: str, value: str | float | None) -> Fraction | None:
    try:
        frequency = None if value is None else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        frequency = Fraction(-1)
    if frequency is not None and frequency < 0:
        raise UserError(f"{name}={value!r} per epoch must be a number of at least 0 or a fraction such as 1/2")
    return frequency


def events_of(trainer: Trainer, plan: Plan, updates_per_epoch: int | None) -> HostEvents:
    """Collect what a trainer does after so many weight updates: `max_steps`, validations, checkpoints and per-update callbacks."""
    events = HostEvents(plan.device_iterations, updates_per_epoch, trainer.max_steps)
    interval = validation_interval(trainer, updates_per_epoch)
    at_epoch_end = trainer.check_val_every_n_epoch is not None and interval == updates_per_epoch
    if trainer.enable_validation and interval is not None and not at_epoch_end:
        if trainer.check_val_every_n_epoch is None:
            events.in_run.append(("a validation", interval, interval))
        else:
            events.in_epoch.append(("a validation", interval))
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps > 0:
            events.in_run.append(("a checkpoint", callback._every_n_train_steps, callback._every_n_train_steps))
        if every := getattr(callback, "every_n_updates", None):
            events.in_run.append(("a checkpoint", every, every))
        if isinstance(callback, EventsPerEpoch):
            if callback.log_every is not None:
                events.in_run.append(("a log", callback.log_every, callback.log_every))
                events.logs_are_given = True
            if callback.checkpoint_every is not None:
                events.in_run.append(("a checkpoint", callback.first_checkpoint, callback.checkpoint_every))
        if any(base.__name__ in _EVERY_UPDATE for base in type(callback).__mro__) and not isinstance(callback, StochasticWeightAveraging):
            events.in_run.append((type(callback).__name__, 1, 1))
        if isinstance(callback, Timer) and callback.time_remaining() is not None and callback._interval == "step":
            events.in_run.append((type(callback).__name__, 1, 1))
        if (every := trainer.log_every_n_steps) > 0:
            if isinstance(callback, LearningRateMonitor) and callback.logging_interval != "epoch":
                events.before.append(("LearningRateMonitor", every))
            if isinstance(callback, DeviceStatsMonitor):  # looks before and after
                events.before.append(("DeviceStatsMonitor", every))
                events.in_run.append(("DeviceStatsMonitor", every, every))
    for owner in (*trainer.callbacks, trainer.lightning_module):
        hooks = batch_hooks(owner)
        if hooks and not getattr(owner, "once_per_host_step", False):  # the hook may end the training, which must not wait
            events.in_run.append((f"{type(owner).__name__}.{hooks[0]}", 1, 1))
    if any(config.reduce_on_plateau and config.interval == "step" for config in trainer.strategy.lr_scheduler_configs):
        events.in_run.append(("a plateau schedule", 1, 1))
    return events


def validation_interval(trainer: Trainer, updates_per_epoch: int | None) -> int | None:
    """`val_check_interval` in weight updates; a fraction is of an epoch; None where only an epoch's end validates."""
    interval = getattr(trainer, "val_check_interval", None)  # Lightning sets none where it is a time
    if isinstance(interval, int):
        return interval
    if updates_per_epoch is None or interval is None or trainer._val_check_time_interval is not None:
        return None
    return max(1, int(updates_per_epoch * interval))
