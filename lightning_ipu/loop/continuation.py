"""Resume from a checkpoint that was written between two weight updates, in any hook: first complete what follows the last update.

What happened before the checkpoint does not happen again; what had not happened yet does, with the same values. Lightning's own methods are
called for the rest of the hooks, without the callbacks on which the hook had been called already. A validation in progress is repeated as
a whole: its partial results are in no checkpoint. Hooks of a start (setup, `on_fit_start`, `on_train_start` and their ends) run at every start.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.loops.evaluation_loop import RestartStage as EvaluationStage
from pytorch_lightning.loops.fit_loop import RestartStage as EpochStage
from pytorch_lightning.loops.training_epoch_loop import RestartStage as BatchStage
from torch.utils._pytree import tree_flatten

from lightning_ipu.loop.position import BATCH_END, EPOCH_END, EPOCH_START, VALIDATION, VALIDATION_END, Hook, Position

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")  # of Lightning's logger connector
_SAVED_LAST = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")  # of ModelCheckpoint, beside its state


def latest_metrics(trainer: Trainer) -> dict[str, Any]:
    """What `trainer.callback_metrics` and its like hold, for `state_beside`."""
    connector = trainer._logger_connector
    return {name: apply_to_collection(getattr(connector, name), torch.Tensor, lambda t: t.detach().cpu().clone()) for name in _SHOWN}


def state_beside(trainer: Trainer, hook: Hook | None, path: Any, *, shown: dict[str, Any]) -> dict[str, Any]:
    """State that a resumed run needs and Lightning keeps only in memory: the latest metrics, the wish to stop, the latest saved files.

    Args:
        trainer: the one that writes the checkpoint.
        hook: the one in which it is written.
        path: of the checkpoint.
        shown: the latest metrics at the position where the run will resume.
    """
    out_of_time = any(isinstance(one, Timer) and (one.time_remaining() or 1) <= 0 for one in trainer.callbacks)  # it will say so again
    saved = {}
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            saved[callback.state_key] = state = {name: getattr(callback, name, None) for name in _SAVED_LAST}
            if hook is not None and hook.callbacks and hook.callbacks[-1] is callback:  # it is saving
                state |= {"_last_global_step_saved": trainer.global_step, "_last_checkpoint_saved": str(path)}
                state["_defer_save_until_validation"] &= hook.name != VALIDATION_END
                state["last_model_path"] = _last_path(callback, trainer)
    return {"shown": shown, "should_stop": trainer.should_stop and not out_of_time, "saved_last": saved}


def load_state_beside(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore what `state_beside` returned."""
    for name, values in state["shown"].items():
        setattr(trainer._logger_connector, name, apply_to_collection(values, torch.Tensor, torch.Tensor.to, trainer.strategy.root_device))
    trainer.should_stop |= state["should_stop"]
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            saved = state["saved_last"].get(callback.state_key, {}).copy()
            last = saved.pop("last_model_path", None)
            if last is not None and Path(last).parent == Path(callback.dirpath):  # else the run has been moved
                callback.last_model_path = last
            vars(callback).update(saved)


def _last_path(callback: ModelCheckpoint, trainer: Trainer) -> str | None:
    """The file that a ModelCheckpoint which is saving another one writes right after it, as `last.ckpt`; None if it keeps none.

    A run that goes on from the other one must know it as its own: else it would leave it alone, and write `last-v1.ckpt`.
    """
    if not callback.save_last:
        return None
    candidates, version = callback._monitor_candidates(trainer), None
    while True:
        path = callback.format_checkpoint_name(candidates, callback.CHECKPOINT_NAME_LAST, ver=version)
        if not callback._enable_version_counter or path == callback.last_model_path or not callback.file_exists(path, trainer):
            return path
        version = callback.STARTING_VERSION if version is None else version + 1


def kept_outputs(outputs: Any) -> Any:
    """The step's outputs for `on_train_batch_end` if a checkpoint can hold them (numbers, text and tensors), else the loss alone."""
    if all(isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))) for leaf in tree_flatten(outputs)[0]):
        return apply_to_collection(outputs, torch.Tensor, lambda tensor: tensor.detach().cpu().clone())
    return {"loss": outputs["loss"].detach().cpu().clone()} if isinstance(outputs, dict) else None


def keep_open(trainer: Trainer) -> None:
    """Let a fit with no weight update left begin all the same, to complete what follows its last one; ends with `enter` or `close`."""
    loop = trainer.fit_loop
    loop.__class__ = type(type(loop).__name__, (type(loop),), {"skip": False, "closed": type(loop)})


def close(trainer: Trainer) -> None:
    """Undo `keep_open`."""
    loop = trainer.fit_loop
    loop.__class__ = getattr(loop, "closed", type(loop))


def enter(trainer: Trainer, position: Position, *, per_update: int) -> None:
    """Set Lightning's loops to the position of the run, as an uninterrupted run would have left them.

    Args:
        trainer: the one with the loops.
        position: where to resume.
        per_update: micro-batches in a weight update.
    """
    close(trainer)
    fit_loop = trainer.fit_loop
    epoch_loop, validation = fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop
    epochs, batches = fit_loop.epoch_progress, epoch_loop.batch_progress
    for counts in (epochs.total, epochs.current):
        counts.ready = counts.started = position.epoch + position.begun
        counts.processed = counts.completed = position.epoch
    for counts, updates in ((batches.total, position.run_updates), (batches.current, position.updates)):
        counts.ready = counts.started = counts.processed = counts.completed = updates * per_update
    batches.is_last_batch = position.ends_epoch
    fit_loop.restarting = fit_loop._restarting = False
    epoch_loop.restarting = False
    fit_loop._restart_stage, epoch_loop._restart_stage, validation._restart_stage = EpochStage.NONE, BatchStage.NONE, EvaluationStage.NONE
    validation.batch_progress.reset()
    validation.batch_progress.is_last_batch = False
    epoch_loop._batches_that_stepped = position.run_updates - (position.hook in (BATCH_END, VALIDATION, VALIDATION_END))


def go_on(trainer: Trainer, position: Position, *, outputs: Any = None, batch: Any = None, batch_idx: int = 0) -> None:
    """Complete what follows the last weight update, and leave the loops ready for the next one.

    Args:
        trainer: in `on_train_start`.
        position: that `enter` has set.
        outputs, batch, batch_idx: what `on_train_batch_end` is called with, where it was not over.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    if position.hook == BATCH_END:
        epoch_loop._results.batch = batch  # by whose size `self.log` weighs
        with without_repeated_hook(trainer, position):
            epoch_loop.end_batch(outputs, batch, batch_idx)
        trainer._logger_connector.update_train_step_metrics()
    if position.hook == VALIDATION_END:
        _end_validation(trainer, position)
        epoch_loop._skip_next_val = True
    if position.hook in (BATCH_END, VALIDATION, VALIDATION_END):
        epoch_loop.on_advance_end(fit_loop._data_fetcher)
    if position.follows and epoch_loop.done:
        with without_repeated_hook(trainer, position, EPOCH_END):
            fit_loop.on_advance_end()
    elif position.begun:
        _enter_epoch(trainer)


def _end_validation(trainer: Trainer, position: Position) -> None:
    """Call the rest of `on_validation_end`, with modes and gradients set as Lightning sets them."""
    validation, first_step = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector._first_loop_iter
    trainer.validating = True
    validation._module_mode.capture(trainer.lightning_module)
    trainer.lightning_module.eval()
    trainer.strategy.on_validation_start()
    with torch.no_grad(), without_repeated_hook(trainer, position):
        validation._on_evaluation_end()
    validation._on_evaluation_model_train()
    trainer._last_val_time = time.monotonic()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = first_step


def _enter_epoch(trainer: Trainer) -> None:
    """Let the loops start within an epoch: with its counters, without its start hooks and without the end of its last update."""
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fit_loop._restart_stage = EpochStage.RESTARTED_MID_EPOCH
    epoch_loop.restarting, epoch_loop._restart_stage = True, BatchStage.RESTARTED_ON_LAST  # for the epoch loop to keep its counters

    epoch_loop.goes_on = True


@contextmanager
def without_repeated_hook(trainer: Trainer, position: Position, name: str | None = None) -> Iterator[None]:
    """Do not call the position's hook again on the callbacks and module that it had been called on; other hooks are called on all.

    Args:
        trainer: the one with the callbacks.
        position: has the hook, and the callbacks and module that it had been called on.
        name: act only if it is this hook.
    """
    hook, heard = position.hook, Counter(position.heard_by)
    silent: list[Any] = []
    if hook is not None and name in (None, hook):
        for callback in trainer.callbacks:
            if heard[callback.state_key]:
                heard[callback.state_key] -= 1
                silent.append(callback)
        if position.module_heard:
            silent.append(trainer.lightning_module)
    before = [(one, vars(one).get(hook, one)) for one in silent]  # `one` itself where there was none
    for one, _ in before:
        vars(one)[hook] = None  # Lightning skips what is not callable
    try:
        yield
    finally:
        for one, own in before:
            del vars(one)[hook]
            if own is not one:
                vars(one)[hook] = own


def awaits(position: Position) -> bool:
    """Whether Lightning will call the position's hook next by itself."""
    return position.hook == EPOCH_START or position.begun and not position.follows and position.hook is not None
