"""Layers of torch.nn that need help with 16-bit weights, because their kernels take operands of one type only.

Under autocast most layers cast weights and inputs to one type themselves. Norms and parametrizations (spectral norm) see their own weights in
32 bits, the type of their statistics. A few other layers compute entirely in 32 bits, or get their inputs in the type of their weights.
These changes stay on the layers after training, as the 16-bit weights do; the layers can be copied and pickled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_map

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_IN_32_BITS = (nn.Bilinear, nn.AdaptiveLogSoftmaxWithLoss)
_OF_ONE_TYPE = (nn.EmbeddingBag, nn.LSTM)


def prepare(module: nn.Module) -> None:
    """Make every layer of a network run under autocast, now that its weights are in 16 bits."""
    for child in module.modules():
        if _wants_wide_weights(child) and _widen not in child._forward_pre_hooks.values():
            child.register_forward_pre_hook(_widen, prepend=True)
            child.register_forward_hook(_narrow_again, always_call=True)
        if isinstance(child, _IN_32_BITS + _OF_ONE_TYPE) and "forward" not in vars(child):
            child.forward = partial(_in_32_bits if isinstance(child, _IN_32_BITS) else _of_one_type, child)


def _wants_wide_weights(module: nn.Module) -> bool:
    return isinstance(module, (*_NORMS, ParametrizationList)) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


def _widen(self: nn.Module, inputs: tuple[Tensor]) -> None:
    """Show a layer its own weights in 32 bits during a forward."""
    if not torch.jit.is_scripting():  # so that the layer can be scripted
        _show_wide(self)


def _narrow_again(self: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    if not torch.jit.is_scripting():
        _show_narrow(self)


def _show_wide(layer: nn.Module) -> None:
    for name, parameter in layer._parameters.items():
        if parameter is not None:
            layer.__dict__[name] = parameter.float()  # an attribute of this name hides the parameter


def _show_narrow(layer: nn.Module) -> None:
    for name in layer._parameters:
        layer.__dict__.pop(name, None)


def _in_32_bits(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward in 32 bits, weights and inputs alike."""
    args, kwargs = _cast((args, kwargs), torch.float32)
    device = next(layer.parameters()).device.type
    parts = list(layer.modules())
    try:
        for part in parts:
            _show_wide(part)
        with torch.autocast(device, enabled=False):
            return type(layer).forward(layer, *args, **kwargs)
    finally:
        for part in parts:
            _show_narrow(part)


def _of_one_type(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward on inputs in the type of its weights."""
    args, kwargs = _cast((args, kwargs), next(layer.parameters()).dtype)
    return type(layer).forward(layer, *args, **kwargs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value, values)
