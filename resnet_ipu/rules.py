"""What the short options come to: LightningCLI's settings, and refusals of what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_ipu import machine
from lightning_ipu.command import cli, once
from lightning_ipu.command.options import UsageError
from lightning_ipu.command.parser import lightning_arguments, settings_of
from lightning_ipu.command.program import check_processes, divisors, multiples
from lightning_ipu.precision import names as precision
from resnet_ipu.legacy import split_names, with_norm_layer, with_opposites
from resnet_ipu.options import CIFAR_SIZES, IMAGENET_CLASSES, IMAGENET_IMAGES, IMAGENET_VALIDATION, LEARNING_RATES, OPTIONS, TOY_MODELS


def settle(given: dict[str, Any]) -> list[str]:
    """LightningCLI arguments for the options that were given; raises UsageError where they do not fit together.

    Checkpoints that are only scored bring their own settings: then nothing has a default here.
    """
    given = with_opposites(with_norm_layer(given))
    of_checkpoints = not given.get("training", True) and "checkpoint_input_dir" in given
    settings = settings_of(given, [option for option in OPTIONS if not of_checkpoints or option.dest in given])
    _settle_data(given, settings, of_checkpoints=of_checkpoints)
    batch, updates = _settle_plan(given, settings)
    if not of_checkpoints:
        _settle_learning_rate(given, settings, batch=batch, samples_per_update=updates)
    _settle_phases(given, settings)

    if given.get("prng") and precision.full_name(given.get("precision", "auto")) != "16.16":
        raise UsageError(f"--prng concerns 16-bit weights: it needs --precision 16.16, not {given.get('precision', 'auto')}")
    if given.get("loss_scaling") == 0 or given.get("auto_loss_scaling") is False and "loss_scaling" not in given:
        settings["trainer.strategy.loss_scaling"] = 1.0 if given.get("half_type") == "fp16" else None
    if given.get("auto_loss_scaling"):
        settings["trainer.strategy.loss_scaling"] = "auto"
    if "norm_groups" in given and given.get("norm_type", "batch") != "group":
        raise UsageError(f"--norm-groups {given['norm_groups']} needs --norm-type group")
    for option in ("mixup", "cutmix"):
        if option in given and settings["data.micro_batch_size"] == 1:
            raise UsageError(f"--{option} {given[option]:g} mixes the images of a micro-batch, which here has one: give at least 2")
    if given.get("ema", 0) >= 1:
        raise UsageError(f"--ema {given['ema']:g} must be below 1, such as 0.999")
    if "ema" in given:
        average = {"class_path": "lightning_ipu.AveragedWeights", "init_args": {"decay": given["ema"]}}
        settings.setdefault("trainer.callbacks", []).append(average)
    if given.get("training", True):
        settings["then_validate"] = True
    if "seed" in given or not of_checkpoints:
        settings["seed_everything"] = given.get("seed", 0)
    if "max_steps" in given and "epochs" not in given:
        settings["trainer.max_epochs"] = -1  # --max-steps alone decides
    settings["trainer.default_root_dir"] = cli.output_directory(given)
    return lightning_arguments(settings)


_OF_IMAGENET = ("image_size", "fast_decode", "no_eight_bit_transfer", "on_bad_image", "num_classes", "train_shards", "validation_shards")


def _settle_data(given: dict[str, Any], settings: dict[str, Any], *, of_checkpoints: bool) -> None:
    """The data set, and what goes by it: the network's size and the number of loader processes."""
    imagenet, synthetic = given.get("dataset") == "IMAGENET", "synthetic_data" in given
    meaningless = ("validation_split", "validate_on_test") if imagenet and not synthetic else _OF_IMAGENET
    if synthetic:
        meaningless = tuple(name for name in meaningless if name != "image_size")
    for option in OPTIONS:
        if option.dest in given and option.dest in meaningless and not of_checkpoints:
            why = "its validation images are files of their own" if imagenet else "it belongs to --dataset IMAGENET"
            why = "made-up images have none of its files" if imagenet and synthetic else why
            raise UsageError(f"{option.name} means nothing for --dataset {given.get('dataset', 'CIFAR-10')}: {why}")
    if synthetic and "image_size" in given:
        settings["data.synthetic_image_size"] = settings.pop("data.image_size")
    if of_checkpoints and not synthetic:
        return
    settings.setdefault("model.size", "50" if imagenet else "20")
    if imagenet and not synthetic:
        settings.setdefault("data.num_workers", min(machine.usable_cores(), 16))
        settings["data.index_dir"] = cli.output_directory(given)
        return
    settings.setdefault("data.num_workers", 0)
    settings["data.seed"] = given.get("seed", 0)
    if imagenet:
        settings["data.dataset"] = "CIFAR-10"  # of which the number of colours is all that is left
        settings["data.synthetic_classes"] = IMAGENET_CLASSES
        settings["data.synthetic_samples"] = IMAGENET_IMAGES + IMAGENET_VALIDATION
        settings.setdefault("data.validation_split", IMAGENET_VALIDATION)


def _settle_plan(given: dict[str, Any], settings: dict[str, Any]) -> tuple[int, int]:
    """Micro-batch, accumulation, stages and processes; returns the batch over all replicas and the samples of a weight update."""
    replicas, group = given.get("replication_factor", 1), given.get("dbn_replica_group_size", 1)
    micro_batch, batch = given.get("micro_batch_size"), given.get("batch_size", 32)
    if micro_batch is None and batch % replicas:
        below = batch - batch % replicas
        near = " or ".join(str(value) for value in (below, below + replicas) if value)
        raise UsageError(f"--batch-size {batch} must be a multiple of --replication-factor {replicas}: {near}, for example")
    micro_batch = micro_batch or batch // replicas
    if group > 1 and (norm := given.get("norm_type", "batch")) != "batch":
        raise UsageError(f"--dbn-replica-group-size {group} shares the statistics of batch norms; --norm-type {norm} has none")
    if replicas % group:
        raise UsageError(f"--dbn-replica-group-size {group} must divide --replication-factor {replicas}: {divisors(replicas)}")
    accumulation = given.get("gradient_accumulation_factor", 1)
    if "global_batch_size" in given:
        wanted = given["global_batch_size"]
        accumulation = max(1, round(wanted / (micro_batch * replicas)))
        if (samples := micro_batch * replicas * accumulation) != wanted:
            once.warn(
                f"--global-batch-size {wanted} is no multiple of micro-batch {micro_batch} x replicas {replicas}: with A = {accumulation} it is"
                f" {samples}",
                prog="resnet_ipu",
            )
    # The batch norms of a group of replicas that share their statistics are those of one replica with the group's samples, and the mean
    # gradient is the same: so that is what runs.
    settings["data.micro_batch_size"] = micro_batch * group
    settings["data.eval_batch_size"] = given.get("validation_micro_batch_size", max(micro_batch, 100))
    settings["trainer.strategy.gradient_accumulation_factor"] = accumulation
    settings["trainer.strategy.replication_factor"] = replicas // group
    if "norm_momentum" in given or "micro_batch_momentum" in given:
        if given.get("norm_momentum", 0) >= 1:
            raise UsageError(f"--norm-momentum {given['norm_momentum']:g} must be below 1")
        kept = given["norm_momentum"] ** (1 / accumulation) if "norm_momentum" in given else given["micro_batch_momentum"]
        settings["model.norm_momentum"] = 1 - kept  # torch's is the other share, of a micro-batch
    if "weight_updates_per_epoch" in given:
        settings["trainer.limit_train_batches"] = given["weight_updates_per_epoch"] * accumulation * (replicas // group)

    stages = _settle_stages(given, settings, replicas=replicas)
    check_processes(given, replicas=replicas // group, stages=stages)
    if "processes" in given:
        settings["trainer.devices"] = given["processes"]
    return micro_batch * replicas, micro_batch * replicas * accumulation


def _settle_stages(given: dict[str, Any], settings: dict[str, Any], *, replicas: int) -> int:
    """Stages and the order of their work; returns how many stages each replica has."""
    splits, ipus = given.get("pipeline_splits"), given.get("num_ipus")
    if ipus is not None and ipus % replicas:
        raise UsageError(f"--num-ipus {ipus} must be a multiple of --replication-factor {replicas}: {multiples(replicas)}, ...")
    stages = len(splits) + 1 if splits else (ipus or replicas) // replicas
    if splits and ipus is not None and ipus != stages * replicas:
        raise UsageError(
            f"--num-ipus {ipus}: the {len(splits)} names of --pipeline-splits make {stages} stages, which on {replicas} replicas are"
            f" {stages * replicas} IPUs"
        )
    if "pipeline" in given and stages == 1:
        which = f"--num-ipus {ipus}" if ipus else "no --num-ipus"
        raise UsageError(
            f"--pipeline needs at least two stages, and {which} with --replication-factor {replicas} makes one: give --num-ipus"
            f" {multiples(replicas, first=2)}, ... or --pipeline-splits"
        )
    if "pipeline_schedule" in given and "pipeline" not in given:
        raise UsageError(f"--pipeline-schedule {given['pipeline_schedule']} needs --pipeline")
    if splits:
        settings["trainer.strategy.pipeline_splits"] = split_names(splits, settings.get("model.size", "20"))
    if stages > 1:
        if not splits:
            settings["trainer.strategy.num_stages"] = stages
        settings["trainer.strategy.pipeline_schedule"] = given.get("pipeline_schedule", "1F1B") if "pipeline" in given else "Sequential"
    if "pipeline_validation_model" in given:
        if stages == 1:
            raise UsageError("--pipeline-validation-model needs --pipeline with at least two stages")
        settings["trainer.strategy.pipeline_validation"] = True
    return stages


def _settle_phases(given: dict[str, Any], settings: dict[str, Any]) -> None:
    """What is done: training, validation while it lasts and afterwards, and of which checkpoints."""
    validates = given.get("validation", True) and "no_validation" not in given
    trains, made = given.get("training", True), given.get("ckpts_per_epoch")
    if not trains and not validates:
        raise UsageError("--training false and --validation false leave nothing to do")
    for option in ("test", "resume", "clean_dir"):
        if not trains and option in given:
            raise UsageError(f"--{option.replace('_', '-')} belongs to a training, and --training is false")
    if not validates:
        settings["trainer.limit_val_batches"] = 0
        for option in ("checkpoint_input_dir", "valid_per_epoch", "clean_dir"):
            if option in given:
                raise UsageError(f"--{option.replace('_', '-')} needs validation, which is off")
    if (folder := given.get("checkpoint_input_dir")) is not None and not Path(folder).is_dir():
        raise UsageError(f"--checkpoint-input-dir {folder}: there is no such directory")
    if "clean_dir" in given and (made is None or "checkpoint_input_dir" in given):
        raise UsageError(
            "--clean-dir deletes what --ckpts-per-epoch has kept, once it is scored: it needs that, and no --checkpoint-input-dir"
        )
    if given.get("first_ckpt_epoch") and made in (None, "0"):
        raise UsageError(f"--first-ckpt-epoch {given['first_ckpt_epoch']:g} needs --ckpts-per-epoch")
    if made is not None and validates:
        settings.setdefault("events.validations", "0")


def _settle_learning_rate(given: dict[str, Any], settings: dict[str, Any], *, batch: int, samples_per_update: int) -> None:
    if "learning_rate" in given:
        rate = given["learning_rate"]
    elif "initial_learning_rate" in given:
        rate = given["initial_learning_rate"] * samples_per_update
    elif "base_learning_rate" in given:
        rate = 2.0 ** given["base_learning_rate"] * batch
    elif given.get("optimizer", "sgd") in LEARNING_RATES:
        rate = LEARNING_RATES[given["optimizer"]]
    else:
        rate = (0.1 if settings["model.size"] in (*CIFAR_SIZES, *TOY_MODELS) else 0.02) * samples_per_update / 32
    settings["model.learning_rate"] = rate
    if "learning_rate_decay" in given or "learning_rate_schedule" in given:
        if (schedule := given.get("lr_schedule", "stepped")) != "stepped":
            option = "--learning-rate-decay" if "learning_rate_decay" in given else "--learning-rate-schedule"
            raise UsageError(f"{option} belongs to a stepped schedule, not to --lr-schedule {schedule}")
        values, fractions = given.get("learning_rate_decay", [1.0, 0.1, 0.01]), given.get("learning_rate_schedule", [0.5, 0.75])
        if len(values) != len(fractions) + 1:
            raise UsageError(
                f"--learning-rate-decay has {len(values)} values and --learning-rate-schedule {len(fractions)}: it must have one value more"
            )
        if fractions != sorted(fractions) or not all(0 <= fraction <= 1 for fraction in fractions):
            raise UsageError(f"--learning-rate-schedule {','.join(map(str, fractions))} must rise from 0 to 1")
        settings |= {"model.schedule": "stepped", "model.decay_values": values, "model.decay_fractions": fractions}
