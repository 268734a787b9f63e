"""``python -m cifar_ipu``: options of both original programs, their arithmetic, and what a run leaves in its directory."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from cifar_ipu import __main__ as command
from cifar_ipu import networks
from cifar_ipu.data import ImageDataModule
from cifar_ipu.options import LAYERS
from lightning_ipu.command.parser import build_parser, parse
from lightning_ipu.recipe.optimizers import OPTIMIZERS

CONFIGS = Path(command.__file__).parent / "configs"
# Every option of the two original programs; each is honoured.
ORIGINAL = """--batch-size --epochs --ipus --gradient-accumulation-count --model_shard_position --batches-per-step --learning-rate --test-only
    --train-only --log-interval --summary-interval --model-dir --profile --generated-data""".split()


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture
def run(command_line, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    return lambda line, *more: command_line(command.main, *line.split(), *more)


def settled(line: str) -> dict[str, str]:
    """LightningCLI settings that a short command line is translated to."""
    parser = build_parser(prog="cifar_ipu", description="", epilog="", options=command.OPTIONS, version=str)
    lines = command.settle(parse(line.split(), parser=parser, options=command.OPTIONS))
    return dict(line.removeprefix("--").split("=", 1) for line in lines)


def plan_of(line: str) -> tuple[str, ...]:
    """micro-batch, R, A, splits and schedule of a short command line."""
    settings = settled(line)
    names = ("replication_factor", "gradient_accumulation_factor", "pipeline_splits", "pipeline_schedule")
    return settings["data.micro_batch_size"], *(settings.get(f"trainer.strategy.{name}") for name in names)


def score_of(output: str) -> tuple[str, str]:
    """Accuracy and loss, the last ones that were printed."""
    return re.findall(r"accuracy: (\d+\.\d\d) %\n(?:test )?loss: (\d+\.\d{4})", output)[-1]


# -- help and wrong command lines ---------------------------------------------------------------------------------------------


def test_help_and_wrong_options_import_no_torch():
    script = """
import resource, runpy, sys
for words in (["--help-all"], ["--help-originals"], ["--version"], ["--batch", "8"], ["--test-only", "--model-dir", "nothing"], ["--model-shard-position", "18"]):
    sys.argv = ["cifar_ipu", *words]
    try:
        runpy.run_module("cifar_ipu", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("status", end.code, file=sys.__stderr__)
assert "torch" not in sys.modules and "pytorch_lightning" not in sys.modules
usage = resource.getrusage(resource.RUSAGE_SELF)
assert usage.ru_utime + usage.ru_stime < 1, usage
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"status (\d|None)", done.stderr) == ["0", "0", "0", "2", "2", "2"]
    for name in (name for option in command.OPTIONS for name in option.names):
        assert re.search(rf"^  (\S+ \S+, )*{re.escape(name)}\b", done.stdout, re.M), name


def test_every_option_of_the_originals_is_known_and_names_are_those_of_the_code():
    assert set(ORIGINAL) <= {name for option in command.OPTIONS if not option.refused for name in option.names}
    assert set(LAYERS) == set(networks.NETWORKS)
    for name, build in networks.NETWORKS.items():
        assert LAYERS[name] == [layer for layer, _ in build().named_children()]
    assert set(next(option for option in command.OPTIONS if option.name == "--optimizer").type.choices) == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--batchsize 8", "unknown option --batchsize; did you mean --batch-size"),
        ("--network whitened", "--network whitened has no original recipe: give --recipe fast, or --network keras or estimator"),
        ("--epochs 0", "--epochs: '0' must be a number above 0"),
        ("--test-only --train-only", "--test-only and --train-only exclude each other"),
        ("--test-only --model-dir nothing", "--test-only: there is no checkpoint in nothing/checkpoints; train first"),
        ("--model-shard-position 17", "--model-shard-position 17: the layers of keras that can begin a second stage are 1 to 16"),
        ("--model-shard-position 0", "--model-shard-position: '0' must be a whole number above 0"),
        ("--pipeline --model-shard-position 7 --ipus 3", "--ipus 3 must be 2 for 1 replica of 2 stages"),
        ("--pipeline --replicas 2 --ipus 2", "--pipeline needs at least two stages: give --ipus 4"),
        ("--replicas 2 --ipus 4", "--ipus 4 must be 2 for 2 replicas of 1 stage"),
        ("--model-shard-position 7 --pipeline-splits network.conv3", "--pipeline-splits and --model-shard-position exclude each other"),
        ("--pipeline-schedule GPipe", "--pipeline-schedule GPipe needs --pipeline"),
        ("--replicas 3 --processes 2", "--processes: .*3"),
        ("--crop-padding 2", "--crop-padding 2 needs --augmentation"),
        ("--recipe fast --crop-padding 1 --generated-data", "--crop-padding 1 needs --augmentation, of images that are not generated"),
        ("--generated-data --augmentation", "--augmentation and --generated-data exclude each other"),
        ("--generated-data --dataset SAMPLE", "--generated-data and --dataset SAMPLE exclude each other"),
        ("--mirror-evaluation --generated-data", "mirror_evaluation=True makes no sense with synthetic class patterns"),
        ("--optimizer lars", "--optimizer lars needs --learning-rate: the recipe's is for sgd"),
        ("--pipeline-splits network.conv9 --dataset SAMPLE", "pipeline_splits='network.conv9' is no submodule"),
        ("--momentum 1 --dataset SAMPLE", "momentum=1.0 must be at least 0 and below 1"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_status_2(run, line, message):
    status, output, errors = run(line)
    assert status == 2 and "Traceback" not in errors and errors.count("\n") == 1, errors
    assert re.match(f"cifar_ipu: error: .*({message})", errors), errors
    assert not Path("results/config.yaml").exists()


# -- what the options mean ----------------------------------------------------------------------------------------------------


def test_the_three_original_scripts_are_one_line_each():
    assert plan_of("--network estimator") == ("16", "1", "1", None, None)
    assert plan_of("--network estimator --replicas 2") == ("16", "2", "1", None, None)
    assert plan_of("--network estimator --ipus 2") == ("16", "2", "1", None, None)
    pipelined = ("16", "1", "8", '["network.conv3"]', "1F1B")
    assert plan_of("--network estimator --pipeline --gradient-accumulation-count 8 --model-shard-position 7") == pipelined
    assert plan_of("--network estimator --pipeline --ipus 2 --model_shard_position 7") == pipelined
    assert plan_of("--network estimator --pipeline") == pipelined
    recipe = {"model.optimizer": "sgd", "model.learning_rate": "0.01", "model.momentum": "0.0", "model.schedule": "const"}
    assert recipe.items() <= settled("--network estimator").items()


def test_stages_beyond_two_are_balanced_and_sharded_without_pipeline():
    settings = settled("--pipeline --ipus 6 --replicas 2")
    assert (settings["trainer.strategy.num_stages"], settings["trainer.strategy.replication_factor"]) == ("3", "2")
    assert plan_of("--pipeline --ipus 4 --model-shard-position 6")[1:4] == ("2", "8", '["network.conv3"]')
    assert plan_of("--model-shard-position 6")[3:] == ('["network.conv3"]', "Sequential")


def test_a_recipe_gives_way_to_what_was_said():
    settings = settled("--recipe fast --label-smoothing 0 --l2-regularization 0.1 --learning-rate 1 --no-augmentation")
    assert settings["model.network"] == "whitened" and settings["data.augment"] == "false" and "data.crop_padding" not in settings
    assert (settings["model.label_smoothing"], settings["model.l2_regularization"], settings["model.learning_rate"]) == (
        "0.0",
        "0.1",
        "1.0",
    )
    settings = settled("--recipe fast --network keras --optimizer sgd --learning-rate 0.1")
    assert settings["data.micro_batch_size"] == "64" and "model.weight_decay" not in settings
    assert "model.warmup_fraction" not in settled("--recipe fast --lr-schedule const")
    settings = settled("--augmentation --crop-padding 4")
    assert (settings["data.augment"], settings["data.crop_padding"], settings["data.scaling"]) == ("true", "4", "unit")


def test_the_default_rate_of_sgd_follows_the_samples_of_a_weight_update():
    for line, rate in (
        ("", 0.01),
        ("--batch-size 256", 0.08),
        ("--gradient-accumulation-count 8", 0.08),
        ("--replicas 2 --gradient-accumulation-count 4", 0.08),
        ("--network estimator --pipeline", 0.08),
        ("--recipe fast --batch-size 32 --gradient-accumulation-count 8", 0.4),
        ("--recipe fast --network keras --batch-size 256", 0.002),
        ("--learning-rate 0.3 --replicas 2", 0.3),
    ):
        assert float(settled(line)["model.learning_rate"]) == pytest.approx(rate), line


def test_every_setting_of_the_short_form_is_one_of_the_long_form(run):
    line = """--network estimator --no-channels-last --dataset MNIST --data-dir d --validation-split 0.2 --augmentation --crop-padding 3
        --batch-size 8 --replicas 2 --gradient-accumulation-count 3 --pipeline --pipeline-splits network.conv3,network.dense1
        --pipeline-schedule Grouped --batches-per-step 5 --precision 32 --seed 7 --epochs 2.5 --optimizer rmsprop --learning-rate 0.5
        --momentum 0.5 --lr-schedule cosine --l2-regularization 0.1 --weight-decay 0.2 --label-smoothing 0.3 --device cpu --threads 1
        --no-allocator-setting --no-core-binding
        --log-interval 2 --summary-interval 3 --model-dir o --profile --checkpoint-every 9 --keep-last 2"""
    status, output, _ = run("fit", *(f"--{key}={value}" for key, value in settled(line).items()), "--print_config")
    assert status == 0
    config = yaml.safe_load(output)
    trainer, model, data = config["trainer"], config["model"], config["data"]
    strategy = trainer["strategy"]["init_args"]
    assert (model["network"], model["channels_last"], model["optimizer"], model["learning_rate"]) == ("estimator", False, "rmsprop", 0.5)
    assert (model["momentum"], model["schedule"], model["l2_regularization"], model["weight_decay"]) == (0.5, "cosine", 0.1, 0.2)
    assert model["label_smoothing"] == 0.3 and model["mirror_evaluation"] is False
    assert (data["dataset"], data["data_dir"], data["validation_split"], data["micro_batch_size"]) == ("MNIST", "d", 0.2, 8)
    assert (data["augment"], data["crop_padding"], data["scaling"], data["seed"]) == (True, 3, "unit", 7)
    assert (strategy["replication_factor"], strategy["gradient_accumulation_factor"], strategy["device_iterations"]) == (2, 3, 5)
    assert strategy["pipeline_splits"] == ["network.conv3", "network.dense1"] and strategy["pipeline_schedule"] == "Grouped"
    assert (config["precision"], config["seed_everything"], config["epochs"]) == ("32", 7, 2.5)
    assert (trainer["accelerator"], trainer["default_root_dir"], trainer["log_every_n_steps"]) == ("cpu", "o", 3)
    assert trainer["callbacks"][0]["class_path"] == "lightning_ipu.ProfileReports"
    assert (config["log_interval"], config["checkpoint_every"], config["keep_last"]) == (2.0, 9, 2)
    assert config["machine"] == {"threads": 1, "keep_freed_memory": False} and strategy["bind_cores"] is False


# -- runs ---------------------------------------------------------------------------------------------------------------------


def test_a_fraction_of_an_epoch_is_so_many_weight_updates_and_the_test_set_is_scored_whole(run):
    # 2,000 images: 7 weight updates of 40 x 7 an epoch, 40 images left out; never a loop more, as the original had.
    line = "--dataset sample --precision 32.32 --batch-size 40 --gradient-accumulation-count 7 --epochs 1.3 --batches-per-step 4"
    status, output, errors = run(f"{line} --summary-interval 4")
    assert status == 0 and "epochs                   1.3, that is 9 weight updates" in output, errors
    last = torch.load("results/checkpoints/last.ckpt")
    assert last["global_step"] == 9 and last["epoch"] == 1
    assert re.findall(r"^epoch (\d) · train loss \d", output, re.M) == ["1", "2"]  # a loss for each epoch, the short one too
    with open("results/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == 9 and any(row["train_loss_step"] for row in rows)  # in weight updates

    # What was printed is the score of all 500 test images, computed here from the checkpoint in plain torch.
    network = networks.keras_cnn(in_channels=1, image_size=28)
    network.load_state_dict({name.removeprefix("network."): value for name, value in last["state_dict"].items()})
    data = ImageDataModule(dataset="SAMPLE", scaling="unit", validation_split=0)
    data.setup()
    images, labels = (torch.stack(parts) for parts in zip(*data.test_dataloader().dataset, strict=True))
    with torch.no_grad():
        logits = network.eval()(images / 255)
    accuracy, loss = score_of(output)
    assert len(labels) == 500 and float(accuracy) == pytest.approx(100 * float((logits.argmax(1) == labels).float().mean()), abs=0.005)
    assert float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), abs=6e-5)

    # --test-only finds that checkpoint, gives the same, says what it makes no use of, and trains nothing.
    status, output, errors = run("--test-only --learning-rate 0.5 --epochs 3")
    assert status == 0 and score_of(output) == (accuracy, loss) and "RANDOM" not in errors
    assert "of no effect beside it: --epochs, --learning-rate" in output and "epoch 1" not in output
    assert Path("results/metrics.csv").read_text().count("\n") == len(rows) + 1

    # A replay scores the test set at its end as well.
    status, output, errors = run("fit --config results/config.yaml --trainer.default_root_dir again")
    assert status == 0 and score_of(output) == (accuracy, loss), errors

    # The configuration holds what the fraction came to, and the network's score without a checkpoint is called random.
    config = yaml.safe_load(Path("results/config.yaml").read_text())
    assert (config["epochs"], config["trainer"]["max_steps"]) == (None, 9)
    status, _, errors = run("test --config results/config.yaml")
    assert status == 0 and "the weights are RANDOM" in errors


def test_a_run_of_three_weight_updates_shows_a_loss_and_one_that_is_repeated_says_so(run):
    status, output, _ = run("--dataset sample --precision 32.32 --epochs 0.1 --train-only --replicas 2")
    assert status == 0 and "that is 3 weight updates" in output and re.search(r"^epoch 1 · train loss \d", output, re.M)
    assert "accuracy" not in output  # --train-only
    with open("results/metrics.csv", newline="") as file:
        assert any(row["train_loss_epoch"] for row in csv.DictReader(file))
    status, output, _ = run("--resume")
    assert status == 0 and "already complete: 3 weight updates" in output


def test_profiling_writes_a_report_of_training_and_of_evaluation(run):
    status, output, _ = run("--dataset sample --precision 32.32 --batch-size 2 --epochs 0.025 --batches-per-step 10 --profile")
    assert status == 0 and "results/train_report.txt: where the time went" in output
    train, evaluation = Path("results/train_report.txt").read_text(), Path("results/eval_report.txt").read_text()
    assert train.startswith("training, weight updates 11 to 20, 20 samples: ") and "aten::convolution_backward" in train
    assert evaluation.startswith("evaluation, all 5 batches: ") and "convolution" in evaluation and "backward" not in evaluation
    status, _, _ = run("--test-only --profile")
    assert status == 0 and Path("results/eval_report-1.txt").read_text() == evaluation != Path("results/eval_report.txt").read_text()


def test_generated_images_are_not_all_zeros_and_differ_between_training_and_test():
    settings = settled("--generated-data --dataset FASHION-MNIST")
    data = ImageDataModule(dataset="FASHION-MNIST", synthetic=settings["data.synthetic"], validation_split=0)
    parts = data._parts
    assert (len(parts["train"]), len(parts["test"])) == (60_000, 10_000) and settings["data.augment"] == "false"
    images, labels = parts["train"].seeded_batch(range(1000), seed=0, epoch=0)
    others, _ = parts["test"].seeded_batch(range(1000), seed=0, epoch=0)
    assert images.float().std() > 10 and labels.unique().tolist() == list(range(10))
    assert not (images.flatten(1) == others.flatten(1)).all(1).any()


def test_a_generated_run_learns_its_classes(run):
    line = "--generated-data --dataset MNIST --precision 32.32 --batch-size 16 --epochs 0.02 --learning-rate 0.05 --train-only"
    status, output, _ = run(line)
    assert status == 0 and "synthetic class patterns" in output and "60,000 to train on, 10,000 to test on" in output
    with open("results/metrics.csv", newline="") as file:
        losses = [float(row["train_loss_step"]) for row in csv.DictReader(file) if row["train_loss_step"]]
    assert losses[0] > 2.2 and losses[-1] < 1.9


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_configurations_train(run, config):
    limits = [
        "--trainer.limit_train_batches=16",
        "--trainer.max_epochs=1",
        "--data.dataset=SAMPLE",
        "--data.micro_batch_size=8",
        "--precision=32.32",
    ]
    status, output, errors = run(f"fit --config {config}", *limits)
    assert status == 0 and "epoch 1/1 · train loss" in output, errors
