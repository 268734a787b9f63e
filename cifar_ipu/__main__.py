"""``python -m cifar_ipu``: train a small CNN on small images under the IPU execution model, then score it on the whole test set.

This module holds the short options, their rules and nothing that needs torch, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

LIGHT_START = True  # `import lightning_ipu` leaves torch alone when the main module says so

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from lightning_ipu.command import cli, once, readers  # noqa: E402
from lightning_ipu.command.options import CHECKPOINT_OPTIONS, MACHINE_OPTIONS, RUN, Option, UsageError  # noqa: E402
from lightning_ipu.command.parser import build_parser, lightning_arguments, settings_of  # noqa: E402
from lightning_ipu.command.readers import choice, positive  # noqa: E402
from lightning_ipu.placement import Placement  # noqa: E402
from lightning_ipu.plan import Plan, PlanError  # noqa: E402

if TYPE_CHECKING:
    from lightning_ipu.command.run import CommandLine

CONFIGS = Path(__file__).parent / "configs"
DATA_SETS = ("CIFAR-10", "CIFAR-100", "MNIST", "FASHION-MNIST", "SAMPLE")

# The layers of each network, in order: --model-shard-position counts them from 0, and each can begin a stage by its name.
_BLOCKS = "pool1 dropout1 conv3 relu3 conv4 relu4 pool2 dropout2 flatten dense1 relu5 dropout3 dense2"
LAYERS = {
    "keras": f"conv1 relu1 conv2 relu2 {_BLOCKS}".split(),
    "estimator": f"conv1 relu1 conv2 relu2 conv2b {_BLOCKS}".split(),
    "whitened": "whiten gelu group1 group2 group3 pool flatten head scale".split(),
}
SHARD_POSITIONS = {"keras": 6, "estimator": 7, "whitened": 3}  # behind the first block

BATCH_SIZES = {"original": {"keras": 32, "estimator": 16}, "fast": {"keras": 64, "estimator": 64, "whitened": 128}}
EPOCHS = {"keras": 100, "estimator": 150}  # of the original recipe
EPOCHS_IN_A_HURRY, EPOCHS_ON_SAMPLE = 10, 10
ACCUMULATION_IN_A_PIPELINE = 8
ITERATIONS, ITERATIONS_WHEN_PROFILED = 50, 10

# What a recipe trains with; `fast` keeps the optimizer that each network was tried with.
_ORIGINAL = {
    "data.augment": False,
    "data.scaling": "unit",
    "model.optimizer": "sgd",
    "model.learning_rate": 0.01,
    "model.momentum": 0.0,
    "model.l2_regularization": 0.0,
    "model.label_smoothing": 0.0,
    "model.schedule": "const",
}
_FAST = {
    "data.augment": True,
    "data.scaling": "standard",
    "model.label_smoothing": 0.1,
    "model.schedule": "linear",
    "model.warmup_fraction": 0.2,
    "model.final_fraction": 0.0,
}
_FAST_SGD = _FAST | {"model.optimizer": "sgd", "model.learning_rate": 0.2, "model.momentum": 0.9, "model.l2_regularization": 5e-4}
_FAST_ADAMW = _FAST | {"model.optimizer": "adamw", "model.learning_rate": 0.002, "model.weight_decay": 0.01}
RECIPES = {
    "original": {"keras": _ORIGINAL, "estimator": _ORIGINAL},
    "fast": {"keras": _FAST_ADAMW, "estimator": _FAST_ADAMW, "whitened": _FAST_SGD},
}

DESCRIPTION = """\
Train a small CNN on CIFAR-10, CIFAR-100, MNIST or Fashion-MNIST under the IPU execution model, then score it on the whole test set.

The plan decides the numbers: a weight update uses batch x accumulation A x replicas R samples, whatever it runs on.
Without --dataset it is CIFAR-10, or, where that is neither on disk nor to be had, a sample of Fashion-MNIST in the package."""

EPILOG = (
    """\
examples:
  python -m cifar_ipu --network estimator
  python -m cifar_ipu --network estimator --replicas 2
  python -m cifar_ipu --network estimator --pipeline --gradient-accumulation-count 8 --model-shard-position 7
  python -m cifar_ipu --recipe fast --dataset FASHION-MNIST --data-dir DIR
  python -m cifar_ipu --test-only --output-dir results
  python -m cifar_ipu fit --config results/config.yaml          replay a run

layers, counted from 0 by --model-shard-position; network.NAME in --pipeline-splits:
"""
    + "\n".join(f"  {network:<10} {' '.join(names)}" for network, names in LAYERS.items())
    + """

A step is a weight update in every option, log and checkpoint name."""
)

_NETWORK, _DATA, _PLAN = "network", "data", "plan (decides the numbers)"
_TRAINING, _RUN = "training", RUN

OPTIONS = (
    Option(name="--config", group="start from", metavar="FILE", help="a file of options, one a line, which the command line overrides; the package's own are for fit --config NAME"),
    Option(name="--network", group=_NETWORK, type=choice(*LAYERS), shown="keras; whitened with --recipe fast", help="keras is Keras' CIFAR-10 example, estimator has a third convolution in its first block, whitened is quick to train"),
    Option(name="--no-channels-last", group=_NETWORK, key="model.channels_last", sets=False, type=bool, help="keep images plane by plane in memory; slower on most devices"),
    #
    Option(name="--dataset", group=_DATA, key="data.dataset", type=choice(*DATA_SETS), shown="CIFAR-10, else SAMPLE", help="data set"),
    Option(name="--data-dir", group=_DATA, key="data.data_dir", type=readers.path, metavar="DIR", default="data", help="where its files are, or are downloaded to"),
    Option(name="--generated-data", group=_DATA, type=bool, help="make up images in the data set's shape, of classes that can be told apart; original: all zeros"),
    Option(name="--validation-split", group=_DATA, key="data.validation_split", type=readers.fraction_or_count("images"), metavar="SHARE", default=0, help="share or number of training images to hold out and validate on after every epoch"),
    Option(name="--augmentation", group=_DATA, type=bool, shown="with --recipe fast", help="random crops and flips of training images"),
    Option(name="--no-augmentation", group=_DATA, type=bool, excludes="--augmentation", help="none of them"),
    Option(name="--crop-padding", group=_DATA, type=positive(zero=True), shown="2", help="pixels of border that crops are taken from"),
    #
    Option(name="--batch-size", group=_PLAN, type=positive(), aliases=("--micro-batch-size",), shown="keras 32, estimator 16; fast 64, whitened 128", help="samples at once on one replica, the micro-batch"),
    Option(name="--replicas", group=_PLAN, type=positive(), aliases=("--replication-factor",), shown="1, or as many as --ipus asks for", help="R, copies of the network whose gradients are averaged"),
    Option(name="--ipus", group=_PLAN, type=positive(), aliases=("--num-ipus",), shown="one per replica and stage; original: 2", help="virtual IPUs: replicas, or with --pipeline stages x replicas"),
    Option(name="--gradient-accumulation-count", group=_PLAN, type=positive(), aliases=("--gradient-accumulation-factor",), shown=f"1; {ACCUMULATION_IN_A_PIPELINE} with --pipeline", help="A, micro-batches per replica and weight update"),
    Option(name="--pipeline", group=_PLAN, type=bool, help="run the stages as a pipeline; without it they run one after the other (sharded): the same numbers"),
    Option(name="--model-shard-position", group=_PLAN, type=positive(), shown=", ".join(f"{name} {position}" for name, position in SHARD_POSITIONS.items()), help="layer that begins the second of two stages"),
    Option(name="--model_shard_position", group=_PLAN, type=positive(), help="the original's spelling of it"),
    Option(name="--pipeline-splits", group=_PLAN, type=readers.names, metavar="NAMES", excludes="--model-shard-position", help="layers that each begin a new stage, such as network.conv3,network.dense1"),
    Option(name="--pipeline-schedule", group=_PLAN, type=choice("1F1B", "GPipe", "Sequential", "Interleaved", "Grouped"), shown="1F1B", help="order of work in a pipeline; Interleaved is 1F1B, Grouped, the original's, is GPipe"),
    Option(name="--batches-per-step", group=_PLAN, key="trainer.strategy.device_iterations", type=positive(), shown=f"{ITERATIONS}; {ITERATIONS_WHEN_PROFILED} with --profile; original: 100", help="D, weight updates per host step at most"),
    Option(name="--precision", group=_PLAN, key="precision", type=readers.precision_choice, default="auto", help="<compute>.<weights>; auto is 16.32 where the device is fast at bfloat16, else 32.32"),
    Option(name="--seed", group=_PLAN, type=readers.seed, default=0, help="of initial weights, order, augmentation and dropout"),
    #
    Option(name="--recipe", group=_TRAINING, type=choice(*RECIPES), default="original", help="original: SGD, 0.01, no augmentation, pixels from 0 to 1; fast: a rate that rises and falls, label smoothing, crops and flips, few epochs"),
    Option(name="--epochs", group=_TRAINING, key="epochs", type=positive(float), metavar="X", shown=f"keras 100, estimator 150; {EPOCHS_IN_A_HURRY} with --recipe fast; {EPOCHS_ON_SAMPLE} on SAMPLE", help="passes over the training set; fractions are turned into weight updates"),
    Option(name="--optimizer", group=_TRAINING, key="model.optimizer", type=choice("sgd", "adamw", "rmsprop", "lars", "lamb"), shown="sgd; fast keras and estimator: adamw", help="optimizer"),
    Option(name="--learning-rate", group=_TRAINING, key="model.learning_rate", type=positive(float), metavar="X", shown="sgd 0.01, fast 0.2, each x samples per weight update / the recipe's --batch-size; adamw 0.002", help="peak learning rate"),
    Option(name="--momentum", group=_TRAINING, key="model.momentum", type=positive(float, zero=True), metavar="X", shown="original 0, fast 0.9", help="of sgd, Nesterov's; of rmsprop and lars"),
    Option(name="--lr-schedule", group=_TRAINING, key="model.schedule", type=choice("const", "linear", "cosine"), shown="original const; fast linear, after a rise over a fifth of the run", help="how the learning rate moves, with every weight update"),
    Option(name="--l2-regularization", group=_TRAINING, key="model.l2_regularization", type=positive(float, zero=True), metavar="X", shown="original 0, fast 5e-4", help="on weights, not on norms and biases"),
    Option(name="--weight-decay", group=_TRAINING, key="model.weight_decay", type=positive(float, zero=True), metavar="X", shown="0; fast adamw 0.01", help="decoupled from the optimizer"),
    Option(name="--label-smoothing", group=_TRAINING, key="model.label_smoothing", type=positive(float, zero=True), metavar="X", shown="original 0, fast 0.1", help="share of the target spread over all classes"),
    Option(name="--mirror-evaluation", group=_TRAINING, key="model.mirror_evaluation", type=bool, help="score the mean of an image's and its mirror image's logits"),
    Option(name="--train-only", group=_TRAINING, type=bool, help="do not score the test set at the end"),
    Option(name="--test-only", group=_TRAINING, type=bool, excludes="--train-only", help="do not train: score the latest checkpoint in --output-dir, with the settings it was trained with"),
    #
    Option(name="--processes", group=_RUN, type=positive(), shown="1, or torchrun's", help="processes that share out the replicas and stages: a divisor of R, or R times a divisor of the stages"),
    *MACHINE_OPTIONS,
    Option(name="--log-interval", group=_RUN, key="log_interval", type=positive(float), metavar="SECONDS", shown="10, or a terminal's moving line; original: 3", help="seconds between lines that say how far the run is"),
    Option(name="--summary-interval", group=_RUN, key="trainer.log_every_n_steps", type=positive(), default=10, help="weight updates between rows of metrics.csv; original: 1"),
    Option(name="--output-dir", group=_RUN, key="trainer.default_root_dir", type=readers.path, metavar="DIR", default="results", help="gets config.yaml, metrics.csv, checkpoints/ and the reports; original: a temporary one", aliases=("--model-dir",)),
    Option(name="--profile", group=_RUN, type=bool, help="write train_report.txt and eval_report.txt into --output-dir: which operators took how long"),
    *CHECKPOINT_OPTIONS,
)  # fmt: skip

# Beside --test-only: the checkpoint knows the rest, and what is given of it is listed as having no effect.
_OF_A_TEST = {"dataset", "data_dir", "generated_data", "precision", "mirror_evaluation", "device", "threads"} | {
    "no_allocator_setting", "output_dir", "profile", "test_only", "no_channels_last"
}  # fmt: skip


def settle(given: dict[str, Any]) -> list[str]:
    """LightningCLI arguments for the options that were given; raises UsageError where they do not fit together.

    Beside --test-only they are those of LightningCLI's ``test``, and only what was given is said: the checkpoint says the rest.
    """
    testing = "test_only" in given
    if testing:
        given = {name: value for name, value in given.items() if name in _OF_A_TEST}
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
    if "generated_data" in given and "augmentation" in given:
        raise UsageError("--augmentation and --generated-data exclude each other: generated images cannot be augmented")
    if "augmentation" in given or "no_augmentation" in given or "generated_data" in given:
        settings["data.augment"] = "augmentation" in given
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
    if "processes" in given:
        try:
            Placement(plan=Plan(replication_factor=replicas, num_stages=stages), processes=given["processes"])
        except PlanError as error:
            raise UsageError(f"--processes: {error}") from None
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


# -- what needs torch ---------------------------------------------------------------------------------------------------------


def start(arguments: list[str], *, given: dict[str, Any]) -> int:
    """Run LightningCLI with this package's classes; returns the exit status."""
    if "profile" in given:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library talks to standard error

    from cifar_ipu.data import ImageDataModule, settle_data_set
    from cifar_ipu.module import CIFARModule
    from lightning_ipu.command.run import Command, run_command

    epochs = EPOCHS_IN_A_HURRY if given.get("recipe") == "fast" else EPOCHS[given.get("network", "keras")]
    command = Command(
        prog="cifar_ipu",
        model_class=CIFARModule,
        datamodule_class=ImageDataModule,
        links=[("num_classes", "num_classes"), ("in_channels", "in_channels"), ("image_size", "image_size")],
        facts=_facts,
        epochs=lambda data: (EPOCHS_ON_SAMPLE, "chosen for the embedded sample") if data.used_sample else (epochs, None),
        note=lambda line: line.datamodule.caveat,
        settle=settle_data_set,
    )
    if "test_only" in given:
        arguments = ["test", *arguments[1:]]
        if idle := [option.name for option in OPTIONS if option.dest in given and option.dest not in _OF_A_TEST]:
            print(f"cifar_ipu: --test-only scores a checkpoint as it was trained; of no effect beside it: {', '.join(idle)}")
    return run_command(command, arguments)


def _facts(line: CommandLine) -> list[tuple[str, str]]:
    """Rows for the table: network, data, device, precision."""
    data = line.datamodule
    held_out = f"{data.num_validation_samples:,} to validate on, " if data.num_validation_samples else ""
    images = f"{data.num_train_samples:,} to train on, {held_out}{data.num_test_samples:,} to test on"
    return [("network", line.model.hparams.network), ("data", data.description), ("images", images), *line.machine_facts()]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if once.is_answered_by_the_first(words):
        return 0
    if words[:1] == ["average"]:
        return cli.average(words[1:], prog="cifar_ipu", version=_version)
    parser = build_parser(prog="cifar_ipu", description=DESCRIPTION, epilog=EPILOG, options=OPTIONS, version=_version)
    return cli.main(words, parser=parser, options=OPTIONS, settle=settle, start=start, folder=CONFIGS)


def _version() -> str:
    from lightning_ipu import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
