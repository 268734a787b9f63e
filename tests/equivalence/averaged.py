"""A run with mixed images and a moving average: under torchrun as a pipeline of two processes, which saves what came out.

torchrun --nproc-per-node 2 tests/equivalence/averaged.py FILE
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from runs import make_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_ipu.averaging import TRAINED, AveragedWeights
from resnet_ipu.module import ResNetModule


def images(samples: int, seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(5, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=seed == 0)


class Keep(pl.Callback):
    """A checkpoint as it is written after the second validation."""

    def on_validation_end(self, trainer, pl_module) -> None:
        self.checkpoint = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint())


def run(processes: int) -> tuple[dict[str, Any], bool]:
    """What came out, and whether this process is the first."""
    keep = Keep()
    trainer = make_trainer(
        A=4, D=2, max_epochs=2, pipeline_splits=["network.layer2"], devices=processes, callbacks=[AveragedWeights(decay=0.9), keep],
        num_sanity_val_steps=0,
    )  # fmt: skip
    module = ResNetModule(
        size="8",
        num_classes=5,
        in_channels=1,
        image_size=8,
        mixup=0.4,
        cutmix=1.0,
        label_smoothing=0.1,
        schedule="const",
        learning_rate=0.1,
    )
    trainer.fit(module, images(64, 0), images(20, 1))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    outcome = {name: keep.checkpoint[name] for name in ("state_dict", TRAINED)}
    return {**outcome, "end": module.state_dict(), "metrics": metrics}, trainer.is_global_zero


if __name__ == "__main__":
    outcome, is_first = run(int(os.environ["WORLD_SIZE"]))
    if is_first:
        torch.save(outcome, sys.argv[1])
