"""For trial runs of a network or a training step: note what they use, and leave everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_ipu.cutting.tensors import tensors_in
from lightning_ipu.randomness import preserved_streams

OF_EVERY_MODULE = {*vars(nn.Module()), *vars(nn.Module)}
# Functions and methods that ask what a tensor is like, not for its values.
_DESCRIBES = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "requires_grad_", "data_ptr", "__hash__", "__len__", "__set__"),
}


class Uses(TorchFunctionMode):
    """Notes what code outside the network's forward uses of the network while this mode is on.

    `tensors` are the names of parameters and buffers whose values it used, `attributes` the (module, name) of attributes that it read.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._tensors = {id(tensor): name for name, tensor in named}
        self._modules = {id(child): name for name, child in module.named_modules()}
        self._kept = [tensor for _, tensor in named]  # so that ids stay unique
        self.tensors: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()

    def __enter__(self) -> Uses:
        def read(module: nn.Module, name: str) -> Any:
            if id(module) in self._modules:
                self.attributes.add((self._modules[id(module)], name))
            return object.__getattribute__(module, name)

        nn.Module.__getattribute__ = read
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        del nn.Module.__getattribute__
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        asked = getattr(func.__self__, "__name__", "") if name == "__get__" else name
        if (asked in ("data", "T", "mT", "H", "mH", "real", "imag")) if name == "__get__" else asked not in _DESCRIBES:
            self.tensors |= {self._tensors[id(tensor)] for tensor in tensors_in((args, kwargs)) if id(tensor) in self._tensors}
        return func(*args, **kwargs)


@contextmanager
def state_restored(module: nn.Module) -> Iterator[None]:
    """Restore at the end what the modules hold: attributes, those that are lists, dicts and sets included, and buffers."""
    held = [(child, vars(child).copy(), child._buffers.copy()) for child in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    own = [value for _, attributes, _ in held for name, value in attributes.items() if name not in OF_EVERY_MODULE]
    containers = [(value, copy(value)) for value in own if type(value) in (list, dict, set)]
    try:
        yield
    finally:
        for child, attributes, child_buffers in held:
            for target, source in ((vars(child), attributes), (child._buffers, child_buffers)):
                target.clear()
                target.update(source)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.resize_(before.shape).copy_(before)
        for value, before in containers:
            value.clear()
            value.extend(before) if type(value) is list else value.update(before)


@contextmanager
def borrowed(module: nn.Module, *, training: bool, fake: FakeTensorMode | None) -> Iterator[None]:
    """Use a network, in training mode or not, with copies in place of its tensors; afterwards it is exactly as it was.

    With `fake` the copies are fake tensors, without data; else only buffers are copied.
    """
    held = [(child, vars(child).copy(), child._parameters.copy(), child._buffers.copy()) for child in module.modules()]
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor, is_parameter: bool) -> Tensor:
        if fake is None and is_parameter:
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone() if fake is None else fake.from_tensor(tensor, static_shapes=True)
        return copies[id(tensor)]

    try:
        with preserved_streams(next((tensor.device for tensor in module.parameters()), None)):
            if module.training != training:
                module.train(training)
            for child, attributes, parameters, buffers in held:
                for target, source in ((child._parameters, parameters), (child._buffers, buffers), (vars(child), attributes)):
                    tensors = {key: value for key, value in source.items() if isinstance(value, Tensor)}
                    target.update({key: copied(value, target is child._parameters) for key, value in tensors.items()})
            yield
    finally:
        for child, attributes, parameters, buffers in held:
            for target, source in ((child._parameters, parameters), (child._buffers, buffers), (vars(child), attributes)):
                target.clear()
                target.update(source)
