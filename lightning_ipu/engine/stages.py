"""Parameters and buffers of the stages that other processes hold, and the network cut into the stages held here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_ipu.cutting.partition import Partition, cut
from lightning_ipu.cutting.tensors import buffer_places, tensor_places
from lightning_ipu.engine.processes import Processes, map_tensors
from lightning_ipu.plan import PlanError

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class StageState:
    """Parameters and buffers of the stages that live elsewhere: given up while training, fetched when the whole network is needed.

    Buffers that the forward does not use (what a step normalises its input by) stay everywhere.

    Args:
        module: the whole network.
        partition: the network cut into stages.
        processes: who holds which stages.

    `own_parameters` and `own_buffers` are the names of what this process holds.
    """

    def __init__(self, module: nn.Module, partition: Partition, processes: Processes) -> None:
        self._module, self.partition, self._processes = module, partition, processes
        self.owners: dict[str, int] = {}  # parameters and buffers by name to the part that holds them
        held = len(partition) // processes.parts
        for names in (partition.parameters, partition.buffers):
            for stage, of_stage in enumerate(names):
                self.owners |= dict.fromkeys(of_stage, stage // held)
        # By place, not by tensor: a step or a forward may put a new tensor in a buffer's place.
        self._places = {name: (tensors, key) for name, _, tensors, key in tensor_places(module)}
        own = slice(processes.stages.start, processes.stages.stop)
        self.own_parameters, self.own_buffers = set().union(*partition.parameters[own]), set().union(*partition.buffers[own])
        self._layouts = {name: self._layout(name) for name in sorted(self.owners)}
        self._elsewhere = [name for name in self._layouts if not self.here(name) and name not in partition.unused_buffers]
        self.is_whole = True

    def _tensor(self, name: str) -> torch.Tensor | None:
        place, key = self._places[name]
        return place.get(key)

    def _layout(self, name: str) -> Layout | None:
        """Shape, strides and type of a tensor, None for a buffer that is None."""
        tensor = self._tensor(name)
        return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)

    def here(self, name: str) -> bool:
        """Whether this process holds a parameter or buffer."""
        return self.owners[name] == self._processes.part

    @torch.no_grad()
    def give_up(self) -> None:
        """Free what other processes hold; a single number stands for each tensor, NaN, so that whoever reads it by mistake sees it."""
        for name in self._elsewhere:
            if (tensor := self._tensor(name)) is None:
                continue
            real = tensor.is_floating_point() or tensor.is_complex()
            nothing = float("nan") if real else False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
            tensor.data = torch.full((), nothing, dtype=tensor.dtype, device=tensor.device).expand(self._layouts[name][0])
            tensor.grad = None
        self.is_whole = False

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool, context: Callable[[], Any]) -> Partition:
        """Cut the network at the same places for another call of `self(...)`, or for evaluation.

        Raises:
            PlanError: a stage would use a parameter or buffer that another process holds.
        """
        gave_up = not self.is_whole
        if gave_up:
            self._lay_out()  # allocated, without values: memory layouts of results follow from it
        try:
            partition = cut(self._module, args, kwargs, splits=self.partition.splits, training=training, context=context)
        finally:
            if gave_up:
                self.give_up()
        held = len(partition) // self._processes.parts
        for stage, names in enumerate(map(set.union, partition.parameters, partition.buffers)):
            for name in sorted(names - partition.unused):
                if self.owners.get(name, stage // held) != stage // held:  # none yet where a forward has registered it
                    raise PlanError(
                        f"the network uses {name!r} in stage {stage} {'for some shapes' if training else 'in evaluation'}, but another process holds"
                        " it, as decided by the first training micro-batch; choose pipeline_splits that keep all its uses in one stage"
                    )
        return partition

    @torch.no_grad()
    def _lay_out(self) -> None:
        for name in self._elsewhere:
            self._make_room(name)

    def _make_room(self, name: str) -> None:
        """Give a tensor memory, without values."""
        tensor, layout = self._tensor(name), self._layouts[name]
        made = None if layout is None else torch.empty_strided(*layout[:2], dtype=layout[2], device=self._processes.device)
        if tensor is None or made is None or tensor.dtype != made.dtype:
            place, key = self._places[name]
            place[key] = made
        else:
            tensor.data = made

    @torch.no_grad()
    def fetch(self) -> None:
        """Have the whole network in every process, each stage from the process that trains it."""
        # A forward may have filled or emptied a buffer, or given it another shape.
        renewed = {name: layout for name in self._layouts if self.here(name) and (layout := self._layout(name)) != self._layouts[name]}
        late = {name: (owner._buffers, key) for name, owner, key in buffer_places(self._module) if name not in self.owners}
        self._places |= late
        renewed |= {name: self._layout(name) for name in late}
        for part, theirs in enumerate(self._processes.gathered(renewed, self._processes.same_replica)):
            self._layouts |= theirs
            for name in theirs:
                if name not in self.owners or name in late:  # a forward has registered it: it stays everywhere from now on
                    path, _, key = name.rpartition(".")
                    self.owners[name], self._places[name] = part, (self._module.get_submodule(path)._buffers, key)
                if not self.here(name):
                    self._make_room(name)
        self._lay_out()
        for name, layout in self._layouts.items():
            if layout is not None:
                dist.broadcast(self._tensor(name).data, self._processes.peer(self.owners[name]), group=self._processes.same_replica)
        self.is_whole = True

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the whole network, on the host; for what is no parameter or buffer, the process with the module's stage answers."""
        if self.is_whole:
            return state
        merged = self.merged({name: value for name, value in state.items() if self._answers_for(name)})
        return {name: merged[name] for name in state if name in merged} | merged  # a stage may have filled or emptied a buffer

    def _answers_for(self, name: str) -> bool:
        if name in self.owners:
            return self.here(name)
        module = name.rpartition(".")[0]
        owners = {owner for tensor, owner in self.owners.items() if module and tensor.startswith(module + ".")}
        return self._processes.is_last if not owners else self._processes.part == max(owners)

    def merged(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """The parts that the processes of a replica hold of a dictionary of tensors, as one dictionary in each, on the host."""
        everyone = self._processes.gathered(map_tensors(torch.Tensor.cpu, own), self._processes.same_replica)
        return {key: value for part in everyone for key, value in part.items()}

    def forget_elsewhere(self, states: dict[nn.Parameter, Any]) -> None:
        """Drop an optimizer's states of parameters that other processes hold."""
        for name, parameter in self._module.named_parameters():
            if not self.here(name):
                states.pop(parameter, None)
