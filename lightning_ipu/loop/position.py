"""Where a run stands, in a checkpoint: written so that the run goes on from there as if it had never stopped.

Lightning's own counters, saved in the middle of its loops, lose a validation that was due, the end of an epoch, and every average over the
part of the epoch that is done. A checkpoint of this package therefore holds a position of its own: the last weight update, the hook that was
being called after it, and on whom it had been called. `continuation.py` resumes from there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.trainer import call

from lightning_ipu.plan import Plan, PlanError

KEY = "lightning_ipu"  # of all of it in a checkpoint

# Hooks that follow a weight update, and those before the next one. A validation in progress counts as its start.
BATCH_END, VALIDATION, VALIDATION_END = "on_train_batch_end", "on_validation_start", "on_validation_end"
EPOCH_END, EPOCH_START, BATCH_START = "on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start"


@dataclass(frozen=True, kw_only=True)
class Position:
    """The place between two weight updates at which a run stands.

    Args:
        epoch: its number.
        updates: weight updates done in it.
        run_updates: weight updates done in the run, those included that an overflow skipped.
        ends_epoch: whether the last of them is the epoch's last.
        hook: the hook that was being called; None if everything that follows the last update was over.
        heard_by: the callbacks on which that hook had been called, by their `state_key`.
        module_heard: whether that hook had been called on the module.
        rest_of_step: weight updates that remained in the host step when an error ended it.
    """

    epoch: int
    updates: int
    run_updates: int
    ends_epoch: bool = False
    hook: str | None = None
    heard_by: Sequence[str] = ()
    module_heard: bool = False
    rest_of_step: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the epoch has begun: `on_train_epoch_start` is over."""
        return self.updates > 0 or self.hook == BATCH_START

    @property
    def follows(self) -> bool:
        """Whether something that follows the last weight update was still to come."""
        return self.hook in (BATCH_END, VALIDATION, VALIDATION_END, EPOCH_END)


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A hook in progress: its name, and the callbacks and module on which it has been or is being called."""

    name: str
    callbacks: Sequence[Callback]
    module: bool
    arguments: tuple[Any, ...] = ()

    @classmethod
    def over(cls, name: str, trainer: Trainer) -> Hook:
        """A hook that has been called on all."""
        return cls(name=name, callbacks=trainer.callbacks, module=True)


def hook_in_progress(trainer: Trainer) -> Hook | None:
    """The hook in which a checkpoint is being written; if an error is the reason, the hook that raised it."""
    others = [callback for callback in trainer.callbacks if not isinstance(callback, (EarlyStopping, Checkpoint))]
    for frame in _frames_of_the_cause(trainer):
        code, names = frame.f_code, frame.f_locals
        if names.get("trainer") is not trainer or "hook_name" not in names:
            continue
        name, arguments = names["hook_name"], names.get("args", ())
        last_heard = name == EPOCH_END  # on the callbacks that monitor something it is called after the module
        if code is call._call_callback_hooks.__code__:
            called = names.get("callbacks", [])
            current = names.get("callback")
            called = called[: 1 + next((place for place, one in enumerate(called) if one is current), -1)]
            after_module = last_heard and names["monitoring_callbacks"]
            return Hook(name=name, callbacks=[*others, *called] if after_module else called, module=bool(after_module), arguments=arguments)
        if code is call._call_lightning_module_hook.__code__:
            return Hook(name=name, callbacks=others if last_heard else trainer.callbacks, module=True)
        if code is call._call_strategy_hook.__code__:
            return Hook.over(name, trainer)
    return None


def _frames_of_the_cause(trainer: Trainer) -> Iterator[FrameType]:
    """The current frames, outermost first; within `on_exception` those of the exception."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        if frame.f_code is call._call_callback_hooks.__code__ and frame.f_locals["hook_name"] == "on_exception":
            step, raised = frame.f_locals["args"][0].__traceback__, []
            while step is not None:
                raised.append(step.tb_frame)
                step = step.tb_next
            return iter(raised)
        frame = frame.f_back
    return reversed(frames)


def read_position(saved: dict[str, Any], path: Any) -> Position:
    """The position in a checkpoint's entry `KEY`.

    Raises:
        PlanError: naming the file, if another version of this package has written it.
    """
    try:
        return Position(**saved["position"])
    except TypeError:
        raise PlanError(
            f"{path} was written by another version of lightning_ipu, in whose format this one cannot resume: it can only be evaluated"
        ) from None


def write_position(loops: dict[str, Any], position: Position, *, plan: Plan) -> None:
    """Set Lightning's saved counters to their values at `position`, as if its own loop had made every weight update.

    They may have been saved in the middle of a host step. Lightning without this package resumes from them.
    """
    per_update = plan.micro_batches_per_update
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    for counts in (epochs["total"], epochs["current"]):
        counts |= {"ready": position.epoch + position.begun, "started": position.epoch + position.begun}
        counts |= {"processed": position.epoch + (position.hook == EPOCH_END), "completed": position.epoch}
    for counts, number in ((batches["total"], position.run_updates), (batches["current"], position.updates)):
        counts |= dict.fromkeys(("ready", "started", "processed", "completed"), number * per_update)
        counts["completed"] -= position.hook == BATCH_END
        counts["ready"] += position.hook == BATCH_START
    batches["is_last_batch"] = position.ends_epoch
    stepped = position.run_updates - (position.hook in (BATCH_END, VALIDATION, VALIDATION_END))  # it counts after the validation
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = stepped
    loops["state_dict"].pop("combined_loader", None)  # a loader of Lightning alone has no state to load


def numbers_of(plan: Plan, *, seed: int, precision: str) -> dict[str, Any]:
    """What decides a run's numbers, for a checkpoint."""
    return {**asdict(plan), "seed": seed, "precision": precision}


def check_numbers(saved: dict[str, Any], plan: Plan, *, seed: int | None = None, precision: str | None = None) -> str | None:
    """Refuse to resume a run with other numbers, where these are given; returns a remark on what may differ but affects the run.

    Raises:
        PlanError: naming what differs, both values and what would be right.
    """
    was = replace(plan, **{name: saved[name] for name in asdict(plan)})
    pairs = {
        "the micro-batch": (was.micro_batch_size, plan.micro_batch_size),
        "replication_factor x gradient_accumulation_factor": (was.micro_batches_per_update, plan.micro_batches_per_update),
        "the seed": (saved["seed"], seed),
        "precision": (saved["precision"], precision),
    }
    for what, (before, now) in pairs.items():
        if now is not None and before != now:
            raise PlanError(
                f"{what} is {now}, but the run to be resumed was trained with {before}: give {before}, or begin a new run without resuming"
            )
    if was.replication_factor != plan.replication_factor:
        return (
            f"replication_factor is {plan.replication_factor} where the run to be resumed had {was.replication_factor}: gradients are the same,"
            " BatchNorm's running statistics and dropout are not"
        )
    return None


def check_data(saved: dict[str, Any], now: dict[str, Any], *, within_epoch: bool) -> str | None:
    """Refuse other training samples within an epoch; between two epochs, return a remark on them.

    Args:
        saved, now: the number of samples, and the data module's `fingerprint` where it has one.
        within_epoch: whether the run stopped within an epoch.

    Raises:
        PlanError: saying what differs and what would be right.
    """
    if saved["samples"] != now["samples"]:
        what = f"the training set has {now['samples']} samples, but that of the run to be resumed had {saved['samples']}"
    elif None not in (saved["fingerprint"], now["fingerprint"]) and saved["fingerprint"] != now["fingerprint"]:
        what = f"the {now['samples']} training samples are not those of the run to be resumed: files, classes or held-out samples differ"
    else:
        return None
    if within_epoch:
        raise PlanError(
            f"{what}; the run stopped within an epoch, so that some samples would be seen twice and others never. Give the same training set, or"
            " resume from a checkpoint at the end of an epoch"
        )
    return f"{what}: the run goes on with the present ones, which may include samples that it had held out for validation"


def weight_updates_in(checkpoint: dict[str, Any]) -> int:
    """Weight updates that the run of a checkpoint has done, counted as loggers do: with those that an overflow skipped."""
    return checkpoint[KEY]["position"]["run_updates"] if KEY in checkpoint else checkpoint["global_step"]
