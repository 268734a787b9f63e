"""The Lightning module that trains a ResNet or ResNeXt classifier; it runs under any Trainer and strategy."""

from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_ipu.optim import parameter_groups
from lightning_ipu.schedule import build_schedule, check_schedule
from resnet_ipu.networks import resnet

Batch = tuple[Tensor, Tensor]  # images [batch, channels, height, width], normalised; labels [batch]


class ResNetModule(pl.LightningModule):
    """Image classifier trained by SGD on the cross-entropy; logs train_, val_ and test_ loss and accuracy (0 to 1).

    Args:
        size: number of layers: 8, 14, 20, 32, 44, 56, 110 (CIFAR), 18, 34, 50, 101, 152 (ImageNet), x50, x101 (ResNeXt 32x4d).
        num_classes: classes of the data set.
        in_channels: channels of the images.
        image_size: side of the images in pixels; chooses the stem where none is given.
        stem: cifar (3x3, stride 1, no pooling) or imagenet (7x7, stride 2, max-pooling); null is cifar up to 64 pixels.
        norm_type: batch, group or none.
        norm_groups: groups of each group norm; null is 16.
        shortcut_type: A (zero-padded) or B (1x1 convolution) where the shape changes, C (1x1 convolution everywhere); null is A
            for the CIFAR sizes and B for the others.
        zero_init_last_norm: start every block as its shortcut alone; null is true where there are norms.
        learning_rate: of SGD, multiplied by the schedule.
        momentum: of SGD.
        nesterov: Nesterov's momentum.
        weight_decay: L2 penalty on the weights of convolutions and the linear head.
        decay_all: penalise norms and biases as well.
        label_smoothing: share of the target spread evenly over the classes; in training only.
        schedule: linear or cosine (after a warm-up), stepped or const; moves with every weight update.
        warmup_fraction: share of the run in which the rate rises, for linear and cosine; null is 0.2.
        final_fraction: of the learning rate, at the end of linear and cosine; null is 0.02.
        decay_values: multipliers of the learning rate for stepped; null is 1, 0.1, 0.01.
        decay_fractions: shares of the run after which stepped takes the next value; null is 0.5, 0.75.
        channels_last: keep images and weights in memory pixel by pixel, which is faster on most devices; moves last bits only.

    Raises:
        ValueError: an option is unknown, out of range, or means nothing beside another one.
    """

    def __init__(
        self,
        *,
        size: str | int = "20",
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        stem: Literal["cifar", "imagenet"] | None = None,
        norm_type: Literal["batch", "group", "none"] = "batch",
        norm_groups: int | None = None,
        shortcut_type: Literal["A", "B", "C"] | None = None,
        zero_init_last_norm: bool | None = None,
        learning_rate: float = 0.02,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 1e-4,
        decay_all: bool = False,
        label_smoothing: float = 0.0,
        schedule: Literal["const", "stepped", "linear", "cosine"] = "linear",
        warmup_fraction: float | None = None,
        final_fraction: float | None = None,
        decay_values: list[float] | None = None,
        decay_fractions: list[float] | None = None,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if not learning_rate > 0:
            raise ValueError(f"learning_rate={learning_rate} must be above 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay={weight_decay} must be at least 0")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
        if image_size < 1:
            raise ValueError(f"image_size={image_size} must be at least 1 pixel")
        given = {
            "warmup_fraction": warmup_fraction,
            "final_fraction": final_fraction,
            "decay_values": decay_values,
            "decay_fractions": decay_fractions,
        }
        self._schedule_options = {name: value for name, value in given.items() if value is not None}
        check_schedule(schedule, **self._schedule_options)

        if stem is None:
            stem = "cifar" if image_size <= 64 else "imagenet"
        if zero_init_last_norm is None:
            zero_init_last_norm = norm_type != "none"
        self.network = resnet(
            str(size),  # YAML reads 20 as a number
            num_classes=num_classes,
            in_channels=in_channels,
            stem=stem,
            norm=norm_type,
            norm_groups=norm_groups,
            shortcut_type=shortcut_type,
            zero_init_last_norm=zero_init_last_norm,
        )
        if channels_last:
            self.network.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, num_classes] of normalised images [batch, in_channels, height, width]."""
        if self.hparams.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, accuracy = self._score(batch, label_smoothing=self.hparams.label_smoothing)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch[1]))
        self.log("train_accuracy", accuracy, prog_bar=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Probabilities [batch, num_classes] of images, or of a batch's images; each row sums to 1."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return _at_least_float32(self(images)).softmax(dim=1)

    def _evaluate(self, batch: Batch, split: str) -> None:
        loss, accuracy = self._score(batch, label_smoothing=0.0)
        self.log(f"{split}_loss", loss, prog_bar=True, batch_size=len(batch[1]))
        self.log(f"{split}_accuracy", accuracy, prog_bar=True, batch_size=len(batch[1]))

    def _score(self, batch: Batch, *, label_smoothing: float) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch and the share of its images that are classified rightly."""
        images, labels = batch
        logits = _at_least_float32(self(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return loss, accuracy

    def configure_optimizers(self) -> dict[str, Any]:
        """SGD, and a schedule that spans the Trainer's weight updates and is stepped with each of them."""
        options = self.hparams
        optimizer = torch.optim.SGD(
            parameter_groups(self.network, weight_decay=options.weight_decay, decay_all=options.decay_all),
            lr=options.learning_rate,
            momentum=options.momentum,
            nesterov=options.nesterov and options.momentum > 0,  # without momentum the two are the same, but torch refuses one
        )
        total = self.trainer.estimated_stepping_batches
        schedule = build_schedule(optimizer, options.schedule, total=total, **self._schedule_options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _at_least_float32(logits: Tensor) -> Tensor:
    """Softmax and loss are taken in 32 bits where the network computes in 16, in 64 where it computes in 64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
