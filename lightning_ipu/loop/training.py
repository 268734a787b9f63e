"""Lightning's loop over an epoch, a host step at a time: its weight updates run in a tight loop, and each of Lightning's counters moves once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_ipu.data.host_steps import HostStep, TrainingLoader
from lightning_ipu.loop import saving
from lightning_ipu.loop.batches import contents
from lightning_ipu.loop.fit import Fit
from lightning_ipu.loop.metrics import metrics_of, set_aside
from lightning_ipu.loop.position import BATCH_END, BATCH_START
from lightning_ipu.loop.undo import Undo
from lightning_ipu.loop.unsaved import Unsaved
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.randomness import preserved_streams


class TrainingEpochLoop(_TrainingEpochLoop):
    """Lightning's loop over an epoch while a fit runs. It takes host steps from the fit, not batches from Lightning's fetcher."""

    fit: Fit
    goes_on = False  # whether the run goes on within an epoch, from a checkpoint of this package
    _host_steps: Iterator[HostStep] = iter(())

    @override
    def run(self, data_fetcher: Any) -> None:
        super().run(data_fetcher)
        self._host_steps = iter(())  # ends the loader's workers

    @override
    def reset(self) -> None:
        self.fit.stop.share_wish(self.trainer)  # which on_train_epoch_start may have set
        super().reset()

    @override
    def on_run_start(self, data_fetcher: Any) -> None:
        self._host_steps = self.fit.begin_epoch(first=self.batch_progress.current.ready)
        if self.goes_on:  # else Lightning would pass the end of the last weight update once more
            self.goes_on = self.restarting = False

    @override
    def advance(self, data_fetcher: Any) -> None:
        """Run one host step.

        Raises:
            StopIteration: the epoch is over, by its data or because `on_train_batch_start` of the module has returned -1.
        """
        if self._is_behind_the_last_batch(data_fetcher):
            return
        self.val_loop.restarting = False
        trainer, connector, progress = self.trainer, self.trainer._logger_connector, self.batch_progress
        with trainer.profiler.profile(f"[{type(self).__name__}].train_dataloader_next"):
            host_step = next(self._host_steps)
            batch, batch_idx = self._first_batch(host_step), self.batch_idx + 1
        planned = host_step.weight_updates * self.fit.plan.micro_batches_per_update
        progress.is_last_batch = progress.current.ready + planned == trainer.num_training_batches
        progress.increment_ready()
        connector.on_batch_start(batch)
        if not self._is_to_run(batch, batch_idx):
            progress.is_last_batch = True
            progress.increment_processed()
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            raise StopIteration
        progress.increment_started()
        with trainer.profiler.profile("run_training_batch"):
            outputs = self._weight_updates(host_step)
        micro_batches = self.fit.progress.step_micro_batches
        self._move(ready=micro_batches - 1, started=micro_batches - 1, processed=micro_batches)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self.end_batch(outputs, batch, batch_idx)
        self._move(completed=micro_batches)
        connector.update_train_step_metrics()

    def end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call the hooks after a host step."""
        call._call_callback_hooks(self.trainer, BATCH_END, outputs, batch, batch_idx)
        call._call_lightning_module_hook(self.trainer, BATCH_END, outputs, batch, batch_idx)
        if self.fit.may_stop_at_batch_end:
            self.fit.stop.share_wish(self.trainer)
        self.trainer._logger_connector.on_batch_end()

    @override
    def _should_accumulate(self) -> bool:
        return False  # a host step is one of whole weight updates

    @override
    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        is_due = super()._should_check_val_fx(data_fetcher)
        if self.fit.processes is not None and self.trainer._val_check_time_interval is not None:  # each process has a clock of its own
            is_due = any(self.fit.processes.gathered(is_due))
        return is_due

    def _is_behind_the_last_batch(self, data_fetcher: Any) -> bool:
        """Whether a checkpoint of stock Lightning is resumed at a point where a validation is due or was in progress."""
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        return False

    def _move(self, **counters: int) -> None:
        """Move Lightning's counters of batches by so many micro-batches."""
        for counts in (self.batch_progress.total, self.batch_progress.current):
            for name, number in counters.items():
                setattr(counts, name, getattr(counts, name) + number)

    def _first_batch(self, host_step: HostStep) -> Any:
        """The batch that hooks get for a host step: this process's first micro-batch."""
        fit = self.fit
        fit.reached = None
        fit.progress.hold(host_step.weight_updates, fit.plan)
        if not fit.data.share.places:
            return ()  # a stage in the middle has no micro-batches
        with preserved_streams(fit.device) if fit.transfer.does_something or fit.data.draws_here else nullcontext():
            return host_step.first()

    def _is_to_run(self, batch: Any, batch_idx: int) -> bool:
        """Call the hooks before a host step; False if the module's ends the epoch, in any process.

        Raises:
            PlanError: a hook has changed the batch, which is one of several.
        """
        trainer, fit = self.trainer, self.fit
        shown = contents(batch) if fit.starters and fit.progress.step_micro_batches > 1 else None
        call._call_callback_hooks(trainer, BATCH_START, batch, batch_idx)
        ends_epoch = call._call_lightning_module_hook(trainer, BATCH_START, batch, batch_idx) == -1
        fit.without_repeated_hook.close()
        if fit.may_end_epoch and fit.processes is not None:
            ends_epoch = bool(fit.processes.largest(int(ends_epoch)))
        if not ends_epoch and shown is not None and contents(batch)[0] != shown[0]:
            raise PlanError(
                f"on_train_batch_start of {' or '.join(fit.starters)} changes the batch, which is one of the"
                f" {fit.progress.step_micro_batches} micro-batches of the host step. Change each of them in on_after_batch_transfer"
            )
        return not ends_epoch

    def _weight_updates(self, host_step: HostStep) -> dict[str, Any]:
        """Make the weight updates of a host step; returns what hooks get as its outputs, those of the first micro-batch here."""
        fit, progress = self.fit, self.fit.progress
        first_update = progress.updates_done
        fit.stop.forget()
        fit.under_way = host_step
        if fit.metrics is not None:
            fit.metrics.begin()
        metrics = metrics_of(fit.module) if fit.undoes else []
        put_back, outputs = None, {}
        try:
            with preserved_streams(fit.device), fit.recorder.recording():
                for number in range(host_step.weight_updates):
                    fit.recorder.update = number
                    put_back = set_aside(metrics) if fit.undoes else None
                    loss, extra = self._weight_update(host_step)
                    if number == 0:
                        outputs = {"loss": loss, **extra}
                    # With several processes a signal that comes now waits for the next update, when all hear of it.
                    if self._should_stop() or fit.stop.agreed is not None or host_step.ends_epoch:
                        break
        except BaseException:  # a checkpoint that is written on the way out stands at the last whole weight update
            self._take_back(host_step, put_back)
            raise
        self._settle(host_step, is_first=first_update == 0)
        return outputs

    def _weight_update(self, host_step: HostStep) -> tuple[torch.Tensor, dict[str, Any]]:
        fit, progress = self.fit, self.fit.progress
        loss, extra, made = fit.engine.weight_update(
            host_step.take,
            update=progress.run_updates,
            first_micro_batch=progress.updates_done * fit.plan.micro_batches_per_update,
        )
        progress.updates_done += 1
        progress.run_updates += 1
        host_step.end_update()
        if made:
            steps = self.automatic_optimization.optim_progress.optimizer.step
            steps.increment_ready()
            steps.increment_completed()
            for schedule, frequency in fit.schedules:
                if steps.current.completed % frequency == 0:
                    fit.step_schedule(schedule)
        return loss, extra

    def _should_stop(self) -> bool:
        """Whether `trainer.should_stop` has been set in any process; true after the same weight update in all."""
        trainer, fit = self.trainer, self.fit
        if fit.processes is not None:
            stops = fit.engine.asked_to_stop
            if fit.late_hooks:
                stops = bool(fit.processes.largest(int(trainer.should_stop)))
            trainer.should_stop |= stops
            return stops
        return trainer.should_stop

    def _take_back(self, host_step: HostStep, put_back: Any) -> None:
        """After an error: leave counters, weights, metrics and logs at the last whole weight update."""
        fit, done = self.fit, host_step.done * self.fit.plan.micro_batches_per_update
        self._move(ready=done, started=done, processed=done, completed=done)
        self.batch_progress.is_last_batch = False
        fit.engine.undo()
        if put_back is not None:
            put_back()
        fit.recorder.forget_from(host_step.done)
        if host_step.done and fit.processes is None:  # else the others would be waited for
            with suppress(Exception):  # the error itself matters more
                fit.rows.log(fit.recorder.replay("training_step"), updates=host_step.done, ends=False)

    def _settle(self, host_step: HostStep, *, is_first: bool) -> None:
        """After the weight updates: check that processes are alike, log, and note that the host step is over."""
        trainer, fit, progress = self.trainer, self.fit, self.batch_progress
        if fit.processes is not None and (is_first or progress.is_last_batch):
            fit.processes.check_alike(fit.module, trainer.optimizers[0], holds=fit.holds)
        if host_step.done < host_step.weight_updates:  # ended early: the rest is still to be trained on
            progress.is_last_batch = False
        if host_step.ends_epoch:
            progress.is_last_batch = True
            fit.own_validation_interval(ends_early=True)
        fit.progress.hold(host_step.done, fit.plan)
        is_last_update = trainer.global_step == trainer.max_steps
        ends = progress.is_last_batch or is_last_update
        if fit.events.logs_are_given:
            ends &= is_last_update or trainer.current_epoch + 1 == trainer.max_epochs
        fit.rows.log(fit.recorder.replay("training_step"), updates=host_step.done, ends=ends)
        if fit.stop.is_agreed_by_several and fit.stop.end_by is None:
            trainer._signal_connector.received_sigterm = True
        fit.under_way, fit.reached = None, BATCH_END


def take_over(fit: Fit, undo: Undo) -> None:
    """Let Lightning's loop run host steps until `undo` is closed, its progress bars follow them, and callbacks log like the module."""
    trainer = fit.trainer
    undo.specialize(trainer.fit_loop.epoch_loop, TrainingEpochLoop, fit=fit)
    undo.exchange(trainer, "accumulate_grad_batches", fit.plan.micro_batches_per_update)  # for `estimated_stepping_batches`
    for callback in trainer.callbacks:
        undo.exchange(callback, "log", partial(_log, fit.module))  # else it would be Lightning's own, whatever has replaced it
        if isinstance(callback, ProgressBar):
            undo.exchange(callback, "on_train_batch_end", partial(_move_bar, callback))


def _log(module: LightningModule, *arguments: Any, **options: Any) -> None:
    """What a callback's `self.log` is while a fit runs."""
    module.log(*arguments, **options)


def _move_bar(bar: ProgressBar, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Pass the number of the host step's last micro-batch to a bar; other callbacks get the first."""
    type(bar).on_train_batch_end(bar, trainer, module, outputs, batch, trainer.fit_loop.epoch_loop.batch_idx)


def start(fit: Fit, undo: Undo) -> None:
    """Called when training starts: begin, or go on where a checkpoint stands.

    Raises:
        PlanError: there are several training loaders.
    """
    trainer = fit.trainer
    loaders, epoch_loop = trainer.fit_loop._combined_loader, trainer.fit_loop.epoch_loop
    if not isinstance(loaders.iterables, TrainingLoader):
        raise PlanError(
            f"train_dataloader gave several training loaders ({len(loaders.flattened)} in a {type(loaders.iterables).__name__});"
            " IPUStrategy needs exactly one: join the data sets, e.g. with torch.utils.data.StackDataset or ConcatDataset"
        )
    fit.stop.share_wish(trainer)
    fit.own_validation_interval()
    fit.schedules = _own_schedules(trainer, fit.plan)
    fit.unsaved = Unsaved(trainer)
    if fit.stages is not None:  # only now: after a refusal the user has the whole network
        fit.stages.give_up()
    if fit.restored is not None:
        saving.resume(fit, undo=undo)
        return
    fit.progress.run_updates = trainer.global_step + (fit.scaling.skipped if fit.scaling else 0)
    position = epoch_loop.batch_progress
    if fit.progress.updates_per_epoch is None and position.is_last_batch:
        # Stock Lightning has saved at the end of a stream's epoch. It does not know the stream's length, and would go on counting in it.
        position.reset_on_run()
        position.current.completed -= epoch_loop.restarted_on_train_batch_end  # which Lightning is about to count


def _own_schedules(trainer: Trainer, plan: Plan) -> list[tuple[Any, int]]:
    """The learning-rate schedules that step after every so many weight updates, and this number; Lightning steps the others."""
    own = []
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.reduce_on_plateau:
            config.frequency *= plan.micro_batches_per_update  # Lightning counts micro-batches here
        elif config.interval == "step":
            own.append((config.scheduler, config.frequency))
    return own


def updates_of_loggers(trainer: Trainer) -> int:
    """The weight updates that loggers have been told of, in earlier fits of the same trainer."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def ends_by_sigterm(exception: BaseException) -> bool:
    """Whether it is Lightning's exception for SIGTERM, which then gets the exit status of a training that is not complete."""
    if not isinstance(exception, SIGTERMException):
        return False
    exception.code = exception.code or 128 + signal.SIGTERM
    return True
