"""Measure the loader without the network, and the network without the loader, in images per second: which one is the bottleneck?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_ipu.command.run import CommandLine
from lightning_ipu.data.order import Share
from lightning_ipu.data.training import TrainingData
from lightning_ipu.errors import UserError

__all__ = ["DataBenchmark", "loader_rate", "network_rate"]

SECONDS = 6.0  # that each of the two is measured for, at least; a short epoch is read again


class DataBenchmark(CommandLine):
    """The command with everything built as for training, which then measures in place of it."""

    trains = False

    @override
    def fit(self, **arguments: Any) -> None:
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        for name, value in self.command.facts(self):
            print(f"{name:<12}{value}")
        batches = Batches(self.datamodule, seed=int(self.config["fit"].seed_everything or 0))
        read = loader_rate(batches)
        precision = self.trainer.strategy.precision_plugin
        learned = network_rate(self.model, batches.on_device, device=self.trainer.strategy.root_device, context=precision.forward_context)
        print("\n".join(report(read=read, learned=learned, workers=self.datamodule.num_workers)))

    @override
    def after_fit(self) -> None:
        """Nothing: nothing was trained."""


class Batches:
    """A data module's training micro-batches, in the order that training would take them in, epoch after epoch."""

    def __init__(self, data: LightningDataModule, *, seed: int) -> None:
        self.data = data
        self._training = TrainingData(data.train_dataloader(), seed=seed, share=Share(places=range(1), per_update=1))
        if not self._training.micro_batches:
            raise UserError(f"{data.data_dir}: there are fewer training images than a micro-batch of {data.micro_batch_size}")

    def __iter__(self) -> Iterator[Any]:
        epoch = 0
        while True:
            for batch in self._training.epoch(epoch, first=0, last=self._training.micro_batches):
                yield self.data.on_before_batch_transfer(batch, 0)
            epoch += 1

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The first micro-batch, as a step would get it."""
        images, labels = self.data.on_before_batch_transfer(self._training.example(), 0)
        return self.data.on_after_batch_transfer((images.to(device), labels.to(device)), 0)


def loader_rate(batches: Batches, *, seconds: float = SECONDS) -> float:
    """Images per second that the loader gives out while nothing else runs; the first micro-batch, which starts the workers, not counted."""
    stream = iter(batches)
    next(stream)
    count, begin = 0, time.perf_counter()
    for images, _ in stream:
        count += len(images)
        if (elapsed := time.perf_counter() - begin) >= seconds:
            return count / elapsed
    raise AssertionError("the stream has no end")


def network_rate(
    module: LightningModule,
    on_device: Callable[[torch.device], tuple[Tensor, Tensor]],
    *,
    device: torch.device,
    context: Callable[[], Any],
    seconds: float = SECONDS,
) -> float:
    """Images per second that the network learns from (forward, backward, update by SGD), given the same micro-batch again and again."""
    module.to(device).train()
    images, labels = on_device(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)

    def step() -> None:
        with context():
            loss = F.cross_entropy(module(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the device

    step()
    steps, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds or steps < 2:
        step()
        steps += 1
    return steps * len(images) / elapsed


def report(*, read: float, learned: float, workers: int) -> list[str]:
    """The two rates in words, and what follows from them."""
    who = f"{workers} worker{'s' if workers > 1 else ''}" if workers else "in the training process"
    lines = [f"loader      {read:,.0f} images/s ({who})", f"network     {learned:,.0f} images/s (forward, backward, update)"]
    if not workers:
        together = 1 / (1 / read + 1 / learned)
        lines.append(
            f"They take turns: {together:,.0f} images/s, {together / read:.0%} of the time spent in loading; with --num-workers they run at once."
        )
    if read >= learned:
        lines.append(f"The network is the bottleneck: the loader could feed {read / learned:,.1f} times as much.")
    else:
        enough = math.ceil(max(workers, 1) * learned / read)
        lines.append(
            f"The loader is the bottleneck: the network could learn from {learned / read:,.1f} times as many images; {enough:,} workers on as"
            " many free cores would keep up."
        )
    return lines
