"""``python -m resnet_ipu``: train a ResNet or ResNeXt under the IPU execution model, then validate it.

This module holds the short options, their rules and nothing that needs torch, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

LIGHT_START = True  # `import lightning_ipu` leaves torch alone when the main module says so

import sys  # noqa: E402
from argparse import ArgumentTypeError  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from lightning_ipu import machine  # noqa: E402
from lightning_ipu.command import cli, configs, once, readers  # noqa: E402
from lightning_ipu.command.options import CHECKPOINT_OPTIONS, MACHINE_OPTIONS, RUN, Option, UsageError  # noqa: E402
from lightning_ipu.command.parser import build_parser, lightning_arguments, parse, settings_of  # noqa: E402
from lightning_ipu.command.readers import choice, positive  # noqa: E402
from lightning_ipu.command.words import pairs, value_of  # noqa: E402
from lightning_ipu.errors import UserError  # noqa: E402
from lightning_ipu.placement import Placement  # noqa: E402
from lightning_ipu.plan import Plan, PlanError  # noqa: E402
from lightning_ipu.precision import names as precision  # noqa: E402
from resnet_ipu.keras_names import module_name  # noqa: E402

if TYPE_CHECKING:
    from lightning_ipu.command.run import CommandLine

CIFAR_SIZES = ("8", "14", "20", "32", "44", "56", "110")
IMAGENET_SIZES = ("18", "34", "50", "101", "152", "x50", "x101")
DATA_SETS = ("CIFAR-10", "CIFAR-100", "MNIST", "FASHION-MNIST", "SAMPLE", "IMAGENET")
TOY_MODELS = ("toy_model", "toy_model_bn")
CONFIGS = Path(__file__).parent / "configs"
IMAGENET_IMAGES, IMAGENET_VALIDATION, IMAGENET_CLASSES, IMAGENET_SIZE, IMAGENET_SIZE_ON_CPU = 1_281_167, 50_000, 1000, 224, 32
EPOCHS, EPOCHS_ON_SAMPLE = 30, 1
LEARNING_RATES = {"adamw": 0.003, "rmsprop": 0.003, "lars": 2.0, "lamb": 0.005}  # of sgd it goes by size and batch

DESCRIPTION = """\
Train a ResNet or ResNeXt on ImageNet or images like it, CIFAR-10, CIFAR-100, MNIST or Fashion-MNIST under the IPU execution model,
then validate it.

The plan decides the numbers: a weight update uses micro-batch x accumulation A x replicas R samples, whatever it runs on.
Without --dataset it is CIFAR-10, or, where that is neither on disk nor to be had, a sample of Fashion-MNIST in the package."""

EPILOG = """\
examples:
  python -m resnet_ipu --size x50 --replication-factor 4
  python -m resnet_ipu --size 20 --dataset CIFAR-10 --data-dir DIR --batch-size 128 --epochs 30
  python -m resnet_ipu --size 50 --dataset IMAGENET --data-dir DIR          DIR/train and DIR/val, or TFRecord shards
  python -m resnet_ipu convert DIR SHARDS                         make TFRecord shards of such folders; convert --help
  python -m resnet_ipu --config resnet8_16ipus_bn --data-dir DIR
  python -m resnet_ipu --training false --checkpoint-input-dir results/checkpoints
  python -m resnet_ipu fit --config results/config.yaml          replay a run
  python -m resnet_ipu validate --config results/config.yaml --ckpt_path results/checkpoints/last.ckpt
  python -m resnet_ipu average --checkpoint-input-path results   average the weights of its checkpoints; average --help

A step is a weight update in every option, log and checkpoint name; only --limit-train-batches and --limit-val-batches count
micro-batches. Where a default is not the original program's (batch norm for group norm, Nesterov momentum, weight decay,
zero-initialised last norms, warm-up) it is because the original's learns worse or diverges in as many updates."""


def _size(text: str) -> str:
    """A network by its size, or by its name in the original programs: cifar_resnet8, resnet50."""
    for prefix, sizes in (("cifar_resnet", CIFAR_SIZES), ("resnet", IMAGENET_SIZES)):
        if text.startswith(prefix) and text.removeprefix(prefix) in sizes:
            return text.removeprefix(prefix)
    return choice(*CIFAR_SIZES, *IMAGENET_SIZES, *TOY_MODELS)(text)


def _dataset(text: str) -> str:
    """A data set by its name, or by the original programs' spelling of it: cifar10."""
    return choice(*DATA_SETS)({"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}.get(text.lower(), text))


def _norm_layer(text: str) -> dict[str, Any]:
    """The original's dictionary of a norm layer, in YAML or JSON."""
    import yaml

    try:
        layer = yaml.load(text, yaml.CSafeLoader)
    except yaml.YAMLError:
        layer = None
    if not isinstance(layer, dict) or not isinstance(layer.get("name"), str):
        raise ArgumentTypeError(f"{text!r} must be a dictionary such as '{{name: custom_batch_norm, momentum: 0.97}}'")
    legal = {"custom_batch_norm": ["momentum"], "batch_norm": ["momentum"], "group_norm": ["num_groups"]}
    if layer["name"] not in legal:
        raise ArgumentTypeError(f"name: {layer['name']!r} is not known; known are {', '.join(legal)}")
    if "channels_per_group" in layer:
        raise ArgumentTypeError("channels_per_group: all norms here have the same number of groups; give num_groups")
    for key in layer:
        if key not in ["name", *legal[layer["name"]]]:
            raise ArgumentTypeError(f"{key} means nothing to {layer['name']}, which takes {', '.join(legal[layer['name']])}")
    if layer["name"] == "group_norm" and not isinstance(layer.get("num_groups"), int):
        raise ArgumentTypeError("group_norm needs num_groups")
    if not 0 <= (momentum := layer.get("momentum", 0)) < 1:
        raise ArgumentTypeError(f"momentum: {momentum} must be at least 0 and below 1")
    return layer


_size.choices = (*CIFAR_SIZES, *IMAGENET_SIZES, *TOY_MODELS)
_dataset.choices = DATA_SETS

_NETWORK, _DATA, _PLAN = "network", "data", "plan (decides the numbers)"
_TRAINING, _RUN = "training", RUN
_COMPILER = "steers the IPU's compiler only and changes nothing here"

OPTIONS = (
    Option(
        name="--config",
        group="start from",
        metavar="NAME",
        help="a configuration in the package, or a file like them; options on the command line override it",
    ),
    Option(
        name="--size",
        group=_NETWORK,
        key="model.size",
        type=_size,
        shown="20; 50 for IMAGENET",
        help="layers; x is ResNeXt 32x4d",
        aliases=("--model-name",),
    ),
    Option(
        name="--stem",
        group=_NETWORK,
        key="model.stem",
        type=choice("cifar", "imagenet"),
        shown="cifar up to 64 pixels",
        help="first layers: 3x3 with stride 1, or 7x7 with stride 2 and max-pooling",
    ),
    Option(
        name="--norm-type",
        group=_NETWORK,
        key="model.norm_type",
        type=choice("batch", "group", "none"),
        default="batch",
        help="normalisation",
    ),
    Option(name="--norm-groups", group=_NETWORK, key="model.norm_groups", type=positive(), shown="16", help="groups of --norm-type group"),
    Option(
        name="--norm-momentum",
        group=_NETWORK,
        type=positive(float, zero=True),
        metavar="X",
        shown="0.9 for a micro-batch",
        help="share of batch norm's running statistics that a weight update keeps, however many micro-batches it has",
    ),
    Option(
        name="--norm-layer",
        group=_NETWORK,
        type=_norm_layer,
        metavar="DICT",
        excludes=("--norm-type", "--norm-momentum", "--norm-groups"),
        help="the three at once, as in '{name: custom_batch_norm, momentum: 0.97}'; batch_norm's momentum is that of a micro-batch",
    ),
    Option(
        name="--shortcut-type",
        group=_NETWORK,
        key="model.shortcut_type",
        type=choice("A", "B", "C"),
        shown="A for 8 to 110, B for the others; original: B",
        help="shortcut where the shape changes: A zero-padded, B 1x1 convolution; C convolution everywhere",
    ),
    Option(
        name="--pretrained",
        group=_NETWORK,
        key="model.pretrained",
        type=readers.path,
        metavar="FILE",
        help="start from a state_dict under torchvision's names, such as its .pth files",
    ),
    Option(
        name="--no-zero-init",
        group=_NETWORK,
        key="model.zero_init_last_norm",
        sets=False,
        type=bool,
        help="do not start each block as its shortcut alone (last norm's weight 0)",
    ),
    Option(
        name="--no-channels-last",
        group=_NETWORK,
        key="model.channels_last",
        sets=False,
        type=bool,
        help="keep images plane by plane in memory; slower on most devices",
    ),
    #
    Option(
        name="--dataset",
        group=_DATA,
        key="data.dataset",
        type=_dataset,
        shown="CIFAR-10, else SAMPLE",
        help="data set; IMAGENET is any images in class folders or TFRecord shards",
    ),
    Option(
        name="--data-dir",
        group=_DATA,
        key="data.data_dir",
        type=readers.path,
        metavar="DIR",
        default="data",
        help="where its files are, or are downloaded to",
        aliases=("--dataset-path",),
    ),
    Option(
        name="--validation-split",
        group=_DATA,
        key="data.validation_split",
        type=readers.fraction_or_count("images"),
        metavar="SHARE",
        shown="0.1; SAMPLE has 500 images of its own",
        help="share or number of training images to validate on; the test set is left for --test",
    ),
    Option(
        name="--validate-on-test",
        group=_DATA,
        key="data.validation_on_test",
        type=bool,
        excludes="--validation-split",
        help="validate on the test set, train on all else",
    ),
    Option(
        name="--synthetic-data",
        group=_DATA,
        key="data.synthetic",
        type=choice("host", "ipu"),
        help="make images up: on the host, or on the device itself, which leaves loading out",
    ),
    Option(
        name="--no-augmentation",
        group=_DATA,
        key="data.augment",
        sets=False,
        type=bool,
        help="no random crops and flips, and nothing of the next three",
    ),
    Option(
        name="--auto-augment",
        group=_DATA,
        key="data.auto_augment",
        type=choice("randaugment", "trivialaugment"),
        excludes="--no-augmentation",
        help="after crop and flip, two random operations on each training image, or one",
    ),
    Option(
        name="--color-jitter",
        group=_DATA,
        key="data.color_jitter",
        type=positive(float),
        metavar="X",
        excludes="--no-augmentation",
        help="vary brightness, contrast and saturation of training images by up to the share X each",
    ),
    Option(
        name="--random-erasing",
        group=_DATA,
        key="data.random_erasing",
        type=positive(float),
        metavar="P",
        excludes="--no-augmentation",
        help="fill a rectangle of a training image with the mean colour, with probability P",
    ),
    Option(
        name="--num-workers",
        group=_DATA,
        key="data.num_workers",
        type=positive(zero=True),
        shown="0; for IMAGENET the cores it may use, at most 16",
        help="loader processes; original: 16",
    ),
    Option(
        name="--image-size",
        group=_DATA,
        key="data.image_size",
        type=positive(),
        shown=f"{IMAGENET_SIZE}; of --synthetic-data on a CPU {IMAGENET_SIZE_ON_CPU}",
        help="of IMAGENET, and of --synthetic-data: side in pixels",
    ),
    Option(
        name="--fast-decode",
        group=_DATA,
        key="data.fast_decode",
        type=bool,
        excludes="--no-augmentation",
        help="of IMAGENET: decode training JPEGs at half scale where the crop has twice the pixels that are needed; faster with large images",
    ),
    Option(
        name="--eight-bit-transfer",
        group=_DATA,
        type=bool,
        help="bring images to the device as uint8 and normalise them there: the default",
    ),
    Option(
        name="--no-eight-bit-transfer",
        group=_DATA,
        key="data.eight_bit_transfer",
        sets=False,
        type=bool,
        excludes="--eight-bit-transfer",
        help="of IMAGENET: normalise on the host instead, which moves four times the bytes",
    ),
    Option(
        name="--on-bad-image",
        group=_DATA,
        key="data.on_bad_image",
        type=choice("raise", "skip"),
        shown="raise",
        help="of IMAGENET: end with the image's path; or decode all once before the run, leave out the bad ones and list them at the end",
    ),
    Option(
        name="--num-classes", group=_DATA, key="data.num_classes", type=positive(), shown="1000", help="of shards that say nothing about it"
    ),
    Option(
        name="--train-shards", group=_DATA, key="data.train_shards", type=positive(), shown="as their names say", help="how many to expect"
    ),
    Option(
        name="--validation-shards", group=_DATA, key="data.validation_shards", type=positive(), shown="as their names say", help="the same"
    ),
    #
    Option(
        name="--batch-size",
        group=_PLAN,
        type=positive(),
        shown="32",
        excludes="--micro-batch-size",
        help="samples over all replicas, accumulation not counted; a multiple of --replication-factor",
    ),
    Option(name="--micro-batch-size", group=_PLAN, type=positive(), help="instead of --batch-size: samples at once on one replica"),
    Option(
        name="--replication-factor",
        group=_PLAN,
        key="trainer.strategy.replication_factor",
        type=positive(),
        default=1,
        help="R, replicas whose gradients are averaged",
        aliases=("--num-replicas",),
    ),
    Option(
        name="--gradient-accumulation-factor",
        group=_PLAN,
        key="trainer.strategy.gradient_accumulation_factor",
        type=positive(),
        default=1,
        help="A, micro-batches per replica and weight update",
        aliases=("--gradient-accumulation-count",),
    ),
    Option(
        name="--global-batch-size",
        group=_PLAN,
        type=positive(),
        excludes="--gradient-accumulation-factor",
        help="instead of A: samples of a weight update; A is rounded to what comes nearest",
    ),
    Option(
        name="--dbn-replica-group-size",
        group=_PLAN,
        type=positive(),
        shown="1",
        help="replicas whose batch norms share their statistics: carried out as R/N replicas of N times the micro-batch",
    ),
    Option(
        name="--num-ipus",
        group=_PLAN,
        type=positive(),
        shown="one per replica and stage",
        help="virtual IPUs, a multiple of R: N/R of them are the stages of each replica",
    ),
    Option(
        name="--pipeline",
        group=_PLAN,
        type=bool,
        help="run the stages as a pipeline; without it they run one after the other (sharded): the same numbers",
    ),
    Option(
        name="--pipeline-splits",
        group=_PLAN,
        key="trainer.strategy.pipeline_splits",
        type=readers.names,
        metavar="NAMES",
        shown="balanced",
        help="submodules that begin a new stage, with commas, such as network.layer2,network.layer3",
    ),
    Option(
        name="--pipeline-schedule",
        group=_PLAN,
        type=choice("1F1B", "GPipe", "Sequential", "Interleaved", "Grouped"),
        shown="1F1B",
        help="order of work in a pipeline; Interleaved is 1F1B, Grouped is GPipe",
    ),
    Option(
        name="--validation-micro-batch-size",
        group=_PLAN,
        type=positive(),
        shown="the micro-batch, at least 100",
        help="samples that are validated at once: the same numbers",
    ),
    Option(
        name="--recompute",
        group=_PLAN,
        key="trainer.strategy.recompute",
        type=bool,
        help="recompute activations in the backward pass: less memory, the same numbers",
        aliases=("--recomputation",),
    ),
    Option(
        name="--batches-per-step",
        group=_PLAN,
        key="trainer.strategy.device_iterations",
        type=positive(),
        default=16,
        help="D, weight updates per host step at most; original: 250",
    ),
    Option(
        name="--precision",
        group=_PLAN,
        key="precision",
        type=readers.precision_choice,
        default="auto",
        help="<compute>.<weights>; auto is 16.32 where the device is fast at bfloat16, else 32.32",
    ),
    Option(
        name="--half-type",
        group=_PLAN,
        key="half_type",
        type=choice(*precision.HALF_TYPES),
        default="bf16",
        help="the 16-bit type; fp16 is for GPUs and --precision 16.16 or 16.32",
    ),
    Option(
        name="--prng",
        group=_PLAN,
        type=bool,
        help="stochastic rounding of weight updates in 16.16, which is the default: a change below the spacing of 16-bit numbers,"
        " 1/256 of a weight in bf16, is made at times instead of never",
    ),
    Option(
        name="--no-prng",
        group=_PLAN,
        key="trainer.strategy.stochastic_rounding",
        sets=False,
        type=bool,
        excludes="--prng",
        help="round them to nearest instead, which loses such changes",
    ),
    Option(
        name="--loss-scaling",
        group=_PLAN,
        key="trainer.strategy.loss_scaling",
        type=positive(float, zero=True),
        metavar="X",
        shown="automatic in fp16, none in bf16",
        help="multiply the loss so that small gradients do not vanish in 16 bits, 0 for not at all; they are divided again before clipping and use",
    ),
    Option(
        name="--auto-loss-scaling",
        group=_PLAN,
        type=bool,
        excludes="--loss-scaling",
        help="double the factor every 2,000 updates; skip an update that overflows, and halve it",
    ),
    Option(name="--seed", group=_PLAN, type=readers.seed, default=0, help="of initial weights, order, augmentation and held-out images"),
    Option(
        name="--deterministic",
        group=_PLAN,
        key="trainer.deterministic",
        type=bool,
        help="let GPUs use deterministic kernels only; order and augmentation go by the seed in any case",
    ),
    #
    Option(
        name="--learning-rate",
        group=_TRAINING,
        type=positive(float),
        metavar="X",
        shown=f"0.1 x samples per weight update / 32 for sizes {CIFAR_SIZES[0]} to {CIFAR_SIZES[-1]}, else 0.02 x the same; for "
        + ", ".join(f"{optimizer} {rate:g}" for optimizer, rate in LEARNING_RATES.items()),
        help="peak learning rate",
    ),
    Option(
        name="--base-learning-rate",
        group=_TRAINING,
        type=int,
        excludes="--learning-rate",
        help="exponent N: the learning rate is 2^N x the value of --batch-size",
    ),
    Option(
        name="--initial-learning-rate",
        group=_TRAINING,
        type=positive(float),
        metavar="X",
        excludes=("--learning-rate", "--base-learning-rate"),
        help="the learning rate is X times the samples of a weight update",
    ),
    Option(
        name="--learning-rate-decay",
        group=_TRAINING,
        type=readers.numbers,
        metavar="X,...",
        shown="1,0.1,0.01",
        help="multipliers of a stepped schedule; this or the next option selects it, as --lr-schedule stepped does",
    ),
    Option(
        name="--learning-rate-schedule",
        group=_TRAINING,
        type=readers.numbers,
        metavar="X,...",
        shown="0.5,0.75",
        help="shares of the run after which the next multiplier holds",
    ),
    Option(
        name="--lr-schedule",
        group=_TRAINING,
        key="model.schedule",
        type=choice("const", "stepped", "linear", "cosine", "polynomial", "exponential"),
        shown="linear",
        help="how the learning rate moves, with every weight update",
    ),
    Option(
        name="--warmup-epochs",
        group=_TRAINING,
        key="model.warmup_epochs",
        type=positive(float, zero=True),
        metavar="X",
        shown="a fifth of the run; none for const and stepped",
        help="epochs in which the learning rate rises",
    ),
    Option(
        name="--warmup-mode",
        group=_TRAINING,
        key="model.warmup_mode",
        type=choice("shift", "mask"),
        shown="shift",
        help="the decay begins after the warm-up (shift) or with the run (mask)",
    ),
    Option(name="--lr-staircase", group=_TRAINING, key="model.staircase", type=bool, help="hold the learning rate over every epoch"),
    Option(
        name="--lr-decay-epochs",
        group=_TRAINING,
        key="model.decay_epochs",
        type=positive(float),
        metavar="X",
        shown="to the end of the run",
        help="epochs that linear, cosine, polynomial and exponential take to reach their end",
    ),
    Option(
        name="--lr-end-ratio",
        group=_TRAINING,
        key="model.final_fraction",
        type=positive(float, zero=True),
        metavar="X",
        shown="0.02",
        help="the learning rate at their end, as a share of the peak",
    ),
    Option(name="--lr-power", group=_TRAINING, key="model.power", type=positive(float), metavar="X", shown="2", help="of polynomial"),
    Option(
        name="--lr-decay-rate",
        group=_TRAINING,
        key="model.decay_rate",
        type=positive(float),
        metavar="X",
        excludes="--lr-end-ratio",
        help="of exponential: multiplier per epoch, in place of --lr-end-ratio",
    ),
    Option(
        name="--epochs",
        group=_TRAINING,
        key="trainer.max_epochs",
        type=positive(),
        shown=f"{EPOCHS}; {EPOCHS_ON_SAMPLE} on SAMPLE",
        help="passes over the training set",
        aliases=("--num-epochs",),
    ),
    Option(
        name="--weight-updates-per-epoch",
        group=_TRAINING,
        type=positive(),
        shown="all that the training set has",
        excludes="--limit-train-batches",
        help="end every epoch after N weight updates",
    ),
    Option(name="--max-steps", group=_TRAINING, key="trainer.max_steps", type=positive(), help="end after N weight updates"),
    Option(
        name="--weight-decay",
        group=_TRAINING,
        key="model.weight_decay",
        type=positive(float, zero=True),
        metavar="X",
        shown="0; 0.01 for adamw and lamb",
        help="decoupled: a weight update is -lr(O(g) + X w), O being the optimizer",
    ),
    Option(
        name="--l2-regularization",
        group=_TRAINING,
        key="model.l2_regularization",
        type=positive(float, zero=True),
        metavar="X",
        shown="1e-4, but 0 for adamw and lamb or beside --weight-decay; original: 0",
        help="through the optimizer: a weight update is -lr O(g + X w)",
    ),
    Option(name="--decay-all", group=_TRAINING, key="model.decay_all", type=bool, help="both on norms and biases as well"),
    Option(
        name="--optimizer",
        group=_TRAINING,
        key="model.optimizer",
        type=choice("sgd", "adamw", "rmsprop", "lars", "lamb"),
        default="sgd",
        help="optimizer",
    ),
    Option(
        name="--momentum",
        group=_TRAINING,
        key="model.momentum",
        type=positive(float, zero=True),
        metavar="X",
        shown="0.9 for sgd (Nesterov's) and lars, 0 for rmsprop; original: none",
        help="momentum",
    ),
    Option(name="--no-nesterov", group=_TRAINING, key="model.nesterov", sets=False, type=bool, help="plain momentum for sgd"),
    Option(
        name="--label-smoothing",
        group=_TRAINING,
        key="model.label_smoothing",
        type=positive(float, zero=True),
        metavar="X",
        default=0.0,
        help="share",
    ),
    Option(
        name="--mixup",
        group=_TRAINING,
        key="model.mixup",
        type=positive(float),
        metavar="ALPHA",
        help="mix the training images of a micro-batch with each other, in shares from Beta(ALPHA, ALPHA), and their labels",
    ),
    Option(
        name="--cutmix",
        group=_TRAINING,
        key="model.cutmix",
        type=positive(float),
        metavar="ALPHA",
        help="the same with rectangles cut from each other; beside --mixup each micro-batch gets one of them by chance",
    ),
    Option(
        name="--ema",
        group=_TRAINING,
        type=positive(float, zero=True),
        metavar="DECAY",
        help="keep an exponential moving average of the weights, validate it, and save it as the checkpoints' weights",
    ),
    Option(
        name="--limit-train-batches",
        group=_TRAINING,
        key="trainer.limit_train_batches",
        type=readers.fraction_or_count("micro-batches", least=1),
        help="micro-batches per epoch, or with a decimal point a share of the training set",
    ),
    Option(
        name="--limit-val-batches",
        group=_TRAINING,
        key="trainer.limit_val_batches",
        type=readers.fraction_or_count("micro-batches"),
        help="the same for validation",
    ),
    Option(name="--training", group=_TRAINING, type=bool, default=True, help="false scores checkpoints, or random weights, instead"),
    Option(name="--validation", group=_TRAINING, type=bool, default=True, help="false trains only"),
    Option(name="--no-validation", group=_TRAINING, type=bool, help="the same as --validation false"),
    Option(
        name="--valid-per-epoch",
        group=_TRAINING,
        key="events.validations",
        type=readers.frequency,
        metavar="X",
        shown="1; with --ckpts-per-epoch 0",
        excludes="--no-validation",
        help="validations per epoch while training: a number, or a fraction such as 1/2, after every second one",
        aliases=("--validations-per-epoch",),
    ),
    Option(name="--test", group=_TRAINING, key="then_test", type=bool, help="score the test set as well, at the end"),
    Option(
        name="--data-benchmark",
        group=_TRAINING,
        type=bool,
        help="do not train: say how many images a second the loader reads and the network learns from, and which of them holds up the other",
    ),
    #
    Option(
        name="--processes",
        group=_RUN,
        type=positive(),
        shown="1, or torchrun's",
        help="processes that share out the replicas and stages: a divisor of R, or R times a divisor of the stages",
    ),
    Option(
        name="--pipeline-validation-model",
        group=_RUN,
        type=bool,
        help="validate over the stages where they are; without it each process fetches the whole network and takes a share",
    ),
    Option(
        name="--validation-num-replicas",
        group=_RUN,
        key="trainer.strategy.validation_replicas",
        type=positive(),
        shown="all",
        help="whole networks that validate at once, at most one per process: the same numbers",
    ),
    *MACHINE_OPTIONS,
    Option(
        name="--steps-per-log",
        group=_RUN,
        key="trainer.log_every_n_steps",
        type=positive(),
        default=10,
        help="rows of metrics.csv; original: 1",
    ),
    Option(
        name="--logs-per-epoch",
        group=_RUN,
        key="events.logs",
        type=readers.frequency,
        metavar="X",
        excludes="--steps-per-log",
        help="the same by epoch: a number, or a fraction such as 1/2; 0 is one row at the end",
    ),
    Option(
        name="--wandb",
        group=_RUN,
        key="wandb",
        type=bool,
        help="log to Weights & Biases as well; with WANDB_MODE=offline into --output-dir, without a network",
    ),
    Option(name="--wandb-run-name", group=_RUN, key="wandb_run_name", metavar="NAME", shown="chosen there", help="name of the run there"),
    Option(name="--wandb-tags", group=_RUN, key="wandb_tags", type=readers.names, metavar="NAMES", help="its tags there, with commas"),
    Option(
        name="--output-dir",
        group=_RUN,
        type=readers.path,
        metavar="DIR",
        shown="results",
        help="gets config.yaml, metrics.csv and checkpoints/",
    ),
    Option(
        name="--log-dir", group=_RUN, type=readers.path, metavar="DIR", excludes="--output-dir", help="the original's word for --output-dir"
    ),
    Option(
        name="--log_dir_string",
        group=_RUN,
        type=readers.path,
        metavar="NAME",
        help="put the output into this sub-directory of --output-dir",
    ),
    *CHECKPOINT_OPTIONS,
    Option(
        name="--ckpts-per-epoch",
        group="checkpoints",
        key="events.checkpoints",
        type=readers.frequency,
        metavar="X",
        excludes="--checkpoint-every",
        help="keep checkpoints, so many per epoch: a number, a fraction such as 1/4, or 0; they are all scored at the end",
    ),
    Option(
        name="--first-ckpt-epoch",
        group="checkpoints",
        key="events.first_checkpoint_epoch",
        type=positive(float, zero=True),
        metavar="X",
        help="epochs before the first of them",
    ),
    Option(
        name="--checkpoint-input-dir",
        group="checkpoints",
        key="checkpoint_input_dir",
        type=readers.path,
        metavar="DIR",
        help="score every checkpoint there, in the order of their weight updates, instead",
    ),
    Option(
        name="--clean-dir", group="checkpoints", key="clean_dir", type=bool, help="delete those of --ckpts-per-epoch once they are scored"
    ),
    #
    Option(
        name="--fp-exceptions",
        group="",
        refused="an IPU's floating-point exceptions do not exist here; fit --trainer.detect_anomaly true stops at the first NaN in a gradient",
    ),
    Option(name="--half-partials", group="", refused="16-bit partial sums are an IPU's; sums are kept in 32 bits here"),
    Option(name="--simulation", group="", refused="simulates an IPU's tiles; here the plan runs on the device that is there"),
    Option(
        name="--ckpt",
        group="",
        refused="checkpoints go to OUTPUT_DIR/checkpoints, last.ckpt being the latest; choose the place with --output-dir",
    ),
    Option(name="--syncless-collectives", group="", refused=_COMPILER),
    Option(name="--max-bytes-per-tile", group="", refused=_COMPILER),
    Option(name="--get-reports", group="", refused="the reports of an IPU's compiler do not exist here (the original ignored this option)"),
)


def settle(given: dict[str, Any]) -> list[str]:
    """LightningCLI arguments for the options that were given; raises UsageError where they do not fit together.

    Checkpoints that are only scored bring their own settings: then nothing has a default here.
    """
    given = _with_norm_layer(given)
    of_checkpoints = not given.get("training", True) and "checkpoint_input_dir" in given
    settings = settings_of(given, [option for option in OPTIONS if not of_checkpoints or option.dest in given])
    _settle_data(given, settings, of_checkpoints=of_checkpoints)
    batch, updates = _settle_plan(given, settings)
    if not of_checkpoints:
        _settle_learning_rate(given, settings, batch=batch, samples_per_update=updates)
    _settle_phases(given, settings)

    if "prng" in given and precision.full_name(given.get("precision", "auto")) != "16.16":
        raise UsageError(f"--prng concerns 16-bit weights: it needs --precision 16.16, not {given.get('precision', 'auto')}")
    if given.get("loss_scaling") == 0:
        settings["trainer.strategy.loss_scaling"] = 1.0 if given.get("half_type") == "fp16" else None
    if "auto_loss_scaling" in given:
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


def _with_norm_layer(given: dict[str, Any]) -> dict[str, Any]:
    """The options with the original's dictionary of a norm layer as options of its own."""
    if "norm_layer" not in given:
        return given
    given = dict(given)
    layer = given.pop("norm_layer")
    if layer["name"] == "group_norm":
        return {**given, "norm_type": "group", "norm_groups": layer["num_groups"]}
    if layer["name"] == "custom_batch_norm":
        return {**given, "norm_type": "batch", "norm_momentum": layer.get("momentum", 0.97)}
    return {**given, "norm_type": "batch", "micro_batch_momentum": layer.get("momentum", 0.99)}


def _settle_plan(given: dict[str, Any], settings: dict[str, Any]) -> tuple[int, int]:
    """Micro-batch, accumulation and stages; returns the batch over all replicas and the samples of a weight update."""
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
        raise UsageError(f"--dbn-replica-group-size {group} must divide --replication-factor {replicas}: {_divisors(replicas)}")
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

    splits, ipus = given.get("pipeline_splits"), given.get("num_ipus")
    if ipus is not None and ipus % replicas:
        raise UsageError(f"--num-ipus {ipus} must be a multiple of --replication-factor {replicas}: {_multiples(replicas)}, ...")
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
            f" {_multiples(replicas, first=2)}, ... or --pipeline-splits"
        )
    if "pipeline_schedule" in given and "pipeline" not in given:
        raise UsageError(f"--pipeline-schedule {given['pipeline_schedule']} needs --pipeline")
    if splits:
        settings["trainer.strategy.pipeline_splits"] = _split_names(splits, settings.get("model.size", "20"))
    if stages > 1:
        if not splits:
            settings["trainer.strategy.num_stages"] = stages
        settings["trainer.strategy.pipeline_schedule"] = given.get("pipeline_schedule", "1F1B") if "pipeline" in given else "Sequential"
    if "pipeline_validation_model" in given:
        if stages == 1:
            raise UsageError("--pipeline-validation-model needs --pipeline with at least two stages")
        settings["trainer.strategy.pipeline_validation"] = True
    if "processes" in given:
        try:
            Placement(plan=Plan(replication_factor=replicas // group, num_stages=stages), processes=given["processes"])
        except PlanError as error:
            raise UsageError(f"--processes: {error}") from None
        settings["trainer.devices"] = given["processes"]
    return micro_batch * replicas, micro_batch * replicas * accumulation


def _split_names(splits: list[str], size: str) -> list[str]:
    """Submodules that begin a stage, where the original's names of layers were given."""
    try:
        return [module_name(split, size) or split for split in splits]
    except ValueError as error:
        raise UsageError(f"--pipeline-splits {error}") from None


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


def _multiples(number: int, *, first: int = 1) -> str:
    return ", ".join(str(number * factor) for factor in range(first, first + 3))


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


# -- what needs torch ---------------------------------------------------------------------------------------------------------


def start(arguments: list[str], *, given: dict[str, Any]) -> int:
    """Run LightningCLI with this package's classes; returns the exit status."""
    from cifar_ipu.data import ImageDataModule, settle_data_set
    from lightning_ipu.command.run import Command, run_command
    from resnet_ipu.imagenet.module import ImageNetDataModule
    from resnet_ipu.module import ResNetModule

    try:
        imagenet = _is_imagenet(arguments)
    except UserError as error:
        once.report(str(error), prog="resnet_ipu")
        return 2
    command = Command(
        prog="resnet_ipu",
        model_class=ResNetModule,
        datamodule_class=ImageNetDataModule if imagenet else ImageDataModule,
        links=[("num_classes", "num_classes"), ("in_channels", "in_channels"), ("image_size", "image_size")],
        facts=_facts,
        epochs=lambda data: (EPOCHS_ON_SAMPLE, "chosen for the embedded sample") if data.used_sample else (EPOCHS, None),
        note=lambda line: line.datamodule.caveat,
        **({} if imagenet else {"settle": settle_data_set}),
    )
    if given.get("dataset") == "IMAGENET" and "synthetic_data" in given and "image_size" not in given:
        import torch

        on_gpu = given.get("device") == "gpu" or given.get("device", "auto") == "auto" and torch.cuda.is_available()
        arguments = [*arguments, f"--data.synthetic_image_size={IMAGENET_SIZE if on_gpu else IMAGENET_SIZE_ON_CPU}"]
    if not given.get("training", True) and (hardware := given.get(configs.HARDWARE)):  # a run without training has no table
        print(f"no effect here: {configs.listed(hardware)} ({configs.HARDWARE})")
    if "data_benchmark" in given:
        from resnet_ipu.throughput import DataBenchmark

        return run_command(command, arguments, line=DataBenchmark)
    return run_command(command, arguments)


def _is_imagenet(arguments: list[str]) -> bool:
    """Whether LightningCLI's arguments are about images in folders or shards, which have a data module of their own.

    As everywhere, what is typed overrides a configuration, and a configuration overrides a checkpoint.
    """

    from lightning_ipu.command.lifecycle import SETTINGS, latest_checkpoint
    from lightning_ipu.command.output import CHECKPOINTS
    from lightning_ipu.files import read_checkpoint

    words = dict(pairs(arguments))
    said, directory = value_of(arguments, "data", "dataset"), value_of(arguments, "trainer", "default_root_dir")
    path = words.get("--ckpt_path")
    if path is None and "--checkpoint_input_dir" in words:
        path = latest_checkpoint(Path(words["--checkpoint_input_dir"]))
    if path == "last" or words.get("--resume") == "true" and path is None:
        path = latest_checkpoint(Path(directory or "results") / CHECKPOINTS)
    if path is not None and Path(path).is_file():
        trained_on = read_checkpoint(path).get(SETTINGS, {}).get("data.dataset")
        wanted = said or trained_on
        if trained_on is not None and wanted != trained_on and "IMAGENET" in (wanted, trained_on):
            raise UsageError(
                f"data.dataset {wanted}, but {path} was trained on {trained_on}: leave data.dataset out, or give another checkpoint"
            )
        said = wanted
    return str(said or "").upper() == "IMAGENET"  # the wrong case is refused later


def _facts(line: CommandLine) -> list[tuple[str, str]]:
    """Rows for the table: network, data, device, precision, and what options were carried out as or have no effect."""
    data, size, given = line.datamodule, line.model.hparams.size, line.short_options
    network = f"ResNeXt-{size[1:]} (32x4d)" if size.startswith("x") else size if size in TOY_MODELS else f"ResNet-{size}"
    images = f"{data.num_train_samples:,} to train on, {data.num_validation_samples:,} to validate on"
    classes = [("classes", data.class_summary)] if data.dataset_name == "IMAGENET" else []
    extra = []
    if (group := given.get("dbn_replica_group_size", 1)) > 1:
        extra.append(("batch norms", f"over groups of {group} replicas, carried out as one replica with the group's samples"))
    if given.get("dataset") == "IMAGENET" and "synthetic_data" in given and "image_size" not in given:
        sizes = f"{IMAGENET_SIZE} on a GPU, {IMAGENET_SIZE_ON_CPU} on a CPU"
        extra.append(("image size", f"{data.image_size} pixels; {sizes}, --image-size chooses"))
    if hardware := given.get(configs.HARDWARE):
        extra.append(("no effect here", f"{configs.listed(hardware)} ({configs.HARDWARE})"))
    return [("network", network), ("data", data.description), ("images", images), *classes, *line.machine_facts(), *extra]


_SHARDS = "one per 100 MB or so, at most 1024"
CONVERT_OPTIONS = (
    Option(name="--train-shards", group="shards", type=positive(), shown=_SHARDS, help="files to spread the training images over"),
    Option(name="--validation-shards", group="shards", type=positive(), shown=_SHARDS, help="files to spread the validation images over"),
    Option(name="--seed", group="shards", type=readers.seed, default=0, help="of the order in which images are spread over the files"),
    Option(
        name="--on-bad-image",
        group="shards",
        type=choice("raise", "skip"),
        default="raise",
        help="end at an image that is none or cut off; or decode all images first, leave out the bad ones and list them at the end",
    ),
    Option(name="--num-workers", group="run", type=positive(), shown="the cores it may use", help="processes"),
)


def _convert(words: list[str]) -> int:
    """Make TFRecord shards of folders of images."""
    what = """\
Make TFRecord shards of the folders SRC/train and SRC/val, which hold a folder of images for each class. The bytes of the images are
copied as they are. Each shard is read back and compared, and there as a whole or not at all: after an interruption the same command
goes on."""
    parser = build_parser(prog="resnet_ipu convert", description=what, epilog="", options=CONVERT_OPTIONS, version=_version)
    parser.usage = "resnet_ipu convert SRC DST [options]"
    places, rest = words[:2], words[2:]
    try:
        if any(word.startswith("-") for word in places):
            places, rest = [], words
        given = parse(rest, parser=parser, options=CONVERT_OPTIONS)
        if len(places) < 2 or not all(place.strip() for place in places):
            raise UsageError("give the folder to read and the one to write to: resnet_ipu convert SRC DST")
        from lightning_ipu.command.messages import keep_quiet
        from resnet_ipu.convert import convert

        shards = {"train": given.get("train_shards"), "validation": given.get("validation_shards")}
        workers = given.get("num_workers", machine.usable_cores())
        with keep_quiet("resnet_ipu convert"):
            convert(
                Path(places[0]).expanduser(),
                Path(places[1]).expanduser(),
                shards=shards,
                seed=given.get("seed", 0),
                workers=workers,
                on_bad_image=given.get("on_bad_image", "raise"),
            )
    except (UserError, OSError) as error:
        once.report(" ".join(str(error).split()), prog="resnet_ipu convert")
        return 2
    except KeyboardInterrupt:
        print("resnet_ipu convert: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if once.is_answered_by_the_first(words):
        return 0
    if words[:1] == ["average"]:
        return cli.average(words[1:], prog="resnet_ipu", version=_version)
    if words[:1] == ["convert"]:
        return _convert(words[1:])
    parser = build_parser(prog="resnet_ipu", description=DESCRIPTION, epilog=EPILOG, options=OPTIONS, version=_version)
    return cli.main(words, parser=parser, options=OPTIONS, settle=settle, start=start, folder=CONFIGS)


def _version() -> str:
    from lightning_ipu import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
