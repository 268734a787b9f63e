"""What the image classifiers have in common: cross-entropy and accuracy, and an optimizer with a schedule in weight updates."""

import inspect
import math
from types import FrameType
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.core.mixins import HyperparametersMixin
from pytorch_lightning.utilities.parsing import collect_init_args
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ipu.errors import UserError
from lightning_ipu.recipe.optimizers import build_optimizer, check_optimizer
from lightning_ipu.recipe.schedules import build_schedule, check_schedule

Batch = tuple[Tensor, Tensor]  # images [batch, channels, height, width], normalised; labels [batch]

_OF_SCHEDULES = (
    *("warmup_fraction", "warmup_epochs", "warmup_start", "warmup_mode", "decay_fraction", "decay_epochs", "final_fraction", "power"),
    *("decay_rate", "decay_values", "decay_fractions", "decay_at_epochs"),
)


def _settled(
    optimizer: str,
    *,
    further: dict[str, Any],
    momentum: float | None,
    nesterov: bool | None,
    weight_decay: float | None,
    l2_regularization: float | None,
) -> dict[str, Any]:
    """The optimizer's options, those that were left open settled; `further` are those by name."""
    if own := {"lr", "momentum", "nesterov", "weight_decay", "l2_regularization", "decay_all"} & set(further):
        raise UserError(f"optimizer_options has {', '.join(sorted(own))}: the module's own arguments say that (lr is learning_rate)")
    if momentum is None and optimizer in ("sgd", "lars"):
        momentum = 0.9
    if nesterov is None and optimizer == "sgd":
        nesterov = momentum > 0
    if weight_decay is None and l2_regularization is None:
        weight_decay, l2_regularization = (0.01, 0.0) if optimizer in ("adamw", "lamb") else (0.0, 1e-4)
    decays = {"weight_decay": weight_decay or 0.0, "l2_regularization": l2_regularization or 0.0}
    return {**further, **_given(momentum=momentum, nesterov=nesterov), **decays}


class ImageClassifier(pl.LightningModule):
    """Trains any network that classifies images, and all other parameters it has; logs train_, val_ and test_ loss and accuracy (0 to 1).

    The network is given, or set by a subclass with ``use``. What a checkpoint holds as its hyperparameters leaves out all arguments that
    are modules: ``ImageClassifier.load_from_checkpoint(path, network=...)`` is given them again.

    Args:
        network: from images [batch, channels, height, width] to logits [batch, classes], of any number of classes.
        optimizer: sgd, adamw, rmsprop, lars or lamb.
        learning_rate: multiplied by the schedule.
        momentum: of sgd, lars and rmsprop; null is 0.9 for the first two and 0 for rmsprop.
        nesterov: Nesterov's momentum, of sgd; null is true where there is momentum.
        optimizer_options: further ones by name: dampening (sgd), betas, eps, amsgrad (adamw), alpha, eps, centered (rmsprop),
            trust_coefficient, eps (lars), betas, eps (lamb).
        weight_decay: λ of decoupled decay of the weights w of convolutions and the linear head: the update is -lr·(O(g) + λ·w), where O
            is the optimizer's direction; null is 0, for adamw and lamb without l2_regularization 0.01.
        l2_regularization: λ of the L2 penalty on them, which goes through the optimizer: -lr·O(g + λ·w); null is 0, and where
            weight_decay is null too 1e-4, but not for adamw and lamb.
        decay_all: both on norms and biases as well.
        loss: cross_entropy, or bce: every class a decision of its own, whose target in a mixed image is 1 for both its classes
            (Wightman, Touvron and Jégou, https://arxiv.org/abs/2110.00476); averaged over classes and images.
        label_smoothing: share of the target spread evenly over the classes; in training only.
        schedule: linear, cosine, polynomial or exponential (after a warm-up), stepped or const; moves with every weight update.
        warmup_fraction: share of the run in which the rate rises; null is 0.2, for stepped and const 0.
        warmup_epochs: the same in epochs.
        warmup_start: share of the learning rate at which the warm-up begins; null begins with one update's share.
        warmup_mode: shift (the default) begins the decay after the warm-up, mask with the run.
        staircase: hold the rate over every epoch.
        decay_fraction: share of the run that linear, cosine, polynomial and exponential take to reach their end; null is what the
            warm-up leaves, with warmup_mode mask all.
        decay_epochs: the same in epochs.
        final_fraction: of the learning rate, at their end; null is 0.02.
        power: of polynomial; null is 2.
        decay_rate: what exponential multiplies the rate by over an epoch, in place of its end.
        decay_values: multipliers of the learning rate for stepped; null is 1, 0.1, 0.01.
        decay_fractions: shares of the run after which stepped takes the next value; null is 0.5, 0.75.
        decay_at_epochs: instead of decay_fractions, the epochs at whose first update stepped takes the next value.
        mirror_evaluation: average the logits of an image and of its mirror image in validation, test and prediction.
        channels_last: keep images and weights in memory pixel by pixel, which is faster on most devices; moves last bits only.

    Raises:
        UserError: an option is unknown, out of range, or means nothing beside another one.
    """

    network: nn.Module

    def __init__(
        self,
        *,
        network: nn.Module | None = None,
        optimizer: Literal["sgd", "adamw", "rmsprop", "lars", "lamb"] = "sgd",
        learning_rate: float = 0.02,
        momentum: float | None = None,
        nesterov: bool | None = None,
        optimizer_options: dict[str, Any] | None = None,
        weight_decay: float | None = None,
        l2_regularization: float | None = None,
        decay_all: bool = False,
        loss: Literal["cross_entropy", "bce"] = "cross_entropy",
        label_smoothing: float = 0.0,
        schedule: Literal["const", "stepped", "linear", "cosine", "polynomial", "exponential"] = "linear",
        warmup_fraction: float | None = None,
        warmup_epochs: float | None = None,
        warmup_start: float | None = None,
        warmup_mode: Literal["shift", "mask"] | None = None,
        staircase: bool = False,
        decay_fraction: float | None = None,
        decay_epochs: float | None = None,
        final_fraction: float | None = None,
        power: float | None = None,
        decay_rate: float | None = None,
        decay_values: list[float] | None = None,
        decay_fractions: list[float] | None = None,
        decay_at_epochs: list[float] | None = None,
        mirror_evaluation: bool = False,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        # A subclass's arguments too, but for modules and for a file of weights: a checkpoint has weights of its own.
        self.save_hyperparameters(ignore=["pretrained", *_without_value(inspect.currentframe())])
        if not learning_rate > 0:
            raise UserError(f"learning_rate={learning_rate} must be above 0")
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
        if loss not in ("cross_entropy", "bce"):
            raise UserError(f"loss={loss!r} is unknown: choose from cross_entropy, bce")
        self._optimizer_options = _settled(
            optimizer,
            further=optimizer_options or {},
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            l2_regularization=l2_regularization,
        )
        check_optimizer(optimizer, **self._optimizer_options)
        self._schedule_options = _given(**{name: self.hparams[name] for name in _OF_SCHEDULES}, staircase=staircase or None)
        check_schedule(schedule, **self._schedule_options)
        if network is not None:
            self.use(network)

    def setup(self, stage: str) -> None:
        """Refuse to run without a network, or to score mirror images where these show something else (digits).

        The data module says that by an attribute ``mirrors``.
        """
        if type(self).forward is ImageClassifier.forward and not hasattr(self, "network"):
            raise UserError(
                f"{type(self).__name__} has no network: give it as network=..., or call use(network) in the subclass's constructor"
            )
        data = getattr(self.trainer, "datamodule", None)
        if self.hparams.mirror_evaluation and not getattr(data, "mirrors", True):
            raise UserError(
                f"mirror_evaluation=True makes no sense with {data.description}: a mirrored image is of another class, or of none"
            )

    def use(self, network: nn.Module) -> None:
        """Make ``network``, from images [batch, channels, height, width] to logits [batch, classes], the one that is trained."""
        self.network = network
        if self.hparams.channels_last:
            network.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of normalised images [batch, channels, height, width]."""
        if self.hparams.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        return self._log(at_least_float32(self(images)), labels, "train", label_smoothing=self.hparams.label_smoothing)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log(self._evaluate(batch[0]), batch[1], "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log(self._evaluate(batch[0]), batch[1], "test")

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Probabilities [batch, classes] of images, or of a batch's images: each row sums to 1, except with bce, where classes are independent."""
        logits = self._evaluate(batch if isinstance(batch, Tensor) else batch[0])
        return logits.sigmoid() if self.hparams.loss == "bce" else logits.softmax(dim=1)

    def _evaluate(self, images: Tensor) -> Tensor:
        """Logits [batch, classes], in at least 32 bits."""
        if not self.hparams.mirror_evaluation:
            return at_least_float32(self(images))
        as_they_are, mirrored = at_least_float32(self(torch.cat([images, images.flip(3)]))).chunk(2)  # one call, as a pipeline demands
        return (as_they_are + mirrored) / 2

    def _log(self, logits: Tensor, labels: Tensor, split: str, *, label_smoothing: float = 0.0) -> Tensor:
        """Log the mean loss of a batch and the share of its images that are classified rightly; returns the loss.

        Labels are classes [batch], or of mixed images the shares of the classes [batch, classes]; then it is shares that are right.
        """
        if logits.dim() != 2:
            raise UserError(f"the network's output has shape {tuple(logits.shape)}, and a classifier's is [batch, classes]")
        predicted = logits.detach().argmax(dim=1)
        try:
            right = predicted == labels if labels.dim() == 1 else labels.gather(1, predicted[:, None])
            loss = self._loss(logits, labels, label_smoothing)
        except (IndexError, RuntimeError):
            _check_labels(labels, classes=logits.shape[1])
            raise
        for name, value in (("loss", loss), ("accuracy", right.float().mean())):
            self.log(f"{split}_{name}", value, prog_bar=True, on_step=split == "train", on_epoch=True, batch_size=len(labels))
        return loss

    def _loss(self, logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
        """Mean loss of a batch; labels as in `_log`."""
        shares = labels.to(logits.dtype) if labels.dim() == 2 else None
        if self.hparams.loss == "cross_entropy":
            return F.cross_entropy(logits, labels if shares is None else shares, label_smoothing=label_smoothing)
        targets = (F.one_hot(labels, logits.shape[1]) if shares is None else shares > 0).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets * (1 - label_smoothing) + label_smoothing / logits.shape[1])

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimizer, and a schedule that spans the Trainer's weight updates and is stepped with each of them."""
        options = self.hparams
        optimizer = build_optimizer(
            self, options.optimizer, lr=options.learning_rate, decay_all=options.decay_all, **self._optimizer_options
        )
        total, per_epoch = self.trainer.estimated_stepping_batches, updates_per_epoch(self.trainer)
        schedule = build_schedule(optimizer, options.schedule, total=total, updates_per_epoch=per_epoch, **self._schedule_options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _check_labels(labels: Tensor, *, classes: int) -> None:
    """Refuse labels that a network of so many outputs does not know; to be called where they led to an error, so that it costs nothing."""
    if labels.dim() == 2 and labels.shape[1] != classes:
        raise UserError(f"the labels are shares of {labels.shape[1]} classes, and the network has {classes} outputs")
    if labels.dim() == 1 and labels.device.type == "cpu" and int(labels.max()) >= classes:
        raise UserError(f"a label is {int(labels.max())}, and the network has {classes} outputs: labels are 0 to {classes - 1}")


def _without_value(frame: FrameType | None) -> list[str]:
    """Names of a module's arguments that are modules themselves, and `network` where it is not given; the frame is its constructor's."""
    values: dict[str, Any] = {}
    for arguments in collect_init_args(frame, [], classes=(HyperparametersMixin,)):
        values |= arguments
    return [name for name, value in values.items() if isinstance(value, nn.Module) or name == "network" and value is None]


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def updates_per_epoch(trainer: pl.Trainer) -> int | None:
    """Weight updates in an epoch; None for data without a length."""
    trainer.fit_loop.setup_data()  # at once where that is done
    batches = trainer.num_training_batches
    return math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else None


def at_least_float32(values: Tensor) -> Tensor:
    """Losses are taken in 32 bits where the network computes in 16, in 64 where it computes in 64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
