"""The short options of ``python -m cifar_ipu``, one row each, and the recipes that their defaults come from; nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

from cifar_ipu.legacy import LEGACY_OPTIONS
from lightning_ipu.command import readers, rows
from lightning_ipu.command.options import CHECKPOINT_OPTIONS, MACHINE_OPTIONS, RUN, Option
from lightning_ipu.command.readers import choice, positive
from lightning_ipu.command.rows import DATA, NETWORK, PLAN, TRAINING

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
Without --dataset it trains on CIFAR-10, from the disk or downloaded; else on SAMPLE, images of Fashion-MNIST in the package."""

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

OPTIONS = (
    Option(name="--config", group="start from", metavar="FILE", help="a file of options, one a line, which the command line overrides; the package's own are for fit --config NAME"),
    Option(name="--network", group=NETWORK, type=choice(*LAYERS), shown="keras; whitened with --recipe fast", help="keras is Keras' CIFAR-10 example, estimator has a third convolution in its first block, whitened is quick to train"),
    rows.no_channels_last("images plane by plane"),
    #
    Option(name="--dataset", group=DATA, key="data.dataset", type=choice(*DATA_SETS), shown="CIFAR-10, else SAMPLE", help="data set by its name"),
    Option(name="--data-dir", group=DATA, key="data.data_dir", type=readers.path, metavar="DIR", default="data", help=rows.DATA_DIR),
    Option(name="--generated-data", group=DATA, type=bool, help="make up images in the data set's shape, of classes that can be told apart; original: all zeros"),
    Option(name="--validation-split", group=DATA, key="data.validation_split", type=readers.fraction_or_count("images"), metavar="SHARE", default=0, help="share or number of training images to hold out and validate on after every epoch"),
    Option(name="--augmentation", group=DATA, type=bool, shown="with --recipe fast", help="random crops and flips of training images"),
    Option(name="--no-augmentation", group=DATA, type=bool, excludes="--augmentation", help="train on the images as they are"),
    Option(name="--crop-padding", group=DATA, type=positive(zero=True), shown="2", help="pixels of border that crops are taken from"),
    #
    Option(name="--batch-size", group=PLAN, type=positive(), also=("--micro-batch-size",), shown="keras 32, estimator 16; fast 64, whitened 128", help="samples at once on one replica, the micro-batch"),
    Option(name="--replicas", group=PLAN, type=positive(), also=("--replication-factor",), shown="1, or as many as --ipus asks for", help=rows.REPLICAS),
    Option(name="--ipus", group=PLAN, type=positive(), also=("--num-ipus",), shown="one per replica and stage; original: 2", help="virtual IPUs: replicas, or with --pipeline stages x replicas"),
    Option(name="--gradient-accumulation-count", group=PLAN, type=positive(), also=("--gradient-accumulation-factor",), shown=f"1; {ACCUMULATION_IN_A_PIPELINE} with --pipeline", help="A, micro-batches per replica and weight update"),
    rows.PIPELINE,
    Option(name="--model-shard-position", group=PLAN, type=positive(), shown=", ".join(f"{name} {position}" for name, position in SHARD_POSITIONS.items()), help="layer that begins the second of two stages"),
    Option(name="--pipeline-splits", group=PLAN, type=readers.names, metavar="NAMES", excludes="--model-shard-position", help="layers that each begin a new stage, such as network.conv3,network.dense1"),
    rows.PIPELINE_SCHEDULE,
    Option(name="--batches-per-step", group=PLAN, key="trainer.strategy.device_iterations", type=positive(), shown=f"{ITERATIONS}; {ITERATIONS_WHEN_PROFILED} with --profile; original: 100", help=rows.ITERATIONS),
    rows.PRECISION,
    rows.seed("initial weights, order, augmentation and dropout"),
    #
    Option(name="--recipe", group=TRAINING, type=choice(*RECIPES), default="original", help="original: SGD, 0.01, no augmentation, pixels from 0 to 1; fast: a rate that rises and falls, label smoothing, crops and flips, few epochs"),
    Option(name="--epochs", group=TRAINING, key="epochs", type=positive(float), metavar="X", shown=f"keras 100, estimator 150; {EPOCHS_IN_A_HURRY} with --recipe fast; {EPOCHS_ON_SAMPLE} on SAMPLE", help="passes over the training set; fractions are turned into weight updates"),
    Option(name="--optimizer", group=TRAINING, key="model.optimizer", type=choice("sgd", "adamw", "rmsprop", "lars", "lamb"), shown="sgd; fast keras and estimator: adamw", help="what turns gradients into weight updates"),
    Option(name="--learning-rate", group=TRAINING, key="model.learning_rate", type=positive(float), metavar="X", shown="sgd 0.01, fast 0.2, each x samples per weight update / the recipe's --batch-size; adamw 0.002", help="peak of the learning rate"),
    Option(name="--momentum", group=TRAINING, key="model.momentum", type=positive(float, zero=True), metavar="X", shown="original 0, fast 0.9", help="share of the last weight update's direction that the next one keeps: of sgd, Nesterov's; of rmsprop and lars"),
    Option(name="--lr-schedule", group=TRAINING, key="model.schedule", type=choice("const", "linear", "cosine"), shown="original const; fast linear, after a rise over a fifth of the run", help="how the learning rate moves, with every weight update"),
    Option(name="--l2-regularization", group=TRAINING, key="model.l2_regularization", type=positive(float, zero=True), metavar="X", shown="original 0, fast 5e-4", help="penalty through the optimizer: a weight update is -lr O(g + X w); norms and biases have none"),
    Option(name="--weight-decay", group=TRAINING, key="model.weight_decay", type=positive(float, zero=True), metavar="X", shown="0; fast adamw 0.01", help="decay of the weights beside the optimizer's step: a weight update is -lr(O(g) + X w)"),
    Option(name="--label-smoothing", group=TRAINING, key="model.label_smoothing", type=positive(float, zero=True), metavar="X", shown="original 0, fast 0.1", help="share of the target spread over all classes"),
    Option(name="--mirror-evaluation", group=TRAINING, key="model.mirror_evaluation", type=bool, help="score the mean of an image's and its mirror image's logits"),
    Option(name="--train-only", group=TRAINING, type=bool, help="do not score the test set at the end"),
    Option(name="--test-only", group=TRAINING, type=bool, excludes="--train-only", help="do not train: score the latest checkpoint in --output-dir, with the settings it was trained with"),
    #
    rows.processes(),
    *MACHINE_OPTIONS,
    Option(name="--log-interval", group=RUN, key="log_interval", type=positive(float), metavar="SECONDS", shown="10, or a terminal's moving line; original: 3", help="seconds between lines that say how far the run is"),
    Option(name="--summary-interval", group=RUN, key="trainer.log_every_n_steps", type=positive(), default=10, help=f"{rows.LOG_STEPS}; original: 1"),
    rows.output_dir("config.yaml, metrics.csv, checkpoints/ and the reports; original: a temporary one", key="trainer.default_root_dir", aliases=("--model-dir",)),
    Option(name="--profile", group=RUN, type=bool, help="write train_report.txt and eval_report.txt into --output-dir: which operators took how long"),
    *CHECKPOINT_OPTIONS,
    *LEGACY_OPTIONS,
)  # fmt: skip
