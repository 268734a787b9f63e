"""Tensors in nested values and modules, and what a receiver must know of one: shape, strides, dtype, and whether it requires a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Spec(NamedTuple):
    """What a receiver must know of a tensor. Strides are dense, even where the sender's are not."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str = "meta") -> Tensor:
        """A tensor like that."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    @property
    def bytes(self) -> int:
        """What sending it once takes."""
        return self.shape.numel() * self.dtype.itemsize


def spec_of(tensor: Tensor) -> Spec:
    """What a receiver must know of this tensor."""
    with torch._C.DisableTorchFunction():
        shape, stride = tensor.shape, tensor.stride()
        room = 1
        for size, step in sorted((pair for pair in zip(shape, stride, strict=True) if pair[0] != 1), key=lambda pair: pair[1]):
            if step != room:  # gaps or overlaps do not cross a cut: row by row
                stride = tuple(shape[place + 1 :].numel() for place in range(len(shape)))
                break
            room *= size
        return Spec(shape, stride, tensor.dtype, tensor.requires_grad)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts, as torch.fx goes through them."""
    found: list[Tensor] = []
    map_aggregate(value, lambda item: found.append(item) if isinstance(item, Tensor) else None)
    return found


TENSOR = object()  # stands for a tensor in a flat list of leaves
Structure = tuple[list[Any], TreeSpec]


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """The tensors in nested tuples, lists and dicts, and the rest of them."""
    leaves, tree = tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], ([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def unflatten(tensors: Iterable[Tensor], structure: Structure) -> Any:
    """The opposite of `flatten`."""
    flat = iter(tensors)
    return tree_unflatten([next(flat) if leaf is TENSOR else leaf for leaf in structure[0]], structure[1])


def example(tensor: Tensor, device: torch.device, *, with_data: bool) -> Tensor:
    """A copy of a tensor, or one like it without data (under a fake mode); for one on the meta device, zeros on `device`."""
    if with_data and not tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    spec = spec_of(tensor)
    made = spec.empty(device if tensor.is_meta else tensor.device)
    return made.detach().zero_().requires_grad_(spec.requires_grad) if with_data else made


def tensor_places(module: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Tensor | None], str]]:
    """A module's parameters and buffers, including those that are None, once for each of their names.

    Yields:
        Name, owner, the owner's dictionary of parameters or of buffers, and the key in it: a forward may put a new tensor there.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        for tensors in (owner._parameters, owner._buffers):
            for key in tensors:
                yield f"{path}.{key}" if path else key, owner, tensors, key


def buffer_places(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """A module's buffers, including those that are None: name, owner and name in the owner."""
    return [(name, owner, key) for name, owner, tensors, key in tensor_places(module) if tensors is owner._buffers]
