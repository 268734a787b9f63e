"""What a module logs in every way there is, with metrics of torchmetrics, over two validation loaders and an epoch that is cut short."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from runs import Net, classes, csv_logger, csv_rows, fit, loader
from torch.nn import functional as F
from torchmetrics import MetricTracker, SumMetric
from torchmetrics.classification import MulticlassAccuracy

PIPELINE = {"A": 2, "pipeline_splits": ["network.0.2"]}
PLANS = {"replicas": {"R": 2, "D": 3}, "pipeline": PIPELINE, "validated in stages": {**PIPELINE, "pipeline_validation": True}}


class Logging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.samples = MulticlassAccuracy(3, average="micro"), SumMetric()
        self.validated, self.ended = SumMetric(), SumMetric()
        self.tracker = MetricTracker(MulticlassAccuracy(3, average="micro"))

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        self.samples.update(len(x))
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("sum", float(len(x)), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)

    def on_validation_epoch_start(self):
        self.tracker.increment()
        self.losses.clear()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y, _ = batch
        self.validated.update(len(x))
        self.log("val_sum", float(len(x)), reduce_fx="sum", sync_dist=True)
        logits = self(x)
        self.tracker.update(logits, y)
        self.losses.append(F.cross_entropy(logits, y))
        self.log("val_loss", self.losses[-1])

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.ended.update(len(batch[0]))

    def on_validation_epoch_end(self):
        self.log_dict({"validated": self.validated.compute(), "ended": self.ended.compute(), "tracked": self.tracker.compute()})
        self.validated.reset(), self.ended.reset()
        self.log("apart", torch.stack(self.losses or [torch.zeros(())]).mean())
        self.log("nan", float("nan"))


class Ends(pl.Callback):
    """Counts the batches whose end was told."""

    def __init__(self) -> None:
        self.number = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.number += 1


def run(devices: int, plan: str) -> dict[str, Any]:
    """Train for one and a half epochs; what was logged, told to callbacks and warned of."""
    ends = Ends()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(
            Logging(),
            loader(classes(48), 4, shuffle=True),
            [loader(classes(52, seed=6), 4), loader(classes(26, seed=7), 4)],
            devices=devices,
            logger=csv_logger(Path(folder)),
            log_every_n_steps=1,
            max_epochs=2,
            max_steps=9,
            limit_val_batches=0.5,
            val_check_interval=3,
            num_sanity_val_steps=0,
            callbacks=[ends],
            **PLANS[plan],
        )
        rows = csv_rows(Path(folder)) if trainer.is_global_zero else []
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    processes = trainer.strategy._processes
    return {
        "metrics": processes.gathered(metrics) if processes else [metrics],
        "rows": [{name: value for name, value in row.items() if name != "apart"} for row in rows],
        "ends": processes.gathered(ends.number) if processes else [ends.number],
        "warnings": [str(warning.message) for warning in caught if "self.log(" in str(warning.message)],
    }
