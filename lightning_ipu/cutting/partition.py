"""Cut a network into stages: before the submodules that are named to begin one, or where measured cost balances them.

The record of a forward is split before each named submodule. Every value that is still needed later crosses the cut, so that skip connections may
span whole stages and a cut may fall inside a residual block. A stage calls the network's own submodules, with their names, state and hooks.
"""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_ipu.cutting.record import MakeContext, Record, Untraceable, Uses, borrowed, called_as_a_whole, example, flatten, unflatten
from lightning_ipu.plan import PlanError

# ---- Names -------------------------------------------------------------------------------------------------------------------


def check_splits(module: nn.Module, splits: list[str]) -> None:
    """Check the names of the submodules that each begin a new stage, in the order in which the network holds them.

    Raises:
        PlanError: a name that is unknown, given twice, out of order, or that leaves a stage without any parameters or submodules.
    """
    _check_names(module, splits)
    names = [name for name, _ in module.named_modules() if name]
    for before, split in zip(splits, splits[1:], strict=False):
        if names.index(split) < names.index(before):
            raise PlanError(
                f"pipeline_splits has {split!r} after {before!r}, but the network runs it before; name them in the network's order"
            )
        if names.index(split) == names.index(before) + 1 and split.startswith(before + "."):
            raise PlanError(f"pipeline_splits {before!r} and {split!r} begin at the same place: the stage between them would be empty")
    if splits and not any(True for _ in _leaves_before(module, splits[0])):
        raise PlanError(
            f"pipeline_splits={splits[0]!r} is where the network begins: the first stage would be empty; name a later submodule"
        )


def _check_names(module: nn.Module, splits: list[str]) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for place, split in enumerate(splits):
        if split not in names:
            close = difflib.get_close_matches(split, names, n=3, cutoff=0.4) or names[:6]
            raise PlanError(f"pipeline_splits={split!r} is no submodule of {type(module).__name__}; near names are {', '.join(close)}")
        if split in splits[:place]:
            raise PlanError(f"pipeline_splits names {split!r} twice; each submodule can begin one stage")


def check_num_stages(module: nn.Module, num_stages: int) -> None:
    """Check that a network has enough submodules for so many stages.

    Raises:
        PlanError: more stages than leaf submodules with parameters.
    """
    # A parametrized layer (torch.nn.utils.parametrizations) holds modules that make its weights.
    blocks = sum(
        1
        for child in module.modules()
        if all(name == "parametrizations" for name, _ in child.named_children())
        and not isinstance(child, ParametrizationList)
        and next(child.parameters(), None) is not None
    )
    if num_stages > max(blocks, 1):
        raise PlanError(f"num_stages={num_stages} is more than the {blocks} layers with parameters that {type(module).__name__} has")


def _leaves_before(module: nn.Module, split: str) -> Iterator[str]:
    """Names of the leaf submodules that the network holds before one of its submodules."""
    for name, child in module.named_modules():
        if name == split:
            return
        if name and next(child.children(), None) is None:
            yield name


# ---- Stages ------------------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A slice of a network: a flat tuple of tensors in, a flat tuple of tensors out.

    Its parameters and buffers are the network's own, under their names there. Call it in the mode (training or not) that it was cut for.
    What it hands on has exactly the shape, dtype and strides of its `outputs`, which is what a receiver has set memory aside for.

    Args:
        inputs, outputs: what comes in and goes out, as meta tensors that require gradients where the values do.
    """

    def __init__(self, record: Record, begin: int, end: int, *, inputs: list[fx.Node], outputs: list[fx.Node], is_last: bool) -> None:
        super().__init__()
        self.inputs = tuple(record.spec(node).empty() for node in inputs)
        self.outputs = tuple(record.spec(node).empty() for node in outputs)
        body = [node for node in record.order[begin:end] if node not in record.constants]
        held = dict.fromkeys(source.target for node in body for source in node.all_input_nodes if source.op == "get_attr") | dict.fromkeys(
            node.target for node in outputs if node.op == "get_attr"
        )

        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in inputs}
        reads = {target: graph.placeholder(f"held_{place}") for place, target in enumerate(held)}
        arrived = dict(copies)

        def copy(node: fx.Node) -> fx.Node:
            if node.op == "get_attr":
                return reads[node.target]
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        changed = set().union(*(node.meta["changes"] for node in body))
        if begin > 0:  # what arrives is a leaf of this stage's autograd graph, which must not be changed in place
            copies |= {node: graph.call_method("clone", (copies[node],)) for node in inputs if node.meta["storage"] in changed}
        for node in body:
            copy(node)
        results = [copy(node) for node in outputs]
        if is_last:  # the user's step may change a result in place, which autograd forbids for leaves
            results = [graph.call_method("clone", (result,)) if result in arrived.values() else result for result in results]
        graph.output(tuple(results))
        run = fx.GraphModule(record.module, graph, class_name="Stage")
        self._modules = run._modules
        self._owners = [(record.module.get_submodule(path), name) for path, _, name in (target.rpartition(".") for target in held)]
        self._network = {"module": record.module, "run": run}  # in a dict, so that torch registers neither
        for target in held:
            self._register(record.module, target)

    def _register(self, network: nn.Module, target: str) -> None:
        """Show what is held by a module that has a cut inside, and so is no module of this stage, under its name."""
        *path, name = target.split(".")
        shell, owner = self, network
        for part in path:
            owner = owner._modules[part]
            shell = shell._modules.setdefault(part, nn.Module())
            if shell is owner:
                return
        for ours, theirs in ((shell._parameters, owner._parameters), (shell._buffers, owner._buffers)):
            if name in theirs:
                ours[name] = theirs[name]

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Run the slice.

        Raises:
            PlanError: a result of another shape or dtype than the one that the network was cut for.
        """
        results = self._network["run"](*values, *(getattr(owner, name) for owner, name in self._owners))
        return tuple(map(_fit, results, self.outputs))


def _fit(value: Tensor, expected: Tensor) -> Tensor:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise PlanError(
            f"a stage made {value.dtype} {list(value.shape)} where the network was cut for {expected.dtype} {list(expected.shape)};"
            " in a pipeline, shapes and precision inside the network may depend on the shapes of the inputs, not on their values"
        )
    if value.stride() == expected.stride():
        return value
    return torch.empty_strided(expected.shape, expected.stride(), dtype=value.dtype, device=value.device).copy_(value)


class Partition:
    """A network cut into stages; `cut` makes it.

    Args:
        splits: the submodules that begin the second and later stages.
        parameters, buffers: their names by stage; what the forward never uses belongs to the last stage, where the user's step runs.
        unused, unused_buffers: the names of what the forward never uses, and of the buffers among them.
        left: the (module, name) of attributes that submodules set in the forward.
        boundaries: the tensors before the first stage, between stages and behind the last, as meta tensors; one tuple more than stages.
        opened: the submodules with a cut inside. They are not called as a whole: a hook or a wrapper on them would not run.
    """

    def __init__(self, record: Record, splits: list[str], starts: list[int]) -> None:
        self.splits, self.opened = splits, record.opened - {""}
        self._record, self._starts = record, [0, *starts, len(record.order)]
        self._crossings = [record.inputs, *map(record.crossing, starts), record.outputs]
        self.boundaries = [tuple(record.spec(node).empty() for node in nodes) for nodes in self._crossings]
        self.left = record.left.keys()
        self.parameters, self.buffers = self._ownership()
        self.unused = {name for name in set().union(*self.parameters, *self.buffers) if name not in self._used}
        self.unused_buffers = self.unused & set().union(*self.buffers)
        self._trained = [(name, parameter, parameter.requires_grad) for name, parameter in record.module.named_parameters()]

    def __len__(self) -> int:
        return len(self.splits) + 1

    def stage(self, first: int, last: int | None = None) -> Stage:
        """One stage, or the stages from `first` to `last` as one."""
        end = (first if last is None else last) + 1
        return Stage(
            self._record,
            self._starts[first],
            self._starts[end],
            inputs=self._crossings[first],
            outputs=self._crossings[end],
            is_last=end == len(self),
        )

    @property
    def stages(self) -> list[Stage]:
        """All stages."""
        return [self.stage(place) for place in range(len(self))]

    def flatten(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """What the first stage takes, out of what `self(...)` was called with: its tensors in order, also from tuples, lists and dicts.

        Raises:
            PlanError: the call differs from the one that the network was cut for in more than the tensors' values.
        """
        tensors, (leaves, tree) = flatten((args, kwargs))
        expected_leaves, expected_tree = self._record.input_structure
        if tree != expected_tree or any(a is not b and a != b for a, b in zip(leaves, expected_leaves, strict=True)):
            raise PlanError(
                f"self(...) was called with {unflatten(map(_Shown, tensors), (leaves, tree))}, but the network was cut for"
                f" {unflatten(map(_Shown, self.boundaries[0]), self._record.input_structure)}; all calls in a pipeline must be alike"
            )
        for tensor, expected in zip(tensors, self.boundaries[0], strict=True):
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise PlanError(
                    f"self(...) was given {_Shown(tensor)} where the network was cut for {_Shown(expected)};"
                    " all micro-batches of a pipeline must have one shape"
                )
        return tuple(tensors)

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `self(...)` was called with when the network was cut, its tensors on the meta device."""
        return unflatten(self.boundaries[0], self._record.input_structure)

    def restore(self, results: Iterable[Tensor]) -> Any:
        """What the forward returns, out of the last stage's results."""
        return unflatten(results, self._record.output_structure)

    def check_step(self, before: Uses, whole: Uses, *, last: int) -> None:
        """Check that a training step finds what it uses of the network beside `self(...)`: the first and the last process run it.

        Args:
            before: what was used before the call.
            whole: what was used in the whole step.
            last: the first of the stages in the last process.

        Raises:
            PlanError: it uses what other stages hold.
        """
        name_of = type(self._record.module).__name__
        held = self.unused_buffers.union(*self.parameters[last:], *self.buffers[last:])
        if away := sorted(before.tensors - self.unused_buffers):
            raise PlanError(
                f"the training step of {name_of}, or a transfer hook, uses {away[0]!r} before it calls self(...), where no stage of a"
                " pipeline holds it; use it in the forward"
            )
        if away := sorted(whole.tensors - held):
            raise PlanError(
                f"the training step of {name_of} uses {away[0]!r} of an earlier stage, which in a pipeline is not where the step runs;"
                " return it, or what is made of it, from the forward"
            )
        for path, name in sorted(whole.attributes & self.left):
            if self._stage_at(self._record.left[path, name]) < last:
                raise PlanError(
                    f"the training step of {name_of} reads {f'{path}.{name}' if path else name!r}, which the forward sets in an earlier"
                    " stage; return it from the forward"
                )

    def check_unchanged(self) -> None:
        """Check that the network would still be cut into what it was cut into.

        Raises:
            PlanError: an attribute that the forward read, or which parameters are trained, has changed since.
        """
        changed = self._record.changed()
        if not changed and any(parameter.requires_grad != before for _, parameter, before in self._trained):
            changed = next(f"{name}.requires_grad" for name, parameter, before in self._trained if parameter.requires_grad != before)
        if changed:
            raise PlanError(
                f"{changed!r} of {type(self._record.module).__name__} has changed since the network was cut into stages, which hold what"
                " they were made for. Hand it to self(...) as a tensor or read it in a submodule without a split inside; and freeze"
                " parameters before training starts"
            )

    def _ownership(self) -> tuple[list[set[str]], list[set[str]]]:
        record = self._record
        owner: dict[str, int] = {}
        for key, places in record.uses.items():
            first, last = self._stage_at(min(places)), self._stage_at(max(places))
            if first != last and (isinstance(key, str) or key in record.names):
                raise PlanError(
                    f"{record.state_names(key)} is used in stages {first} and {last} of the pipeline {self.splits}; choose pipeline_splits"
                    " that leave all its uses in one stage, or give each stage one of its own"
                )
            owner.update(dict.fromkeys(record.names.get(key, ()), first))
        self._used = set(owner)
        shares: list[list[set[str]]] = []
        for found in (record.module.named_parameters, record.module.named_buffers):
            shares.append([set() for _ in range(len(self))])
            for name, _ in found(remove_duplicate=False):
                shares[-1][owner.get(name, len(self) - 1)].add(name)
        return shares[0], shares[1]

    def _stage_at(self, place: int) -> int:
        return sum(start <= place for start in self._starts[1:-1])


class _Shown:
    """A tensor as messages show it."""

    def __init__(self, tensor: Tensor) -> None:
        self._text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def __repr__(self) -> str:
        return self._text


def cut(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    splits: list[str],
    training: bool = True,
    context: MakeContext = nullcontext,
) -> Partition:
    """Cut a network into stages before the named submodules.

    The network is left as it is: the stages call its submodules, with their hooks. It is run once without data (with the example's, or zeros, if
    a submodule branches on data), under its own random streams, and neither its buffers nor its mode change.

    Args:
        module: the network; its `forward` is cut.
        args, kwargs: what `self(...)` is called with; of tensors only shape, strides, dtype and device matter, they may be on the meta device.
        splits: names of the submodules that begin the second and later stages, in the order in which the forward calls them.
        training: cut the forward of training, or the one of evaluation; a forward may differ in the two.
        context: makes what the forward runs in (autocast), so that boundaries have the precision that really arrives.

    Raises:
        PlanError: the forward cannot be cut there; the message names the module and what to do.
    """
    _check_names(module, splits)
    record = Record(
        module,
        args,
        kwargs or {},
        lambda name, _: any(split.startswith(name + ".") for split in splits),
        training=training,
        context=context,
    )
    first_calls = dict(reversed(record.entries))
    for split in splits:
        if record.called[split] != 1:
            times = "not called" if not record.called[split] else f"called {record.called[split]} times"
            raise PlanError(
                f"pipeline_splits={split!r} is {times} by the forward of {type(module).__name__} in"
                f" {'training' if training else 'evaluation'}; name a submodule that is called exactly once"
            )
    starts = [first_calls[split] for split in splits]
    for before, split in zip(splits, splits[1:], strict=False):
        if first_calls[split] < first_calls[before]:
            order = sorted(splits, key=lambda name: first_calls[name])
            raise PlanError(f"pipeline_splits has {split!r} after {before!r}, but the forward calls it before; the order is {order}")
    for place, (begin, end) in enumerate(zip([0, *starts], [*starts, len(record.order)], strict=True)):
        if splits and not any(node.op == "call_module" for node in record.order[begin:end]):
            where = f"before {splits[place]!r}" if place < len(splits) else f"from {splits[-1]!r} on"
            raise PlanError(f"pipeline_splits={splits} leaves stage {place} ({where}) empty: it would call no submodule")
    for split, start in zip(splits, starts, strict=True):
        if record.aliased(start):
            raise PlanError(
                f"pipeline_splits={split!r}: two tensors that are made before {split!r} share memory, and one is changed in place later;"
                " change a copy of it, or cut elsewhere"
            )
    return Partition(record, splits, starts)


# ---- Balanced cuts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What one stage of a balanced pipeline holds and costs for one micro-batch.

    Args:
        begins_at: the submodule that it begins with; empty for the first stage.
        blocks: blocks between which it could have been cut further, each measured by itself.
        parameters: elements of its parameters.
        seconds: forward and backward.
        time_share: of all stages' seconds.
        boundary_bytes: what it hands on to the next stage in the forward.
        activation_bytes: what it keeps for the backward.
    """

    begins_at: str
    blocks: int
    parameters: int
    seconds: float
    time_share: float
    boundary_bytes: int
    activation_bytes: int


def balanced_splits(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    num_stages: int,
    context: MakeContext = nullcontext,
    bandwidth: float = 2e9,
) -> tuple[list[str], list[StageCost]]:
    """Measure a network in training block by block and choose the cuts that make its slowest stage fastest.

    A cut is possible before a submodule with parameters (one that evaluation calls too) where no more values cross than at the beginning
    of the block around it: between residual blocks, not inside them. Neither gradients, buffers, mode nor random streams are changed.

    Args:
        module, args, kwargs, context: as in `cut`; the example's data is used, zeros where it is on the meta device.
        num_stages: stages to make.
        bandwidth: bytes per second between stages; a stage's time includes what it receives and sends, there and back.

    Returns:
        The names for `splits`, and a row for each stage.

    Raises:
        PlanError: the network has too few places to cut, or its forward cannot be cut at all.
    """
    record = _deep_record(module, args, kwargs or {}, context, training=True)
    evaluated = _deep_record(module, args, kwargs or {}, context, training=False).called
    candidates = {name: place for name, place in _candidates(record).items() if evaluated[name] == 1}
    if num_stages > len(candidates) + 1:
        places = ", ".join(candidates) or "none"
        raise PlanError(
            f"num_stages={num_stages} needs {num_stages - 1} cuts, but {type(module).__name__} has {len(candidates)} places for one: {places}"
        )
    parts = Partition(record, list(candidates), list(candidates.values()))
    seconds, activations = _measure(parts, args, kwargs or {}, context)
    sent = [sum(record.spec(node).bytes for node in nodes) for nodes in parts._crossings[1:-1]]
    returned = [sum(record.spec(node).bytes for node in nodes if record.spec(node).requires_grad) for nodes in parts._crossings[1:-1]]
    cuts = choose_cuts(seconds, [(there + back) / bandwidth for there, back in zip(sent, returned, strict=True)], num_stages)

    sizes = dict(module.named_parameters(remove_duplicate=False))
    rows = []
    for begin, end in zip([0, *cuts], [*cuts, len(parts)], strict=True):
        names = set().union(*parts.parameters[begin:end])
        rows.append(
            StageCost(
                begins_at=parts.splits[begin - 1] if begin else "",
                blocks=end - begin,
                parameters=sum(tensor.numel() for tensor in {id(sizes[name]): sizes[name] for name in names}.values()),
                seconds=sum(seconds[begin:end]),
                time_share=sum(seconds[begin:end]) / sum(seconds),
                boundary_bytes=sent[end - 1] if end < len(parts) else 0,
                activation_bytes=sum(activations[begin:end]),
            )
        )
    return [parts.splits[place - 1] for place in cuts], rows


def stage_table(costs: list[StageCost]) -> list[str]:
    """Lines that show the stages of a balanced pipeline."""
    rows = [("stage", "begins at", "blocks", "parameters", "time", "hands on", "keeps")]
    for number, cost in enumerate(costs):
        sizes = [f"{bytes_ / 2**20:.2f} MiB" for bytes_ in (cost.boundary_bytes, cost.activation_bytes)]
        rows.append(
            (str(number), cost.begins_at or "the input", str(cost.blocks), f"{cost.parameters:,}", f"{cost.time_share:.1%}", *sizes)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def choose_cuts(seconds: list[float], transfer: list[float], num_stages: int) -> list[int]:
    """Cut a chain of blocks into contiguous stages so that the slowest is as fast as can be, and then so that least is transferred.

    Args:
        seconds: of each block.
        transfer: seconds that a cut costs on both of its sides, one for each place between two blocks.
        num_stages: at most as many as there are blocks.

    Returns:
        The numbers of the blocks that begin the second and later stages.
    """
    count = len(seconds)
    sums = [0.0, *itertools.accumulate(seconds)]
    at = [0.0, *transfer, 0.0]

    def stage(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + at[begin] + at[end]

    # By dynamic programming over (stages so far, blocks so far): first the least possible slowest stage, then the least transfer under it.
    slowest = [0.0] + [float("inf")] * count
    for _ in range(num_stages):
        slowest = [float("inf")] + [min(max(slowest[begin], stage(begin, end)) for begin in range(end)) for end in range(1, count + 1)]
    best: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * count
    for _ in range(num_stages):
        last, best = best, [None] * (count + 1)
        for end in range(1, count + 1):
            fitting = [begin for begin in range(end) if last[begin] is not None and stage(begin, end) <= slowest[count]]
            if fitting:
                begin = min(fitting, key=lambda place: last[place][0] + at[place])
                best[end] = last[begin][0] + at[begin], [*last[begin][1], begin]
    return best[count][1][1:]


def _deep_record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: MakeContext, *, training: bool) -> Record:
    """Write a forward down as deep as it can be: kinds of modules that cannot be gone into are taken whole."""
    whole: set[type] = {nn.MultiheadAttention}

    def goes_into(name: str, child: nn.Module) -> bool:
        return next(child.children(), None) is not None and type(child) not in whole and not called_as_a_whole(child)

    while True:
        try:
            return Record(module, args, kwargs, goes_into, training=training, context=context)
        except Untraceable as refusal:
            if refusal.module is module or type(refusal.module) in whole:
                raise
            whole.add(type(refusal.module))


def _candidates(record: Record) -> dict[str, int]:
    """The submodules before which a network may be cut, and their places in the order of execution."""
    module, begins = record.module, dict(reversed(record.entries))
    tied = [(min(places), max(places)) for key, places in record.uses.items() if isinstance(key, str) or key in record.names]
    state_from = min((places[0] for key, places in record.uses.items() if key in record.names), default=0)
    found: dict[int, str] = {}
    for name, place in record.entries:
        crossing = record.crossing(place)
        around = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
        if (
            place not in found
            and place > state_from
            and record.called[name] == 1
            and next(module.get_submodule(name).parameters(), None) is not None
            and not any(first < place <= last for first, last in tied)
            and not record.aliased(place)
            and all(len(crossing) <= len(record.crossing(begins[outer])) for outer in around if outer in begins)
        ):
            found[place] = name
    return {name: place for place, name in sorted(found.items())}


def _measure(parts: Partition, args: tuple[Any, ...], kwargs: dict[str, Any], context: MakeContext) -> tuple[list[float], list[int]]:
    """Seconds (forward and backward) and bytes kept for the backward of each part of a network, for one micro-batch.

    Once to warm up, then up to three times or for five seconds; the fastest counts.
    """
    module = parts._record.module
    device = next(module.parameters()).device
    stages = parts.stages
    parameters = [[tensor for tensor in stage.parameters() if tensor.requires_grad] for stage in stages]
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    clock = _clock(device)
    seconds, kept = [float("inf")] * len(stages), [0] * len(stages)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(borrowed(module, training=True, fake=None))
        stack.enter_context(torch.enable_grad())
        values = [example(tensor, device, with_data=True) for tensor in parts.flatten(*args, **kwargs)]
        started = time.perf_counter()
        for turn in range(4):
            spent = [0.0] * len(stages)
            runs, arriving = [], values
            for place, stage in enumerate(stages):
                leaves = [value.detach().requires_grad_(spec.requires_grad) for value, spec in zip(arriving, stage.inputs, strict=True)]
                saved: dict[int, int] = {}

                def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
                    storage = tensor.untyped_storage()
                    saved[storage.data_ptr()] = storage.nbytes()
                    return tensor

                count = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor) if turn == 0 else nullcontext()
                begin = clock()
                with context(), count:
                    arriving = stage(*leaves)
                spent[place] += clock() - begin
                runs.append((leaves, arriving))
                if turn == 0:
                    kept[place] = sum(size for pointer, size in saved.items() if pointer not in own)
            gradients = [torch.ones_like(value) if value.requires_grad else None for value in arriving]
            for place in reversed(range(len(stages))):
                leaves, results = runs.pop()
                pairs = [(value, gradient) for value, gradient in zip(results, gradients, strict=True) if value.requires_grad]
                wanted = [leaf for leaf in leaves if leaf.requires_grad] + parameters[place]
                begin = clock()
                made: tuple[Tensor | None, ...] = ()
                if pairs and wanted:  # torch.autograd.grad, because a backward would touch the parameters' gradients
                    made = torch.autograd.grad(
                        [value for value, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True
                    )
                spent[place] += clock() - begin
                flowing = iter(made)
                gradients = [next(flowing, None) if leaf.requires_grad else None for leaf in leaves]
            if turn:
                seconds = list(map(min, seconds, spent))
                if time.perf_counter() - started > 5:
                    break
    return seconds, kept


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once a device has finished what it was given."""
    if device.type != "cuda":
        return time.perf_counter

    def finished() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return finished
