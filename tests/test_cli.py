"""``python -m resnet_ipu``: options, messages, exit status, and what a run leaves in its output directory."""

import csv
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import warm
import yaml
from image_tree import make_tree
from torch.utils.data import DataLoader, Dataset

from lightning_ipu.command.parser import build_parser, lightning_arguments, parse
from lightning_ipu.errors import UserError
from resnet_ipu import __main__ as command
from resnet_ipu import networks
from resnet_ipu.module import ResNetModule
from resnet_ipu.options import CIFAR_SIZES, IMAGENET_SIZES

CONFIGS = Path(command.__file__).parent / "configs"
TINY = ["--dataset", "sample", "--size", "8", "--precision", "32.32", "--limit-train-batches", "8", "--limit-val-batches", "2"]

# Every option of the original program; each is honoured or refused by name.
ORIGINAL = """--dataset --data-dir --num-workers --batch-size --size --norm-type --norm-groups --shortcut-type --precision --prng --no-prng
    --fp-exceptions --half-partials --base-learning-rate --learning-rate-decay --learning-rate-schedule --epochs --no-validation
    --valid-per-epoch --steps-per-log --weight-decay --num-ipus --replication-factor --recompute --pipeline --batches-per-step --simulation
    --gradient-accumulation-factor --ckpt --syncless-collectives --max-bytes-per-tile --log-dir --log_dir_string --get-reports""".split()


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture
def run(command_line):
    return partial(command_line, command.main)


def settled(*arguments: str) -> dict[str, str]:
    """LightningCLI settings that a short command line is translated to."""
    parser = build_parser(prog="resnet_ipu", description="", epilog="", options=command.OPTIONS, version=str)
    lines = command.settle(parse(arguments, parser=parser, options=command.OPTIONS))
    return dict(line.removeprefix("--").split("=", 1) for line in lines)


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


def process(*arguments: str) -> subprocess.Popen:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], text=True, env=ENVIRONMENT, **streams)


# -- help and wrong command lines ---------------------------------------------------------------------------------------------


def test_helps_list_every_option_once_with_its_default_in_under_half_a_second_of_cpu_time_the_main_one_at_most_sixty():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    helped = process("-m", "resnet_ipu", "--help")
    text, errors = helped.communicate(timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert helped.returncode == 0 and errors == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert "[batch]" in text and "[1e-4, but 0 for adamw" in text and "[30; 1 on" in re.sub(r"\s+", " ", text)
    everything, originals = (process("-m", "resnet_ipu", view).communicate(timeout=60)[0] for view in ("--help-all", "--help-originals"))
    listed = [re.findall(r"^  (--?[\w-]+)", words, re.M) for words in (text, everything, originals)]
    assert len(listed[0]) <= 60 and set(listed[0]) - {"--help-all"} < set(listed[1])
    ours = [option.name for option in command.OPTIONS if not (option.refused or option.original)]
    theirs = [option.name for option in command.OPTIONS if option.refused or option.original]
    assert sorted(listed[1]) == sorted([*ours, "-h", "--help-originals", "--version"])
    assert sorted(listed[2]) == sorted([*theirs, *(name for option in command.OPTIONS for name in option.aliases)])


def test_help_version_and_wrong_options_import_no_torch():
    script = """
import runpy, sys
for words in (["--help"], ["--version"], ["--sise", "8"], ["--batch-size", "30", "--replication-factor", "4"], ["--dataset", "nothing"]):
    sys.argv = ["resnet_ipu", *words]
    try:
        runpy.run_module("resnet_ipu", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("status", end.code, file=sys.__stderr__)
assert "torch" not in sys.modules and "pytorch_lightning" not in sys.modules
"""
    done = process("-c", script)
    _, errors = done.communicate(timeout=60)
    assert done.returncode == 0, errors
    assert re.findall(r"status (\d|None)", errors) == ["0", "0", "2", "2", "2"]


def test_every_option_of_the_original_is_known_and_every_size_is_a_network():
    assert set(ORIGINAL) <= {option.name for option in command.OPTIONS}
    for size in (*CIFAR_SIZES, *IMAGENET_SIZES):
        with torch.device("meta"):
            networks.resnet(size, num_classes=10, in_channels=3, stem="cifar", norm="batch")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--sise 20", "unknown option --sise; did you mean --size?"),
        ("--size 21", "--size: '21' is not known; known are 8, 14, 20"),
        ("20", "unexpected argument '20'"),
        ("--batch-size 30 --replication-factor 4", "--batch-size 30 must be a multiple of --replication-factor 4: 28 or 32"),
        ("--batch-size 3 --replication-factor 4", "--batch-size 3 must be a multiple of --replication-factor 4: 4, for example"),
        ("--batch-size 0", "--batch-size: '0' must be a whole number above 0"),
        ("--batch-size 32 --micro-batch-size 8", "--batch-size and --micro-batch-size exclude each other"),
        ("--learning-rate .1 --base-learning-rate -6", "--base-learning-rate and --learning-rate exclude each other"),
        ("--num-ipus 6 --replication-factor 4", "--num-ipus 6 must be a multiple of --replication-factor 4: 4, 8, 12"),
        ("--pipeline", "--pipeline needs at least two stages.*give --num-ipus 2, 3, 4, ... or --pipeline-splits"),
        ("--pipeline --num-ipus 2 --replication-factor 2", "--num-ipus 2 with --replication-factor 2 makes one: give --num-ipus 4, 6, 8"),
        ("--num-ipus 3 --pipeline-splits network.layer2", "the 1 names of --pipeline-splits make 2 stages"),
        ("--pipeline-schedule GPipe --num-ipus 2", "--pipeline-schedule GPipe needs --pipeline"),
        ("--dataset cifar-11", "'cifar-11' is not known; known are CIFAR-10"),
        ("--precision 16.8", "--precision: '16.8' is not known; known are auto, 16.16"),
        ("--prng", "--prng concerns 16-bit weights: it needs --precision 16.16, not auto"),
        ("--prng --no-prng --precision 16", "--no-prng and --prng exclude each other"),
        ("--loss-scaling 128 --auto-loss-scaling", "--auto-loss-scaling and --loss-scaling exclude each other"),
        ("--loss-scaling -1", "--loss-scaling: '-1' must be a number of at least 0"),
        (
            "--lr-schedule cosine --learning-rate-decay 1,.1,0",
            "--learning-rate-decay belongs to a stepped schedule, not to --lr-schedule cosine",
        ),
        ("--lr-decay-rate .9 --lr-end-ratio .1", "--lr-decay-rate and --lr-end-ratio exclude each other"),
        ("--max-bytes-per-tile 1000", "--max-bytes-per-tile: steers the IPU's compiler only"),
        ("--ckpt=model.onnx", "--ckpt: checkpoints go to OUTPUT_DIR/checkpoints"),
        ("--get-reports", "--get-reports: the reports"),
        ("--norm-groups 4", "--norm-groups 4 needs --norm-type group"),
        ("--learning-rate-decay 1,x", "--learning-rate-decay: '1,x' must be numbers"),
        ("--learning-rate-decay 1,.1", "--learning-rate-decay has 2 values and --learning-rate-schedule 2"),
        ("--learning-rate-schedule .75,.5", "--learning-rate-schedule 0.75,0.5 must rise"),
        (
            "--limit-train-batches 1.5",
            "--limit-train-batches: '1.5' must be a whole number of micro-batches from 1 on, or a share above 0.0",
        ),
        ("--valid-per-epoch -1", "--valid-per-epoch: '-1' must be a number of at least 0 or a fraction such as 1/2"),
        ("--epochs", "--epochs: expected one argument"),
        ("--ema 1", "--ema 1 must be below 1, such as 0.999"),
        ("--mixup 0.2 --micro-batch-size 1", "--mixup 0.2 mixes the images of a micro-batch, which here has one: give at least 2"),
        ("--cutmix 0", "--cutmix: '0' must be a number above 0"),
        ("--auto-augment randaugment --no-augmentation", "--auto-augment and --no-augmentation exclude each other"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_status_2(run, line, message):
    status, output, errors = run(*line.split())
    assert status == 2 and output == ""
    assert re.match(f"resnet_ipu: error: .*{message}", errors) and errors.count("\n") == 1


# -- translation --------------------------------------------------------------------------------------------------------------


def test_the_batch_is_over_all_replicas_and_the_learning_rate_goes_by_it():
    settings = settled("--size", "x50", "--replication-factor", "4", "--gradient-accumulation-factor", "8")
    assert settings["data.micro_batch_size"] == "8" and float(settings["model.learning_rate"]) == 0.16  # of 256 samples
    for words in (
        "--batch-size 256",
        "--gradient-accumulation-factor 8",
        "--micro-batch-size 16 --replication-factor 4 --global-batch-size 256",
    ):
        assert float(settled("--size", "8", *words.split())["model.learning_rate"]) == 0.8
    assert (
        float(settled("--micro-batch-size", "8", "--replication-factor", "4", "--base-learning-rate", "-6")["model.learning_rate"]) == 0.5
    )
    assert settled("--learning-rate", "0.3")["model.learning_rate"] == "0.3"


def test_stages_come_from_the_number_of_ipus_and_are_sharded_without_pipeline():
    prefix = "trainer.strategy."
    settings = settled("--num-ipus", "8", "--replication-factor", "2", "--pipeline", "--pipeline-schedule", "grouped")
    assert (settings[f"{prefix}num_stages"], settings[f"{prefix}pipeline_schedule"]) == ("4", "Grouped")
    settings = settled("--num-ipus", "4")
    assert (settings[f"{prefix}num_stages"], settings[f"{prefix}pipeline_schedule"]) == ("4", "Sequential")
    assert f"{prefix}num_stages" not in settled("--num-ipus", "4", "--replication-factor", "4")


def test_decay_or_schedule_selects_the_originals_steps_and_names_are_read_in_any_case():
    settings = settled("--learning-rate-schedule", "0.25,0.5", "--norm-type", "GROUP", "--dataset", "Cifar-10", "--shortcut-type", "b")
    assert settings["model.schedule"] == "stepped" and settings["model.decay_values"] == "[1.0, 0.1, 0.01]"
    assert (settings["model.norm_type"], settings["data.dataset"], settings["model.shortcut_type"]) == ("group", "CIFAR-10", "B")
    assert "model.schedule" not in settled()


def test_every_setting_of_the_short_form_is_one_of_the_long_form(run):
    line = """--size 14 --norm-type group --norm-groups 8 --shortcut-type B --no-zero-init --no-channels-last --dataset MNIST --data-dir d
        --validation-split 0.2 --synthetic-data host --num-workers 2 --micro-batch-size 8 --replication-factor 2
        --gradient-accumulation-factor 3 --num-ipus 4 --pipeline --pipeline-splits network.layer2 --recompute --batches-per-step 5
        --precision 32 --no-prng --seed 7 --learning-rate 0.5 --learning-rate-decay 1,0.1 --learning-rate-schedule 0.5 --epochs 3
        --max-steps 9 --weight-decay 0 --momentum 0.5 --label-smoothing 0.1 --limit-train-batches 0.5 --limit-val-batches 3
        --valid-per-epoch 2 --test --device cpu --threads 1 --no-allocator-setting --no-core-binding
        --steps-per-log 2 --output-dir o --log_dir_string n
        --no-augmentation"""
    translated = [f"--{key}={value}" for key, value in settled(*line.split()).items()]
    status, output, _ = run("fit", *translated, "--print_config")
    assert status == 0
    config = yaml.safe_load(output)
    trainer, model, data = config["trainer"], config["model"], config["data"]
    strategy = trainer["strategy"]["init_args"]
    assert (model["size"], model["norm_groups"], model["zero_init_last_norm"], model["channels_last"]) == ("14", 8, False, False)
    assert (model["learning_rate"], model["decay_values"], model["weight_decay"], model["momentum"]) == (0.5, [1.0, 0.1], 0.0, 0.5)
    assert (data["dataset"], data["data_dir"], data["validation_split"], data["synthetic"]) == ("MNIST", "d", 0.2, "host")
    assert (data["micro_batch_size"], data["num_workers"], data["augment"], data["seed"]) == (8, 2, False, 7)
    assert (strategy["replication_factor"], strategy["gradient_accumulation_factor"], strategy["device_iterations"]) == (2, 3, 5)
    assert (strategy["pipeline_splits"], strategy["pipeline_schedule"], strategy["recompute"]) == (["network.layer2"], "1F1B", True)
    assert (trainer["max_epochs"], trainer["max_steps"], config["events"]["validations"]) == (3, 9, "2")
    assert (trainer["limit_train_batches"], trainer["limit_val_batches"], trainer["log_every_n_steps"]) == (0.5, 3, 2)
    assert (trainer["accelerator"], trainer["default_root_dir"]) == ("cpu", "o/n")
    assert (config["precision"], config["seed_everything"]) == ("32", 7)
    assert config["machine"] == {"threads": 1, "keep_freed_memory": False} and strategy["bind_cores"] is False
    assert strategy["stochastic_rounding"] is False and strategy["loss_scaling"] is None

    line = """--optimizer lars --l2-regularization 0.1 --decay-all --lr-schedule polynomial --warmup-epochs 2 --warmup-mode mask --lr-staircase
        --lr-decay-epochs 9 --lr-end-ratio 0 --lr-power 3 --half-type fp16 --precision 16.16 --auto-loss-scaling --mixup 0.2 --cutmix 1
        --ema 0.99 --auto-augment RandAugment --color-jitter 0.4 --random-erasing 0.1 --pretrained resnet50.pth"""
    translated = [f"--{key}={value}" for key, value in settled(*line.split()).items()]
    status, output, _ = run("fit", *translated, "--print_config")
    assert status == 0
    config = yaml.safe_load(output)
    model, strategy = config["model"], config["trainer"]["strategy"]["init_args"]
    assert (model["optimizer"], model["learning_rate"], model["momentum"], model["weight_decay"]) == ("lars", 2.0, None, None)
    assert (model["l2_regularization"], model["decay_all"], model["schedule"], model["power"]) == (0.1, True, "polynomial", 3.0)
    assert (model["warmup_epochs"], model["warmup_mode"], model["staircase"]) == (2.0, "mask", True)
    assert (model["decay_epochs"], model["final_fraction"], model["decay_rate"]) == (9.0, 0.0, None)
    assert (config["half_type"], config["precision"], strategy["loss_scaling"]) == ("fp16", "16.16", "auto")
    assert (model["mixup"], model["cutmix"], model["pretrained"]) == (0.2, 1.0, "resnet50.pth")
    assert (config["data"]["auto_augment"], config["data"]["color_jitter"], config["data"]["random_erasing"]) == ("randaugment", 0.4, 0.1)
    (average,) = config["trainer"]["callbacks"]
    assert average["class_path"] == "lightning_ipu.AveragedWeights" and average["init_args"]["decay"] == 0.99
    assert float(settled("--loss-scaling", "128")["trainer.strategy.loss_scaling"]) == 128


# -- runs ---------------------------------------------------------------------------------------------------------------------


def weights(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, map_location="cpu")["state_dict"]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def files(directory: str | Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()}


def test_a_short_run_trains_validates_and_its_config_replays_it(run):
    status, output, errors = run(*TINY)
    assert status == 0
    assert re.search(r"^│ epochs +1, chosen for the embedded sample", output, re.M)
    closing = re.search(
        r"\nthroughput: \d+\.\d samples/sec\naccuracy: (\d+\.\d\d) %\nloss: (\d\.\d{4})\nresults in results: .*\nThese figures are from the embedded",
        output,
    )
    assert closing and "Traceback" not in errors and "Tip" not in errors and "GPU" not in errors
    assert files(".") == {f"results/{name}" for name in ("config.yaml", "metrics.csv", ".lock", "checkpoints/last.ckpt")} | {
        "results/checkpoints/best-update8.ckpt"
    }

    with open("results/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps)) and any(
        row["train_loss_step"] for row in rows
    )  # a run shorter than --steps-per-log has a loss as well
    assert f"{float(rows[-1]['val_loss']):.4f}" == closing[2] and f"{100 * float(rows[-1]['val_accuracy']):.2f}" == closing[1]
    config = yaml.safe_load(Path("results/config.yaml").read_text())
    assert (config["precision"], config["data"]["dataset"], config["trainer"]["max_epochs"]) == ("32.32", "SAMPLE", 1)

    first = weights("results/checkpoints/last.ckpt")
    status, output, _ = run("fit", "--config", "results/config.yaml")  # into the same directory
    assert status == 0 and "An earlier run was in results: it is in results/earlier-1 now." in output
    assert same(first, weights("results/earlier-1/checkpoints/last.ckpt"))
    assert same(first, weights("results/checkpoints/last.ckpt"))
    assert f"accuracy: {closing[1]} %\nloss: {closing[2]}\n" in output
    assert Path("results/config.yaml").read_text() == Path("results/earlier-1/config.yaml").read_text()

    # What fit measured last is what validate measures, from the checkpoint alone; without one it warns.
    status, output, errors = run("validate", "--ckpt_path", "results/checkpoints/last.ckpt", "--trainer.limit_val_batches", "2")
    assert status == 0 and f"accuracy: {closing[1]} %\nloss: {closing[2]}\n" in output and "RANDOM" not in errors
    status, _, errors = run("validate", "--config", "results/config.yaml")
    assert status == 0 and "warning: validate without --ckpt_path: the weights are RANDOM" in errors
    # The command line overrides the checkpoint's settings.
    status, _, errors = run("validate", "--ckpt_path", "results/checkpoints/last.ckpt", "--model.size", "14")
    assert status == 2 and re.match("resnet_ipu: error: the checkpoint does not fit the network: Missing key", errors)

    status, output, _ = run("predict", "--ckpt_path", "results/checkpoints/last.ckpt")
    predictions = torch.load("results/predictions.pt")
    assert status == 0 and "predictions: results/predictions.pt (500 x 10)" in output and predictions.shape == (500, 10)
    torch.testing.assert_close(predictions.sum(1), torch.ones(500))


def test_fewer_samples_than_one_weight_update_is_an_error_that_names_the_factors_and_leaves_an_earlier_run_alone(run):
    Path("results/checkpoints").mkdir(parents=True)
    Path("results/config.yaml").write_text("of an earlier run")
    status, output, errors = run(*TINY[:6], "--micro-batch-size", "8", "--replication-factor", "40", "--gradient-accumulation-factor", "7")
    assert status == 2 and "Traceback" not in errors
    assert re.search(r"^resnet_ipu: error: .*2000 samples.*micro-batch 8 .*_factor 7 .*replication_factor 40 = 2240 samples", errors, re.M)
    assert files("results") == {"config.yaml", ".lock"} and Path("results/config.yaml").read_text() == "of an earlier run"


def test_a_run_that_max_steps_ends_within_an_epoch_saves_and_scores_its_last_weights(run):
    status, output, _ = run(*TINY, "--max-steps", "11", "--batches-per-step", "4", "--norm-type", "none", "--test", "--output-dir", "out")
    assert status == 0
    last = torch.load("out/checkpoints/last.ckpt")
    assert last["global_step"] == 11
    score = re.search(r"^accuracy: .*\nloss: .*\n(test accuracy: \d+\.\d\d %)\ntest loss: \d\.\d{4}$", output, re.M)
    assert score
    status, output, _ = run("test", "--ckpt_path", "out/checkpoints/last.ckpt")
    assert score[1].removeprefix("test ") in output


def test_averaged_weights_are_validated_saved_and_scored_as_what_they_are(run):
    status, output, _ = run(*TINY, "--epochs", "2", "--ema", "0.9", "--checkpoint-every", "4", "--keep-last", "4")
    closing = re.search(r"\n(accuracy: .*\nloss: .*\n)", output)[1]
    assert status == 0 and re.search(r"averaged weights +decay 0.9; validated and saved: the average weights", output)
    evaluate = ["validate", "--trainer.limit_val_batches", "2", "--ckpt_path"]
    status, output, errors = run(*evaluate, "results/checkpoints/last.ckpt")
    assert status == 0 and f"weights: exponential moving average, decay 0.9\n{closing}" in output and "warning" not in errors

    status, output, _ = run("average", "--checkpoint-input-path", "results", "--weight-avg-N", "2", "--checkpoint-output-path", "mean.ckpt")
    assert status == 0 and output.endswith("mean.ckpt: mean of 2 checkpoints, after weight updates 12, 16\n")
    status, output, _ = run(*evaluate, "mean.ckpt")
    assert status == 0 and "weights: mean of 2 checkpoints, after weight updates 12, 16\naccuracy: " in output
    status, _, errors = run("fit", "--config", "results/config.yaml", "--ckpt_path", "mean.ckpt")
    assert status == 2 and "mean.ckpt is an average (mean of 2 checkpoints" in errors and errors.count("\n") == 1


def test_no_validation_trains_every_epoch_and_the_stages_change_no_number(run):
    status, output, _ = run(*TINY, "--no-validation", "--epochs", "2", "--output-dir", "one")
    assert status == 0 and output.count("train loss") == 2 and "accuracy" not in output and "throughput: " in output
    status, _, _ = run(*TINY, "--no-validation", "--epochs", "2", "--output-dir", "two", "--num-ipus", "3", "--pipeline", "--recompute")
    assert status == 0 and same(weights("one/checkpoints/last.ckpt"), weights("two/checkpoints/last.ckpt"))


def test_without_held_out_images_there_is_no_validation_and_the_latest_checkpoint_is_kept(run):
    status, output, errors = run(*TINY[:-2], "--validation-split", "0", "--synthetic-data", "ipu", "--epochs", "1")
    assert status == 0 and "val" not in output.split("epoch 1/")[1] and "warning" not in errors
    assert {"results/checkpoints/last.ckpt", "results/checkpoints/update8.ckpt"} <= files(".")


def test_a_strategy_without_a_plan_is_refused(run):
    status, _, errors = run("fit", "--data.dataset=SAMPLE", "--trainer.strategy=auto", "--trainer.accelerator=cpu")
    assert status == 2 and re.match("resnet_ipu: error: trainer.strategy: .* has no plan; this command runs under IPUStrategy", errors)


OF_LIGHTNING = [path for path in sorted(CONFIGS.glob("*.yaml")) if "\ntrainer:" in path.read_text()]


@pytest.mark.parametrize("config", OF_LIGHTNING, ids=lambda path: path.stem)
def test_the_example_configurations_train(run, config, tmp_path):
    data = ["--data.dataset=SAMPLE"]
    limits = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    if "stem" in yaml.safe_load(config.read_text())["model"]:  # of ImageNet: two replicas of two small images
        data = [f"--data.data_dir={make_tree(tmp_path / 'tree')}", "--data.image_size=16", "--data.eval_image_size=16"]
        limits += [
            "--model.size=8",
            "--data.micro_batch_size=2",
            "--data.eval_batch_size=4",
            "--data.num_workers=0",
            "--model.warmup_epochs=null",
        ]
        limits += [f"--trainer.strategy.init_args.{name}" for name in ("replication_factor=2", "gradient_accumulation_factor=1")]
    status, output, _ = run("fit", "--config", str(config), *data, "--precision=32.32", *limits)
    assert status == 0 and "epoch 1/1" in output


@pytest.mark.parametrize(
    ("name", "batch", "epochs", "rate", "optimizer", "smoothing"),
    [
        ("original", 32, 30, 2**-6 * 32, "sgd", 0),
        ("mlperf_sgd", 1920, 40, 0.001991319 * 1920, "sgd", 0.1),
        ("mlperf_lars", 3456, 38, 0.003045455 * 3456, "lars", 0.1),
        ("torchvision_v1", 256, 90, 0.1, "sgd", 0),
        ("torchvision_v2", 1024, 600, 0.5, "sgd", 0.1),
        ("timm_a3", 2048, 100, 0.008, "lamb", 0),
    ],
)
def test_the_recipes_have_the_published_batch_epochs_and_learning_rate(name, batch, epochs, rate, optimizer, smoothing):
    config = yaml.safe_load((CONFIGS / f"resnet50_{name}.yaml").read_text())
    model, plan = config["model"], config["trainer"]["strategy"]["init_args"]
    replicas, accumulation = plan.get("replication_factor", 1), plan.get("gradient_accumulation_factor", 1)
    assert config["data"]["micro_batch_size"] * replicas * accumulation == batch
    assert (model["size"], model["stem"], config["trainer"]["max_epochs"]) == ("50", "imagenet", epochs)
    assert (model.get("optimizer", "sgd"), model.get("label_smoothing", 0)) == (optimizer, smoothing)
    assert model["learning_rate"] == pytest.approx(rate, rel=1e-4)


def test_a_damaged_archive_is_named_in_one_line_and_help_does_not_mind(run, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-python.tar.gz").write_bytes(b"half of it")
    status, _, errors = run("--dataset", "CIFAR-10", "--size", "8", "--precision", "32.32")
    assert status == 2 and re.match(r"resnet_ipu: error: data/cifar-10-python\.tar\.gz: .*put cifar-10-python", errors)
    assert errors.count("\n") == 1
    assert run("--help")[0] == 0


def test_settings_that_fail_later_are_one_line_as_well(run):
    for words, message in (
        (["--momentum", "1"], "momentum=1.0 must be at least 0 and below 1"),
        (["--loss-scaling", "128"], "loss_scaling=128.0 makes no sense in precision=32-true"),
        (["--precision", "16.16", "--half-type", "fp16", "--device", "cpu"], "16-bit type fp16 is for GPUs; a CPU computes in bf16"),
        (["--precision", "16.16", "--auto-loss-scaling"], "loss_scaling=auto makes no sense in bf16"),
        (["--optimizer", "adamw", "--momentum", ".9"], "momentum=0.9 means nothing to optimizer='adamw'"),
        (["--pipeline-splits", "network.layer9"], "pipeline_splits='network.layer9' is no submodule"),
        (["--device", "gpu"] if not torch.cuda.is_available() else ["--num-ipus", "999"], "."),
    ):
        status, output, errors = run(*TINY, *words)
        assert status == 2 and re.match(f"resnet_ipu: error: .*{message}", errors) and errors.count("\n") == 1, errors
    status, _, errors = run("fit", "--model.sise", "20")
    assert status == 2 and errors.startswith("resnet_ipu: error: ") and "--model.sise" in errors
    for key, message in (
        ("--machine.threads", "threads must be at least 1, not 0"),
        ("--trainer.devices", r".*devices='0'.* is not a valid"),
    ):
        status, _, errors = run("fit", key, "0", "--data.dataset", "SAMPLE")
        assert status == 2 and re.match(f"resnet_ipu: error: {message}", errors) and errors.count("\n") == 1, errors


class Refused(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise UserError(f"sample {index}: no such thing")


def test_only_errors_raised_on_purpose_lose_their_traceback():
    from lightning_ipu.command.messages import is_meant_for_people, one_line
    from lightning_ipu.plan import PlanError

    def caught(action) -> Exception:
        try:
            action()
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    from lightning_ipu.plan import Plan

    assert is_meant_for_people(caught(lambda: Plan(micro_batch_size=0)))
    assert isinstance(caught(lambda: Plan(micro_batch_size=0)), PlanError)
    assert not is_meant_for_people(caught(lambda: int("x")))  # a slip
    assert not is_meant_for_people(caught(lambda: torch.zeros(2).view(3)))
    assert not is_meant_for_people(caught(lambda: torch.optim.SGD([torch.zeros(1)], lr=-1)))  # raised by torch, not by us
    assert not is_meant_for_people(caught(lambda: networks.resnet("no size")))  # code that knows no UserError
    assert is_meant_for_people(caught(lambda: ResNetModule(size="no size")))
    assert is_meant_for_people(caught(lambda: open("/nowhere/file")))
    batches = DataLoader(Refused(), num_workers=1)
    assert is_meant_for_people(error := caught(lambda: next(iter(batches)))) and "Traceback" in str(error)
    assert one_line(error) == "sample 0: no such thing"
    assert is_meant_for_people(caught(lambda: pl.Trainer(strategy="no_such_strategy", logger=False)))  # a ValueError of Lightning's


@pytest.mark.parametrize(("number", "status", "again"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "the signal")])
def test_a_signal_ends_at_a_weight_update_with_a_checkpoint_and_status_128_more(tmp_path, number, status, again):
    line = ["-m", "resnet_ipu", *TINY[:6], "--epochs", "1000", "--batches-per-step", "60"]
    running = warm.start(line, cwd=tmp_path, env=ENVIRONMENT, stdout=warm.PIPE, stderr=warm.PIPE)
    for shown in running.stdout:
        if shown.startswith("epoch 1/"):
            break
    running.send_signal(number)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == status and "Traceback" not in errors
    said = re.search(r"stopped after (\d+) weight updates; the state is saved in results/checkpoints/last\.ckpt", output)
    assert said and f"then saving ({again} again ends at once)" in output
    assert torch.load(tmp_path / "results/checkpoints/last.ckpt")["global_step"] == int(said[1]) >= 62


class Interrupted(pl.Callback):
    """Sends the process the signal of Ctrl-C in the middle of the second validation, once or twice."""

    def __init__(self, times: int) -> None:
        self.times, self.validations = times, 0

    def on_validation_start(self, trainer, module):
        self.validations += 1

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        if self.validations == 2 and batch_idx == 1:
            for number in range(self.times):
                time.sleep(1.1 * number)  # within a second they are one request
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_within_a_validation_ends_after_it_with_a_checkpoint_and_twice_at_once(run, times):
    config = [{"class_path": "test_cli.Interrupted", "init_args": {"times": times}}]
    short = settled(*TINY, "--epochs", "3")
    line = ["fit", *lightning_arguments(short), f"--trainer.callbacks={json.dumps(config)}"]
    status, output, _ = run(*line)
    assert status == 130 and ("stopped after 16 weight updates" in output) == (times == 1)
    last = torch.load("results/checkpoints/last.ckpt")["lightning_ipu"]["position"]
    assert (last["epoch"], last["updates"], last["run_updates"]) == ((2, 0, 16) if times == 1 else (1, 0, 8))


def test_resuming_takes_the_options_of_the_start_and_refuses_another_model(run):
    assert run(*TINY, "--epochs", "1")[0] == 0
    for line in (["--batch-size", "64"], ["--gradient-accumulation-factor", "2"]):  # the rate, too, is another, but not the cause
        status, _, errors = run("--resume", *line, "--epochs", "2")
        error = errors.splitlines()[-1]
        assert (
            status == 2
            and "learning_rate" not in error
            and re.search("error: (the micro-batch is 64|.*gradient_accumulation_factor is 2),", error)
        )
    assert run(*TINY, "--epochs", "1", "--learning-rate", "0.05", "--output-dir", "results")[0] == 0
    status, output, errors = run("--resume", "--epochs", "2")
    assert status == 0 and "goes on after weight update 8" in output and "resuming with --epochs 2 in place of 1" in errors
    status, output, _ = run("--resume")
    assert status == 0 and "already complete: 16 weight updates, 2 epochs" in output
    status, _, errors = run("--resume", "--size", "14", "--epochs", "3")
    assert status == 2 and "model.size is 14, but the run to be resumed has 8" in errors.splitlines()[-1]
    status, _, errors = run("--resume", "--replication-factor", "2", "--gradient-accumulation-factor", "2", "--epochs", "3")
    assert status == 2 and "error: the micro-batch is 16, but" in errors.splitlines()[-1]
    status, _, errors = run("--resume", "--optimizer", "adamw", "--epochs", "3")
    assert status == 2 and "model.optimizer is adamw" in errors.splitlines()[-1]
    status, _, errors = run("--resume", "--no-augmentation", "--epochs", "3")
    assert status == 0 and "warning: the run goes on with data.augment False; so far it was" in errors
    status, _, errors = run("fit", "--config", "results/config.yaml", "--resume", "true", "--trainer.max_epochs", "4")
    assert status == 0 and torch.load("results/checkpoints/last.ckpt")["global_step"] == 32
