"""What follows a weight update, where a checkpoint was written in the midst of it: the rest of it happens first when the run goes on.

One law: what had happened before the checkpoint does not happen again, and what had not, does, with its values. So Lightning's own methods
are called for the rest, while callbacks that a hook had been called on do not hear of it. A validation that was under way is run anew, as
a whole: what it had gathered is in no checkpoint. Hooks of a start (setup, `on_fit_start`, `on_train_start` and their ends) come with each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.loops.evaluation_loop import RestartStage as EvaluationStage
from pytorch_lightning.loops.fit_loop import RestartStage as EpochStage
from pytorch_lightning.loops.training_epoch_loop import RestartStage as BatchStage
from pytorch_lightning.trainer import call
from torch.utils._pytree import tree_flatten

from lightning_ipu.resume import BATCH_END, EPOCH_END, EPOCH_START, VALIDATION, VALIDATION_END, Hook, Position

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")  # of Lightning's logger connector
_SAVED_LAST = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")  # of ModelCheckpoint, beside its state


def latest_metrics(trainer: Trainer) -> dict[str, Any]:
    """What `trainer.callback_metrics` and its like hold, for `state_beside`."""
    connector = trainer._logger_connector
    return {name: apply_to_collection(getattr(connector, name), torch.Tensor, lambda t: t.detach().cpu().clone()) for name in _SHOWN}


def state_beside(trainer: Trainer, hook: Hook | None, path: Any, *, shown: dict[str, Any]) -> dict[str, Any]:
    """What a run goes on with and Lightning keeps in memory alone: the latest metrics, whether it was to stop, what is saved.

    Args:
        trainer: whose.
        hook: in which the checkpoint is written.
        path: of the checkpoint.
        shown: the latest metrics, of the place at which the run will go on.
    """
    out_of_time = any(isinstance(one, Timer) and (one.time_remaining() or 1) <= 0 for one in trainer.callbacks)  # it will say so again
    saved = {}
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            saved[callback.state_key] = state = {name: getattr(callback, name, None) for name in _SAVED_LAST}
            if hook is not None and hook.callbacks and hook.callbacks[-1] is callback:  # it is saving
                state |= {"_last_global_step_saved": trainer.global_step, "_last_checkpoint_saved": str(path)}
                state["_defer_save_until_validation"] &= hook.name != VALIDATION_END
    return {"shown": shown, "should_stop": trainer.should_stop and not out_of_time, "saved_last": saved}


def load_state_beside(trainer: Trainer, state: dict[str, Any]) -> None:
    """Go on from `state_beside`."""
    for name, values in state["shown"].items():
        setattr(trainer._logger_connector, name, apply_to_collection(values, torch.Tensor, torch.Tensor.to, trainer.strategy.root_device))
    trainer.should_stop |= state["should_stop"]
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            vars(callback).update(state["saved_last"].get(callback.state_key, {}))


def kept_outputs(outputs: Any) -> Any:
    """What `on_train_batch_end` gets of the step, as far as a checkpoint can hold it: numbers, text and tensors, at least the loss."""
    if all(isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))) for leaf in tree_flatten(outputs)[0]):
        return apply_to_collection(outputs, torch.Tensor, lambda tensor: tensor.detach().cpu().clone())
    return {"loss": outputs["loss"].detach().cpu().clone()} if isinstance(outputs, dict) else None


def keep_open(trainer: Trainer) -> None:
    """Let a fit begin that has no weight update left to make, for what follows its last one; until `enter`."""
    loop = trainer.fit_loop
    loop.__class__ = type(type(loop).__name__, (type(loop),), {"skip": False, "closed": type(loop)})


def close(trainer: Trainer) -> None:
    """Undo `keep_open`."""
    loop = trainer.fit_loop
    loop.__class__ = getattr(loop, "closed", type(loop))


def enter(trainer: Trainer, position: Position, *, per_update: int) -> None:
    """Set Lightning's loops to where the run stands, as its own first pass would have left them there.

    Args:
        trainer: whose loops.
        position: to go on at.
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
    """Do the rest of what follows the last weight update, and leave the loops ready for the next.

    Args:
        trainer: in `on_train_start`.
        position: that `enter` has set.
        outputs, batch, batch_idx: what `on_train_batch_end` is called with, where it was not over.
    """
    fit_loop = trainer.fit_loop
    epoch_loop, connector = fit_loop.epoch_loop, trainer._logger_connector
    if position.hook == BATCH_END:
        epoch_loop._results.batch = batch  # by whose size `self.log` weighs
        with unheard(trainer, position):
            call._call_callback_hooks(trainer, BATCH_END, outputs, batch, batch_idx)
            call._call_lightning_module_hook(trainer, BATCH_END, outputs, batch, batch_idx)
        connector.on_batch_end()
        connector.update_train_step_metrics()
    if position.hook == VALIDATION_END:
        _end_validation(trainer, position)
        epoch_loop._skip_next_val = True
    if position.hook in (BATCH_END, VALIDATION, VALIDATION_END):
        epoch_loop.on_advance_end(fit_loop._data_fetcher)
    if position.follows and epoch_loop.done:
        with unheard(trainer, position, EPOCH_END):
            fit_loop.on_advance_end()
    elif position.begun:
        _enter_epoch(trainer)


def _end_validation(trainer: Trainer, position: Position) -> None:
    """Call the rest of `on_validation_end`, under the conditions in which Lightning calls it."""
    validation, first_step = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector._first_loop_iter
    trainer.validating = True
    validation._module_mode.capture(trainer.lightning_module)
    trainer.lightning_module.eval()
    trainer.strategy.on_validation_start()
    with torch.no_grad(), unheard(trainer, position):
        validation._on_evaluation_end()
    validation._on_evaluation_model_train()
    trainer._last_val_time = time.monotonic()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = first_step


def _enter_epoch(trainer: Trainer) -> None:
    """Let the loops begin in the midst of an epoch: with its counters, and without its beginning or anything of its last update."""
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fit_loop._restart_stage = EpochStage.RESTARTED_MID_EPOCH
    epoch_loop.restarting, epoch_loop._restart_stage = True, BatchStage.RESTARTED_ON_LAST  # for the epoch loop to keep its counters

    def on_run_start(data_fetcher: Any) -> None:
        del epoch_loop.on_run_start
        epoch_loop.on_run_start(data_fetcher)
        epoch_loop.restarting = False  # else it would pass the end of the last update once more

    epoch_loop.on_run_start = on_run_start


@contextmanager
def unheard(trainer: Trainer, position: Position, name: str | None = None) -> Iterator[None]:
    """Let those on whom the position's hook had been called not hear of it again: all callbacks and the module still hear of others.

    Args:
        trainer: whose callbacks.
        position: with the hook and who has heard of it.
        name: only if it is this hook.
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
    before = [(one, vars(one).get(hook, one)) for one in silent]  # itself: there was none
    for one, _ in before:
        vars(one)[hook] = None  # Lightning passes by what cannot be called
    try:
        yield
    finally:
        for one, own in before:
            del vars(one)[hook]
            if own is not one:
                vars(one)[hook] = own


def awaits(position: Position) -> bool:
    """Whether the position's hook is one that Lightning calls next by itself."""
    return position.hook == EPOCH_START or position.begun and not position.follows and position.hook is not None
