"""Cut a network into stages before the submodules that are named to begin one.

The trace of a forward is split before each named submodule. Every value that is still needed later crosses the cut, so that skip connections may
span whole stages and a cut may fall inside a residual block. A stage calls the network's own submodules, with their names, state and hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_ipu.cutting.splits import check_names
from lightning_ipu.cutting.tensors import buffer_places, flatten, unflatten
from lightning_ipu.cutting.trace import MakeContext, Trace
from lightning_ipu.cutting.trial import Uses
from lightning_ipu.plan import PlanError


class Stage(nn.Module):
    """A slice of a network: a flat tuple of tensors in, a flat tuple of tensors out.

    Its parameters and buffers are the network's own, under their names there. Call it in the mode (training or not) that it was cut for.
    What it hands on has exactly the shape, dtype and strides of its `outputs`, for which the receiver has allocated memory.

    Args:
        inputs, outputs: what comes in and goes out, as meta tensors that require gradients where the values do.
    """

    def __init__(self, trace: Trace, begin: int, end: int, *, inputs: list[fx.Node], outputs: list[fx.Node], is_last: bool) -> None:
        super().__init__()
        self.inputs = tuple(trace.spec(node).empty() for node in inputs)
        self.outputs = tuple(trace.spec(node).empty() for node in outputs)
        body = [node for node in trace.order[begin:end] if node not in trace.constants]
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
        run = fx.GraphModule(trace.module, graph, class_name="Stage")
        self._modules = run._modules
        self._owners = [(trace.module.get_submodule(path), name) for path, _, name in (target.rpartition(".") for target in held)]
        self._network = {"module": trace.module, "run": run}  # in a dict, so that torch registers neither
        for target in held:
            self._register(trace.module, target)

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

    def __init__(self, trace: Trace, splits: list[str], starts: list[int]) -> None:
        self.splits, self.opened = splits, trace.opened - {""}
        self._trace, self._starts = trace, [0, *starts, len(trace.order)]
        self._crossings = [trace.inputs, *map(trace.crossing, starts), trace.outputs]
        self.boundaries = [tuple(trace.spec(node).empty() for node in nodes) for nodes in self._crossings]
        self.left = trace.left.keys()
        self.parameters, self.buffers = self._ownership()
        self.unused = {name for name in set().union(*self.parameters, *self.buffers) if name not in self._used}
        self.unused_buffers = self.unused & set().union(*self.buffers)
        self._trained = [(name, parameter, parameter.requires_grad) for name, parameter in trace.module.named_parameters()]

    def __len__(self) -> int:
        return len(self.splits) + 1

    def stage(self, first: int, last: int | None = None) -> Stage:
        """One stage, or the stages from `first` to `last` as one."""
        end = (first if last is None else last) + 1
        return Stage(
            self._trace,
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
        expected_leaves, expected_tree = self._trace.input_structure
        if tree != expected_tree or any(a is not b and a != b for a, b in zip(leaves, expected_leaves, strict=True)):
            raise PlanError(
                f"self(...) was called with {unflatten(map(_Shown, tensors), (leaves, tree))}, but the network was cut for"
                f" {unflatten(map(_Shown, self.boundaries[0]), self._trace.input_structure)}; all calls in a pipeline must be alike"
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
        return unflatten(self.boundaries[0], self._trace.input_structure)

    def restore(self, results: Iterable[Tensor]) -> Any:
        """What the forward returns, out of the last stage's results."""
        return unflatten(results, self._trace.output_structure)

    def check_step(self, before: Uses, whole: Uses, *, last: int) -> None:
        """Check that a training step finds what it uses of the network beside `self(...)`: the first and the last process run it.

        Args:
            before: what was used before the call.
            whole: what was used in the whole step.
            last: the first of the stages in the last process.

        Raises:
            PlanError: it uses what other stages hold.
        """
        name_of = type(self._trace.module).__name__
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
            if self._stage_at(self._trace.left[path, name]) < last:
                raise PlanError(
                    f"the training step of {name_of} reads {f'{path}.{name}' if path else name!r}, which the forward sets in an earlier"
                    " stage; return it from the forward"
                )

    def check_unchanged(self) -> None:
        """Check that the network would still be cut into what it was cut into.

        Raises:
            PlanError: an attribute that the forward read, or which parameters are trained, has changed since.
        """
        changed = self._trace.changed()
        if not changed and any(parameter.requires_grad != before for _, parameter, before in self._trained):
            changed = next(f"{name}.requires_grad" for name, parameter, before in self._trained if parameter.requires_grad != before)
        if changed:
            raise PlanError(
                f"{changed!r} of {type(self._trace.module).__name__} has changed since the network was cut into stages, which hold what"
                " they were made for. Hand it to self(...) as a tensor or read it in a submodule without a split inside; and freeze"
                " parameters before training starts"
            )

    def _ownership(self) -> tuple[list[set[str]], list[set[str]]]:
        trace = self._trace
        owner: dict[str, int] = {}
        for key, places in trace.uses.items():
            first, last = self._stage_at(min(places)), self._stage_at(max(places))
            if first != last and (isinstance(key, str) or key in trace.names):
                raise PlanError(
                    f"{trace.state_names(key)} is used in stages {first} and {last} of the pipeline {self.splits}; choose pipeline_splits"
                    " that leave all its uses in one stage, or give each stage one of its own"
                )
            owner.update(dict.fromkeys(trace.names.get(key, ()), first))
        self._used = set(owner)
        shares: list[list[set[str]]] = []
        parameters = [name for name, _ in trace.module.named_parameters(remove_duplicate=False)]
        for names in (parameters, [name for name, *_ in buffer_places(trace.module)]):
            shares.append([set() for _ in range(len(self))])
            for name in names:
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
    check_names(module, splits)
    trace = Trace(
        module,
        args,
        kwargs or {},
        lambda name, _: any(split.startswith(name + ".") for split in splits),
        training=training,
        context=context,
    )
    first_calls = dict(reversed(trace.entries))
    for split in splits:
        if trace.called[split] != 1:
            times = "not called" if not trace.called[split] else f"called {trace.called[split]} times"
            raise PlanError(
                f"pipeline_splits={split!r} is {times} by the forward of {type(module).__name__} in"
                f" {'training' if training else 'evaluation'}; name a submodule that is called exactly once"
            )
    starts = [first_calls[split] for split in splits]
    for before, split in zip(splits, splits[1:], strict=False):
        if first_calls[split] < first_calls[before]:
            order = sorted(splits, key=lambda name: first_calls[name])
            raise PlanError(f"pipeline_splits has {split!r} after {before!r}, but the forward calls it before; the order is {order}")
    for place, (begin, end) in enumerate(zip([0, *starts], [*starts, len(trace.order)], strict=True)):
        if splits and not any(node.op == "call_module" for node in trace.order[begin:end]):
            where = f"before {splits[place]!r}" if place < len(splits) else f"from {splits[-1]!r} on"
            raise PlanError(f"pipeline_splits={splits} leaves stage {place} ({where}) empty: it would call no submodule")
    for split, start in zip(splits, starts, strict=True):
        if trace.aliased(start):
            raise PlanError(
                f"pipeline_splits={split!r}: two tensors that are made before {split!r} share memory, and one is changed in place later;"
                " change a copy of it, or cut elsewhere"
            )
    return Partition(trace, splits, starts)
