"""LightningCLI's words: what is typed wins over configurations, whatever the order, and configurations are found by name."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from image_tree import make_tree

from cifar_ipu import __main__ as cifar
from cosmoflow_ipu import __main__ as cosmoflow
from lightning_ipu.command import configs
from lightning_ipu.command.words import arranged, value_of
from resnet_ipu import __main__ as resnet

pytestmark = pytest.mark.usefixtures("own_process")
TINY = ["--dataset", "sample", "--size", "8", "--precision", "32.32", "--limit-train-batches", "2", "--limit-val-batches", "1"]


@pytest.fixture
def run(command_line):
    return partial(command_line, resnet.main)


def printed(run, *words: str) -> dict:
    status, output, errors = run(*words, "--print_config")
    assert status == 0, errors
    return yaml.safe_load(output)


@pytest.mark.parametrize("config", [["--config", "c.yaml"], ["--config=c.yaml"], ["-c", "c.yaml"], ["-cc.yaml"], ["--conf", "c.yaml"]])
def test_a_typed_value_wins_over_a_configuration_to_its_right_in_every_spelling(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("trainer: {max_steps: 4}")
    words = arranged(["--trainer.max_steps", "2", *config], folder=resnet.CONFIGS, prog="resnet_ipu")
    assert words == ["--config=c.yaml", "--trainer.max_steps", "2"]


def test_typed_values_win_over_configurations_and_whole_sections_and_of_several_files_the_last(run):
    Path("one.yaml").write_text("trainer: {max_steps: 4, max_epochs: 5}\nmodel: {size: '14'}")
    Path("two.yaml").write_text("trainer: {max_steps: 6}")
    Path("data.yaml").write_text("{dataset: MNIST, micro_batch_size: 4}")
    typed = ["--trainer.max_epochs", "2", "--data.micro_batch_size", "8"]
    config = printed(run, "fit", *typed, "--config", "one.yaml", "--data", "data.yaml", "-c", "two.yaml")
    assert (config["trainer"]["max_steps"], config["trainer"]["max_epochs"], config["model"]["size"]) == (6, 2, "14")
    assert (config["data"]["dataset"], config["data"]["micro_batch_size"]) == ("MNIST", 8)


def test_a_checkpoint_or_resume_that_is_typed_before_the_configuration_is_heard(run):
    assert run(*TINY, "--epochs", "1")[0] == 0
    status, output, errors = run("validate", "--ckpt_path", "results/checkpoints/last.ckpt", "--config", "results/config.yaml")
    assert status == 0 and "RANDOM" not in errors and "accuracy" in output
    status, output, _ = run("fit", "--resume", "true", "--trainer.max_epochs", "2", "--config", "results/config.yaml")
    assert status == 0 and "goes on after weight update 2" in output and not Path("results/earlier-1").exists()
    assert torch.load("results/checkpoints/last.ckpt")["global_step"] == 4


@pytest.mark.parametrize(
    ("words", "dataset"),
    [
        (["-c", "a.yaml"], "IMAGENET"),
        (["--config", "a.yaml", "--config", "b.yaml"], "IMAGENET"),
        (["--config", "b.yaml", "--config", "c.yaml"], "SAMPLE"),
        (["--config", "c.yaml", "-c=a.yaml"], "IMAGENET"),
        (["--data.dataset=SAMPLE", "--config", "a.yaml"], "SAMPLE"),
        (["--data", "{dataset: IMAGENET}", "--config", "c.yaml"], "IMAGENET"),
        (["--config", "d.yaml"], "IMAGENET"),
    ],
    ids=" ".join,
)
def test_the_data_set_is_that_of_the_last_configuration_unless_one_is_typed(words, dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("data: {dataset: IMAGENET}")
    Path("b.yaml").write_text("trainer: {max_steps: 1}")
    Path("c.yaml").write_text("data: {dataset: SAMPLE}")
    Path("d.yaml").write_text("data: section.yaml")
    Path("section.yaml").write_text("dataset: IMAGENET")
    assert value_of(arranged(words, folder=resnet.CONFIGS, prog="resnet_ipu"), "data", "dataset") == dataset


def test_images_in_folders_are_trained_on_with_several_configurations(run, tmp_path):
    data = f"dataset: IMAGENET, data_dir: {make_tree(tmp_path / 'tree')}, image_size: 16, eval_image_size: 16, micro_batch_size: 4"
    Path("a.yaml").write_text(f"data: {{{data}}}\nmodel: {{size: '8'}}")
    Path("b.yaml").write_text("trainer: {max_steps: 1, limit_val_batches: 1}\nprecision: '32.32'")
    status, output, errors = run("fit", "-c", "a.yaml", "-c", "b.yaml")
    assert status == 0 and "16 x 16" in output, errors


@pytest.mark.parametrize(
    ("command", "name"),
    [(resnet, "resnet50_torchvision_v1"), (resnet, "resnet8_test"), (cifar, "keras_cifar10"), (cosmoflow, "small")],
    ids=lambda value: value if isinstance(value, str) else value.__name__.partition(".")[0],
)
def test_a_packaged_configuration_is_found_from_anywhere_by_its_name_and_by_its_path_in_the_project(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = command.__name__.partition(".")[0]
    for spelling in (name, f"{name}.yaml", f"configs/{name}.yaml", f"{package}/configs/{name}.yaml"):
        assert configs.find(spelling, folder=command.CONFIGS, prog=package) == command.CONFIGS / f"{name}.yaml"
    Path(f"{name}.yaml").write_text("of the user")
    assert configs.find(f"{name}.yaml", folder=command.CONFIGS, prog=package) == Path(f"{name}.yaml")


def test_every_command_and_subcommand_takes_a_packaged_configuration(command_line):
    for command, name, size in ((resnet, "resnet20_cifar10", "size"), (cifar, "keras_cifar10", "network"), (cosmoflow, "small", "network")):
        for subcommand in ("fit", "validate"):
            config = printed(partial(command_line, command.main), subcommand, "--config", name)
            path = command.CONFIGS / f"{name}.yaml"
            assert config["model"][size] == yaml.safe_load(path.read_text())["model"][size]
    Path("mine.yaml").write_text("network: estimator\nbatch-size: 4\nepochs: 0.004\ntrain-only: true")
    status, output, errors = command_line(cifar.main, "--config", "mine.yaml", "--dataset", "sample", "--precision", "32.32")
    assert status == 0 and "estimator" in output and "that is 2 weight updates" in output, errors


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        (resnet, "--config c.yaml fit", "fit must come first: python -m resnet_ipu fit --config c.yaml"),
        (cifar, "-c c.yaml validate --ckpt_path last", "validate must come first: python -m cifar_ipu validate -c c.yaml --ckpt_path last"),
        (cosmoflow, "--n-train 8 test", "test must come first: python -m cosmoflow_ipu test --n-train 8"),
        (resnet, "--trainer.max_steps 2", "keys of LightningCLI need a subcommand, python -m resnet_ipu fit --trainer.max_steps ..."),
        (resnet, "--config resnet8_test --config resnet50", "--config is given twice"),
        (cifar, "--config keras_cifar10", "laid out for LightningCLI: python -m cifar_ipu fit --config"),
        (resnet, "fit --config resnet50_torchvision", "no such file, and the package has .*; did you mean resnet50_torchvision_v1?"),
        (cosmoflow, "--profile", "unknown option --profile; cosmoflow_ipu --help lists the options"),
    ],
    ids=str,
)
def test_a_line_that_cannot_be_read_is_told_how_to_say_it(command_line, command, line, message):
    status, output, errors = command_line(command.main, *line.split())
    assert status == 2 and output == "" and errors.count("\n") == 1
    assert re.search(message, errors), errors
