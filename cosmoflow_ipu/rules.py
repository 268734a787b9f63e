"""What the short options come to: LightningCLI's settings, and refusals of what does not fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cosmoflow_ipu.options import CONFIGS, OPTIONS
from lightning_ipu.command import cli, configs
from lightning_ipu.command.options import UsageError
from lightning_ipu.command.parser import lightning_arguments, settings_of
from lightning_ipu.command.program import check_processes
from lightning_ipu.command.words import value_of


def settle(given: dict[str, Any]) -> list[str]:
    """LightningCLI arguments for the options that were given; raises UsageError where they do not fit together.

    With a configuration only what was given is added to it; without one every option has a value.
    """
    configured = "config" in given
    config = [f"--config={_find_config(given['config'])}"] if configured else []
    options = [option for option in OPTIONS if option.dest in given] if configured else OPTIONS
    settings = settings_of(given, options) | {"then_validate": True}
    _settle_plan(given, settings, configured=configured)
    _settle_data(given, settings, configured=configured)
    if "lr" not in given and ("optimizer" in given or not configured):
        rates = {"SGD": 0.02 * _samples_per_update(settings, config) / 8, "Adadelta": 0.5}
        settings["model.learning_rate"] = rates.get(settings["model.optimizer"], 0.001)
    if "conv_size" not in given and not configured and settings["model.network"] != "resnet":
        settings["model.conv_size"] = 16
    if "apply_log" in given:
        settings["model.apply_log"] = given["apply_log"] == "1"
    if "stop_at_mae" in given:
        if settings.get("data.n_valid") == 0:
            raise UsageError(f"--stop-at-mae {given['stop_at_mae']:g} needs validation, and --n-valid is 0")
        stop = {"monitor": "val_mae", "mode": "min", "stopping_threshold": given["stop_at_mae"], "patience": 1_000_000}
        settings["trainer.callbacks"] = [{"class_path": "pytorch_lightning.callbacks.EarlyStopping", "init_args": stop}]
    if "max_steps" in given and "n_epochs" not in given:
        settings["trainer.max_epochs"] = -1  # --max-steps alone decides
    if given.get("print_fom") and settings.get("data.n_valid") == 0:
        raise UsageError("--print-fom needs validation, and --n-valid is 0")
    return config + lightning_arguments(settings)


def _settle_plan(given: dict[str, Any], settings: dict[str, Any], *, configured: bool) -> None:
    """Replicas and stages: as in the original program, --num-ipus alone means replicas."""
    splits, ipus, replicas = given.get("pipeline_splits"), given.get("num_ipus"), given.get("replication_factor")
    stages = len(splits) + 1 if splits else 1
    if ipus is not None:
        if ipus % (replicas or stages):
            what = f"--replication-factor {replicas}" if replicas else f"the {stages} stages that --pipeline-splits makes"
            raise UsageError(f"--num-ipus {ipus} must be a multiple of {what}")
        if replicas is None:
            replicas = ipus // stages
        elif splits and ipus != replicas * stages:
            raise UsageError(f"--num-ipus {ipus}: {replicas} replicas of the {stages} stages of --pipeline-splits are {replicas * stages}")
        elif not splits and ipus > replicas:
            settings["trainer.strategy.num_stages"] = ipus // replicas
    if replicas is not None:
        settings["trainer.strategy.replication_factor"] = replicas
    if not configured:  # else the strategy looks at it, with the configuration's plan
        stages = settings.get("trainer.strategy.num_stages", stages)
        check_processes(given, replicas=replicas or 1, stages=stages)


def _samples_per_update(settings: dict[str, Any], config: list[str]) -> int:
    """Micro-batch x A x R as the options say, else the configuration, else the defaults."""
    strategy = value_of(config, "trainer", "strategy")
    plan = strategy.get("init_args", {}) if isinstance(strategy, dict) else {}
    samples = settings.get("data.micro_batch_size") or value_of(config, "data", "micro_batch_size") or 8
    for factor in ("gradient_accumulation_factor", "replication_factor"):
        samples *= settings.get(f"trainer.strategy.{factor}", plan.get(factor, 1))
    return samples


def _settle_data(given: dict[str, Any], settings: dict[str, Any], *, configured: bool) -> None:
    if given.get("staged_files") == "1":
        raise UsageError("--staged-files 1: files of its own for each node cannot be had: every process must see all files; copy them")
    dataset = given.get("dataset")
    if dataset is None and "data_dir" in given:
        dataset = "tfrecord"
    elif dataset is None and not configured:
        dataset = "synthetic"
    if dataset == "tfrecord" and "data_dir" not in given and not configured:
        raise UsageError("--dataset tfrecord needs --data-dir DIR, the folder of the files")
    if dataset is not None:
        settings["data.dataset"] = dataset
    if given.get("on_bad_record") == "skip" and ("output_dir" in given or not configured):
        settings["data.index_dir"] = cli.output_directory(given)
    if "no_augmentation" not in given and not configured:
        settings["data.augment"] = dataset != "dummy"
    if "seed" in given or not configured:
        settings["seed_everything"] = settings["data.seed"] = given.get("seed", 0)
    if not configured:
        settings["data.eval_batch_size"] = max(settings["data.micro_batch_size"], 16)


def _find_config(name: str) -> Path:
    """A configuration in the working directory or, by its path or mere name, in the package."""
    place = configs.find(name, folder=CONFIGS, prog="cosmoflow_ipu")
    if re.search(r"^(ipu_config|train):", place.read_text(errors="replace"), re.MULTILINE):
        raise UsageError(
            f"--config {name} is laid out for the original program (data, model, optimizer, train, ipu_config): give its values as"
            " options, which have the same names, or start from configs/graphcore.yaml of the package"
        )
    configs.content_of(place, "cosmoflow_ipu")
    return place
