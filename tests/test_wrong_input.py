"""What a person gets wrong about files and numbers ends in one line that names it, or works; nothing is written where nobody looks."""

import argparse
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from image_tree import BAD, encoded, photo
from pytorch_lightning.loggers.logger import DummyLogger
from runs import Ledger, fit, loader

from cifar_ipu import __main__ as cifar
from cosmoflow_ipu import __main__ as cosmoflow
from lightning_ipu.command import readers
from lightning_ipu.command.options import AVERAGE_OPTIONS
from resnet_ipu import __main__ as resnet

pytestmark = pytest.mark.usefixtures("own_process")
TINY = "--dataset SAMPLE --size 8 --precision 32.32 --limit-train-batches 1 --limit-val-batches 1".split()
LAST = "results/checkpoints/last.ckpt"


@pytest.fixture
def run(command_line):
    return partial(command_line, resnet.main)


def refused(outcome: tuple[int, str, str], *messages: str) -> None:
    status, _, errors = outcome
    assert status != 0 and errors.count("\n") == 1 and ": error: " in errors, errors
    assert all(message in errors for message in messages), errors


def make_folders(root: Path, names: list[str], *splits: str) -> Path:
    """A folder for each class with two pictures in it."""
    for split in splits:
        for number, name in enumerate(names):
            (root / split / name).mkdir(parents=True)
            for k in range(2):
                (root / split / name / f"{k}.jpg").write_bytes(encoded(photo(10 * number + k), "JPEG"))
    return root


# -- files that are something else --------------------------------------------------------------------------------------------------------


def test_another_commands_checkpoint_or_configuration_is_refused_by_its_name(run, command_line):
    assert command_line(cifar.main, *"--dataset SAMPLE --precision 32.32 --epochs 0.02 --train-only".split())[0] == 0
    theirs = "results/checkpoints/last.ckpt is a checkpoint of cifar_ipu, not of resnet_ipu: python -m cifar_ipu"
    for words in (["validate", "--ckpt_path", LAST], ["predict", "--ckpt_path", "last"], ["fit", "--ckpt_path", LAST]):
        refused(run(*words), theirs)
    refused(run("--training", "false", "--checkpoint-input-dir", "results/checkpoints"), theirs)
    for words in (["--resume"], ["fit", "--config", "results/config.yaml"]):
        refused(run(*words), "results/config.yaml is a configuration of cifar_ipu, not of resnet_ipu: python -m cifar_ipu fit")
    stranger = torch.load(LAST)
    del stranger["command_settings"]["command"]  # as a run of before, or of somebody's own, leaves it
    torch.save(stranger, LAST)
    refused(run("validate", "--ckpt_path", LAST), f"{LAST} is no checkpoint of resnet_ipu, which has no setting model.network")


@pytest.mark.parametrize("main", [resnet.main, cifar.main, cosmoflow.main], ids=["resnet", "cifar", "cosmoflow"])
def test_what_is_no_configuration_is_named_in_all_commands_and_forms(command_line, main):
    torch.save({"weights": torch.zeros(3)}, "last.ckpt")
    Path("empty.yaml").write_text("# nothing yet\n")
    Path("broken.yaml").write_text("trainer: [")
    Path("list.yaml").write_text("- 3\n")
    wanted = {
        "last.ckpt": "last.ckpt is not a YAML file",
        "empty.yaml": "empty.yaml is empty",
        "broken.yaml": "broken.yaml is not a YAML file",
        "list.yaml": "list.yaml must hold",
    }
    for name, message in wanted.items():
        for words in (["--config", name], ["fit", "--config", name], ["predict", f"--model={name}"]):
            refused(command_line(main, *words), message)
    Path("unknown.yaml").write_text("model: {colour: red}")
    refused(command_line(main, "fit", "--config", "unknown.yaml"), "unknown.yaml: model.colour is no key")
    refused(command_line(main, "predict", "--checkpoint", "last.ckpt"), "a checkpoint is given with --ckpt_path")


def test_a_logger_whose_package_is_missing_is_one_line(run):
    logger = {"class_path": "test_wrong_input.Missing"}
    refused(
        run("fit", "--data.dataset=SAMPLE", f"--trainer.logger={json.dumps(logger)}"),
        "test_wrong_input.Missing: sparkles is not installed: pip install sparkles",
    )


class Missing(DummyLogger):
    """A logger of a package that is not there."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("sparkles is not installed: pip install sparkles")


# -- numbers and paths ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed 4294967296", "--seed: '4294967296' must be a whole number from 0 to 4294967295"),
        ("fit --seed_everything 4294967296", "seed_everything=4294967296 must lie between 0 and 4294967295"),
        ("--validation-split 1.5", "--validation-split: '1.5' must be a whole number of images, or a share"),
        ("--limit-train-batches 0", "--limit-train-batches: '0' must be a whole number of micro-batches from 1 on"),
        ("fit --trainer.limit_train_batches 0 --data.dataset SAMPLE", "trainer.limit_train_batches=0 leaves nothing to train on"),
        ("fit --trainer.max_epochs 0 --data.dataset SAMPLE", "trainer.max_epochs=0 trains nothing"),
        ("validate --trainer.limit_val_batches 0 --data.dataset SAMPLE", "trainer.limit_val_batches=0 leaves nothing to validate"),
        ("--threads 100000 --dataset SAMPLE", "threads"),
        ("fit --machine.threads 100000 --data.dataset SAMPLE", "threads=100000"),
        ("--num-workers 100000 --dataset SAMPLE", "num_workers=100000 is too many processes for this machine; at most"),
        ("fit --data.num_workers 100000 --data.dataset SAMPLE", "num_workers=100000 is too many"),
        ("--dataset SAMPLE --batch-size 2000 --replication-factor 2000 --processes 2000", "devices=2000 is too many"),
        ("fit --trainer.default_root_dir null", "trainer.default_root_dir=null: the results need a directory"),
        ("fit --trainer.default_root_dir=", "trainer.default_root_dir is empty"),
        ("fit --data.data_dir=", "data.data_dir is empty"),
    ],
)
def test_numbers_and_paths_that_cannot_be_are_refused(run, words, message):
    refused(run(*words.split()), message)


def test_more_threads_and_processes_than_a_machine_bears_are_refused_wherever_they_are_given(run, command_line, tmp_path, monkeypatch):
    tree = make_folders(tmp_path / "tree", ["ant", "bee"], "train")
    refused(run("convert", tree, "shards", "--num-workers", "100000"), "num_workers=100000 is too many")
    generate = partial(command_line, cosmoflow.main, "generate", "--output-dir", tmp_path / "universes")
    refused(generate("--num-workers", "100000"), "num_workers=100000 is too many")
    with pytest.raises(ValueError, match="num_workers=100000 is too many"):
        fit(Ledger(), loader(8, num_workers=100000))
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    refused(run("--dataset", "SAMPLE"), "OMP_NUM_THREADS=100000 in the environment must be at most 1024")


def test_every_option_that_names_a_path_takes_home_directories_and_no_empty_word(monkeypatch):
    monkeypatch.setenv("HOME", "/own")
    for options in (
        resnet.OPTIONS,
        cifar.OPTIONS,
        cosmoflow.OPTIONS,
        cosmoflow.GENERATE_OPTIONS,
        cosmoflow.SHOW_OPTIONS,
        AVERAGE_OPTIONS,
    ):
        for option in options:
            if option.metavar in ("DIR", "FILE") and option.name != "--config":
                assert option.type is readers.path, option.name
    assert [readers.path(text) for text in ("~/x", "results", "a b", "null", "1e3", "./y")] == [
        "/own/x", "results", "./a b", "./null", "./1e3", "./y"
    ]  # fmt: skip
    for text in ("", " "):
        with pytest.raises(argparse.ArgumentTypeError, match="is no path"):
            readers.path(text)


def test_names_that_yaml_takes_for_numbers_booleans_nothing_or_dates_survive_a_configuration(run, tmp_path):
    names = ["-1", "007", "0x1f", "12:30", "1_000", "1e3", "2020-01-01", "null", "true", "yes", "~"]
    make_folders(tmp_path / "1e3", names, "train", "val")
    size = "--dataset IMAGENET --size 8 --image-size 16 --precision 32.32 --batch-size 4 --num-workers 0 --epochs 1".split()
    status, _, errors = run(*size, "--data-dir", "1e3", "--output-dir", "null")
    assert status == 0, errors
    text = Path("null/config.yaml").read_text()
    assert yaml.safe_load(text)["data"]["classes"] == names and "- '1e3'" in text
    first = torch.load("null/checkpoints/last.ckpt")["state_dict"]
    assert run("fit", "--config", "null/config.yaml", "--trainer.default_root_dir", "2e3")[0] == 0
    again = torch.load("2e3/checkpoints/last.ckpt")["state_dict"]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert run("validate", "--ckpt_path", "null/checkpoints/last.ckpt")[0] == 0


# -- evaluations ------------------------------------------------------------------------------------------------------------------------


def test_a_run_without_validation_is_validated_when_somebody_asks(run):
    assert run(*TINY, "--no-validation")[0] == 0
    status, output, errors = run("validate", "--config", "results/config.yaml", "--ckpt_path", LAST)
    assert status == 0 and "accuracy: " in output, errors
    none = ["--data.validation_split", "0", "--data.validation_on_test", "false", "--data.synthetic", "host", "--data.augment", "false"]
    refused(run("validate", "--ckpt_path", LAST, *none), "there is nothing to validate")


def test_predictions_need_the_images_to_predict_alone_and_leave_nothing_elsewhere(run, tmp_path, monkeypatch):
    tree = make_folders(tmp_path / "tree", ["ant", "bee"], "train", "val")
    size = "--dataset IMAGENET --size 8 --image-size 16 --precision 32.32 --batch-size 2 --num-workers 0 --epochs 1".split()
    assert run(*size, "--data-dir", tree)[0] == 0
    index = tmp_path / "results/images-validation.npz"
    assert index.exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    last = tmp_path / LAST
    for words in (["validate", "--ckpt_path", last], ["validate", "--config", tmp_path / "results/config.yaml", "--ckpt_path", last]):
        status, output, errors = run(*words)
        assert status == 0 and "accuracy" in output and not list(Path().iterdir()), errors
    only = tmp_path / "only"
    (only / "test").mkdir(parents=True)
    for k in range(3):
        (only / "test" / f"{k}.png").write_bytes(encoded(photo(k), "PNG"))
    status, output, errors = run("predict", "--ckpt_path", last, "--data.data_dir", only)
    assert status == 0 and "(3 x 2)" in output, errors
    (only / "val" / "nobody").mkdir(parents=True)  # a class that the network does not know: it must not be looked at
    status, output, errors = run("predict", "--ckpt_path", last, "--data.data_dir", only)
    assert status == 0, errors
    Path("file").write_text("")
    status, output, errors = run("predict", "--ckpt_path", last, "--data.data_dir", only, "--trainer.default_root_dir", "file")
    assert status != 0 and output == "" and "cannot write in the output directory file: File exists" in errors
    shutil.rmtree(tree / "val")
    (tree / "val").mkdir()
    refused(run(*size, "--data-dir", tree), "val has no images: put the validation images there, or remove the folder")


def test_convert_refuses_an_image_that_is_cut_off(run, tmp_path):
    tree = make_folders(tmp_path / "tree", ["ant", "bee"], "train")
    (tree / "train/bee/cut_off.jpg").write_bytes(BAD["cut_off.jpg"])
    refused(run("convert", tree, "shards", "--num-workers", "1"), "train/bee/cut_off.jpg: ")
    status, output, _ = run("convert", tree, "shards", "--num-workers", "1", "--on-bad-image", "skip")
    assert status == 0 and "4 images" in output and "bee/cut_off.jpg" in output
