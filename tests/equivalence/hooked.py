"""What hooks draw and decide, and what a loader's collate_fn leaves out, on several processes."""

from typing import Any

import numpy
import pytorch_lightning as pl
import torch
from runs import Net, classes, fit, loader
from torch.nn import functional as F

PLANS = {"replicas": {"R": 2, "A": 2, "D": 8}, "pipeline": {"A": 2, "D": 8, "pipeline_splits": ["network.0.2"]}}


class Hooked(Net):
    """Draws in every hook of an update; the process that meets sample 41 stops the run, or the first one in a hook of the third update."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.draws = late, []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        logits = self(x)
        self.log("index", index.double().mean(), on_step=False, on_epoch=True)
        self.trainer.should_stop |= not self.late and 41 in index
        return F.cross_entropy(logits, y)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.1 * torch.rand(()), *batch[1:]]

    def on_before_zero_grad(self, optimizer):
        self.draws.append(torch.rand(()).item())

    def on_after_backward(self):
        self.draws.append(numpy.random.rand())

    def on_before_optimizer_step(self, optimizer):
        self.draws.append(torch.rand(()).item())
        self.trainer.should_stop |= self.late and self.trainer.is_global_zero and self.global_step == 2

    def validation_step(self, batch, batch_idx):
        self(batch[0])
        self.log("val_index", batch[2].double().mean())


def without_every_fifth(rows: list[Any]) -> list[torch.Tensor]:
    return torch.utils.data.default_collate([row for row in rows if row[2] % 5])


def run(devices: int, plan: str, late: bool) -> dict[str, Any]:
    module = Hooked(late)
    validation = loader(classes(30, seed=6), 4, collate_fn=without_every_fifth)
    options = {"collate_fn": without_every_fifth} if plan == "replicas" else {}  # stages know one shape
    trainer: pl.Trainer = fit(module, loader(classes(64), 4, **options), validation, devices=devices, num_sanity_val_steps=0, **PLANS[plan])
    return {
        "updates": trainer.global_step,
        "draws": module.draws,
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }
