"""The state of one fit, which its loop, loaders and checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_ipu.data.host_steps import HostStep, host_steps
from lightning_ipu.data.training import TrainingData
from lightning_ipu.engine.processes import Processes
from lightning_ipu.engine.stages import StageState
from lightning_ipu.engine.update import Engine
from lightning_ipu.loop.continuation import latest_metrics
from lightning_ipu.loop.events import HostEvents, batch_hooks, events_of, validation_interval
from lightning_ipu.loop.logs import LogRecorder
from lightning_ipu.loop.metrics import SharedMetrics
from lightning_ipu.loop.position import VALIDATION_END
from lightning_ipu.loop.progress import Stop, TrainingProgress
from lightning_ipu.loop.rows import LogRows
from lightning_ipu.loop.transfer import Transfer
from lightning_ipu.loop.unsaved import Unsaved
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.precision.loss_scaling import LossScaling


@dataclass(kw_only=True)
class Fit:
    """The state of one fit.

    What stands below `data` is settled by `Trainer.fit` step by step: the collaborators when the strategy is set up, the data when
    Lightning first asks for the training loader, the events when the first epoch begins.
    """

    trainer: Trainer
    module: LightningModule
    device: torch.device
    plan: Plan
    seed: int
    seed_is_given: bool
    processes: Processes | None
    progress: TrainingProgress
    stop: Stop

    transfer: Transfer = None
    recorder: LogRecorder = None
    metrics: SharedMetrics | None = None  # with several processes
    engine: Engine | None = None
    stages: StageState | None = None  # where several processes hold a stage each
    scaling: LossScaling | None = None
    schedules: list[tuple[Any, int]] = field(default_factory=list)  # stepped after every so many weight updates
    lr_step: Any = None  # the module's own `lr_scheduler_step`
    undoes: bool = False  # whether a weight update that an error ends is taken back
    late_hooks: bool = False  # whether hooks run after the reduction in which processes exchange whether to stop

    data: TrainingData = None
    data_word: dict[str, Any] = field(default_factory=dict)  # number and fingerprint of the training samples
    events: HostEvents | None = None
    left_over: tuple[int, int] | None = None  # of a stream: samples and weight updates that were announced

    # Where the run stands, for a checkpoint that may be written at any time:
    restored: dict[str, Any] | None = None  # this package's entry of a checkpoint, until the fit has resumed from it
    epoch: int | None = None  # the one whose weight updates `progress.updates_done` counts
    under_way: HostStep | None = None  # the host step in progress, or the one that an error has ended
    reached: str | None = None  # the latest hook after a host step that is over; None once the next one begins
    shown_before: dict[str, Any] | None = None  # the latest metrics before the validation in progress
    rest_of_step: int | None = None  # weight updates that an error left in the host step from which the run resumes
    has_saved: bool = False
    unsaved: Unsaved | None = None  # what no checkpoint holds, once training has started
    without_repeated_hook: ExitStack = field(
        default_factory=ExitStack
    )  # skips a hook on the callbacks that it had been called on before the checkpoint

    def __post_init__(self) -> None:
        self.rows = LogRows(self.trainer)
        owners = (*self.trainer.callbacks, self.module)
        self.starters = [type(owner).__name__ for owner in owners if "on_train_batch_start" in batch_hooks(owner)]
        self.may_stop_at_batch_end = any("on_train_batch_end" in batch_hooks(owner) for owner in owners)
        self.may_end_epoch = is_overridden("on_train_batch_start", self.module)

    @property
    def in_step(self) -> bool:
        """Whether a training step is running."""
        return self.recorder is not None and self.recorder.in_step

    @property
    def steps_are_compiled(self) -> bool:
        """Whether the module's steps are compiled, by its own `compile()` or torch.compile around its methods."""
        return self.module._compiler_ctx is not None

    @property
    def replicas(self) -> range:
        """Replicas that run in this process."""
        return range(self.plan.replication_factor) if self.processes is None else self.processes.replicas

    def holds(self, name: str) -> bool:
        """Whether this process holds a parameter or buffer of the module; one that runs whole networks holds all."""
        return self.stages is None or name not in self.stages.owners or self.stages.here(name)

    def count_micro_batch(self) -> None:
        """Called after each micro-batch of this process."""
        self.progress.samples_done += self.plan.micro_batch_size * self.plan.replication_factor // len(self.replicas)

    def step_schedule(self, schedule: Any) -> None:
        """Step a learning-rate schedule after a weight update."""
        if self.lr_step:
            self.lr_step(schedule, None)
        else:
            schedule.step()

    def begin_epoch(self, *, first: int) -> Iterator[HostStep]:
        """The host steps of the trainer's epoch from micro-batch number `first` on."""
        trainer = self.trainer
        if self.events is None:
            self.events = events_of(trainer, self.plan, self.progress.updates_per_epoch)
            self._announce()
        self.own_validation_interval()
        if first == 0:
            self.recorder.begin_epoch()
            self.rows.begin_epoch()
        self.epoch, self.progress.updates_done = trainer.current_epoch, first // self.plan.micro_batches_per_update
        self.recorder.drawn = self.plan.micro_batch_size
        updates = self.progress.updates_per_epoch
        return host_steps(
            self.data,
            plan=self.plan,
            epoch=trainer.current_epoch,
            first=first,
            last=None if updates is None else updates * self.plan.micro_batches_per_update,
            next_updates=self._next_updates,
            ready=self.ready,
            left_over=self._say_left_over,
        )

    def begin_validation(self, *, over_stages: bool) -> None:
        """Called before a validation, in this fit or after it. A validation needs the whole network, unless it runs over the stages."""
        if self.reached is not None:
            self.shown_before = latest_metrics(self.trainer)
        if self.stages is not None and not self.stages.is_whole and not over_stages:
            self.stages.fetch()

    def end_validation(self, *, over_stages: bool) -> None:
        """Called after a validation, in this fit or after it."""
        if self.reached is not None:
            self.reached, self.shown_before = VALIDATION_END, None
        if self.engine is None:
            return
        self.stop.share_wish(self.trainer)
        if self.stages is not None and not self.trainer.sanity_checking and not over_stages:
            self.stages.give_up()

    def own_validation_interval(self, *, ends_early: bool = False) -> None:
        """Set the validation interval in micro-batches, as Lightning counts it. Lightning sets it anew with every training loader."""
        trainer, updates = self.trainer, self.progress.updates_per_epoch
        interval = validation_interval(trainer, updates)
        if interval is not None:
            at_the_end = interval == updates and trainer.check_val_every_n_epoch is not None
            trainer.val_check_batch = float("inf") if ends_early and at_the_end else interval * self.plan.micro_batches_per_update

    def ready(self, batch: Any, number: int) -> Any:
        """A micro-batch of a host step on the device, given its number within it."""
        return self.transfer.ready(batch, plan=self.plan, replicas=self.replicas, update=self.progress.run_updates, number=number)

    def _next_updates(self) -> int:
        """How many weight updates the next host step may hold."""
        updates = self.events.updates_until_due(run_update=self.trainer.global_step, epoch_update=self.progress.updates_done)
        if self.trainer.should_stop:  # min_steps or min_epochs may keep it going: it looks after every update
            updates = 1
        if self.rest_of_step is not None:
            updates, self.rest_of_step = min(updates, self.rest_of_step), None
        return updates

    def _announce(self) -> None:
        if self.progress.samples_left_out:
            rank_zero_info(
                f"{self.progress.samples_left_out} samples are left out of every epoch: it holds {self.progress.updates_per_epoch} whole weight"
                f" updates ({self.plan.factors()})."
            )
        if self.events.reduction:
            rank_zero_info(self.events.reduction)

    def _say_left_over(self, samples: int, updates: int) -> None:
        """Called at the end of an epoch of a stream of unknown length, which is when these numbers are known."""
        if updates == 0:
            raise PlanError(
                f"the training stream gave {samples} samples, fewer than one weight update needs: {self.plan.factors()}."
                " Lower one of these factors, or give more samples"
            )
        asked, announced = self.progress.updates_per_epoch, self.left_over
        self.left_over, self.progress.samples_left_out = (samples, updates), samples
        if asked is not None and announced != self.left_over:
            rank_zero_info(
                f"The stream ended in epoch {self.epoch} after {updates} of the {asked} weight updates that limit_train_batches asks for:"
                f" {samples} samples were left out."
            )
        elif samples and (announced is None or samples != announced[0]):
            rank_zero_info(
                f"{samples} samples of the stream were left out of epoch {self.epoch}: it held {updates} whole weight updates"
                f" ({self.plan.factors()})."
            )
