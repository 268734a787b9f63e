"""Checkpoints of a fit: the position of the run is added to what Lightning writes, and the run goes on from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ipu.loop import continuation
from lightning_ipu.loop.checkpoint_io import unloadable_types
from lightning_ipu.loop.fit import Fit
from lightning_ipu.loop.metrics import load_metric_states, metric_states
from lightning_ipu.loop.position import (
    BATCH_END,
    BATCH_START,
    EPOCH_END,
    EPOCH_START,
    KEY,
    VALIDATION,
    VALIDATION_END,
    Hook,
    Position,
    hook_in_progress,
    numbers_of,
    read_position,
    write_position,
)
from lightning_ipu.loop.undo import Undo
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import preserved_streams


def add_position(fit: Fit, checkpoint: dict[str, Any], path: Any) -> None:
    """Add to a checkpoint the position of the run and the state that only this package keeps.

    Raises:
        PlanError: the checkpoint is being written within a weight update.
    """
    if fit.recorder.recording_hook:
        raise PlanError(
            f"save_checkpoint was called in {fit.recorder.recording_hook}, within a weight update, where no state can be"
            " resumed; save in on_train_batch_start, on_train_batch_end or any hook after it"
        )
    if fit.restored is not None:  # resumed, but before the first new weight update
        position = Position(**fit.restored["position"])
        checkpoint[KEY] = fit.restored
    else:
        hook = hook_in_progress(fit.trainer)
        position = _position(fit, hook)
        checkpoint[KEY] = _entry(fit, hook, position, path)
    write_position(checkpoint["loops"]["fit_loop"], position, plan=fit.plan)
    checkpoint["epoch"] = position.epoch
    if not fit.has_saved:
        fit.has_saved = True
        _check_hyperparameters(checkpoint)


def _entry(fit: Fit, hook: Hook | None, position: Position, path: Any) -> dict[str, Any]:
    """This package's entry of a checkpoint."""
    trainer = fit.trainer
    shown = fit.shown_before if position.hook == VALIDATION else None
    entry = {
        "numbers": numbers_of(fit.plan, seed=fit.seed, precision=str(trainer.precision)),
        "data": fit.data_word,
        "position": {**vars(position), "heard_by": list(position.heard_by)},
        "beside": continuation.state_beside(trainer, hook, path, shown=shown or continuation.latest_metrics(trainer)),
        "order": fit.data.order_state(position.epoch + position.ends_epoch),
        "moves": fit.data.moves,
        "unsaved": {} if fit.unsaved is None else fit.unsaved.changed(),
    }
    if position.begun:
        gathered = fit.engine is not None and fit.metrics is not None
        metrics = fit.metrics.merged() if gathered else metric_states(fit.module)
        entry |= {"averages": fit.recorder.state_dict(), "metrics": metrics, **fit.rows.state_dict()}
    if position.hook == BATCH_END and hook is not None and len(hook.arguments) == 3:
        outputs, _, number = hook.arguments
        outputs = continuation.kept_outputs(outputs)
        entry["batch_end"] = {"outputs": outputs, "number": number, "updates": fit.progress.step_updates}
    return entry


def _position(fit: Fit, hook: Hook | None) -> Position:
    """The position of the run, whatever Lightning is doing at the moment; `hook` is the one that it is calling."""
    trainer, progress = fit.trainer, fit.progress
    epoch_loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    batches, name = epoch_loop.batch_progress, hook and hook.name
    updates, completed, per_epoch = progress.updates_done, epochs.completed, progress.updates_per_epoch
    ended_within = 0 < updates < (per_epoch or updates + 1) and trainer.global_step == trainer.max_steps and not batches.is_last_batch
    rest = None
    if fit.epoch is None or completed > fit.epoch and not ended_within:  # between two epochs
        if name != EPOCH_START:
            hook = Hook.over(EPOCH_START, trainer) if epochs.started > completed else None
        epoch, updates = completed, 0
    else:
        epoch = fit.epoch
        if fit.under_way is not None:
            hook, rest = Hook.over(BATCH_START, trainer), fit.under_way.weight_updates - fit.under_way.done
        elif completed > epoch:
            hook = None
        elif trainer.validating and name not in (VALIDATION_END, "on_validation_model_train"):
            hook = Hook(name=VALIDATION, callbacks=(), module=False)
        elif name not in (BATCH_START, BATCH_END, VALIDATION_END, EPOCH_END):
            # In a hook that is none of these, or in none: an error in a logger or a loader, say.
            last = EPOCH_END if epochs.processed > completed else fit.reached
            if last == BATCH_END and batches.current.completed == batches.current.processed:
                last = VALIDATION  # if one is due
            hook = None if last is None else Hook.over(last, trainer)
    position = Position(
        epoch=epoch,
        updates=updates,
        run_updates=progress.run_updates,
        hook=hook and hook.name,
        heard_by=[callback.state_key for callback in hook.callbacks] if hook else (),
        module_heard=hook is not None and hook.module,
        rest_of_step=rest,
    )
    return replace(position, ends_epoch=position.follows and batches.is_last_batch)


def _check_hyperparameters(checkpoint: dict[str, Any]) -> None:
    """Warn of hyperparameters that would keep a checkpoint from being loaded."""
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        for name, types in unloadable_types(checkpoint.get(key) or {}).items():
            rank_zero_warn(
                f"save_hyperparameters puts {name!r} into the checkpoints. Because it holds {types}, they load only with weights_only=False,"
                f" given to fit, validate, test or load_from_checkpoint. Leave it out with save_hyperparameters(ignore=[{name!r}])"
            )


def take_position(fit: Fit, checkpoint: dict[str, Any], path: Any, *, averages: str, averagers: tuple[type, ...], undo: Undo) -> None:
    """Take the position of the run to be resumed from its checkpoint, before Lightning restores anything.

    Args:
        averages: the checkpoint's entry of weights that stand beside an average of them.
        averagers: the callbacks that keep such averages.

    Raises:
        PlanError: the run kept an average of weights and this one does not; another version has written the file.
    """
    trainer = fit.trainer
    if averages in checkpoint and not any(isinstance(callback, (*averagers, WeightAveraging)) for callback in trainer.callbacks):
        raise PlanError(f"{path} holds an average of weights that its run kept: give the callback AveragedWeights (--ema) again to go on")
    fit.restored = checkpoint.get(KEY)
    if fit.restored is None:
        return
    if read_position(fit.restored, path).follows:
        continuation.keep_open(trainer)
        undo.callback(continuation.close, trainer)
    if not fit.seed_is_given and fit.seed != (before := fit.restored["numbers"]["seed"]):
        rank_zero_info(f"No seed was given: the run goes on with the seed in its checkpoint, {before}.")
        fit.seed = before


def resume(fit: Fit, *, undo: Undo) -> None:
    """Go on where the checkpoint stands; called when training starts."""
    trainer, saved, progress = fit.trainer, fit.restored, fit.progress
    position, fit.restored = Position(**saved["position"]), None
    if lost := fit.unsaved.lost(saved["unsaved"]):
        rank_zero_warn(lost)
    continuation.enter(trainer, position, per_update=fit.plan.micro_batches_per_update)
    fit.own_validation_interval(ends_early=position.ends_epoch and position.updates != progress.updates_per_epoch)
    ended = _ended_step(fit, position, saved["batch_end"]) if "batch_end" in saved else {}
    progress.updates_done, progress.run_updates = position.updates, position.run_updates
    fit.reached, fit.rest_of_step = position.hook if position.follows else None, position.rest_of_step
    continuation.load_state_beside(trainer, saved["beside"])
    if position.begun:
        _resume_epoch(fit, position, saved)
    continuation.go_on(trainer, position, **ended)
    if continuation.awaits(position):
        fit.without_repeated_hook.enter_context(continuation.without_repeated_hook(trainer, position))
        undo.callback(fit.without_repeated_hook.close)
    if progress.updates_per_epoch is None and trainer.current_epoch > position.epoch:
        trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()


def _ended_step(fit: Fit, position: Position, saved: dict[str, Any]) -> dict[str, Any]:
    """What `on_train_batch_end` of the host step before the checkpoint is called with."""
    outputs = apply_to_collection(saved["outputs"], torch.Tensor, torch.Tensor.to, fit.device)
    updates, places = saved["updates"], fit.data.share.places
    fit.progress.hold(updates, fit.plan)
    fit.progress.run_updates = position.run_updates - updates  # by which transfer hooks draw
    batch: Any = ()
    if places:  # else a stage in the middle
        number = (position.updates - updates) * fit.plan.micro_batches_per_update + places.start
        with preserved_streams(fit.device):
            batch = fit.ready(fit.data.again(position.epoch, number), 0)
    return {"outputs": outputs, "batch": batch, "batch_idx": saved["number"]}


def _resume_epoch(fit: Fit, position: Position, saved: dict[str, Any]) -> None:
    """Restore what the epoch has logged so far."""
    connector, processes = fit.trainer._logger_connector, fit.processes
    fit.epoch = position.epoch
    connector._first_loop_iter = False  # else Lightning drops the values at the epoch's first step
    fit.recorder.load_state_dict(saved["averages"])
    if not position.updates:
        connector._first_loop_iter = None
    fit.rows.load_state_dict(saved)
    if processes is None or processes.rank == processes.parts - 1:  # the first that runs whole steps
        load_metric_states(fit.module, saved["metrics"])
    if position.hook == BATCH_START and position.rest_of_step is not None:
        fit.rows.log_last(epoch=position.epoch, update=position.run_updates)
