"""The Lightning module that learns a universe's parameters from its particle counts; it runs under any Trainer and strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from typing_extensions import override

from cosmoflow_ipu.networks import cosmoflow
from cosmoflow_ipu.universe import CENTRE, PARAMETERS, SYMBOLS, to_physical
from lightning_ipu.errors import UserError, as_user_errors
from lightning_ipu.recipe.classifier import at_least_float32, updates_per_epoch
from lightning_ipu.recipe.schedules import build_schedule, check_schedule

Batch = tuple[Tensor, Tensor]  # counts [batch, channels, size, size, size] int16; targets [batch, 4] from -1 to 1

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
}
_WITH_MOMENTUM = ("SGD", "RMSprop")
MIDDLE = "mae_of_the_middle"  # the error on the evaluated samples of predicting the middle of each parameter's range


class CountTransform(nn.Module):
    """Turns counts into what the network sees: log(1 + counts), or counts divided by their mean, then each channel shifted and scaled.

    Shift and scale are buffers, so that a checkpoint holds them; at first they change nothing. Constant values are not scaled, and an
    empty volume stays empty.
    """

    def __init__(self, channels: int, *, apply_log: bool) -> None:
        super().__init__()
        self.apply_log = apply_log
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def forward(self, counts: Tensor) -> Tensor:
        volumes = counts.float()  # half precision holds whole numbers up to 2,048 only: the logarithm comes before any cast
        if self.apply_log:
            volumes = volumes.log1p()
        else:
            mean = volumes.mean(dim=(1, 2, 3, 4), keepdim=True)
            volumes = volumes / mean.where(mean > 0, 1)
        shape = (-1, 1, 1, 1)
        return (volumes - self.mean.float().view(shape)).div_(self.std.float().view(shape)).to(self.mean.dtype)

    @torch.no_grad()
    def fit(self, counts: Tensor) -> None:
        """Choose shift and scale so that each channel of some volumes has mean 0 and standard deviation 1."""
        self.mean.zero_(), self.std.fill_(1)
        volumes = self(counts).double()
        mean, std = volumes.mean(dim=(0, 2, 3, 4)), volumes.std(dim=(0, 2, 3, 4))
        self.mean.copy_(mean), self.std.copy_(std.where(std > 1e-6 * mean.abs().clamp(min=1), 1))  # below is the rounding of a constant

    @property
    def fitted(self) -> bool:
        """Whether shift and scale do anything."""
        return bool((self.mean != 0).any() or (self.std != 1).any())


class CosmoFlowModule(pl.LightningModule):
    """Regression of Omega_m, sigma_8, n_s and H_0, each scaled to -1 to 1, by the mean squared error.

    Logs train_, val_ and test_ loss and mae (the mean absolute error over the four, on that scale: 0.5 is what a constant gets, 0.124 the
    benchmark's goal); for validation and test also mae_NAME and r2_NAME for each parameter and r2, their mean.

    Args:
        network: cosmoflow (Graphcore's: kernel 2, 16 to 256 channels), cosmoflow-mlperf (kernel 3, 32 to 512), cosmoflow-v1 or resnet.
        input_size: voxels along each side of the volume, 32 to 128.
        in_channels: redshifts of the volume, 1 to 4.
        conv_size: channels of the first convolution; null is 16, for cosmoflow-mlperf 32.
        n_conv_layers: null is 5, for cosmoflow-mlperf as many as leave 4 voxels a side.
        fc1_size: outputs of the first dense layer; null is 128.
        fc2_size: outputs of the second dense layer; null is 64.
        hidden_activation: a layer of Keras by its name; null is LeakyReLU, whose slope is 0.3 there.
        dropout: share of the dense layers' outputs dropped in training; null is 0.
        apply_log: the network sees log(1 + counts), taken in 32 bits on the device; else counts divided by their mean.
        standardise: shift and scale each channel of that to mean 0 and deviation 1 over some training volumes, measured when training
            first begins. The redshifts differ little from each other, and those differences tell Omega_m: without this, which the originals
            do not have, it takes many times the training before the network sees them.
        optimizer: SGD, Adadelta, Adagrad, Adam, AdamW or RMSprop.
        learning_rate: multiplied by the schedule.
        momentum: of SGD and RMSprop; null is 0.9 and 0.
        l2: penalty l2 x the sum of squares of the weights of the two hidden dense layers, as Keras has it: weight_decay = 2 x l2.
        schedule: linear, cosine, polynomial, exponential, stepped or const; moves with every weight update.
        warmup_fraction: share of the run in which the rate rises; null is 0.2, for stepped and const 0.
        warmup_epochs: the same in epochs.
        warmup_mode: whether the decay begins after the warm-up (shift) or with the run (mask); null is shift.
        final_fraction: of the learning rate, at the end of linear, cosine, polynomial and exponential; null is 0.02.
        decay_values: multipliers of the learning rate for stepped; null is 1, 0.1, 0.01.
        decay_fractions: shares of the run after which stepped takes the next value; null is 0.5, 0.75.
        decay_at_epochs: instead of decay_fractions, the epochs at whose first update stepped takes the next value.
        physical_spread: share of their centre within which the parameters lie on either side, where it is known.
        predict_units: predictions on the scale from -1 to 1 (unit), or in physical units, for which physical_spread is needed.
        report: after each validation print the errors of the four parameters and draw predictions against truth to validation.png.
        channels_last: keep volumes and weights in memory voxel by voxel, which is faster on most devices; moves last bits only.

    Raises:
        UserError: an option is unknown, out of range, or means nothing beside another one.
    """

    def __init__(
        self,
        *,
        network: Literal["cosmoflow", "cosmoflow-mlperf", "cosmoflow-v1", "resnet"] = "cosmoflow-mlperf",
        input_size: int = 32,
        in_channels: int = 4,
        conv_size: int | None = None,
        n_conv_layers: int | None = None,
        fc1_size: int | None = None,
        fc2_size: int | None = None,
        hidden_activation: str | None = None,
        dropout: float | None = None,
        apply_log: bool = True,
        standardise: bool = True,
        optimizer: str = "SGD",
        learning_rate: float = 0.01,
        momentum: float | None = None,
        l2: float = 0.0,
        schedule: str = "linear",
        warmup_fraction: float | None = None,
        warmup_epochs: float | None = None,
        warmup_mode: Literal["shift", "mask"] | None = None,
        final_fraction: float | None = None,
        decay_values: list[float] | None = None,
        decay_fractions: list[float] | None = None,
        decay_at_epochs: list[float] | None = None,
        physical_spread: float | None = None,
        predict_units: Literal["unit", "physical"] = "unit",
        report: bool = False,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if optimizer not in OPTIMIZERS:
            raise UserError(f"optimizer={optimizer!r} is unknown: choose from {', '.join(OPTIMIZERS)}")
        if not learning_rate > 0:
            raise UserError(f"learning_rate={learning_rate} must be above 0")
        if momentum is not None and optimizer not in _WITH_MOMENTUM:
            raise UserError(f"momentum={momentum} means nothing to optimizer={optimizer!r}")
        if momentum is not None and not 0 <= momentum < 1:
            raise UserError(f"momentum={momentum} must be at least 0 and below 1")
        if not l2 >= 0:
            raise UserError(f"l2={l2} must be at least 0")
        if l2 and network == "resnet":
            raise UserError(f"l2={l2} means nothing to network='resnet', which has no hidden dense layers")
        if predict_units not in ("unit", "physical"):
            raise UserError(f"predict_units={predict_units!r} is unknown: choose from unit, physical")
        if predict_units == "physical" and physical_spread is None:
            raise UserError("predict_units='physical' needs physical_spread (data.spread): the ranges that the targets were scaled from")
        given = {
            "warmup_fraction": warmup_fraction,
            "warmup_epochs": warmup_epochs,
            "warmup_mode": warmup_mode,
            "final_fraction": final_fraction,
            "decay_values": decay_values,
            "decay_fractions": decay_fractions,
            "decay_at_epochs": decay_at_epochs,
        }
        self._schedule_options = {name: value for name, value in given.items() if value is not None}
        check_schedule(schedule, **self._schedule_options)
        with as_user_errors():
            self.network = cosmoflow(
                network,
                input_size=input_size,
                in_channels=in_channels,
                conv_size=conv_size,
                n_conv_layers=n_conv_layers,
                fc1_size=fc1_size,
                fc2_size=fc2_size,
                hidden_activation=hidden_activation,
                dropout=dropout,
            )
        if channels_last:
            self.network.to(memory_format=torch.channels_last_3d)
        self.transform = CountTransform(in_channels, apply_log=apply_log)
        self._reported: dict[str, dict[str, float]] = {}
        self._scores: list[tuple[Tensor, Tensor]] = []  # predictions and targets of an evaluation, at its end those of all processes

    @property
    def reported(self) -> dict[str, dict[str, float]]:
        """The last scores of "val" and "test" in this process."""
        return self._reported

    def forward(self, counts: Tensor) -> Tensor:
        """Parameters [batch, 4] from -1.2 to 1.2 of volumes of counts [batch, channels, size, size, size], int16 or any other numbers."""
        volumes = self.transform(counts)
        if self.hparams.channels_last:
            volumes = volumes.contiguous(memory_format=torch.channels_last_3d)
        return self.network(volumes)

    def on_fit_start(self) -> None:
        """Measure the volumes for `standardise`, unless a checkpoint that is continued from has done so."""
        if not self.hparams.standardise or self.transform.fitted:
            return
        sample = getattr(self.trainer.datamodule, "sample_counts", None)
        if sample is None:
            raise UserError(
                "standardise=True needs a data module with sample_counts(), such as CosmoFlowDataModule; give standardise=False"
            )
        self.transform.fit(sample().to(self.device))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        predictions, targets = self._predict(batch)
        loss = F.mse_loss(predictions, targets)
        for name, value in (("train_loss", loss), ("train_mae", (predictions.detach() - targets).abs().mean())):
            self.log(name, value, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(targets))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Parameters [batch, 4] of volumes, or of a batch's volumes; see `predict_units`."""
        counts = batch if isinstance(batch, Tensor) else batch[0]
        predictions = at_least_float32(self(counts))
        return predictions if self.hparams.predict_units == "unit" else to_physical(predictions, spread=self.hparams.physical_spread)

    def _predict(self, batch: Batch) -> Batch:
        counts, targets = batch
        predictions = at_least_float32(self(counts))
        return predictions, targets.to(predictions.dtype)

    def _evaluate(self, batch: Batch, split: str) -> None:
        predictions, targets = self._predict(batch)
        error = predictions - targets
        self.log(f"{split}_loss", error.square().mean(), prog_bar=True, batch_size=len(targets))
        self.log(f"{split}_mae", error.abs().mean(), prog_bar=True, batch_size=len(targets))
        for number, name in enumerate(PARAMETERS):
            self.log(f"{split}_mae_{name}", error[:, number].abs().mean(), batch_size=len(targets))
        self._scores.append((predictions.double().cpu(), targets.double().cpu()))

    def on_validation_epoch_start(self) -> None:
        self._scores = []

    def on_test_epoch_start(self) -> None:
        self._scores = []

    def on_validation_epoch_end(self) -> None:
        self._log_r2("val")

    def on_test_epoch_end(self) -> None:
        self._log_r2("test")

    def _log_r2(self, split: str) -> None:
        """Share of each parameter's variance that the predictions explain, over the whole evaluation."""
        self._scores = [score for scores in _everyones(self._scores) for score in scores]
        sums = torch.zeros(4, 4, dtype=torch.float64)  # of 1, targets, their squares, squared errors; for each parameter
        for predictions, targets in self._scores:
            sums += torch.stack([value.sum(0) for value in (torch.ones_like(targets), targets, targets**2, (predictions - targets) ** 2)])
        count, total, squares, errors = sums
        variances = squares - total**2 / count
        r2 = 1 - errors / variances.where(variances > 1e-12 * squares, torch.nan)  # undefined if all targets are equal
        for number, name in enumerate(PARAMETERS):
            self.log(f"{split}_r2_{name}", r2[number])
        self.log(f"{split}_r2", r2.mean())

    def configure_callbacks(self) -> list[Callback]:
        return [Report()] if self.hparams.report else []

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimizer, and a schedule that spans the Trainer's weight updates and is stepped with each of them."""
        options = self.hparams
        hidden = [self.network.fc1.weight, self.network.fc2.weight] if options.l2 else []
        others = [parameter for parameter in self.parameters() if not any(parameter is weight for weight in hidden)]
        groups = [{"params": others, "weight_decay": 0.0}]
        if hidden:
            groups.append({"params": hidden, "weight_decay": 2 * options.l2})
        momentum = {}
        if options.optimizer in _WITH_MOMENTUM:
            default = 0.9 if options.optimizer == "SGD" else 0.0
            momentum = {"momentum": default if options.momentum is None else options.momentum}
        optimizer = OPTIMIZERS[options.optimizer](groups, lr=options.learning_rate, **momentum)
        total = self.trainer.estimated_stepping_batches
        counts_epochs = {"warmup_epochs", "decay_at_epochs"} & self._schedule_options.keys()
        per_epoch = updates_per_epoch(self.trainer) if counts_epochs else None
        schedule = build_schedule(optimizer, options.schedule, total=total, updates_per_epoch=per_epoch, **self._schedule_options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _everyones(value: Any) -> list[Any]:
    """The `value` of each process, in the order of their ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


class Report(Callback):
    """Prints and draws what an evaluation says about each of the four parameters."""

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: CosmoFlowModule) -> None:
        self._report(trainer, pl_module, "val", "validation")

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: CosmoFlowModule) -> None:
        self._report(trainer, pl_module, "test", "test")

    def _report(self, trainer: pl.Trainer, module: CosmoFlowModule, prefix: str, name: str) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or not module._scores:
            return
        module._reported[prefix] = {key: float(value) for key, value in trainer.callback_metrics.items()}
        show = print if trainer.progress_bar_callback is None else trainer.progress_bar_callback.print
        show(f"{prefix} " + mae_line(module._reported[prefix], prefix, spread=module.hparams.physical_spread))
        predictions, targets = (torch.cat(parts).numpy() for parts in zip(*module._scores, strict=True))
        module._reported[prefix][MIDDLE] = float(abs(targets).mean())
        from cosmoflow_ipu.pictures import draw_predictions

        draw_predictions(predictions, targets, path=Path(trainer.default_root_dir) / f"{name}.png", spread=module.hparams.physical_spread)


def mae_line(metrics: dict[str, float], prefix: str, *, spread: float | None) -> str:
    """Mean absolute errors in one line: their mean and each parameter's, in physical units too where the spread is known."""
    errors = [metrics[f"{prefix}_mae_{name}"] for name in PARAMETERS]
    parts = ", ".join(f"{symbol} {error:.3f}" for symbol, error in zip(SYMBOLS, errors, strict=True))
    if spread:
        parts += f" (± {', '.join(f'{error * spread * centre:.2g}' for error, centre in zip(errors, CENTRE, strict=True))})"
    return f"MAE {metrics[f'{prefix}_mae']:.4f}: {parts}; R² {metrics[f'{prefix}_r2']:.3f}"
