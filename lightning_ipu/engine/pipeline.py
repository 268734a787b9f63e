"""A pipeline's schedule: micro-batches go forward and backward through stages that are held by a row of processes.

A stage is cut for certain shapes. For micro-batches of other shapes (text of varying length, a short last batch) the network is cut again,
once for each kind of call of `self(...)`. The first process sees a micro-batch before the others and sends them the number of its kind
beside the data, so that they know what will arrive. The schedules of torch.distributed.pipelining are not used: they send one
shape only, and reserve memory for all micro-batches of a weight update instead of those in flight.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_ipu.cutting.partition import Partition, Stage
from lightning_ipu.cutting.tensors import example, flatten, unflatten

_DATA, _KIND, _CALL, _TAGS = range(4)  # tags of what travels in one pipeline, and how many each has
_KEPT = 64  # kinds whose stages are kept; for others the network is cut again when they come up
_MANY = 16  # kinds after which the user is warned


class Slice(NamedTuple):
    """What this process holds of the network, cut for one kind of call."""

    partition: Partition
    stage: Stage


class Kinds:
    """The kinds of calls of `self(...)` so far, by number, and the network cut for each. Calls of a kind differ in their tensors' values only.

    Processes that meet the same kinds in the same order have the same numbers, also once kinds have been forgotten.

    Args:
        make: cuts the network for args and kwargs.
        stages: those of this process.
        first: the network as it was cut for kind 0, None where it has not been.
        device: where the tensors of a call that another process describes are made.
        remark: told when there are many kinds.
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
        self._cut: OrderedDict[int, tuple[Any, Slice]] = OrderedDict()
        if first is not None:
            self._keep(first, *flatten(first.call))

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The number of a call's kind, None where it is new."""
        tensors, (leaves, tree) = flatten((args, kwargs))
        for number, (others, other_tree) in self._alike.get(_shapes(tensors), {}).items():
            if tree == other_tree and all(a is b or a == b for a, b in zip(leaves, others, strict=True)):
                return number
        return None

    def __getitem__(self, number: int) -> Slice:
        """The network cut for a kind."""
        self._cut.move_to_end(number)
        return self._cut[number][1]

    def described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """A call without its tensors' values, for `add`."""
        tensors, structure = flatten((args, kwargs))
        metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta", requires_grad=t.requires_grad) for t in tensors]
        return pickle.dumps(([tensor.device.type for tensor in tensors], unflatten(metas, structure)))

    def add(self, call: bytes) -> Slice:
        """Cut the network for a new kind."""
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
        piece, shapes = Slice(partition, partition.stage(self._stages.start, self._stages.stop - 1)), _shapes(tensors)
        self._alike.setdefault(shapes, {})[number], self._cut[number] = structure, (shapes, piece)
        if len(self._cut) > _KEPT:
            oldest, (shapes, _) = self._cut.popitem(last=False)
            del self._alike[shapes][oldest]
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


def turns(count: int, ahead: int) -> Iterator[tuple[bool, int]]:
    """The order of a process's work on `count` micro-batches, as (is forward, number): `ahead` forward passes, then backward and forward in turn."""
    for number in range(ahead):
        yield True, number
    for number in range(count):
        yield False, number
        if ahead + number < count:
            yield True, ahead + number


class Pipeline:
    """The work of this process, and what it receives from and sends to its neighbours.

    Sending does not block; the next tensor in the same direction waits until the previous one has been received.

    Args:
        part, parts: this process's place in the row, and how many there are.
        peer: the rank of the process in a place.
        groups: of these processes, for what goes forward, for what goes back and for tensors on the CPU; where a group does one thing at a
            time (NCCL), three.
        device: where the data are.
        number: of the pipeline, alike in all its processes: what one that has failed left on its way reaches no other (gloo).
    """

    def __init__(
        self,
        part: int,
        parts: int,
        peer: Callable[[int], int],
        *,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        number: int,
    ) -> None:
        self.is_first, self.is_last, self._device, self._tag = part == 0, part == parts - 1, device, number * _TAGS
        self._first, self._others = peer(0), [peer(place) for place in range(1, parts)]
        self._before, self._behind = peer(max(part - 1, 0)), peer(min(part + 1, parts - 1))
        self._forward, self._back, self._control = groups
        self._sent: dict[bool, list[tuple[Any, torch.Tensor]]] = {True: [], False: []}  # by whether forward
        self._told: list[tuple[Any, torch.Tensor]] = []
        self._next: tuple[Any, torch.Tensor]

    def run(
        self,
        order: Sequence[tuple[bool, int]],
        *,
        kind: Callable[[int], Slice],
        forward: Callable[[int, Slice, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]],
        loss: Callable[[int, Slice, tuple[torch.Tensor, ...]], torch.Tensor] | None = None,
        around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Carry out the passes in order.

        Args:
            order: of the passes, as from `turns`.
            kind: gives the network cut for a micro-batch.
            forward: runs this process's stages on a micro-batch; nothing arrives in the first.
            loss: on the last process, computes the loss from what `forward` returned; None without backward passes.
            around_backward: makes the context of a backward pass.
        """
        under_way: dict[int, tuple[list[torch.Tensor], Sequence[torch.Tensor], Slice]] = {}
        for is_forward, number in order:
            if is_forward:
                piece, arrived = kind(number), []
                if not self.is_first:
                    like = [_on_the_wire(meta) for meta in piece.stage.inputs]
                    arrived = self._receive(like, self._before, self._forward)
                    for value, meta in zip(arrived, like, strict=True):
                        value.requires_grad_(meta.requires_grad and torch.is_grad_enabled())
                results = forward(number, piece, tuple(map(_off_the_wire, arrived, piece.stage.inputs)))
                if not self.is_last:
                    results = tuple(map(_on_the_wire, results))
                    self._send([result.detach() for result in results], self._behind, self._forward)
                elif loss is not None:
                    results = (loss(number, piece, results),)
                under_way[number] = arrived, results, piece
                del arrived, results
            else:
                arrived, results, piece = under_way.pop(number)
                with around_backward():
                    self._run_backward(results, piece)
                if not self.is_first:
                    leaves = [value for value in arrived if value.requires_grad]
                    back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
                    self._send(back, self._before, self._back)
        for works in (*self._sent.values(), self._told):
            _wait(works)

    def _run_backward(self, results: Sequence[torch.Tensor], piece: Slice) -> None:
        """The backward pass of a micro-batch: from the loss, or from the gradients that arrive."""
        if self.is_last:
            results[0].backward()
            return
        sought = [_on_the_wire(meta) for meta in piece.stage.outputs if meta.requires_grad]
        gradients = self._receive(sought, self._behind, self._back)
        made = [result for result, meta in zip(results, piece.stage.outputs, strict=True) if meta.requires_grad]
        pairs = [(result, gradient) for result, gradient in zip(made, gradients, strict=True) if result.requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))

    def _receive(self, like: Sequence[torch.Tensor], peer: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        values = [torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in like]
        for work in [dist.irecv(value, peer, group, self._tag + _DATA) for value in values]:
            work.wait()
        return values

    def _send(self, values: Sequence[torch.Tensor], peer: int, group: dist.ProcessGroup) -> None:
        sent = self._sent[peer == self._behind]
        _wait(sent)
        values = [value.contiguous() for value in values]
        sent += [(dist.isend(value, peer, group, self._tag + _DATA), value) for value in values]

    def tell(self, kinds: Kinds, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Slice:
        """In the first process: find a micro-batch's kind and send it to the others."""
        number, call = kinds.find(args, kwargs), b""
        if number is None:
            call = kinds.described(args, kwargs)
        told = [(_KIND, torch.tensor([-len(call) if call else number]))]
        if call:
            told.append((_CALL, torch.frombuffer(bytearray(call), dtype=torch.uint8)))
        for other in self._others:
            self._told += [(dist.isend(word, other, self._control, self._tag + tag), word) for tag, word in told]
        return kinds.add(call) if call else kinds[number]

    def listen(self) -> None:
        """In another process: begin to receive the next micro-batch's kind."""
        word = torch.empty(1, dtype=torch.int64)
        self._next = dist.irecv(word, self._first, self._control, self._tag + _KIND), word

    def hear(self, kinds: Kinds) -> Slice:
        """In another process, after `listen`: the next micro-batch's kind."""
        work, word = self._next
        work.wait()
        if (number := int(word)) >= 0:
            return kinds[number]
        call = torch.empty(-number, dtype=torch.uint8)
        dist.recv(call, self._first, self._control, self._tag + _CALL)
        return kinds.add(call.numpy().tobytes())


def _wait(works: list[tuple[Any, torch.Tensor]]) -> None:
    for work, _ in works:
        work.wait()
    works.clear()


def _dimensions(tensor: torch.Tensor) -> list[int]:
    """Dimensions of a dense tensor from the slowest to the fastest, as they lie in memory."""
    return sorted(range(tensor.dim()), key=lambda dimension: (-tensor.stride(dimension), dimension))


def _on_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous view of a dense tensor, in which it is sent: channels_last images with their channels last."""
    return tensor.permute(_dimensions(tensor))


def _off_the_wire(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A received tensor, with its dimensions in their original order."""
    dimensions = _dimensions(like)
    return tensor.permute([dimensions.index(place) for place in range(tensor.dim())])
