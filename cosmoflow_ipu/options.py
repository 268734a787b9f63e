"""The short options of ``python -m cosmoflow_ipu``, one row each; nothing here needs torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cosmoflow_ipu.legacy import LEGACY_OPTIONS
from lightning_ipu.command import readers, rows
from lightning_ipu.command.options import CHECKPOINT_OPTIONS, MACHINE_OPTIONS, RUN, Option
from lightning_ipu.command.readers import choice, positive
from lightning_ipu.command.rows import DATA, NETWORK, PLAN, TRAINING

NETWORKS = ("cosmoflow", "cosmoflow-mlperf", "cosmoflow-v1", "resnet")
ACTIVATIONS = ("LeakyReLU", "ReLU", "ELU", "SELU", "Softplus", "Sigmoid", "Tanh")
OPTIMIZERS = ("SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop")
DATA_SETS = ("synthetic", "tfrecord", "dummy")
CONFIGS = Path(__file__).parent / "configs"
EPOCHS = 10

DESCRIPTION = """\
Learn Omega_m, sigma_8, n_s and H_0 of universes from the distribution of their matter, under the IPU execution model.

The plan decides the numbers: a weight update uses micro-batch x accumulation A x replicas R samples, whatever it runs on.
Without --data-dir the universes are simulated, once, into data/ and read back from there."""

EPILOG = """\
examples:
  python -m cosmoflow_ipu
  python -m cosmoflow_ipu --num-ipus 2                          two replicas
  python -m cosmoflow_ipu --data-dir DIR --n-epochs 30          the benchmark's TFRecord files, in DIR/train and DIR/validation
  python -m cosmoflow_ipu configs/graphcore.yaml --n-train 100 --n-epochs 1
  python -m cosmoflow_ipu fit --config results/config.yaml      replay a run
  python -m cosmoflow_ipu validate --ckpt_path results/checkpoints/last.ckpt
  python -m cosmoflow_ipu generate --output-dir DIR --n-train 1000
  python -m cosmoflow_ipu show --index 3 --output universe.png

A step is a weight update in every option, log and checkpoint name. Errors are on the benchmark's scale, on which each parameter lies
between -1 and 1: a constant gets 0.5, the benchmark's goal is 0.124."""
_SIMULATION = "simulated universes"
_FLAG = choice("0", "1")

SIMULATION_OPTIONS = (
    Option(name="--sample-size", group=_SIMULATION, key="data.sample_size", type=positive(), shown="32", help="voxels a side of a cube"),
    Option(name="--cells", group=_SIMULATION, key="data.cells", type=positive(), shown="--sample-size", help="voxels a side of the box that is cut into cubes"),
    Option(name="--voxel-size", group=_SIMULATION, key="data.voxel_size", type=positive(float), metavar="X", shown="4; the benchmark's: 1.4", help="side of a voxel in Mpc/h where H_0 = 70"),
    Option(name="--oversample", group=_SIMULATION, key="data.oversample", type=positive(), shown="2; the benchmark's: 1", help="simulated particles along each side of a voxel"),
    Option(name="--spread", group=_SIMULATION, key="data.spread", type=positive(float), metavar="X", shown="0.3; the benchmark's: 0.1", help="range of the parameters: 0.3, 0.8, 0.96 and 70, each up to the share X more or less; for files, the range that they have, to show errors in physical units"),
    Option(name="--box-in-mpc-per-h", group=_SIMULATION, key="data.fixed_mpc", sets=False, type=bool, help="give all boxes the same size in Mpc/h, not in Mpc; H_0 can hardly be learned then"),
    Option(name="--pack", group=_SIMULATION, key="data.pack", type=bool, help="write the files with gzip"),
)  # fmt: skip

OPTIONS = (
    Option(name="--config", group="start from", metavar="FILE", help="configuration to start from, in the working directory or in the package: configs/graphcore.yaml, mlperf, small; --config may be left out"),
    Option(name="--network", group=NETWORK, key="model.network", type=choice(*NETWORKS), default="cosmoflow-mlperf", help="cosmoflow is Graphcore's: kernel 2, 16 to 256 channels; cosmoflow-mlperf has kernel 3 and twice the channels"),
    Option(name="--conv-size", group=NETWORK, key="model.conv_size", type=positive(), shown="16", help="channels of the first convolution"),
    Option(name="--n-conv-layers", group=NETWORK, key="model.n_conv_layers", type=positive(), shown="5; cosmoflow-mlperf: down to 4 voxels a side", help="convolutions, each followed by pooling"),
    Option(name="--fc1-size", group=NETWORK, key="model.fc1_size", type=positive(), shown="128", help="outputs of the first dense layer"),
    Option(name="--fc2-size", group=NETWORK, key="model.fc2_size", type=positive(), shown="64", help="outputs of the second dense layer"),
    Option(name="--hidden-activation", group=NETWORK, key="model.hidden_activation", type=choice(*ACTIVATIONS), shown="LeakyReLU", help="activation between the layers, one of Keras'"),
    Option(name="--dropout", group=NETWORK, key="model.dropout", type=positive(float, zero=True), metavar="X", shown="0", help="share of the dense layers' outputs dropped in training"),
    Option(name="--apply-log", group=NETWORK, type=_FLAG, shown="1", help="the network sees log(1 + counts); 0: counts divided by their mean"),
    Option(name="--no-standardise", group=NETWORK, key="model.standardise", sets=False, type=bool, help="do not bring the redshifts to mean 0 and deviation 1, as in the original; Omega_m then takes many times as long to learn"),
    rows.no_channels_last("volumes redshift by redshift"),
    #
    Option(name="--dataset", group=DATA, type=choice(*DATA_SETS), shown="tfrecord with --data-dir, else synthetic", help="simulated universes, CosmoFlow's files, or one random cube over and over"),
    Option(name="--data-dir", group=DATA, key="data.data_dir", type=readers.path, metavar="DIR", shown="data", help="folder of .tfrecord files, plain or gzip, in train/ and validation/ or together; where simulated ones are kept"),
    Option(name="--n-train", group=DATA, key="data.n_train", type=positive(), shown="2000; of files: all", help="training samples"),
    Option(name="--n-valid", group=DATA, key="data.n_valid", type=positive(zero=True), shown="a tenth of --n-train; of files: all", help="validation samples; 0 does not validate"),
    Option(name="--validation-split", group=DATA, key="data.validation_split", type=positive(float), metavar="X", shown="0.1", help="share of the universes to hold out where all files lie in one folder"),
    Option(name="--channels", group=DATA, key="data.channels", type=positive(), default=4, help="redshifts that the network sees, of 0, 0.5, 1.5 and 3"),
    Option(name="--no-augmentation", group=DATA, key="data.augment", sets=False, type=bool, help="do not turn and mirror training cubes"),
    Option(name="--on-bad-record", group=DATA, key="data.on_bad_record", type=choice("raise", "skip"), shown="raise", help="raise ends at a bad record with file, record and byte; skip reads all before the run and leaves the bad ones out"),
    Option(name="--cache-gb", group=DATA, key="data.cache_gb", type=positive(float, zero=True), metavar="X", shown="the size of packed files, up to half of the free memory", help="memory for cubes already read, for all processes on this machine together"),
    Option(name="--num-workers", group=DATA, key="data.num_workers", type=positive(zero=True), default=0, help="processes that load data, 0 for none beside the training one"),
    *SIMULATION_OPTIONS,
    #
    Option(name="--micro-batch-size", group=PLAN, key="data.micro_batch_size", type=positive(), default=8, help="samples at once on one replica"),
    Option(name="--num-ipus", group=PLAN, type=positive(), shown="one per replica and stage", help="virtual IPUs; without --replication-factor, replicas follow from it"),
    Option(name="--replication-factor", group=PLAN, type=positive(), shown="1", help=rows.REPLICAS),
    rows.accumulation(),
    Option(name="--pipeline-splits", group=PLAN, key="trainer.strategy.pipeline_splits", type=readers.names, metavar="NAMES", help="submodules that begin a new stage, such as network.features.2,network.fc1"),
    rows.recompute(),
    Option(name="--iterations-per-loop", group=PLAN, key="trainer.strategy.device_iterations", type=positive(), default=16, help=rows.ITERATIONS),
    rows.PRECISION,
    rows.seed("universes, initial weights, order and symmetries"),
    #
    Option(name="--optimizer", group=TRAINING, key="model.optimizer", type=choice(*OPTIMIZERS), default="SGD", help="what turns gradients into weight updates; SGD has a momentum of 0.9"),
    Option(name="--lr", group=TRAINING, key="model.learning_rate", type=positive(float), metavar="X", shown="SGD 0.02 x samples per weight update / 8; Adadelta 0.5; others 0.001", help="learning rate after a warm-up of 20 %, from where it falls to 2 %"),
    Option(name="--l2", group=TRAINING, key="model.l2", type=positive(float, zero=True), metavar="X", shown="0; the benchmark's: 0.01", help="penalty on the hidden dense layers, as in Keras"),
    Option(name="--n-epochs", group=TRAINING, key="trainer.max_epochs", type=positive(), also=("--epochs",), shown=str(EPOCHS), help="passes over the training set"),
    rows.MAX_STEPS,
    Option(name="--stop-at-mae", group=TRAINING, type=positive(float), metavar="X", help="end when the validation's mean absolute error is at most X; the benchmark's: 0.124"),
    Option(name="--test", group=TRAINING, key="then_test", type=bool, help="score universes of a test set as well, at the end"),
    #
    rows.processes(key="trainer.devices"),
    *MACHINE_OPTIONS,
    rows.STEPS_PER_LOG,
    rows.output_dir("config.yaml, metrics.csv, validation.png and checkpoints/", key="trainer.default_root_dir"),
    Option(name="--data-benchmark", group=RUN, type=bool, help="do not train: read the training set as fast as it goes, 3 epochs, and say how fast"),
    Option(name="--print-fom", group=RUN, type=bool, help="end with the figure of merit, the validation's mean absolute error, as a line of its own"),
    *CHECKPOINT_OPTIONS,
    *LEGACY_OPTIONS,
)  # fmt: skip
GENERATE_OPTIONS = (
    *SIMULATION_OPTIONS,
    Option(name="--output-dir", group=DATA, type=readers.path, metavar="DIR", help="gets train/, validation/ and test/ with .tfrecord files; must be given"),
    Option(name="--n-train", group=DATA, key="data.n_train", type=positive(), default=2000, help="training cubes"),
    Option(name="--n-valid", group=DATA, key="data.n_valid", type=positive(zero=True), shown="a tenth of --n-train", help="validation cubes, and as many to test on"),
    Option(name="--seed", group=DATA, key="data.seed", type=readers.seed, default=0, help="of the universes"),
    Option(name="--num-workers", group=RUN, type=positive(), shown="the cores it may use", help="processes"),
)  # fmt: skip
SHOW_OPTIONS = (
    *(replace(option, shown="64") if option.name == "--cells" else option for option in SIMULATION_OPTIONS if option.name not in ("--sample-size", "--pack")),
    Option(name="--index", group=DATA, type=positive(zero=True), default=0, help="number of the universe"),
    Option(name="--seed", group=DATA, type=readers.seed, default=0, help="of the universes"),
    Option(name="--output", group=RUN, type=readers.path, metavar="FILE", default="universe.png", help="where the picture goes"),
)  # fmt: skip
