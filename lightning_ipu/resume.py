"""Where a run stands, in a checkpoint: written so that the run goes on from there as if it had never stopped.

Lightning's own counters, saved in the middle of its loops, lose a validation that was due, the end of an epoch, and every average over the
part of the epoch that is done. A checkpoint of this package therefore says in its own words which weight update it stands after, and the
loops are set to that place when training starts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.loops.evaluation_loop import RestartStage as EvaluationStage
from pytorch_lightning.loops.fit_loop import RestartStage as EpochStage
from pytorch_lightning.loops.training_epoch_loop import RestartStage as BatchStage

from lightning_ipu.plan import Plan, PlanError

KEY = "lightning_ipu"  # of all of it in a checkpoint


@dataclass(frozen=True, kw_only=True)
class Position:
    """The place between two weight updates at which a run stands.

    Args:
        epoch: its number.
        updates: weight updates done in it; as many as it has where what follows its last update is still to come.
        run_updates: weight updates done in the run, those included that an overflow skipped.
        validation_due: whether the validation that follows the last of them is still to come.
    """

    epoch: int
    updates: int
    run_updates: int
    validation_due: bool = False


def write_position(loops: dict[str, Any], position: Position, *, plan: Plan, updates_per_epoch: int) -> None:
    """Set Lightning's saved counters to `position`: they may have been saved while it was counting the next host step."""
    per_update, begun = plan.micro_batches_per_update, position.updates > 0
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    for counts in (epochs["total"], epochs["current"]):
        counts |= {"ready": position.epoch + begun, "started": position.epoch + begun}
        counts |= {"processed": position.epoch, "completed": position.epoch}
    for counts, number in ((batches["total"], position.run_updates), (batches["current"], position.updates)):
        counts |= dict.fromkeys(("ready", "started", "processed", "completed"), number * per_update)
    batches["is_last_batch"] = begun and position.updates == updates_per_epoch
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = position.run_updates


def enter_position(trainer: Trainer, position: Position) -> None:
    """Set the loops, whose counters `write_position` has written, to go on at `position`; called when training starts."""
    fit_loop = trainer.fit_loop
    epoch_loop, begun = fit_loop.epoch_loop, position.updates > 0
    validation = epoch_loop.val_loop
    progress = fit_loop.epoch_progress  # Lightning has just counted on what it took the checkpoint for
    for counts in (progress.total, progress.current):
        counts.ready = counts.started = position.epoch + begun
        counts.processed = counts.completed = position.epoch
    fit_loop._restarting = epoch_loop.restarting = begun  # the latter in the loops within it as well
    fit_loop._restart_stage = EpochStage.RESTARTED_MID_EPOCH if begun else EpochStage.NONE
    epoch_loop._restart_stage = BatchStage.RESTARTED_ON_LAST if begun else BatchStage.NONE
    validation._restart_stage = EvaluationStage.RESTARTED_MID_EVALUATION if position.validation_due else EvaluationStage.NONE
    validation.batch_progress.reset()
    validation.batch_progress.is_last_batch = False
    epoch_loop._batches_that_stepped = position.run_updates
    if begun and epoch_loop._should_check_val_fx(fit_loop._data_fetcher):
        epoch_loop._batches_that_stepped -= 1  # the loop passes the end of this update once more, to validate or to see that it has


def numbers_of(plan: Plan, *, seed: int, precision: str) -> dict[str, Any]:
    """What decides a run's numbers, for a checkpoint."""
    return {**asdict(plan), "seed": seed, "precision": precision}


def check_numbers(saved: dict[str, Any], plan: Plan, *, seed: int | None = None, precision: str | None = None) -> str | None:
    """Refuse to go on with a run under other numbers, as far as they are given; returns a remark on what may differ but shows.

    Raises:
        PlanError: naming what differs, both values and what would be right.
    """
    was = Plan(**{name: saved[name] for name in asdict(plan)})
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


def weight_updates_in(checkpoint: dict[str, Any]) -> int:
    """Weight updates that the run of a checkpoint has done, counted as loggers do: with those that an overflow skipped."""
    return checkpoint[KEY]["position"]["run_updates"] if KEY in checkpoint else checkpoint["global_step"]
