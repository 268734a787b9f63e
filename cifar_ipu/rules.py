"""What the short options come to: LightningCLI's settings, and refusals of what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cifar_ipu.options import (
    ACCUMULATION_IN_A_PIPELINE,
    BATCH_SIZES,
    ITERATIONS,
    ITERATIONS_WHEN_PROFILED,
    LAYERS,
    OPTIONS,
    RECIPES,
    SHARD_POSITIONS,
)
from lightning_ipu.command import cli
from lightning_ipu.command.options import UsageError
from lightning_ipu.command.parser import lightning_arguments, settings_of
from lightning_ipu.command.program import check_processes

# Options that --test-only takes. The others come from the checkpoint; if given, they are listed as having no effect.
OF_A_TEST = {"dataset", "data_dir", "generated_data", "precision", "mirror_evaluation", "device", "threads"} | {
    "no_allocator_setting", "output_dir", "profile", "test_only", "no_channels_last"
}  # fmt: skip


def settle(given: dict[str, Any]) -> list[str]:
    """LightningCLI arguments for the options that were given; raises UsageError where they do not fit together.

    With --test-only they are arguments of LightningCLI's ``test``: only what was given, since the checkpoint has the rest.
    """
    testing = "test_only" in given
    if testing:
        given = {name: value for name, value in given.items() if name in OF_A_TEST}
        settings = settings_of(given, [option for option in OPTIONS if option.dest in given])
        directory = settings["trainer.default_root_dir"] = cli.output_directory(given)
        if not any(Path(directory, "checkpoints").glob("*.ckpt")):
            raise UsageError(
                f"--test-only: there is no checkpoint in {directory}/checkpoints; train first, or give the --output-dir of a run"
            )
        settings["ckpt_path"] = "last"
    else:
        settings = settings_of(given, OPTIONS)
        network = _settle_recipe(given, settings)
        samples = _settle_plan(given, settings, network=network)
        if "learning_rate" not in given and settings["model.optimizer"] == "sgd":  # the recipes' rates are for their own batches
            settings["model.learning_rate"] *= samples / BATCH_SIZES[given.get("recipe", "original")][network]
        settings["seed_everything"] = settings["data.seed"] = given.get("seed", 0)
        settings |= {"then_validate": True, "then_test": "train_only" not in given}
    if "generated_data" in given:
        if given.get("dataset") == "SAMPLE":
            raise UsageError("--generated-data and --dataset SAMPLE exclude each other: the sample is real images")
        settings |= {"data.synthetic": "host", "data.augment": False}
    if "profile" in given:
        settings["trainer.callbacks"] = [{"class_path": "lightning_ipu.ProfileReports"}]
    return lightning_arguments(settings)


def _settle_recipe(given: dict[str, Any], settings: dict[str, Any]) -> str:
    """Network, data and training by the recipe, then by what was given; returns the network."""
    recipe = given.get("recipe", "original")
    network = given.get("network", "whitened" if recipe == "fast" else "keras")
    if network not in RECIPES[recipe]:
        raise UsageError(f"--network {network} has no original recipe: give --recipe fast, or --network {' or '.join(RECIPES[recipe])}")
    training = dict(RECIPES[recipe][network])
    if "optimizer" in given and given["optimizer"] != training["model.optimizer"]:  # nor are its rate and its decay right
        if "learning_rate" not in given:
            raise UsageError(f"--optimizer {given['optimizer']} needs --learning-rate: the recipe's is for {training['model.optimizer']}")
        for name in ("momentum", "l2_regularization", "weight_decay"):
            training.pop(f"model.{name}", None)
    if given.get("lr_schedule") == "const":
        for name in ("warmup_fraction", "final_fraction"):
            training.pop(f"model.{name}", None)
    for option in OPTIONS:
        if option.key in training and option.dest in given:
            del training[option.key]
    settings |= {**training, "model.network": network}
    if "generated_data" in given and given.get("augmentation"):
        raise UsageError("--augmentation and --generated-data exclude each other: generated images cannot be augmented")
    if "augmentation" in given or "no_augmentation" in given or "generated_data" in given:
        settings["data.augment"] = given.get("augmentation", False)
    if settings["data.augment"]:
        settings["data.crop_padding"] = given.get("crop_padding", 2)
    elif "crop_padding" in given:
        raise UsageError(f"--crop-padding {given['crop_padding']} needs --augmentation, of images that are not generated")
    return network


def _settle_plan(given: dict[str, Any], settings: dict[str, Any], *, network: str) -> int:
    """Micro-batch, replicas and stages; --ipus alone means replicas, with --pipeline stages as well. Returns the samples of a weight update."""
    pipeline, ipus, replicas = "pipeline" in given, given.get("ipus"), given.get("replicas")
    splits = given.get("pipeline_splits") or _split_at(given, network=network)
    if splits:
        stages = len(splits) + 1
    elif pipeline:
        stages = 2 if ipus is None else ipus // (replicas or 1)
    else:
        stages = 1
    if replicas is None:
        replicas = max(1, (ipus or stages) // stages)
    if ipus not in (None, stages * replicas):
        what = f"{replicas} replica{'s' if replicas > 1 else ''} of {stages} stage{'s' if stages != 1 else ''}"
        raise UsageError(f"--ipus {ipus} must be {stages * replicas} for {what}")
    if pipeline and stages < 2:
        raise UsageError(f"--pipeline needs at least two stages: give --ipus {2 * replicas}, or leave --ipus away")
    if "pipeline_schedule" in given and not pipeline:
        raise UsageError(f"--pipeline-schedule {given['pipeline_schedule']} needs --pipeline")

    micro_batch = given.get("batch_size", BATCH_SIZES[given.get("recipe", "original")][network])
    settings |= {"data.micro_batch_size": micro_batch, "data.eval_batch_size": max(micro_batch, 100)}
    strategy = {"replication_factor": replicas}
    strategy["gradient_accumulation_factor"] = given.get("gradient_accumulation_count", ACCUMULATION_IN_A_PIPELINE if pipeline else 1)
    strategy["device_iterations"] = given.get("batches_per_step", ITERATIONS_WHEN_PROFILED if "profile" in given else ITERATIONS)
    if splits is None and stages == 2:
        splits = [f"network.{LAYERS[network][SHARD_POSITIONS[network]]}"]
    if splits:
        strategy["pipeline_splits"] = splits
    elif stages > 1:
        strategy["num_stages"] = stages
    if stages > 1:
        strategy["pipeline_schedule"] = given.get("pipeline_schedule", "1F1B") if pipeline else "Sequential"
    settings |= {f"trainer.strategy.{name}": value for name, value in strategy.items()}
    check_processes(given, replicas=replicas, stages=stages)
    if "processes" in given:
        settings["trainer.devices"] = given["processes"]
    return micro_batch * replicas * strategy["gradient_accumulation_factor"]


def _split_at(given: dict[str, Any], *, network: str) -> list[str] | None:
    """The layer that --model-shard-position names, as a list of one; None without that option."""
    if (position := given.get("model_shard_position")) is None:
        return None
    if "pipeline_splits" in given:
        raise UsageError("--model-shard-position and --pipeline-splits exclude each other: give one of them")
    layers = LAYERS[network]
    if position >= len(layers):
        raise UsageError(
            f"--model-shard-position {position}: the layers of {network} that can begin a second stage are 1 to {len(layers) - 1}"
        )
    return [f"network.{layers[position]}"]
