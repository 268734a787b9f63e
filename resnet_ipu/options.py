"""The short options of ``python -m resnet_ipu``, one row each; nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

from lightning_ipu.command import readers, rows
from lightning_ipu.command.options import CHECKPOINT_OPTIONS, MACHINE_OPTIONS, RUN, Option
from lightning_ipu.command.readers import choice, positive
from lightning_ipu.command.rows import DATA, NETWORK, PLAN, TRAINING
from lightning_ipu.precision import names as precision
from resnet_ipu.legacy import LEGACY_OPTIONS

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
Without --dataset it trains on CIFAR-10, from the disk or downloaded; else on SAMPLE, images of Fashion-MNIST in the package."""

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


_size.choices = (*CIFAR_SIZES, *IMAGENET_SIZES, *TOY_MODELS)
_dataset.choices = DATA_SETS

OPTIONS = (
    Option(name="--config", group="start from", metavar="NAME", help="a configuration in the package, or a file like them; options on the command line override it"),
    Option(name="--size", group=NETWORK, key="model.size", type=_size, shown="20; 50 for IMAGENET", help="the network by its number of layers; x is ResNeXt 32x4d", aliases=("--model-name",)),
    Option(name="--stem", group=NETWORK, key="model.stem", type=choice("cifar", "imagenet"), shown="cifar up to 64 pixels", help="first layers: 3x3 with stride 1, or 7x7 with stride 2 and max-pooling", rare=True),
    Option(name="--norm-type", group=NETWORK, key="model.norm_type", type=choice("batch", "group", "none"), default="batch", help="normalisation layers: over the micro-batch, over groups of channels, or none"),
    Option(name="--norm-groups", group=NETWORK, key="model.norm_groups", type=positive(), shown="16", help="groups of --norm-type group", rare=True),
    Option(name="--norm-momentum", group=NETWORK, type=positive(float, zero=True), metavar="X", shown="0.9 for a micro-batch", help="share of batch norm's running statistics that a weight update keeps, however many micro-batches it has", rare=True),
    Option(name="--shortcut-type", group=NETWORK, key="model.shortcut_type", type=choice("A", "B", "C"), shown="A for 8 to 110, B for the others; original: B", help="residual shortcut where the shape changes: A zero-padded, B 1x1 convolution; C convolution everywhere", rare=True),
    Option(name="--pretrained", group=NETWORK, key="model.pretrained", type=readers.path, metavar="FILE", help="start from a state_dict under torchvision's names, such as its .pth files"),
    Option(name="--no-zero-init", group=NETWORK, key="model.zero_init_last_norm", sets=False, type=bool, help="do not set the last norm's weight of each block to 0, with which a block begins as its shortcut alone", rare=True),
    rows.no_channels_last("images plane by plane"),
    #
    Option(name="--dataset", group=DATA, key="data.dataset", type=_dataset, shown="CIFAR-10, else SAMPLE", help="data set by its name; IMAGENET is any images in class folders or TFRecord shards"),
    Option(name="--data-dir", group=DATA, key="data.data_dir", type=readers.path, metavar="DIR", default="data", help=rows.DATA_DIR, aliases=("--dataset-path",)),
    Option(name="--validation-split", group=DATA, key="data.validation_split", type=readers.fraction_or_count("images"), metavar="SHARE", shown="0.1; SAMPLE has 500 images of its own", help="share or number of training images to validate on; the test set is left for --test"),
    Option(name="--validate-on-test", group=DATA, key="data.validation_on_test", type=bool, excludes="--validation-split", help="validate on the test set, train on all else", rare=True),
    Option(name="--synthetic-data", group=DATA, key="data.synthetic", type=choice("host", "ipu"), help="made-up images: host makes them in the loader, ipu on the device, so that nothing is loaded"),
    Option(name="--no-augmentation", group=DATA, key="data.augment", sets=False, type=bool, help="no random crops and flips, and no --auto-augment, --color-jitter, --random-erasing"),
    Option(name="--auto-augment", group=DATA, key="data.auto_augment", type=choice("randaugment", "trivialaugment"), excludes="--no-augmentation", help="after crop and flip, two random operations on each training image, or one"),
    Option(name="--color-jitter", group=DATA, key="data.color_jitter", type=positive(float), metavar="X", excludes="--no-augmentation", help="vary brightness, contrast and saturation of training images by up to the share X each", rare=True),
    Option(name="--random-erasing", group=DATA, key="data.random_erasing", type=positive(float), metavar="P", excludes="--no-augmentation", help="fill a rectangle of a training image with the mean colour, with probability P", rare=True),
    Option(name="--num-workers", group=DATA, key="data.num_workers", type=positive(zero=True), shown="0; for IMAGENET the cores it may use, at most 16", help="processes that load data, 0 for none beside the training one; original: 16"),
    Option(name="--image-size", group=DATA, key="data.image_size", type=positive(), shown=f"{IMAGENET_SIZE}; of --synthetic-data on a CPU {IMAGENET_SIZE_ON_CPU}", help="of IMAGENET, and of --synthetic-data: side in pixels"),
    Option(name="--fast-decode", group=DATA, key="data.fast_decode", type=bool, excludes="--no-augmentation", help="of IMAGENET: decode training JPEGs at half scale where the crop has at least twice the pixels each way that are needed; faster with large images", rare=True),
    Option(name="--no-eight-bit-transfer", group=DATA, key="data.eight_bit_transfer", sets=False, type=bool, excludes="--eight-bit-transfer", help="of IMAGENET: normalise on the host instead, which moves four times the bytes", rare=True),
    Option(name="--on-bad-image", group=DATA, key="data.on_bad_image", type=choice("raise", "skip"), shown="raise", help="of IMAGENET, for an image that cannot be read: raise ends with its path; skip decodes all before the run, leaves the bad ones out and lists them"),
    Option(name="--num-classes", group=DATA, key="data.num_classes", type=positive(), shown="1000", help="classes of shards that say nothing about it", rare=True),
    Option(name="--train-shards", group=DATA, key="data.train_shards", type=positive(), shown="as their names say", help="training shards to expect", rare=True),
    Option(name="--validation-shards", group=DATA, key="data.validation_shards", type=positive(), shown="as their names say", help="validation shards to expect", rare=True),
    #
    Option(name="--batch-size", group=PLAN, type=positive(), shown="32", excludes="--micro-batch-size", help="samples over all replicas, micro-batch x R, accumulation not counted; a multiple of --replication-factor"),
    Option(name="--micro-batch-size", group=PLAN, type=positive(), help="instead of --batch-size: samples at once on one replica"),
    Option(name="--replication-factor", group=PLAN, key="trainer.strategy.replication_factor", type=positive(), default=1, help=rows.REPLICAS, aliases=("--num-replicas",)),
    rows.accumulation(aliases=("--gradient-accumulation-count",)),
    Option(name="--global-batch-size", group=PLAN, type=positive(), excludes="--gradient-accumulation-factor", help="instead of A: samples of a weight update; A is rounded to what comes nearest", rare=True),
    Option(name="--dbn-replica-group-size", group=PLAN, type=positive(), shown="1", help="replicas whose batch norms share their statistics: carried out as R/N replicas of N times the micro-batch", rare=True),
    Option(name="--num-ipus", group=PLAN, type=positive(), shown="one per replica and stage", help="virtual IPUs, a multiple of R: N/R of them are the stages of each replica"),
    rows.PIPELINE,
    Option(name="--pipeline-splits", group=PLAN, key="trainer.strategy.pipeline_splits", type=readers.names, metavar="NAMES", shown="balanced", help="submodules that begin a new stage, with commas, such as network.layer2,network.layer3"),
    rows.PIPELINE_SCHEDULE,
    Option(name="--validation-micro-batch-size", group=PLAN, type=positive(), shown="the micro-batch, at least 100", help="samples that are validated at once; results do not depend on it", rare=True),
    rows.recompute(aliases=("--recomputation",)),
    Option(name="--batches-per-step", group=PLAN, key="trainer.strategy.device_iterations", type=positive(), default=16, help=f"{rows.ITERATIONS}; original: 250"),
    rows.PRECISION,
    Option(name="--half-type", group=PLAN, key="half_type", type=choice(*precision.HALF_TYPES), default="bf16", help="the 16-bit type; fp16 is for GPUs and --precision 16.16 or 16.32", rare=True),
    Option(name="--no-prng", group=PLAN, key="trainer.strategy.stochastic_rounding", sets=False, type=bool, excludes="--prng", help="in 16.16 round weight updates to nearest, not stochastically: changes below the spacing of 16-bit numbers are lost", rare=True),
    Option(name="--loss-scaling", group=PLAN, key="trainer.strategy.loss_scaling", type=positive(float, zero=True), metavar="X", shown="automatic in fp16, none in bf16", help="multiply the loss so that small gradients do not vanish in 16 bits, 0 for not at all; they are divided again before clipping and use", rare=True),
    Option(name="--auto-loss-scaling", group=PLAN, type=bool, shown="with --half-type fp16", excludes="--loss-scaling", help="double the loss's factor every 2,000 updates; skip an update that overflows, and halve it", rare=True),
    rows.seed("initial weights, order, augmentation and held-out images"),
    Option(name="--deterministic", group=PLAN, key="trainer.deterministic", type=bool, help="let GPUs use deterministic kernels only; order and augmentation go by the seed in any case", rare=True),
    #
    Option(name="--learning-rate", group=TRAINING, type=positive(float), metavar="X", shown=f"0.1 x samples per weight update / 32 for sizes {CIFAR_SIZES[0]} to {CIFAR_SIZES[-1]}, else 0.02 x the same; for " + ", ".join(f"{optimizer} {rate:g}" for optimizer, rate in LEARNING_RATES.items()), help="peak of the learning rate"),
    Option(name="--lr-schedule", group=TRAINING, key="model.schedule", type=choice("const", "stepped", "linear", "cosine", "polynomial", "exponential"), shown="linear", help="how the learning rate moves, with every weight update"),
    Option(name="--warmup-epochs", group=TRAINING, key="model.warmup_epochs", type=positive(float, zero=True), metavar="X", shown="a fifth of the run; none for const and stepped", help="epochs in which the learning rate rises"),
    Option(name="--warmup-mode", group=TRAINING, key="model.warmup_mode", type=choice("shift", "mask"), shown="shift", help="the decay begins after the warm-up (shift) or with the run (mask)", rare=True),
    Option(name="--lr-staircase", group=TRAINING, key="model.staircase", type=bool, help="hold the learning rate over every epoch", rare=True),
    Option(name="--lr-decay-epochs", group=TRAINING, key="model.decay_epochs", type=positive(float), metavar="X", shown="to the end of the run", help="epochs that linear, cosine, polynomial and exponential take to reach their end", rare=True),
    Option(name="--lr-end-ratio", group=TRAINING, key="model.final_fraction", type=positive(float, zero=True), metavar="X", shown="0.02", help="the learning rate at their end, as a share of the peak", rare=True),
    Option(name="--lr-power", group=TRAINING, key="model.power", type=positive(float), metavar="X", shown="2", help="exponent of --lr-schedule polynomial", rare=True),
    Option(name="--lr-decay-rate", group=TRAINING, key="model.decay_rate", type=positive(float), metavar="X", excludes="--lr-end-ratio", help="of exponential: multiplier per epoch, in place of --lr-end-ratio", rare=True),
    Option(name="--epochs", group=TRAINING, key="trainer.max_epochs", type=positive(), shown=f"{EPOCHS}; {EPOCHS_ON_SAMPLE} on SAMPLE", help="passes over the training set", aliases=("--num-epochs",)),
    rows.MAX_STEPS,
    Option(name="--weight-decay", group=TRAINING, key="model.weight_decay", type=positive(float, zero=True), metavar="X", shown="0; 0.01 for adamw and lamb", help="decoupled: a weight update is -lr(O(g) + X w), O being the optimizer"),
    Option(name="--l2-regularization", group=TRAINING, key="model.l2_regularization", type=positive(float, zero=True), metavar="X", shown="1e-4, but 0 for adamw and lamb or beside --weight-decay; original: 0", help="through the optimizer: a weight update is -lr O(g + X w)"),
    Option(name="--decay-all", group=TRAINING, key="model.decay_all", type=bool, help="apply --weight-decay and --l2-regularization to norms and biases as well", rare=True),
    Option(name="--optimizer", group=TRAINING, key="model.optimizer", type=choice("sgd", "adamw", "rmsprop", "lars", "lamb"), default="sgd", help="what turns gradients into weight updates"),
    Option(name="--momentum", group=TRAINING, key="model.momentum", type=positive(float, zero=True), metavar="X", shown="0.9 for sgd (Nesterov's) and lars, 0 for rmsprop; original: none", help="share of the last weight update's direction that the next one keeps"),
    Option(name="--no-nesterov", group=TRAINING, key="model.nesterov", sets=False, type=bool, help="plain momentum for sgd, not Nesterov's", rare=True),
    Option(name="--label-smoothing", group=TRAINING, key="model.label_smoothing", type=positive(float, zero=True), metavar="X", default=0.0, help="share of the target that is spread over all classes"),
    Option(name="--mixup", group=TRAINING, key="model.mixup", type=positive(float), metavar="ALPHA", help="mix the training images of a micro-batch with each other, in shares from Beta(ALPHA, ALPHA), and their labels"),
    Option(name="--cutmix", group=TRAINING, key="model.cutmix", type=positive(float), metavar="ALPHA", help="paste rectangles of a micro-batch's training images into each other and mix their labels by area; beside --mixup each micro-batch gets one of them by chance"),
    Option(name="--ema", group=TRAINING, type=positive(float, zero=True), metavar="DECAY", help="keep an exponential moving average of the weights, validate it, and save it as the checkpoints' weights"),
    Option(name="--limit-train-batches", group=TRAINING, key="trainer.limit_train_batches", type=readers.fraction_or_count("micro-batches", least=1), help="micro-batches per epoch, or with a decimal point a share of the training set"),
    Option(name="--limit-val-batches", group=TRAINING, key="trainer.limit_val_batches", type=readers.fraction_or_count("micro-batches"), help="micro-batches per validation, or with a decimal point a share of its images"),
    Option(name="--training", group=TRAINING, type=bool, default=True, help="false scores checkpoints, or random weights, instead"),
    Option(name="--validation", group=TRAINING, type=bool, default=True, help="false trains only"),
    Option(name="--valid-per-epoch", group=TRAINING, key="events.validations", type=readers.frequency, metavar="X", shown="1; with --ckpts-per-epoch 0", excludes="--no-validation", help="validations per epoch while training: a number, or a fraction such as 1/2, after every second one", aliases=("--validations-per-epoch",)),
    rows.THEN_TEST,
    Option(name="--data-benchmark", group=TRAINING, type=bool, help="do not train: say how many images a second the loader reads and the network learns from, and which of them holds up the other"),
    #
    rows.processes(),
    Option(name="--pipeline-validation-model", group=RUN, type=bool, help="validate over the stages where they are; without it each process fetches the whole network and takes a share", rare=True),
    Option(name="--validation-num-replicas", group=RUN, key="trainer.strategy.validation_replicas", type=positive(), shown="all", help="whole networks that validate at once, at most one per process; results do not depend on it", rare=True),
    *MACHINE_OPTIONS,
    Option(name="--steps-per-log", group=RUN, key="trainer.log_every_n_steps", type=positive(), default=10, help=f"{rows.LOG_STEPS}; original: 1"),
    Option(name="--logs-per-epoch", group=RUN, key="events.logs", type=readers.frequency, metavar="X", excludes="--steps-per-log", help="rows of metrics.csv per epoch: a number, or a fraction such as 1/2; 0 is one row at the end", rare=True),
    Option(name="--wandb", group=RUN, key="wandb", type=bool, help="log to Weights & Biases as well; with WANDB_MODE=offline into --output-dir, without a network"),
    Option(name="--wandb-run-name", group=RUN, key="wandb_run_name", metavar="NAME", shown="chosen there", help="name of the run in Weights & Biases", rare=True),
    Option(name="--wandb-tags", group=RUN, key="wandb_tags", type=readers.names, metavar="NAMES", help="tags of the run in Weights & Biases, with commas", rare=True),
    rows.output_dir("config.yaml, metrics.csv and checkpoints/"),
    *CHECKPOINT_OPTIONS,
    Option(name="--ckpts-per-epoch", group="checkpoints", key="events.checkpoints", type=readers.frequency, metavar="X", excludes="--checkpoint-every", help="keep checkpoints, so many per epoch: a number, a fraction such as 1/4, or 0; they are all scored at the end"),
    Option(name="--first-ckpt-epoch", group="checkpoints", key="events.first_checkpoint_epoch", type=positive(float, zero=True), metavar="X", help="epochs before the first checkpoint of --ckpts-per-epoch", rare=True),
    Option(name="--checkpoint-input-dir", group="checkpoints", key="checkpoint_input_dir", type=readers.path, metavar="DIR", help="score every checkpoint in DIR, in the order of their weight updates, in place of the run's own"),
    Option(name="--clean-dir", group="checkpoints", key="clean_dir", type=bool, help="delete the checkpoints of --ckpts-per-epoch once they are scored", rare=True),
    *LEGACY_OPTIONS,
)  # fmt: skip

_SHARDS = "one per 100 MB or so, at most 1024"
CONVERT_OPTIONS = (
    Option(name="--train-shards", group="shards", type=positive(), shown=_SHARDS, help="files to spread the training images over"),
    Option(name="--validation-shards", group="shards", type=positive(), shown=_SHARDS, help="files to spread the validation images over"),
    Option(name="--seed", group="shards", type=readers.seed, default=0, help="of the order in which images are spread over the files"),
    Option(name="--on-bad-image", group="shards", type=choice("raise", "skip"), default="raise", help="raise ends at an image that cannot be read; skip decodes all images first, leaves the bad ones out and lists them at the end"),
    Option(name="--num-workers", group="run", type=positive(), shown="the cores it may use", help="processes"),
)  # fmt: skip

CONVERT = """\
Make TFRecord shards of the folders SRC/train and SRC/val, which hold a folder of images for each class. The bytes of the images are
copied as they are. Each shard is read back and compared, and there as a whole or not at all: after an interruption the same command
goes on."""
