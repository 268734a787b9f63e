"""Evaluate a network over its stages: forward only, one batch after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_ipu.cutting.call import arguments_of_call, step_around
from lightning_ipu.cutting.partition import Partition
from lightning_ipu.engine.kinds import Kinds
from lightning_ipu.engine.links import Links
from lightning_ipu.engine.processes import Processes
from lightning_ipu.engine.stages import StageState

_WHAT = "a step of pipeline_validation"


class EvaluationPipeline:
    """Forward only, one batch at a time: the stages work on successive batches, since none waits for those behind it.

    Args:
        module: the network.
        processes: who holds which stages.
        state: what of the network is here.
        context: makes the context of a step (autocast).
        remark: called with what the user should know.
    """

    def __init__(
        self, module: nn.Module, processes: Processes, *, state: StageState, context: Callable[[], Any], remark: Callable[[str], None]
    ) -> None:
        self._module, self._processes, self._context = module, processes, context

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partition:
            return state.cut(args, kwargs, training=False, context=context)

        self._links = Links(processes)
        self._kinds = Kinds(make, processes.stages, first=None, device=processes.device, remark=remark)

    def step(self, step: Callable[[], Any]) -> Any:
        """Run the user's step on a batch; returns its result on the last stage, None elsewhere."""
        with self._context():
            args, kwargs = arguments_of_call(self._module, step, _WHAT)
        kind, values = self._kinds.find(args, kwargs)
        piece = self._kinds.cut(kind)  # as every process does by itself
        piece.partition.check_unchanged()
        if not self._processes.is_first:
            values = piece.arriving.restored(self._links.receive_forward(piece.arriving))
        with self._context():
            results = piece.stage(*values)
        if self._processes.is_last:
            return step_around(self._module, piece.partition.restore(results), step, _WHAT)
        self._links.send_forward([result.detach() for result in piece.leaving.laid_out(results)])
        self._links.finish()
        return None
