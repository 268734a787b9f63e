"""Runs with buffers that the forward fills or registers, and with whole numbers that differ between replicas."""

from typing import Any

import torch
from runs import Net, blocks, classes, fit, loader
from torch import nn
from torch.nn import functional as F

PLANS = {
    "replicas": {"R": 2, "A": 2},
    "replicas in turn": {"R": 4, "A": 1},
    "stages": {"A": 4, "pipeline_splits": ["network.1"]},
}


class Filled(nn.Module):
    """Centres its input by a moving average that begins with the first batch, keeps it twice, and notes what was last the largest class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", None)
        self.register_buffer("largest", torch.tensor([-(2**62), 0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        if not hasattr(self, "late"):
            self.register_buffer("late", mean.clone())
        else:
            self.late.lerp_(mean, 0.1)
        self.largest[1] = x.detach().sum(0).argmax()
        self.largest[0] += self.largest[1]
        return x - self.average


class Module(Net):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Filled(), blocks(norm=True), Filled()))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


def run(devices: int, plan: str) -> list[dict[str, Any]]:
    """The state after four weight updates, in every process where replicas are apart."""
    module = Module()
    trainer = fit(module, loader(classes(64), 4), devices=devices, **PLANS[plan])
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return [state] if devices == 1 else trainer.strategy._processes.gathered(state)
