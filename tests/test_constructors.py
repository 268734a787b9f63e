"""Constructors have no side effects: nothing is downloaded, written, drawn or set, before a run begins."""

import logging
import os
import random
import signal
import socket
import warnings

import numpy as np
import pytest
import torch
from image_tree import make_tree
from torch import nn

import cifar_ipu
import cosmoflow_ipu
import lightning_ipu
import resnet_ipu

DRAW_WEIGHTS = {
    "ResNetModule": lambda: resnet_ipu.ResNetModule(size="8"),
    "CIFARModule": lambda: cifar_ipu.CIFARModule(network="whitened"),
    "CosmoFlowModule": lambda: cosmoflow_ipu.CosmoFlowModule(conv_size=2, report=True),
}
DRAW_NOTHING = {
    "ImageClassifier": lambda: lightning_ipu.ImageClassifier(network=nn.Flatten()),
    "ImageDataModule without a name": cifar_ipu.ImageDataModule,
    "ImageDataModule that is to be downloaded": lambda: cifar_ipu.ImageDataModule(dataset="CIFAR-100", auto_augment="randaugment"),
    "ImageDataModule of synthetic images": lambda: cifar_ipu.ImageDataModule(synthetic="ipu"),
    "ImageNetDataModule": lambda: resnet_ipu.ImageNetDataModule(data_dir="images", index_dir="lists", on_bad_image="skip"),
    "CosmoFlowDataModule": lambda: cosmoflow_ipu.CosmoFlowDataModule(data_dir="universes"),
    "IPUStrategy": lambda: lightning_ipu.IPUStrategy(replication_factor=2, num_stages=2, recompute=True),
    "AveragedWeights": lightning_ipu.AveragedWeights,
    "EventsPerEpoch": lambda: lightning_ipu.EventsPerEpoch(checkpoints=2),
    "ProfileReports": lightning_ipu.ProfileReports,
    "SlowdownWatch": lightning_ipu.SlowdownWatch,
}


def state_of_the_process() -> dict[str, object]:
    return {
        "files": sorted(os.walk(".")),
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "defaults of torch": (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        "cuDNN": (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
        "python's and numpy's streams": (random.getstate(), str(np.random.get_state())),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "warnings": list(warnings.filters),
        "logging": (logging.getLogger().level, list(logging.getLogger().handlers)),
    }


@pytest.mark.parametrize("name", [*DRAW_WEIGHTS, *DRAW_NOTHING])
@pytest.mark.filterwarnings("ignore:no data set is named")
def test_a_constructor_changes_nothing_but_its_object(name, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"{name} opens a connection to {arguments[1:]}")

    make_tree(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")  # of another run: removed when a Trainer is made
    monkeypatch.setattr(socket.socket, "connect", refuse)
    make = {**DRAW_WEIGHTS, **DRAW_NOTHING}[name]
    for package in (cifar_ipu, cosmoflow_ipu, lightning_ipu, resnet_ipu):  # what is imported for it may set what it likes
        assert all(getattr(package, public) for public in package.__all__)
    before, stream = state_of_the_process(), torch.get_rng_state()
    make()
    for what, value in state_of_the_process().items():
        assert value == before[what], what
    assert name in DRAW_WEIGHTS or torch.equal(torch.get_rng_state(), stream)
    assert os.environ["TORCHELASTIC_RUN_ID"] == "7" and sorted(os.listdir()) == ["images"]
