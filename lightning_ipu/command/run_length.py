"""The length of a run: its epochs, weight updates and limits, from all the settings for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jsonargparse import Namespace
from pytorch_lightning import LightningDataModule

from lightning_ipu.errors import UserError
from lightning_ipu.plan import Plan
from lightning_ipu.strategy import IPUStrategy

_LIMITS = {
    "fit": ("limit_train_batches", "train on"),
    "validate": ("limit_val_batches", "validate"),
    "test": ("limit_test_batches", "test"),
    "predict": ("limit_predict_batches", "predict"),
}


def run_length(
    trainer: Namespace,
    data: LightningDataModule,
    *,
    epochs: float | None,
    usual: Callable[[LightningDataModule], tuple[int, str | None]],
) -> tuple[dict[str, int], str | None]:
    """The Trainer's settings that bound the run, if it has none of its own, and the number of epochs in words, None if unknown.

    Args:
        trainer: the Trainer's settings, its strategy built.
        epochs: asked for outside of the Trainer's settings.
        usual: how many epochs are trained where nothing says how many, and why, in words, where that is worth a line.
    """
    bounded = trainer.max_epochs is not None or trainer.max_steps != -1 or trainer.max_time is not None
    if epochs is None and bounded:
        return {}, f"{trainer.max_epochs:,}" if (trainer.max_epochs or 0) > 0 else None
    if epochs is None:
        epochs, reason = usual(data)
        return {"max_epochs": epochs}, f"{epochs:,}, {reason}" if reason else f"{epochs:,}"
    if bounded:
        raise UserError(f"epochs={epochs:g} and trainer.max_epochs, max_steps or max_time say different things; give one")
    if epochs == float("inf"):
        raise UserError("epochs=inf has no end; give trainer.max_epochs=-1 for a run that is to be stopped by hand")
    if epochs == int(epochs):
        return {"max_epochs": int(epochs)}, f"{int(epochs):,}"
    if trainer.limit_train_batches not in (None, 1.0):
        raise UserError(f"epochs={epochs:g}: parts of an epoch do not go with trainer.limit_train_batches; use max_steps")
    if (samples := getattr(data, "num_train_samples", None)) is None or not hasattr(data, "micro_batch_size"):
        raise UserError(f"epochs={epochs:g}: the length of an epoch of {type(data).__name__} is not known; use max_steps")
    plan = trainer.strategy.plan if isinstance(trainer.strategy, IPUStrategy) else Plan()  # a strategy by its registered name
    plan = replace(plan, micro_batch_size=data.micro_batch_size)
    updates = max(1, round(epochs * plan.updates_in(samples)))
    return {"max_epochs": -1, "max_steps": updates}, f"{epochs:g}, that is {updates:,} weight updates"


def limit(subcommand: str, trainer: Namespace, words: Sequence[str]) -> dict[str, float]:
    """The Trainer's limit on a subcommand's batches: an evaluation that is asked for takes all, even if the run itself had none."""
    for name in ("max_epochs", "max_steps"):
        if subcommand == "fit" and trainer[name] == 0:
            raise UserError(f"trainer.{name}=0 trains nothing; give at least 1")
    name, what = _LIMITS[subcommand]
    if trainer[name] != 0:
        return {}
    if subcommand == "fit" or any(word.startswith(f"--trainer.{name}") for word in words):
        raise UserError(f"trainer.{name}=0 leaves nothing to {what}; leave it out, or give at least 1")
    return {name: 1.0}
