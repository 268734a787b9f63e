"""The network cut into stages for each kind of call of `self(...)`, and how the tensors between stages are sent.

A stage is cut for certain shapes. For micro-batches of other shapes (text of varying length, a short last batch) the network is cut again,
once for each kind of call.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from lightning_ipu.cutting.partition import Partition
from lightning_ipu.cutting.tensors import example, flatten, unflatten

_KEPT = 64  # kinds whose stages are kept; for others the network is cut again when they come up
_MANY = 16  # kinds after which the user is warned
_ALIGNED = 64  # bytes: where torch lets a tensor begin
_PACKED = 1 << 20  # bytes up to which tensors are copied into one message; larger ones take longer to copy than a message costs


class Wire:
    """How the tensors at one boundary are sent: each contiguous, channels_last images with their channels last.

    Args:
        like: meta tensors of their shapes, strides and dtypes, which require gradients where the values do.
        may_pack: whether a message may hold all of them, behind a number. `size` are its bytes, 0 where tensors are sent one by one.
    """

    def __init__(self, like: Sequence[torch.Tensor], *, may_pack: bool) -> None:
        orders = [sorted(range(tensor.dim()), key=lambda k, tensor=tensor: (-tensor.stride(k), k)) for tensor in like]
        self._sorted = all(order == list(range(len(order))) for order in orders)
        self._orders = orders
        self._back = [[order.index(k) for k in range(len(order))] for order in orders]
        self.dtypes = [tensor.dtype for tensor in like]
        self.shapes = [torch.Size(tensor.shape[k] for k in order) for tensor, order in zip(like, orders, strict=True)]
        self.trained = [tensor.requires_grad for tensor in like]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        begins = list(accumulate(rooms, initial=_ALIGNED))
        self.size = begins[-1] if may_pack and begins[-1] <= _PACKED else 0
        self._gaps = [room - size for room, size in zip(rooms, sizes, strict=True)]
        self._spans = list(zip(begins, (begin + size for begin, size in zip(begins, sizes, strict=False)), strict=False))

    def laid_out(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Contiguous views of dense tensors, in which they are sent."""
        return values if self._sorted else [value.permute(order) for value, order in zip(values, self._orders, strict=True)]

    def restored(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Such views, with their dimensions in their original order."""
        return values if self._sorted else [value.permute(back) for value, back in zip(values, self._back, strict=True)]

    def pack(self, number: int, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """One message of a number and tensors that are laid out."""
        head = torch.zeros(_ALIGNED // 8, dtype=torch.int64)
        head[0] = number
        parts = [head.view(torch.uint8)]
        for value, gap in zip(values, self._gaps, strict=True):
            parts.append(value.reshape(-1).view(torch.uint8))
            if gap:
                parts.append(torch.zeros(gap, dtype=torch.uint8))
        return torch.cat(parts)

    def pack_alone(self, number: int) -> torch.Tensor:
        """A message as long as one with tensors, of a number."""
        message = torch.zeros(self.size // 8, dtype=torch.int64)
        message[0] = number
        return message.view(torch.uint8)

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a message, as views of it."""
        layout = zip(self._spans, self.dtypes, self.shapes, strict=True)
        return [message[begin:end].view(dtype).view(shape) for (begin, end), dtype, shape in layout]


class Slice:
    """What this process holds of the network, cut for one kind of call.

    Args:
        number: of the kind, alike in all processes.
        partition: the network cut for it.
        stages: those of this process.
        may_pack: as for Wire.
    """

    def __init__(self, number: int, partition: Partition, stages: range, *, may_pack: bool) -> None:
        self.number, self.partition = number, partition
        self.stage = partition.stage(stages.start, stages.stop - 1)
        self.arriving, self.leaving = (Wire(like, may_pack=may_pack) for like in (self.stage.inputs, self.stage.outputs))


class Kinds:
    """The kinds of calls of `self(...)` so far, by number, and the network cut for each. Calls of a kind differ in their tensors' values only.

    Processes that meet the same kinds in the same order have the same numbers, also once kinds have been forgotten.

    Args:
        make: cuts the network for args and kwargs.
        stages: those of this process.
        first: the network as it was cut for kind 0, None where it has not been.
        device: where the tensors of a call that another process describes are made.
        remark: called with a warning when there are many kinds.
    """

    def __init__(
        self,
        make: Callable[[tuple[Any, ...], dict[str, Any]], Partition],
        stages: range,
        *,
        first: Partition | None,
        device: torch.device,
        remark: Callable[[str], None],
    ) -> None:
        self._make, self._stages, self._device, self._remark = make, stages, device, remark
        self._added = 0
        self._alike: dict[Any, dict[int, Any]] = {}  # by shapes: what else makes the kind of each number
        self._of_tensors: dict[Any, int] = {}  # the numbers of those whose arguments are tensors alone, by shapes
        self._cut: OrderedDict[int, tuple[Any, Slice]] = OrderedDict()
        if first is not None:
            self._keep(first, *flatten(first.call))

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | bytes, Sequence[torch.Tensor]]:
        """The number of a call's kind, or, where it is new, the call without its tensors' values, for `cut`; and the call's tensors."""
        if not kwargs and all(type(value) is torch.Tensor for value in args):  # as most calls are
            number = self._of_tensors.get(_shapes(args))
            if number is not None:
                return number, args
        tensors, (leaves, tree) = flatten((args, kwargs))
        for number, (others, other_tree) in self._alike.get(_shapes(tensors), {}).items():
            if tree == other_tree and all(a is b or a == b for a, b in zip(leaves, others, strict=True)):
                return number, tensors
        metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta", requires_grad=t.requires_grad) for t in tensors]
        return pickle.dumps(([tensor.device.type for tensor in tensors], unflatten(metas, (leaves, tree)))), tensors

    def cut(self, kind: int | bytes) -> Slice:
        """The network cut for a kind: as it is kept, or anew."""
        if isinstance(kind, bytes):
            return self._add(kind)
        self._cut.move_to_end(kind)
        return self._cut[kind][1]

    @property
    def latest(self) -> Slice:
        """The network cut for the latest call."""
        return next(reversed(self._cut.values()))[1]

    def _add(self, call: bytes) -> Slice:
        devices, described = pickle.loads(call)
        metas, structure = flatten(described)
        # Zeros, since a forward may look at values inside a submodule: the same in every process.
        tensors = [
            example(meta, self._device if kind == self._device.type else torch.device(kind), with_data=True)
            for meta, kind in zip(metas, devices, strict=True)
        ]
        return self._keep(self._make(*unflatten(tensors, structure)), metas, structure)

    def _keep(self, partition: Partition, tensors: list[torch.Tensor], structure: Any) -> Slice:
        number, self._added = self._added, self._added + 1
        piece = Slice(number, partition, self._stages, may_pack=self._device.type == "cpu")
        shapes = _shapes(tensors)
        self._alike.setdefault(shapes, {})[number], self._cut[number] = structure, (shapes, piece)
        args, kwargs = unflatten(tensors, structure)
        if not kwargs and all(isinstance(value, torch.Tensor) for value in args):
            self._of_tensors[shapes] = number
        if len(self._cut) > _KEPT:
            oldest, (shapes, _) = self._cut.popitem(last=False)
            del self._alike[shapes][oldest]
            if self._of_tensors.get(shapes) == oldest:
                del self._of_tensors[shapes]
        if self._added == _MANY:
            self._remark(
                f"self(...) was called with {_MANY} different shapes or other arguments, and the network is cut into stages again for each;"
                " pad to fewer sizes to train faster"
            )
        return piece

    def check_unchanged(self) -> None:
        """Check that the network would still be cut as it was."""
        for _, piece in self._cut.values():
            piece.partition.check_unchanged()


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)
