"""``python -m cosmoflow_ipu``: options, messages, exit status, what a run leaves, and the commands beside training."""

import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from cosmoflow_ipu import __main__ as command
from cosmoflow_ipu import module, networks
from cosmoflow_ipu.legacy import with_named_config
from cosmoflow_ipu.options import ACTIVATIONS, DATA_SETS, NETWORKS, OPTIMIZERS
from lightning_ipu.command.parser import build_parser, parse
from lightning_ipu.data.tf_example import encode_example
from lightning_ipu.data.tfrecord import TFRecords, write_tfrecord

CONFIGS = Path(command.__file__).parent / "configs"
TINY = "--n-train 8 --n-valid 3 --n-epochs 1 --precision 32.32 --conv-size 2 --oversample 1 --micro-batch-size 2".split()

# Every option of the original program; each is honoured or refused by name.
ORIGINAL = """--output-dir --data-dir --n-train --n-valid --micro-batch-size --n-epochs --apply-log --staged-files --iterations-per-loop
    --num-ipus --use-estimator --data-benchmark --conv-size --fc1-size --fc2-size --hidden-activation --dropout --optimizer --lr -d
    --distributed --print-fom -v --verbose --profiling""".split()


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture
def run(command_line):
    return partial(command_line, command.main)


def settled(*arguments: str) -> dict[str, str]:
    """LightningCLI settings that a short command line is translated to."""
    parser = build_parser(prog="cosmoflow_ipu", description="", epilog="", options=command.OPTIONS, version=str)
    words = with_named_config(list(arguments))
    lines = command.settle(parse(words, parser=parser, options=command.OPTIONS))
    return dict(line.removeprefix("--").split("=", 1) for line in lines)


def test_help_and_wrong_options_import_no_torch():
    script = """
import runpy, sys
for words in (["--help-all"], ["--help-originals"], ["--version"], ["--n-trian", "8"], ["configs/nothing.yaml"], ["generate", "--help"], ["generate"], ["show", "--x"]):
    sys.argv = ["cosmoflow_ipu", *words]
    try:
        runpy.run_module("cosmoflow_ipu", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("status", end.code, file=sys.__stderr__)
assert "torch" not in sys.modules and "pytorch_lightning" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"status (\d|None)", done.stderr) == ["0", "0", "0", "2", "2", "0", "2", "2"]
    for option in command.OPTIONS:
        assert re.search(rf"^  {re.escape(option.name)}\b", done.stdout, re.M), option.name


def test_every_option_of_the_original_is_known_and_names_are_those_of_the_code():
    assert set(ORIGINAL) <= {option.name for option in command.OPTIONS}
    assert NETWORKS == networks.NETWORKS and ACTIVATIONS == tuple(networks.ACTIVATIONS)
    assert OPTIMIZERS == tuple(module.OPTIMIZERS) and DATA_SETS == ("synthetic", "tfrecord", "dummy")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--n-trian 20", "unknown option --n-trian; did you mean --n-train?"),
        ("--network alexnet", "--network: 'alexnet' is not known; known are cosmoflow, cosmoflow-mlperf"),
        ("--n-train 0", "--n-train: '0' must be a whole number above 0"),
        ("--apply-log 2", "--apply-log: '2' is not known; known are 0, 1"),
        ("--staged-files 1", "--staged-files 1: files of its own for each node cannot be had"),
        ("--use-estimator", "--use-estimator: TensorFlow's Estimator does not exist here"),
        ("-d", "-d: use --processes, or torchrun"),
        ("--profiling", "--profiling: an IPU's profile does not exist here"),
        ("--optimizer lbfgs", "--optimizer: 'lbfgs' is not known; known are SGD, Adadelta"),
        ("--dataset tfrecord", "--dataset tfrecord needs --data-dir DIR"),
        ("--num-ipus 3 --replication-factor 2", "--num-ipus 3 must be a multiple of --replication-factor 2"),
        ("--num-ipus 3 --pipeline-splits network.fc1", "--num-ipus 3 must be a multiple of the 2 stages"),
        ("--num-ipus 6 --replication-factor 2 --pipeline-splits network.fc1", "2 replicas of the 2 stages of --pipeline-splits are 4"),
        ("--num-ipus 3 --processes 2", "--processes: "),
        ("--n-valid 0 --stop-at-mae 0.3", "--stop-at-mae 0.3 needs validation, and --n-valid is 0"),
        ("--n-valid 0 --print-fom", "--print-fom needs validation, and --n-valid is 0"),
        ("other.yaml", "--config other.yaml: there is no such file, and the package has graphcore, mlperf, small"),
        ("--data-dir nowhere", "data_dir nowhere is not there; give the folder that holds train/"),
        ("--sample-size 32 --cells 48", "cells=48 must be a multiple of sample_size=32"),
        ("--network cosmoflow-v1", "input_size=32 leaves no voxel after 5 of 5 convolution layers"),
        ("--data-dir nowhere --data-benchmark", "data_dir nowhere is not there"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_status_2(run, line, message):
    status, output, errors = run(*line.split())
    assert status == 2 and output == ""
    assert errors.startswith("cosmoflow_ipu: error: ") and message in errors and errors.count("\n") == 1
    assert not list(Path().iterdir())


def test_a_configuration_of_the_original_program_is_told_apart(run):
    Path("cosmo.yaml").write_text("output_dir: results\ndata:\n  name: dummy\nipu_config:\n  num_ipus: 1\n")
    status, _, errors = run("cosmo.yaml")
    assert status == 2 and "--config cosmo.yaml is laid out for the original program" in errors and errors.count("\n") == 1


def test_num_ipus_alone_means_replicas_as_in_the_original_program():
    prefix = "trainer.strategy."
    assert settled("--num-ipus", "2")[f"{prefix}replication_factor"] == "2"
    settings = settled("--num-ipus", "4", "--pipeline-splits", "network.fc1")
    assert settings[f"{prefix}replication_factor"] == "2" and f"{prefix}num_stages" not in settings
    settings = settled("--num-ipus", "4", "--replication-factor", "2")
    assert (settings[f"{prefix}replication_factor"], settings[f"{prefix}num_stages"]) == ("2", "2")
    assert f"{prefix}replication_factor" not in settled()


def test_every_setting_of_the_short_form_is_one_of_the_long_form(run):
    line = """--network cosmoflow --conv-size 4 --n-conv-layers 3 --fc1-size 16 --fc2-size 12 --hidden-activation relu --dropout 0.1
        --apply-log 0 --no-standardise --no-channels-last --dataset synthetic --data-dir d --n-train 10 --n-valid 4 --channels 2 --no-augmentation
        --cache-gb 0.5 --num-workers 2 --staged-files 0 --sample-size 32 --cells 64 --voxel-size 2 --oversample 1 --spread 0.2
        --box-in-mpc-per-h --pack --micro-batch-size 3 --num-ipus 4 --gradient-accumulation-factor 2 --pipeline-splits network.fc1
        --recompute --iterations-per-loop 7 --precision 32 --seed 9 --optimizer sgd --lr 0.3 --l2 0.1 --n-epochs 2 --max-steps 5
        --stop-at-mae 0.2 --device cpu --threads 1 --no-allocator-setting --no-core-binding
        --steps-per-log 3 --output-dir o --print-fom --test"""
    status, output, errors = run("fit", *(f"--{key}={value}" for key, value in settled(*line.split()).items()), "--print_config")
    assert status == 0, errors
    config = yaml.safe_load(output)
    model, files, trainer = config["model"], config["data"], config["trainer"]
    assert (model["network"], model["conv_size"], model["n_conv_layers"], model["fc1_size"], model["fc2_size"]) == (
        "cosmoflow",
        4,
        3,
        16,
        12,
    )
    assert (model["hidden_activation"], model["dropout"], model["apply_log"], model["channels_last"]) == ("ReLU", 0.1, False, False)
    assert model["standardise"] is False
    assert (model["optimizer"], model["learning_rate"], model["l2"]) == ("SGD", 0.3, 0.1)
    assert (files["dataset"], files["data_dir"], files["n_train"], files["n_valid"], files["channels"]) == ("synthetic", "d", 10, 4, 2)
    assert (files["augment"], files["cache_gb"], files["num_workers"], files["pack"], files["seed"]) == (False, 0.5, 2, True, 9)
    assert (files["sample_size"], files["cells"], files["voxel_size"], files["oversample"], files["spread"]) == (32, 64, 2.0, 1, 0.2)
    assert (files["fixed_mpc"], files["micro_batch_size"], config["seed_everything"], config["precision"]) == (False, 3, 9, "32")
    strategy = trainer["strategy"]["init_args"]
    assert (strategy["replication_factor"], strategy["gradient_accumulation_factor"], strategy["device_iterations"]) == (2, 2, 7)
    assert (strategy["pipeline_splits"], strategy["recompute"]) == (["network.fc1"], True)
    assert (trainer["max_epochs"], trainer["max_steps"], trainer["log_every_n_steps"], trainer["accelerator"]) == (2, 5, 3, "cpu")
    assert trainer["callbacks"][0]["init_args"]["stopping_threshold"] == 0.2 and trainer["default_root_dir"] == "o"
    assert config["machine"] == {"threads": 1, "keep_freed_memory": False} and strategy["bind_cores"] is False


def test_a_run_simulates_trains_reports_and_is_replayed_validated_and_predicted_from_what_it_leaves(run):
    status, output, errors = run(*TINY, "--num-ipus", "2", "--print-fom", "--test")
    assert status == 0, errors
    assert re.search(r"network +cosmoflow-mlperf, of log\(1 \+ counts\)", output) and re.search(r"replicas R +2", output)
    scores = re.search(r"\nMAE (0\.\d+): Ω_m 0\.\d+, .* \(± 0\.\d+, .*\); R² -?\d+\.\d+\n", output)
    fom = re.search(r"\nFoM: (0\.\d{6})\n", output)
    assert scores and fom and f"{float(fom[1]):.4f}" == scores[1] and "test loss: " in output and "Traceback" not in errors
    assert {path.name for path in Path("results").iterdir()} == {
        ".lock",
        "config.yaml",
        "metrics.csv",
        "checkpoints",
        "validation.png",
        "test.png",
    }
    assert Path("results/validation.png").read_bytes().startswith(b"\x89PNG")
    assert any("best" in path.name for path in Path("results/checkpoints").iterdir())

    first = torch.load("results/checkpoints/last.ckpt")["state_dict"]
    status, output, errors = run("fit", "--config", "results/config.yaml", "--trainer.default_root_dir", "again")
    assert status == 0 and "simulating" not in output, errors
    assert scores[0] in output and fom[0] in output and "test loss: " in output
    second = torch.load("again/checkpoints/last.ckpt")["state_dict"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    status, output, errors = run("validate", "--ckpt_path", "results/checkpoints/last.ckpt")
    assert status == 0 and f"MAE {scores[1]}: " in output and "warning" not in errors
    status, output, _ = run("predict", "--ckpt_path", "results/checkpoints/last.ckpt", "--model.predict_units", "physical")
    predictions = torch.load("results/predictions.pt")
    assert status == 0 and predictions.shape == (3, 4) and 0.15 < predictions[:, 0].mean() < 0.45 and 30 < predictions[:, 3].mean() < 110


def test_the_original_line_runs_from_the_package_and_says_that_it_learns_nothing(run):
    line = ["configs/graphcore.yaml", "--n-train", "2", "--n-epochs", "1", "--num-ipus=2", "--precision", "32.32"]
    status, output, errors = run(*line)
    assert status == 0 and re.search(r"parameters +619,956", output) and "one random cube over and over" in output.splitlines()[-1], errors
    assert re.search(r"replicas R +2", output) and re.search(r"device iterations D +5,000", output)
    config = yaml.safe_load(Path("results/config.yaml").read_text())
    assert config["model"]["optimizer"] == "Adadelta" and config["model"]["learning_rate"] == 0.5 and config["model"]["dropout"] == 0.2


def test_a_configuration_without_validation_validates_where_it_is_asked_to_and_a_runs_own_configuration_is_benchmarked(run):
    line = [
        "configs/graphcore.yaml",
        "--n-train",
        "2",
        "--n-epochs",
        "1",
        "--sample-size",
        "32",
        "--conv-size",
        "2",
        "--precision",
        "32.32",
    ]
    status, output, errors = run(*line)
    assert status == 0 and "val loss" not in output and "warning" not in errors, errors
    assert {path.name for path in Path("results/checkpoints").iterdir()} == {"last.ckpt", "update2.ckpt"}
    status, output, errors = run("--config", "results/config.yaml", "--data-benchmark")
    assert status == 0 and output.splitlines()[0] == "Epoch, Bandwidth(GB/s), Samples/Second" and output.count("\n") == 4, errors
    status, output, errors = run(*line, "--n-valid", "2")
    assert status == 0 and "val loss" in output and "MAE" in output, errors
    assert any("best" in path.name for path in Path("results/checkpoints").iterdir())


def test_the_default_rate_of_sgd_follows_the_samples_of_a_weight_update():
    def rate(*words: str) -> float:
        return float(settled(*words)["model.learning_rate"])

    assert rate() == 0.02 and rate("--num-ipus", "2") == 0.04 and rate("--gradient-accumulation-factor", "4") == 0.08
    assert rate("--micro-batch-size", "4") == 0.01 and rate("--num-ipus", "2", "--optimizer", "Adam") == 0.001
    assert rate("configs/mlperf.yaml", "--optimizer", "SGD") == pytest.approx(0.02 * 4 * 16 / 8)


def test_every_configuration_trains_and_is_what_it_says(run):
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"graphcore", "mlperf", "small"}
    status, _, errors = run("generate", "--output-dir", "d", "--n-train", "8", "--n-valid", "2", "--oversample", "1")
    assert status == 0, errors
    short = "--precision 32.32 --conv-size 2 --n-epochs 1".split()
    line = ["--data-dir", "d", "--micro-batch-size", "1", "--gradient-accumulation-factor", "4"]
    status, output, errors = run("configs/mlperf.yaml", *line, *short)
    assert status == 0 and re.search(r"samples +8 to train on, 2 to validate on", output), errors
    assert re.search(r"global batch +4 samples", output)
    small = "--n-train 4 --n-valid 2 --oversample 1 --output-dir b --micro-batch-size 2".split()
    status, _, errors = run("configs/small.yaml", *small, *short)
    assert status == 0, errors


def test_mlperfs_rate_falls_with_the_updates_after_17_and_33_epochs_as_the_reference_has_it():
    config = yaml.safe_load((CONFIGS / "mlperf.yaml").read_text())
    one = module.CosmoFlowModule(input_size=32, conv_size=1, **{k: v for k, v in config["model"].items() if k != "conv_size"})

    class Run:  # 128 epochs of 8 weight updates
        estimated_stepping_batches, num_training_batches, accumulate_grad_batches = 128 * 8, 128, 16

        class fit_loop:
            setup_data = staticmethod(lambda: None)

    one._trainer, one._fabric = Run(), None
    settings = module.CosmoFlowModule.configure_optimizers(one)
    scheduler = settings["lr_scheduler"]["scheduler"]
    factors = [scheduler.lr_lambdas[0](update) for update in range(128 * 8)]
    assert factors == [1.0] * 17 * 8 + [0.25] * 16 * 8 + [0.125] * 95 * 8
    assert [group["weight_decay"] for group in settings["optimizer"].param_groups] == [0.0, 0.02]


def test_a_damaged_file_ends_a_run_in_one_line_with_status_1_or_is_skipped(run):
    assert run("generate", "--output-dir", "d", "--n-train", "6", "--n-valid", "2", "--oversample", "1")[0] == 0
    path = Path("d/train/universe-0000003.tfrecord")
    flipped = bytearray(path.read_bytes())
    flipped[1000] ^= 1
    path.write_bytes(flipped)
    line = ["--data-dir", "d", *TINY[4:8], "--micro-batch-size", "1", "--no-standardise"]
    for workers in ("0", "1"):
        status, _, errors = run(*line, "--num-workers", workers)
        assert status == 1 and errors.splitlines()[-1].startswith(
            "cosmoflow_ipu: error: d/train/universe-0000003.tfrecord: record 0 at byte 0: "
        )
        assert "Traceback" not in errors and "checksum" in errors
    status, output, errors = run(*line, "--on-bad-record", "skip")
    assert status == 0 and "1 bad train records or files are left out, 5 records are good" in errors
    assert re.search(r"samples +5 to train on", output)
    path.write_bytes(flipped[:5000])
    status, _, errors = run(*line)
    assert status == 2 and "the file is cut off" in errors and errors.count("\n") == 1


def test_generate_writes_goes_on_and_refuses_another_family(run):
    line = ["generate", "--output-dir", "d", "--n-valid", "1", "--sample-size", "8", "--cells", "16", "--oversample", "1", "--pack"]
    status, output, _ = run(*line, "--n-train", "9", "--spread", "0.1")
    assert status == 0 and output.startswith("d: 4 universes, ") and "cut from 16^3" in output
    records = TFRecords(sorted(Path("d/train").iterdir()))
    assert len(records) == 16 and records.packed
    flags_off = "--box-in-mpc-per-h", "false"
    assert run(*line, "--n-train", "20", "--spread", "0.1", *flags_off)[1].startswith("d: 5 universes, ")
    status, _, errors = run(*line, "--n-train", "20", "--spread", "0.2")
    assert status == 2 and "d holds universes of spread 0.1, not 0.2" in errors and errors.count("\n") == 1


def test_show_draws_a_universe(run):
    status, output, errors = run("show", "--index", "3", "--cells", "16", "--output", "u.png")
    assert status == 0 and output.startswith("u.png: universe 3"), errors
    assert Path("u.png").read_bytes().startswith(b"\x89PNG")
    status, _, errors = run("show", "--cells", "1")
    assert status == 2 and "cells=1 must lie between 4 and 1024" in errors and errors.count("\n") == 1


def test_the_data_benchmark_reads_and_prints_one_line_for_each_epoch(run):
    status, output, errors = run(*TINY, "--data-benchmark")
    assert status == 0, errors
    header, *rows = output.splitlines()
    assert header == "Epoch, Bandwidth(GB/s), Samples/Second" and [row.split(",")[0] for row in rows] == ["1", "2", "3"]
    assert all(float(row.split(",")[2]) > 0 for row in rows) and not Path("results").exists()


def test_stop_at_mae_ends_the_run(run):
    status, output, _ = run(*TINY[:4], "--n-epochs", "50", *TINY[6:], "--stop-at-mae", "2")
    assert status == 0 and "epoch 1/50" in output and "epoch 2/50" not in output


def test_a_targets_file_from_elsewhere_without_a_test_set_is_validated_in_its_place(run):
    for split in ("train", "validation"):
        Path("d", split).mkdir(parents=True)
        record = encode_example({"x": np.ones(32**3 * 4, "<i2").tobytes(), "y": np.full(4, 0.25)})
        write_tfrecord(f"d/{split}/a_000.tfrecord", [record])
    warnings.simplefilter("ignore")
    status, output, errors = run("test", "--data.dataset", "tfrecord", "--data.data_dir", "d", "--model.conv_size", "2")
    assert status == 0 and "MAE" in output and "± " not in output, errors  # without the spread there are no physical units
