"""``python -m cosmoflow_ipu``: learn the parameters of universes from their particle counts under the IPU execution model.

This module holds the short options, their rules and nothing that needs torch, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

LIGHT_START = True  # `import lightning_ipu` leaves torch alone when the main module says so

import re  # noqa: E402
import sys  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from lightning_ipu.command import cli, configs, once, readers  # noqa: E402
from lightning_ipu.command.options import CHECKPOINT_OPTIONS, MACHINE_OPTIONS, RUN, SUBCOMMANDS, Option, UsageError  # noqa: E402
from lightning_ipu.command.parser import build_parser, lightning_arguments, parse, settings_of  # noqa: E402
from lightning_ipu.command.readers import choice, positive  # noqa: E402
from lightning_ipu.command.words import value_of  # noqa: E402
from lightning_ipu.errors import UserError  # noqa: E402
from lightning_ipu.placement import Placement  # noqa: E402
from lightning_ipu.plan import Plan, PlanError  # noqa: E402

if TYPE_CHECKING:
    from lightning_ipu.command.run import CommandLine

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


_NETWORK, _DATA, _SIMULATION, _PLAN = "network", "data", "simulated universes", "plan (decides the numbers)"
_TRAINING, _RUN = "training", RUN
_FLAG = choice("0", "1")

SIMULATION_OPTIONS = (
    Option(name="--sample-size", group=_SIMULATION, key="data.sample_size", type=positive(), shown="32", help="voxels a side of a cube"),
    Option(name="--cells", group=_SIMULATION, key="data.cells", type=positive(), shown="--sample-size", help="voxels a side of the box that is cut into cubes"),
    Option(name="--voxel-size", group=_SIMULATION, key="data.voxel_size", type=positive(float), metavar="X", shown="4; the benchmark's: 1.4", help="side of a voxel in Mpc/h where H_0 = 70"),
    Option(name="--oversample", group=_SIMULATION, key="data.oversample", type=positive(), shown="2; the benchmark's: 1", help="particles along each side of a voxel"),
    Option(name="--spread", group=_SIMULATION, key="data.spread", type=positive(float), metavar="X", shown="0.3; the benchmark's: 0.1", help="share of 0.3, 0.8, 0.96, 70 within which parameters lie; of files: if it is known, for errors in physical units"),
    Option(name="--box-in-mpc-per-h", group=_SIMULATION, key="data.fixed_mpc", sets=False, type=bool, help="the box has one size in Mpc/h, not in Mpc: then H_0 can hardly be told"),
    Option(name="--pack", group=_SIMULATION, key="data.pack", type=bool, help="write the files with gzip"),
)  # fmt: skip

OPTIONS = (
    Option(name="--config", group="start from", metavar="FILE", help="configuration to start from, in the working directory or in the package: configs/graphcore.yaml, mlperf, small; --config may be left out"),
    Option(name="--network", group=_NETWORK, key="model.network", type=choice(*NETWORKS), default="cosmoflow-mlperf", help="cosmoflow is Graphcore's: kernel 2, 16 to 256 channels; cosmoflow-mlperf has kernel 3 and twice the channels"),
    Option(name="--conv-size", group=_NETWORK, key="model.conv_size", type=positive(), shown="16", help="channels of the first convolution"),
    Option(name="--n-conv-layers", group=_NETWORK, key="model.n_conv_layers", type=positive(), shown="5; cosmoflow-mlperf: down to 4 voxels a side", help="convolutions, each followed by pooling"),
    Option(name="--fc1-size", group=_NETWORK, key="model.fc1_size", type=positive(), shown="128", help="outputs of the first dense layer"),
    Option(name="--fc2-size", group=_NETWORK, key="model.fc2_size", type=positive(), shown="64", help="outputs of the second dense layer"),
    Option(name="--hidden-activation", group=_NETWORK, key="model.hidden_activation", type=choice(*ACTIVATIONS), shown="LeakyReLU", help="a layer of Keras"),
    Option(name="--dropout", group=_NETWORK, key="model.dropout", type=positive(float, zero=True), metavar="X", shown="0", help="share of the dense layers' outputs dropped in training"),
    Option(name="--apply-log", group=_NETWORK, type=_FLAG, shown="1", help="the network sees log(1 + counts); 0: counts divided by their mean"),
    Option(name="--no-standardise", group=_NETWORK, key="model.standardise", sets=False, type=bool, help="do not bring the redshifts to mean 0 and deviation 1, as in the original; Omega_m is then learned many times as late"),
    Option(name="--no-channels-last", group=_NETWORK, key="model.channels_last", sets=False, type=bool, help="keep volumes redshift by redshift in memory; slower on most devices"),
    #
    Option(name="--dataset", group=_DATA, type=choice(*DATA_SETS), shown="tfrecord with --data-dir, else synthetic", help="simulated universes, CosmoFlow's files, or one random cube over and over"),
    Option(name="--data-dir", group=_DATA, key="data.data_dir", type=readers.path, metavar="DIR", shown="data", help="folder of .tfrecord files, plain or gzip, in train/ and validation/ or together; where simulated ones are kept"),
    Option(name="--n-train", group=_DATA, key="data.n_train", type=positive(), shown="2000; of files: all", help="training samples"),
    Option(name="--n-valid", group=_DATA, key="data.n_valid", type=positive(zero=True), shown="a tenth of --n-train; of files: all", help="validation samples; 0 does not validate"),
    Option(name="--validation-split", group=_DATA, key="data.validation_split", type=positive(float), metavar="X", shown="0.1", help="share of the universes to hold out where all files lie in one folder"),
    Option(name="--channels", group=_DATA, key="data.channels", type=positive(), default=4, help="redshifts that the network sees, of 0, 0.5, 1.5 and 3"),
    Option(name="--no-augmentation", group=_DATA, key="data.augment", sets=False, type=bool, help="do not turn and mirror training cubes"),
    Option(name="--on-bad-record", group=_DATA, key="data.on_bad_record", type=choice("raise", "skip"), shown="raise", help="end with file, record and byte; or read all before the run and leave out what is bad"),
    Option(name="--cache-gb", group=_DATA, key="data.cache_gb", type=positive(float, zero=True), metavar="X", shown="the size of packed files, up to half of the free memory", help="memory for cubes already read, for all processes on this machine together"),
    Option(name="--num-workers", group=_DATA, key="data.num_workers", type=positive(zero=True), default=0, help="loader processes"),
    Option(name="--staged-files", group=_DATA, type=_FLAG, shown="0", help="1, files of its own for each node, is refused: every process must see them all"),
    *SIMULATION_OPTIONS,
    #
    Option(name="--micro-batch-size", group=_PLAN, key="data.micro_batch_size", type=positive(), default=8, help="samples at once on one replica"),
    Option(name="--num-ipus", group=_PLAN, type=positive(), shown="one per replica and stage", help="virtual IPUs; without --replication-factor, replicas follow from it"),
    Option(name="--replication-factor", group=_PLAN, type=positive(), shown="1", help="R, replicas whose gradients are averaged"),
    Option(name="--gradient-accumulation-factor", group=_PLAN, key="trainer.strategy.gradient_accumulation_factor", type=positive(), default=1, help="A, micro-batches per replica and weight update"),
    Option(name="--pipeline-splits", group=_PLAN, key="trainer.strategy.pipeline_splits", type=readers.names, metavar="NAMES", help="submodules that begin a new stage, such as network.features.2,network.fc1"),
    Option(name="--recompute", group=_PLAN, key="trainer.strategy.recompute", type=bool, help="recompute activations in the backward pass: less memory, the same numbers"),
    Option(name="--iterations-per-loop", group=_PLAN, key="trainer.strategy.device_iterations", type=positive(), default=16, help="D, weight updates per host step at most"),
    Option(name="--precision", group=_PLAN, key="precision", type=readers.precision_choice, default="auto", help="<compute>.<weights>; auto is 16.32 where the device is fast at bfloat16, else 32.32"),
    Option(name="--seed", group=_PLAN, type=readers.seed, default=0, help="of universes, initial weights, order and symmetries"),
    #
    Option(name="--optimizer", group=_TRAINING, key="model.optimizer", type=choice(*OPTIMIZERS), default="SGD", help="SGD has a momentum of 0.9"),
    Option(name="--lr", group=_TRAINING, key="model.learning_rate", type=positive(float), metavar="X", shown="SGD 0.02 x samples per weight update / 8; Adadelta 0.5; others 0.001", help="learning rate after a warm-up of 20 %, from where it falls to 2 %"),
    Option(name="--l2", group=_TRAINING, key="model.l2", type=positive(float, zero=True), metavar="X", shown="0; the benchmark's: 0.01", help="penalty on the hidden dense layers, as in Keras"),
    Option(name="--n-epochs", group=_TRAINING, key="trainer.max_epochs", type=positive(), aliases=("--epochs",), shown=str(EPOCHS), help="passes over the training set"),
    Option(name="--max-steps", group=_TRAINING, key="trainer.max_steps", type=positive(), help="end after N weight updates"),
    Option(name="--stop-at-mae", group=_TRAINING, type=positive(float), metavar="X", help="end when the validation's mean absolute error is at most X; the benchmark's: 0.124"),
    Option(name="--test", group=_TRAINING, key="then_test", type=bool, help="score universes of a test set as well, at the end"),
    #
    Option(name="--processes", group=_RUN, key="trainer.devices", type=positive(), shown="1, or torchrun's", help="processes that share out the replicas and stages: a divisor of R, or R times a divisor of the stages"),
    *MACHINE_OPTIONS,
    Option(name="--steps-per-log", group=_RUN, key="trainer.log_every_n_steps", type=positive(), default=10, help="rows of metrics.csv"),
    Option(name="--output-dir", group=_RUN, key="trainer.default_root_dir", type=readers.path, metavar="DIR", default="results", help="gets config.yaml, metrics.csv, validation.png and checkpoints/"),
    Option(name="--data-benchmark", group=_RUN, type=bool, help="do not train: read the training set as fast as it goes, 3 epochs, and say how fast"),
    Option(name="--print-fom", group=_RUN, type=bool, help="end with the figure of merit, the validation's mean absolute error, as a line of its own"),
    *CHECKPOINT_OPTIONS,
    #
    Option(name="--use-estimator", group="", refused="TensorFlow's Estimator does not exist here; there is one way to train, with the same numbers"),
    Option(name="--distributed", group="", refused="use --processes, or torchrun (the original ignored this option)"),
    Option(name="-d", group="", refused="use --processes, or torchrun (the original ignored this option)"),
    Option(name="--verbose", group="", refused="the table at the start and metrics.csv tell what there is to tell"),
    Option(name="-v", group="", refused="the table at the start and metrics.csv tell what there is to tell"),
    Option(name="--profiling", group="", refused="an IPU's profile does not exist here"),
)  # fmt: skip

GENERATE_OPTIONS = (
    *SIMULATION_OPTIONS,
    Option(name="--output-dir", group=_DATA, type=readers.path, metavar="DIR", help="gets train/, validation/ and test/ with .tfrecord files; must be given"),
    Option(name="--n-train", group=_DATA, key="data.n_train", type=positive(), default=2000, help="training cubes"),
    Option(name="--n-valid", group=_DATA, key="data.n_valid", type=positive(zero=True), shown="a tenth of --n-train", help="validation cubes, and as many to test on"),
    Option(name="--seed", group=_DATA, key="data.seed", type=readers.seed, default=0, help="of the universes"),
    Option(name="--num-workers", group=_RUN, type=positive(), shown="the cores it may use", help="processes"),
)  # fmt: skip

SHOW_OPTIONS = (
    *(replace(option, shown="64") if option.name == "--cells" else option for option in SIMULATION_OPTIONS if option.name not in ("--sample-size", "--pack")),
    Option(name="--index", group=_DATA, type=positive(zero=True), default=0, help="number of the universe"),
    Option(name="--seed", group=_DATA, type=readers.seed, default=0, help="of the universes"),
    Option(name="--output", group=_RUN, type=readers.path, metavar="FILE", default="universe.png", help="where the picture goes"),
)  # fmt: skip


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
    if "print_fom" in given and settings.get("data.n_valid") == 0:
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
    if "processes" in given and not configured:  # else the strategy looks at it, with the configuration's plan
        stages = settings.get("trainer.strategy.num_stages", stages)
        try:
            Placement(plan=Plan(replication_factor=replicas or 1, num_stages=stages), processes=given["processes"])
        except PlanError as error:
            raise UsageError(f"--processes: {error}") from None


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


# -- what needs torch ---------------------------------------------------------------------------------------------------------


def start(arguments: list[str], *, given: dict[str, Any]) -> int:
    """Run LightningCLI with this package's classes; returns the exit status."""
    from cosmoflow_ipu.data import CosmoFlowDataModule
    from cosmoflow_ipu.module import CosmoFlowModule
    from lightning_ipu.command.run import Command, run_command

    command = Command(
        prog="cosmoflow_ipu",
        model_class=CosmoFlowModule,
        datamodule_class=CosmoFlowDataModule,
        links=[("input_size", "input_size"), ("in_channels", "in_channels"), ("physical_spread", "physical_spread")],
        facts=_facts,
        epochs=lambda data: (EPOCHS, None),
        note=_note,
        defaults={"model.report": True, "checkpoint.monitor": "val_mae", "checkpoint.mode": "min"},
    )
    if "data_benchmark" in given:
        from cosmoflow_ipu.throughput import DataBenchmark

        return run_command(command, arguments, line=DataBenchmark)
    return run_command(command, arguments)


def _facts(line: CommandLine) -> list[tuple[str, str]]:
    """Rows for the table: network, data, device, precision."""
    data, options = line.datamodule, line.model.hparams
    seen = "log(1 + counts)" if options.apply_log else "counts / mean"
    samples = f"{data.num_train_samples:,} to train on, {data.num_validation_samples:,} to validate on"
    return [("network", f"{options.network}, of {seen}"), ("data", data.description), ("samples", samples), *line.machine_facts()]


def _note(line: CommandLine) -> str | None:
    """The closing line: errors of the last evaluation, and what they are not."""
    from cosmoflow_ipu.module import MIDDLE, mae_line

    data, reported = line.datamodule, line.model.reported
    names = {"val": "", "test": "test "}
    lines = []
    for prefix, scores in reported.items():
        lines.append(names[prefix] + mae_line(scores, prefix, spread=data.physical_spread))
        if scores[f"{prefix}_mae"] >= scores[MIDDLE] and data.dataset_name != "dummy":
            lines.append(
                f"That is no better than a constant: the middle of each range gets {scores[MIDDLE]:.4f}. Train for longer, or on more universes."
            )
    if line.short_options.get("print_fom") and "val" in reported:
        lines.append(f"FoM: {reported['val']['val_mae']:.6f}")
    if data.dataset_name == "dummy":
        lines.append("These figures are of one random cube over and over: they tell the speed, and nothing was learned.")
    return "\n".join(lines) or None


def _generate(given: dict[str, Any]) -> int:
    """Write a data set of simulated universes."""
    from cosmoflow_ipu.data import SPLITS, CosmoFlowDataModule, write_universes

    data = CosmoFlowDataModule(**_data_options(given, GENERATE_OPTIONS))
    folder = Path(given["output_dir"])
    write_universes(
        folder,
        data.universes,
        sample_size=data.input_size,
        indices=data.indices(SPLITS),
        pack=data.pack,
        workers=given.get("num_workers"),
    )
    files = sorted(folder.glob("*/*.tfrecord"))
    print(f"{folder}: {len(files):,} universes, {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB; {data.description}")
    return 0


def _show(given: dict[str, Any]) -> int:
    """Draw a simulated universe."""
    from cosmoflow_ipu.pictures import draw_universe
    from cosmoflow_ipu.universe import Universes
    from lightning_ipu.files import check_writable

    options = _data_options({"cells": 64, **given}, SHOW_OPTIONS)
    universes = Universes(**{"voxel_size": 4.0, "oversample": 2, "spread": 0.3, "seed": given.get("seed", 0), **options})
    path = Path(given.get("output", "universe.png"))
    check_writable(path.parent)
    try:
        draw_universe(universes, given.get("index", 0), path=path)
    except ModuleNotFoundError as error:
        raise UsageError(f"show needs {error.name}, which is not installed: pip install 'lightning-ipu[cosmology]'") from None
    print(f"{path}: universe {given.get('index', 0)}, a slice at each redshift and the power spectrum beside theory")
    return 0


def _data_options(given: dict[str, Any], options: tuple[Option, ...]) -> dict[str, Any]:
    return {key.removeprefix("data."): value for key, value in settings_of(given, options).items()}


def _other(name: str, words: list[str]) -> int:
    """The commands beside training: generate and show."""
    options, run, what = {
        "generate": (GENERATE_OPTIONS, _generate, "Write a data set of simulated universes as TFRecord files; goes on where it was interrupted."),
        "show": (SHOW_OPTIONS, _show, "Draw a simulated universe: a slice at each redshift, and its power spectrum beside linear theory."),
    }[name]  # fmt: skip
    parser = build_parser(prog=f"cosmoflow_ipu {name}", description=what, epilog="", options=options, version=_version)
    parser.usage = f"cosmoflow_ipu {name} [options]"
    try:
        given = parse(words, parser=parser, options=options)
        if name == "generate" and "output_dir" not in given:
            raise UsageError("generate needs --output-dir DIR, the folder to write to")
        return run(given)
    except (UserError, OSError) as error:
        once.report(" ".join(str(error).split()), prog=f"cosmoflow_ipu {name}")
        return 2
    except KeyboardInterrupt:
        print(f"cosmoflow_ipu {name}: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if once.is_answered_by_the_first(words):
        return 0
    if words and words[0] in ("generate", "show"):
        return _other(words[0], words[1:])
    if words[:1] == ["average"]:
        return cli.average(words[1:], prog="cosmoflow_ipu", version=_version)
    if not words or words[0] not in SUBCOMMANDS:
        words = _with_named_config(words)
    parser = build_parser(prog="cosmoflow_ipu", description=DESCRIPTION, epilog=EPILOG, options=OPTIONS, version=_version)
    return cli.main(words, parser=parser, options=OPTIONS, settle=settle, start=start, folder=CONFIGS, reads_config=False)


def _with_named_config(words: list[str]) -> list[str]:
    """The words with `--config=` before a configuration's name, which the original program takes without."""
    named: list[str] = []
    for word in words:
        is_file = word.endswith((".yaml", ".yml")) and not word.startswith("-")
        named.append(f"--config={word}" if is_file and named[-1:] != ["--config"] else word)
    return named


def _version() -> str:
    from lightning_ipu import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
