"""Messages between the processes that hold the stages of a replica, each of which talks to its neighbours.

The first process sees a micro-batch before the others. The number of its kind goes from process to process, so that each knows what will
arrive: in one message with the data where these are small and of the same kind as the micro-batch before, else ahead of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_ipu.engine.kinds import Kinds, Slice, Wire
from lightning_ipu.engine.processes import Processes

_DATA, _KIND, _CALL, _TAGS = range(4)  # tags of what travels in one pipeline, and how many each has
_pipelines = itertools.count()  # numbers the pipelines, alike in all processes


class Links:
    """What this process receives from and sends to its neighbours in one pipeline; all processes must make theirs.

    Sending does not block; the next tensor in the same direction waits until the previous one has been received. What a pipeline that has failed
    left on its way reaches no other, which has other tags (gloo).

    Args:
        processes: who holds which stages.
    """

    def __init__(self, processes: Processes) -> None:
        part, parts = processes.part, processes.parts
        self._is_last, self._device, self._tag = processes.is_last, processes.device, next(_pipelines) * _TAGS
        self._before, self._behind = processes.peer(max(part - 1, 0)), processes.peer(min(part + 1, parts - 1))
        self._forward, self._back, self._control = processes.pipeline_groups()
        self._sent_forward: list[tuple[Any, torch.Tensor]] = []
        self._sent_back: list[tuple[Any, torch.Tensor]] = []
        self._announced: list[tuple[Any, torch.Tensor]] = []

    # ---- Forward, with the kind of the micro-batch -------------------------------------------------------------------------------

    def announce(self, before: Slice, kind: int | bytes) -> None:
        """Send a micro-batch's kind ahead of its data, unless both go in one message.

        Args:
            before: of the micro-batch before.
            kind: of this one, as from `Kinds.find`.
        """
        if self._is_last or kind == before.number and before.leaving.size:
            return
        word = -len(kind) if isinstance(kind, bytes) else kind
        if before.leaving.size:  # which the neighbour waits for
            self._send([before.leaving.pack_alone(word)], self._behind, self._forward, self._sent_forward)
        else:
            self._announce(torch.tensor([word]), _KIND)
        if isinstance(kind, bytes):
            self._announce(torch.frombuffer(bytearray(kind), dtype=torch.uint8), _CALL)

    def send(self, before: Slice, piece: Slice, values: Sequence[torch.Tensor]) -> None:
        """Send the data of a micro-batch that has been announced."""
        if piece is before and piece.leaving.size:
            values = [piece.leaving.pack(piece.number, values)]
        self._send(values, self._behind, self._forward, self._sent_forward)

    def receive(self, kinds: Kinds) -> tuple[Slice, Slice, list[torch.Tensor]]:
        """Receive the next micro-batch, and announce it to the process behind.

        Returns:
            the network cut for the micro-batch before it, the network cut for it, and its data.
        """
        before, message = kinds.latest, None
        if before.arriving.size:
            message = torch.empty(before.arriving.size, dtype=torch.uint8)
            dist.irecv(message, self._before, self._forward, self._tag + _DATA).wait()
            word = int(message[:8].view(torch.int64))
        else:
            word = int(self._heard(torch.empty(1, dtype=torch.int64), _KIND))
        kind = word if word >= 0 else self._heard(torch.empty(-word, dtype=torch.uint8), _CALL).numpy().tobytes()
        self.announce(before, kind)  # first, so that all cut the network at the same time, or refuse to
        piece = kinds.cut(kind)
        if message is not None and piece is before:
            return before, piece, piece.arriving.unpack(message)
        return before, piece, self.receive_forward(piece.arriving)

    # ---- Tensors whose shapes both sides know -----------------------------------------------------------------------------------

    def send_forward(self, values: Sequence[torch.Tensor]) -> None:
        """Send tensors to the process behind, one by one."""
        self._send(values, self._behind, self._forward, self._sent_forward)

    def receive_forward(self, wire: Wire) -> list[torch.Tensor]:
        """Receive tensors from the process before."""
        return self._receive(zip(wire.shapes, wire.dtypes, strict=True), self._before, self._forward)

    def send_back(self, gradients: Sequence[torch.Tensor]) -> None:
        """Send gradients to the process before."""
        self._send(gradients, self._before, self._back, self._sent_back)

    def receive_back(self, wire: Wire) -> list[torch.Tensor]:
        """Receive the gradients of the tensors that need one."""
        layout = zip(wire.shapes, wire.dtypes, wire.trained, strict=True)
        return self._receive(((shape, dtype) for shape, dtype, trained in layout if trained), self._behind, self._back)

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        for works in (self._sent_forward, self._sent_back, self._announced):
            _wait(works)

    def _send(self, values: Sequence[torch.Tensor], peer: int, group: dist.ProcessGroup, sent: list[tuple[Any, torch.Tensor]]) -> None:
        _wait(sent)
        for value in values:
            value = value.contiguous()
            sent.append((dist.isend(value, peer, group, self._tag + _DATA), value))

    def _receive(self, layout: Any, peer: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        values = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in layout]
        for work in [dist.irecv(value, peer, group, self._tag + _DATA) for value in values]:
            work.wait()
        return values

    def _announce(self, word: torch.Tensor, tag: int) -> None:
        self._announced.append((dist.isend(word, self._behind, self._control, self._tag + tag), word))

    def _heard(self, word: torch.Tensor, tag: int) -> torch.Tensor:
        dist.irecv(word, self._before, self._control, self._tag + tag).wait()
        return word


def _wait(works: list[tuple[Any, torch.Tensor]]) -> None:
    for work, _ in works:
        work.wait()
    works.clear()
