"""16.16 and 16.32 as a precision plugin of Lightning's Trainer: autocast, 16-bit weights, their update and loss scaling in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pytorch_lightning.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ipu.errors import UserError
from lightning_ipu.plan import PlanError
from lightning_ipu.precision.layers import prepare
from lightning_ipu.precision.loss_scaling import AUTOMATIC, LossScaling
from lightning_ipu.precision.names import SIXTEEN_BIT, name_and_type, scaling_refusal
from lightning_ipu.precision.update import SixteenBitUpdate

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _scaler_refusal(scaler: torch.amp.GradScaler | None, loss_scaling: float | str | None) -> str | None:
    """Why the settings of a GradScaler cannot be used, in one line; None if they can."""
    if scaler is None:
        return None
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        return f"scaler={type(scaler).__name__} has methods of its own, which would not be called; give a torch.amp.GradScaler, or loss_scaling"
    default = torch.amp.GradScaler("cpu").state_dict()
    if loss_scaling is not None and scaler.state_dict() != default:
        return f"loss_scaling={loss_scaling} contradicts the settings of the plugin's scaler; give one of the two"
    return None


class SixteenBit(Precision):
    """16-bit computing, over 32-bit weights (16.32) or 16-bit ones (16.16).

    Both compute under torch.autocast: convolutions and matrix products in 16 bits; losses, norms' statistics and the reductions that
    autocast lists in 32; batches and targets enter as the user made them.

    Args:
        precision: Lightning's name: bf16-mixed, 16-mixed (16.32), bf16-true or 16-true (16.16).
        device: cpu or cuda.
        loss_scaling: a fixed factor, "auto", or None, which is "auto" for float16 and no scaling for bfloat16.
        stochastic_rounding: of the weight update in 16.16.
        scaler: the GradScaler of Lightning's own plugin, whose settings "auto" starts from; a disabled one means no scaling.

    Raises:
        UserError: the settings make no sense together.
    """

    def __init__(
        self,
        precision: str,
        *,
        device: str,
        loss_scaling: float | str | None = None,
        stochastic_rounding: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if precision not in SIXTEEN_BIT:
            raise UserError(f"precision={precision!r} is not one of {', '.join(SIXTEEN_BIT)}")
        named, half_type = name_and_type(precision)
        if problem := scaling_refusal(named, half_type=half_type, loss_scaling=loss_scaling):
            raise UserError(problem)
        self.precision, self.device, self.stochastic_rounding = precision, device, stochastic_rounding
        self.dtype = _DTYPES[half_type]
        self.narrow_weights = named == "16.16"
        if problem := _scaler_refusal(scaler, loss_scaling):
            raise UserError(problem)
        if loss_scaling is None and half_type == "fp16" and (scaler is None or scaler.is_enabled()):
            loss_scaling = AUTOMATIC
        self.scaling = None if loss_scaling is None else LossScaling(loss_scaling, scaler=scaler)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make a network's parameters 16-bit; buffers, such as norms' running statistics, stay as they are."""
        if not self.narrow_weights:
            return module
        for name, parameter in module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise PlanError(f"{name!r} has no shape yet, and so cannot be in 16 bits: run a batch through the network first")
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)
        prepare(module)
        return module

    def narrow_update(self, optimizer: Optimizer, module: nn.Module, *, seed: int) -> SixteenBitUpdate | None:
        """What makes this precision's weight updates; None where the optimizer's own `step` does."""
        if not self.narrow_weights:
            return None
        return SixteenBitUpdate(optimizer, module, seed=seed, stochastic=self.stochastic_rounding)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.autocast(self.device, dtype=self.dtype, cache_enabled=False):
            yield

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaling is None else self.scaling.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaling is not None:
            self.scaling.load_state_dict(state_dict)


def in_place_of(
    plugin: Precision | None, *, on_cpu: bool, loss_scaling: float | Literal["auto"] | None, stochastic_rounding: bool
) -> Precision | None:
    """This package's plugin for one of Lightning's that computes in 16 bits, under the same name of precision; others stay."""
    if type(plugin) not in (HalfPrecision, MixedPrecision):
        return plugin
    return SixteenBit(
        plugin.precision,
        device="cpu" if on_cpu else "cuda",
        loss_scaling=loss_scaling,
        stochastic_rounding=stochastic_rounding,
        scaler=getattr(plugin, "scaler", None),
    )
