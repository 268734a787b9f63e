"""A run with mixed images and a moving average, in one process or as a pipeline of two."""

import copy
from typing import Any

import pytorch_lightning as pl
from runs import make_trainer

from cifar_ipu.data import ImageDataModule
from lightning_ipu.recipe.averaging import TRAINED, AveragedWeights
from resnet_ipu.module import ResNetModule


class Keep(pl.Callback):
    """A checkpoint as it is written after the second validation."""

    def on_validation_end(self, trainer, pl_module) -> None:
        self.checkpoint = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint())


def run(processes: int) -> dict[str, Any]:
    """What came out; equal in every process."""
    keep = Keep()
    trainer = make_trainer(
        A=4, D=2, max_epochs=2, limit_train_batches=16, limit_val_batches=5, num_sanity_val_steps=0,
        pipeline_splits=["network.layer2"], devices=processes, callbacks=[AveragedWeights(decay=0.9), keep],
    )  # fmt: skip
    module = ResNetModule(size="8", in_channels=1, mixup=0.4, cutmix=1.0, label_smoothing=0.1, schedule="const", learning_rate=0.1)
    # Its transfer hook normalises images under seeds of its own, between two micro-batches' steps.
    trainer.fit(module, datamodule=ImageDataModule(dataset="SAMPLE", micro_batch_size=4, random_erasing=0.5))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    outcome = {name: keep.checkpoint[name] for name in ("state_dict", TRAINED)}
    return {**outcome, "end": module.state_dict(), "metrics": metrics}
