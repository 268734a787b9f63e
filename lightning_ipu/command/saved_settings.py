"""The settings that a checkpoint was trained with: which of them a later start takes over, and how its own differ."""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_ipu.command.configs import COMMAND
from lightning_ipu.command.lifecycle import SETTINGS
from lightning_ipu.errors import UserError
from lightning_ipu.loop.position import KEY, check_numbers
from lightning_ipu.plan import Plan

MOVABLE = ("data.data_dir", "data.index_dir", "data.num_workers")  # settings that a run may go on with others of, unremarked


def settings_in(
    checkpoint: dict[str, Any],
    path: str | Path,
    *,
    prog: str,
    links: Sequence[tuple[str, str]],
    known: Container[str],
    own: Container[str] = (),
) -> dict[str, Any]:
    """The settings that a checkpoint was trained with, by LightningCLI's keys; those of another command are refused.

    Args:
        path: of the checkpoint, for messages.
        prog: the command.
        links: (attribute of the data module, argument of the model) that are the same thing; such arguments are left out.
        known: the command's keys.
        own: which of "model" and "data" are classes of the user's own, whose settings the checkpoint has as far as they save them.
    """
    linked = {argument for _, argument in links} | {"_instantiator", "_class_path"}
    hyperparameters = checkpoint.get("hyper_parameters", {})
    model, class_path = "model.init_args" if "model" in own else "model", hyperparameters.get("_class_path")
    settings = {f"{model}.{name}": value for name, value in hyperparameters.items() if name not in linked}
    if class_path is not None:
        if "model" not in own:
            raise UserError(f"{path} is a checkpoint of {class_path}: give --model {class_path}")
        settings["model.class_path"] = class_path
    settings |= checkpoint.get(SETTINGS, {})
    if (command := settings.get(COMMAND, prog)) != prog:
        raise UserError(f"{path} is a checkpoint of {command}, not of {prog}: python -m {command} takes it")
    if unknown := [name for name in settings if name not in known and not ("model" in own and name.startswith("model."))]:
        raise UserError(f"{path} is no checkpoint of {prog}, which has no setting {', '.join(unknown[:3])}")
    return settings


def compare_settings(config: Namespace, checkpoint: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse to go on with another plan or model than the `saved` settings, and say which settings of the data are others.

    The plan is compared first: a learning rate that follows from it would otherwise be named as the difference.
    """
    different = {}
    if (numbers := checkpoint.get(KEY, {}).get("numbers")) is not None and hasattr(config.trainer.strategy, "init_args"):
        factors = {name: config.trainer.strategy.init_args[name] for name in ("replication_factor", "gradient_accumulation_factor")}
        if "micro_batch_size" in config.data:  # else the loader's, which the strategy compares
            check_numbers(numbers, Plan(micro_batch_size=config.data.micro_batch_size, **factors))
    for name, before in saved.items():
        section, _, key = name.partition(".")
        now = config.get(name, before)  # a class of the user's own may save what is no argument
        if now == before or name in MOVABLE or section not in ("model", "data"):
            continue
        if section == "model":
            different[name] = now, before
        else:
            warnings.warn(f"the run goes on with {name} {now}; so far it was {before}", stacklevel=2)
    if different:
        now = ", ".join(f"{name} is {now}" for name, (now, _) in different.items())
        before = ", ".join(str(before) for _, before in different.values())
        raise UserError(f"{now}, but the run to be resumed has {before}: give {before}, or begin a new run without resuming")
