"""Modules and data of the user's own, by the paths of their classes: fit, resume, validate, and what is refused in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from resnet_ipu.__main__ import main

OWN = """
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(pl.LightningDataModule):
    def __init__(self, samples: int = 16):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        x = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=2)

    val_dataloader = train_dataloader


class Flat(nn.Sequential):
    def __init__(self, classes: int = 10):
        super().__init__(nn.Flatten(), nn.Linear(28 * 28, classes))
"""
RUN = "fit --model flowers.Net --data flowers.Data --model.width 5 --trainer.max_epochs 1"


@pytest.fixture
def run(command_line, tmp_path, monkeypatch):
    """Runs a command line in a directory with flowers.py: (exit status, standard output, standard error)."""
    (tmp_path / "flowers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` has the current directory
    monkeypatch.delitem(sys.modules, "flowers", raising=False)
    return lambda line: command_line(main, *line.split())


def weights(path: str) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def test_a_run_of_own_classes_is_replayed_resumed_and_validated(run):
    status, output, errors = run(f"{RUN} --trainer.strategy.gradient_accumulation_factor 2")
    assert status == 0 and not errors and "flowers.Net" in output and "4 weight updates" in output
    config = yaml.safe_load(Path("results/config.yaml").read_text())
    assert config["model"] == {"class_path": "flowers.Net", "init_args": {"width": 5, "lr": 0.1}}
    first = weights("results/checkpoints/last.ckpt")
    assert first["net.0.weight"].shape == (5, 4)

    assert run("fit --config results/config.yaml --trainer.default_root_dir again")[0] == 0
    assert all(torch.equal(value, first[name]) for name, value in weights("again/checkpoints/last.ckpt").items())

    assert run("fit --config again/config.yaml --trainer.default_root_dir again --resume true --trainer.max_epochs 2")[0] == 0
    assert run("fit --config results/config.yaml --trainer.default_root_dir whole --trainer.max_epochs 2")[0] == 0
    whole = weights("whole/checkpoints/last.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in weights("again/checkpoints/last.ckpt").items())

    status, output, _ = run("validate --model flowers.Net --data flowers.Data --model.width 5 --ckpt_path whole/checkpoints/last.ckpt")
    assert status == 0 and "loss: " in output

    for line, message in (
        ("--model.lr 0.5", "model.init_args.lr is 0.5, but the run to be resumed has 0.1"),
        ("--model flowers.Other", "--model flowers.Other must be the path of a LightningModule, such as flowers.Net, and is not there"),
    ):
        status, _, errors = run(f"fit --config results/config.yaml --resume true --trainer.max_epochs 2 {line}")
        assert status == 2 and message in errors and errors.count("\n") == 1
    status, _, errors = run("validate --ckpt_path results/checkpoints/last.ckpt --data.dataset SAMPLE")
    assert status == 2 and "last.ckpt is a checkpoint of flowers.Net: give --model flowers.Net" in errors


def test_an_own_network_trains_on_the_packages_data_and_the_packages_network_on_own_data(run):
    short = "--trainer.max_steps 1 --trainer.limit_val_batches 1"
    network = "--model lightning_ipu.ImageClassifier --model.network flowers.Flat --model.network.classes 12"
    status, _, errors = run(f"fit {network} --data.dataset SAMPLE --trainer.limit_train_batches 1 --trainer.limit_val_batches 1")
    assert status == 0 and not errors and weights("results/checkpoints/last.ckpt")["network.1.weight"].shape == (12, 784)
    assert run("validate --config results/config.yaml --ckpt_path results/checkpoints/last.ckpt")[0] == 0

    data = "--data cifar_ipu.ImageDataModule --data.dataset SAMPLE --model.size 8 --model.in_channels 1 --model.num_classes 11"
    status, _, errors = run(f"fit {data} {short} --trainer.default_root_dir other")
    assert status == 0 and not errors and weights("other/checkpoints/last.ckpt")["network.fc.weight"].shape[0] == 11


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            RUN.replace("flowers.Net", "thorns.Net"),
            "--model thorns.Net: there is no module thorns, neither in this directory nor installed",
        ),
        (
            RUN.replace("flowers.Net", "flowers.Data"),
            "--model flowers.Data must be the path of a LightningModule, such as flowers.Net, and is none",
        ),
        (RUN.replace("flowers.Data", "flowers.Net"), "--data flowers.Net must be the path of a LightningDataModule"),
        (RUN.replace("--model.width", "--model.size"), "flowers.Net takes no argument size"),
        (RUN.replace("--trainer.max_epochs 1", ""), "how long is training? Give --epochs, --trainer.max_epochs or --trainer.max_steps"),
        (f"{RUN[:-22]} --epochs 0.5", "epochs=0.5: the length of an epoch of Data is not known; use max_steps"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(run, line, message):
    status, _, errors = run(line)
    assert status == 2 and message in errors and errors.count("\n") == 1, errors


def test_two_processes_find_the_classes_in_the_current_directory(tmp_path):
    (tmp_path / "flowers.py").write_text(OWN)
    words = f"-m resnet_ipu {RUN} --trainer.devices 2 --trainer.accelerator cpu --trainer.strategy.replication_factor 2"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, *words.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "processes" in done.stdout, done.stdout + done.stderr
