"""Cut a network into stages: before the submodules that are named to begin one, or where measured cost balances them.

The unmodified forward runs once, on tensors without data, and what it calls is written down: submodules without a cut inside whole, whatever
they do, and the tensor operations between them one by one. The record is split before each named submodule, and every value that is still
needed later crosses the cut. Alternatives: torch.export refuses a value that feeds more than one later stage; torch.fx's own tracer
refuses control flow on shapes, and freezes `self.training` and `torch.no_grad` without a word. Shapes are part of the record: a micro-batch
of another shape needs a cut of its own.
"""

from __future__ import annotations

import difflib
import itertools
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import preserved_streams
from lightning_ipu.stage import _may_draw

MakeContext = Callable[[], AbstractContextManager]

# Tensor methods and functions that turn data into Python values, on which a forward may then branch.
_READS_DATA = {
    *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__array__"),
    *("equal", "allclose", "is_nonzero"),
}
_TOUCHES_GRAPH = {"backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__set__"}
_STATIC = (int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)


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
    blocks = sum(1 for child in module.modules() if next(child.children(), None) is None and next(child.parameters(), None) is not None)
    if num_stages > max(blocks, 1):
        raise PlanError(f"num_stages={num_stages} is more than the {blocks} layers with parameters that {type(module).__name__} has")


def _leaves_before(module: nn.Module, split: str) -> Iterator[str]:
    """Names of the leaf submodules that the network holds before one of its submodules."""
    for name, child in module.named_modules():
        if name == split:
            return
        if name and next(child.children(), None) is None:
            yield name


# ---- The record of a forward -------------------------------------------------------------------------------------------------


class _Untraceable(PlanError):
    """Something in the forward of a module that has a cut inside; the same would be fine in a module without."""

    def __init__(self, message: str, module: nn.Module) -> None:
        super().__init__(message)
        self.module = module


class _Spec(NamedTuple):
    """What a receiver must know of a tensor; dense strides, whatever the sender's are."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str = "meta") -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def _spec(tensor: Tensor) -> _Spec:
    with torch._C.DisableTorchFunction():
        shape, stride = tensor.shape, tensor.stride()
        room = 1
        for size, step in sorted((pair for pair in zip(shape, stride, strict=True) if pair[0] != 1), key=lambda pair: pair[1]):
            if step != room:  # gaps or overlaps do not cross a cut: row by row
                stride = tuple(shape[place + 1 :].numel() for place in range(len(shape)))
                break
            room *= size
        return _Spec(shape, stride, tensor.dtype, tensor.requires_grad)


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    with torch._C.DisableTorchFunction():
        return [(tensor, tensor._version) for tensor in _tensors(value)]


def _changed(versions: list[tuple[Tensor, int]]) -> set[int]:
    with torch._C.DisableTorchFunction():
        return {tensor.untyped_storage()._cdata for tensor, version in versions if tensor._version != version}


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_aggregate(value, lambda item: found.append(item) if isinstance(item, Tensor) else None)
    return found


def _gradients_off() -> bool:
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    return before


def _gradients_back(before: bool) -> None:
    torch._C._set_grad_enabled(before)


class _Recorder(TorchFunctionMode):
    """Writes down what a forward calls, in order, as nodes of a torch.fx graph.

    Args:
        module: whose forward it is.
        goes_into: says of a submodule, by name and itself, whether its own calls are written down instead of the call of it.
    """

    def __init__(self, module: nn.Module, goes_into: Callable[[str, nn.Module], bool]) -> None:
        super().__init__()
        self._root, self._goes_into = module, goes_into
        self._names = {id(child): name for name, child in module.named_modules()}
        self.graph, self.order = fx.Graph(), []
        self.entries: list[tuple[str, int]] = []  # submodules as they are called, and how many nodes came before
        self.opened: dict[str, nn.Module] = {"": module}  # the submodules gone into
        self.uses: dict[Any, list[int]] = {}  # state (by id of its tensor, or name of a module that draws) to the nodes that use it
        self.changed: set[int] = set()  # storages that some node changes in place
        self.leaf: str | None = None  # the submodule that runs unrecorded
        self._owners: dict[int, str] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # so that ids stay unique
        self._stack: list[nn.Module] = [module]
        self._function = ""
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Take note of what the modules hold, and of the context."""
        self._autocast = _autocast_state()
        for name, child in self._root.named_modules():
            for key, value in [*child._parameters.items(), *child._buffers.items(), *vars(child).items()]:
                if isinstance(value, Tensor):
                    self._owners.setdefault(id(value), f"{name}.{key}" if name else key)

    def end(self) -> None:
        """Let go of the tensors."""
        self._alive.clear()
        self._nodes.clear()

    # What calls and is called

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Stand in for nn.Module.__call__."""
        if threading.get_ident() != self._thread:
            return original(module, *args, **kwargs)
        name = self._names.get(id(module))
        if self.leaf is not None or name is None:
            return self._enter(original, module, args, kwargs)
        self.entries.append((name, len(self.order)))
        if self._goes_into(name, module):
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or "forward" in vars(module):
                raise _Untraceable(
                    f"{name!r} has hooks, or is recomputed, as a whole, and a stage would begin inside it; cut elsewhere", module
                )
            self.opened[name] = module
            return self._enter(original, module, args, kwargs)
        versions = _versions((args, kwargs))
        self.leaf = name
        output = self._enter(original, module, args, kwargs)  # after an exception `leaf` says where it came from
        self.leaf = None
        for tensor in [*module.parameters(), *module.buffers()]:
            self._use(id(tensor), len(self.order))
        self._write("call_module", name, args, kwargs, output, versions)
        return output

    def _enter(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._stack.append(module)
        output = original(module, *args, **kwargs)
        self._stack.pop()
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.leaf is not None:
            return func(*args, **kwargs)
        name = self._function = getattr(func, "__name__", str(func))
        inputs = _tensors((args, kwargs))
        if name == "__iter__":  # tensors inside an iterator would not be seen
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if inputs and name in _READS_DATA:
            raise self._refusal(f"looks at the values of a tensor ({name}), so that its control flow may depend on data")
        if name in _TOUCHES_GRAPH:
            raise self._refusal(f"calls {name} on a tensor")
        versions = _versions(inputs)
        output = func(*args, **kwargs)
        if _tensors(output) or (output is None and inputs):
            if name == "__get__":
                self._write("call_function", getattr, (args[0], func.__self__.__name__), {}, output, versions)
            elif getattr(torch.Tensor, name, None) == func and isinstance(args[0], Tensor):
                self._write("call_method", name, args, kwargs, output, versions)
            else:
                self._write("call_function", func, args, kwargs, output, versions)
        return output

    def drew(self, operation: Any) -> None:
        """Told of every operation that draws random numbers: only a module that is seeded by its name may."""
        module = self._stack[-1]
        name = self._names.get(id(module), "")
        if self.leaf is not None and name and _may_draw(module) and module.training:
            self._use(name, len(self.order))
            return
        where = f"submodule {name!r} ({type(module).__name__})" if name else type(module).__name__
        drawn = self._function if self.leaf is None and self._function else str(operation)
        raise _Untraceable(
            f"the forward of {where} draws random numbers by {drawn}, which in a pipeline would depend on the stages;"
            " use a module such as nn.Dropout, or draw in a submodule of its own that holds no others, and in training only",
            module,
        )

    # The record

    def placeholder(self, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self._alive)}")
        self._bind(tensor, node)
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node whose value a tensor is; a parameter, buffer or other tensor that a module holds is read where it is used."""
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        if id(tensor) not in self._owners:
            raise self._refusal(
                f"uses a tensor {list(tensor.shape)} that no recorded operation made (a custom autograd.Function, a container that is"
                " neither tuple, list nor dict, or a tensor from outside the network)"
            )
        self._use(id(tensor), len(self.order))
        node = self.graph.create_node("get_attr", self._owners[id(tensor)])
        node.meta.update(spec=_spec(tensor), storage=_storage(tensor))
        return node

    def _use(self, key: Any, place: int) -> None:
        self.uses.setdefault(key, []).append(place)

    def _write(self, op: str, target: Any, args: Any, kwargs: Any, output: Any, versions: list[tuple[Tensor, int]]) -> None:
        if _autocast_state() != self._autocast:
            raise self._refusal("switches autocast between its submodules; do so inside a submodule")
        held = not torch.is_grad_enabled()
        if held:
            before = self._append("call_function", _gradients_off, (), {})
        args, kwargs = map_aggregate(tuple(args), self._argument), map_aggregate(dict(kwargs), self._argument)
        node = self._append(op, target, args, kwargs)
        changed = _changed(versions)
        self.changed |= changed
        node.meta["changes"] = changed
        node.meta["steady"] = op != "call_module"
        self._take(output, node)
        if held:
            self._append("call_function", _gradients_back, (before,), {})

    def _append(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta.update(steady=False, changes=set())
        self.order.append(node)
        return node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, _STATIC):
            return value
        raise self._refusal(
            f"passes a {type(value).__name__} on; only tensors, numbers, strings and tuples, lists and dicts of them can be"
        )

    def _take(self, output: Any, node: fx.Node) -> None:
        """Bind every tensor in an output to a node."""
        if isinstance(output, Tensor):
            self._bind(output, node)
        elif isinstance(output, (tuple, list, dict)):
            for key, item in output.items() if isinstance(output, dict) else enumerate(output):
                if _tensors(item):
                    child = self._append("call_function", operator.getitem, (node, key), {})
                    child.meta["steady"] = node.meta["steady"]
                    self._take(item, child)

    def _bind(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        node.meta.update(spec=_spec(tensor), storage=_storage(tensor))

    def _refusal(self, what: str) -> _Untraceable:
        module = self._stack[-1]
        name = self._names.get(id(module)) or type(module).__name__
        return _Untraceable(
            f"the forward of {name} {what}; with a pipeline split inside it, it must be plain. Move that into a submodule without a split inside",
            module,
        )


class _WatchDraws(TorchDispatchMode):
    """Tells a recorder of every operation that draws random numbers."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
            if given.get("dropout_p", 1.0) != 0.0 and given.get("train", True) is not False:
                self._recorder.drew(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def _borrowed(module: nn.Module, *, training: bool, fake: FakeTensorMode | None) -> Iterator[None]:
    """Lend a network out: training or not, with copies in place of its tensors, and afterwards exactly as it was.

    The copies are without data where `fake` is given; else only buffers are copied, parameters are used and not changed.
    """
    held = [(child, vars(child).copy(), child._parameters.copy(), child._buffers.copy()) for child in module.modules()]
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor, is_parameter: bool) -> Tensor:
        if fake is None and is_parameter:
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone() if fake is None else fake.from_tensor(tensor, static_shapes=True)
        return copies[id(tensor)]

    try:
        with preserved_streams(next((tensor.device for tensor in module.parameters()), None)):
            for child, attributes, parameters, buffers in held:
                child.training = training
                for target, source in ((child._parameters, parameters), (child._buffers, buffers), (vars(child), attributes)):
                    tensors = {key: value for key, value in source.items() if isinstance(value, Tensor)}
                    target.update({key: copy(value, target is child._parameters) for key, value in tensors.items()})
            yield
    finally:
        for child, attributes, parameters, buffers in held:
            for target, source in ((child._parameters, parameters), (child._buffers, buffers), (vars(child), attributes)):
                target.clear()
                target.update(source)


_TENSOR = object()  # stands for a tensor in a flat list of leaves
_Structure = tuple[list[Any], TreeSpec]


def _flatten(value: Any) -> tuple[list[Tensor], _Structure]:
    leaves, tree = tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], ([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def _unflatten(tensors: Iterable[Tensor], structure: _Structure) -> Any:
    flat = iter(tensors)
    return tree_unflatten([next(flat) if leaf is _TENSOR else leaf for leaf in structure[0]], structure[1])


def _example(tensor: Tensor, device: torch.device, *, with_data: bool) -> Tensor:
    if with_data and not tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    spec = _spec(tensor)
    made = spec.empty(device if tensor.is_meta else tensor.device)
    return made.detach().zero_().requires_grad_(spec.requires_grad) if with_data else made


class _Record:
    """The forward of a network written down: its nodes in order, its structure, and what state is used where."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        goes_into: Callable[[str, nn.Module], bool],
        *,
        training: bool,
        context: MakeContext,
    ) -> None:
        self.module = module
        recorder = _Recorder(module, goes_into)
        try:
            self._run(recorder, args, kwargs, training=training, context=context, fake=FakeTensorMode(allow_non_fake_inputs=True))
        except Exception:
            if recorder.leaf is None:
                raise
            # A submodule whose control flow asks for data gets some; it may do what it likes in there.
            recorder = _Recorder(module, goes_into)
            self._run(recorder, args, kwargs, training=training, context=context, fake=None)
        self.order, self.entries, self.opened, self.uses = recorder.order, recorder.entries, set(recorder.opened), recorder.uses
        self.called = Counter(name for name, _ in self.entries)
        self._changed = recorder.changed
        self._place = {node: -1 for node in self.inputs} | {node: place for place, node in enumerate(self.order)}
        self.constants: set[fx.Node] = set()  # made of nothing: made anew in each stage instead of crossing cuts
        self._last_use: dict[fx.Node, int] = {}
        for place, node in enumerate(self.order):
            steady = node.meta["steady"] and not node.meta["changes"] and node.meta.get("storage") not in self._changed
            if steady and all(source in self.constants for source in node.all_input_nodes):
                self.constants.add(node)
            else:
                self._last_use.update(dict.fromkeys(node.all_input_nodes, place))
        self._last_use.update(dict.fromkeys(self.outputs, len(self.order)))

    def _run(
        self,
        recorder: _Recorder,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        context: MakeContext,
        fake: FakeTensorMode | None,
    ) -> None:
        module, original = self.module, nn.Module.__call__
        given, self.input_structure = _flatten((args, kwargs))
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        with ExitStack() as stack:
            for entered in (
                torch.inference_mode(False),
                _borrowed(module, training=training, fake=fake),
                fake,
                torch.enable_grad(),
                context(),
            ):
                stack.enter_context(entered or nullcontext())
            stack.callback(torch.clear_autocast_cache)
            inputs = [_example(tensor, device, with_data=fake is None) for tensor in given]
            recorder.begin()
            self.names: dict[int, list[str]] = {}
            for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
                self.names.setdefault(id(tensor), []).append(name)
            self.inputs = [recorder.placeholder(tensor) for tensor in inputs]
            held = {child: _held(child) for child in module.modules()}
            nn.Module.__call__ = lambda self, *args, **kwargs: recorder.call(original, self, args, kwargs)
            stack.callback(setattr, nn.Module, "__call__", original)
            stack.enter_context(_WatchDraws(recorder))
            args, kwargs = _unflatten(inputs, self.input_structure)
            with recorder:
                output = module.forward(*args, **kwargs)
            for name, child in recorder.opened.items():
                for key in {key for key, _ in _held(child) ^ held[child]}:
                    where = f"{name}.{key}" if name else key
                    raise _Untraceable(
                        f"the forward of {name or type(module).__name__} puts a tensor in {where!r}, which a stage would not;"
                        " do so in a submodule without a split inside",
                        child,
                    )
            tensors, self.output_structure = _flatten(output)
            for leaf in self.output_structure[0]:
                if leaf is not _TENSOR and not isinstance(leaf, _STATIC):
                    raise PlanError(
                        f"{type(module).__name__}.forward returns a {type(leaf).__name__}; in a pipeline only tensors, numbers, strings and"
                        " tuples, lists and dicts of them can be returned"
                    )
            if not tensors:
                raise PlanError(f"{type(module).__name__}.forward returns no tensor, so that nothing can be pipelined")
            self.outputs = [recorder.node_of(tensor) for tensor in tensors]
            recorder.end()

    def crossing(self, place: int) -> list[fx.Node]:
        """The nodes whose values cross a cut before the node in a place: made before, needed there or later."""
        made = [*self.inputs, *self.order[:place]]
        return [node for node in made if self._last_use.get(node, -1) >= place and node not in self.constants]

    def aliased(self, nodes: list[fx.Node]) -> bool:
        """Whether among values that cross a cut two share memory that something changes in place; behind the cut they no longer would."""
        shared = Counter(node.meta["storage"] for node in nodes)
        return any(count > 1 and storage in self._changed for storage, count in shared.items())

    def spec(self, node: fx.Node) -> _Spec:
        return node.meta["spec"]

    def state_names(self, key: Any) -> str:
        """How messages call a piece of state that is used by more than one stage."""
        if isinstance(key, str):
            return f"the submodule {key!r}, which draws random numbers,"
        kind = (
            "parameter" if any(name in dict(self.module.named_parameters(remove_duplicate=False)) for name in self.names[key]) else "buffer"
        )
        return f"the {kind} {' = '.join(map(repr, self.names[key]))}"


def _held(module: nn.Module) -> set[tuple[str, int]]:
    return {(key, id(value)) for key, value in [*module._buffers.items(), *vars(module).items()] if isinstance(value, Tensor)}


# ---- Stages ------------------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A slice of a network: a flat tuple of tensors in, a flat tuple of tensors out.

    Its parameters and buffers are the network's own, under their names there. Call it in the mode (training or not) that it was cut for.
    What it hands on has exactly the shape, dtype and strides of its `outputs`, which is what a receiver has set memory aside for.

    Args:
        inputs, outputs: what comes in and goes out, as meta tensors that require gradients where the values do.
    """

    def __init__(self, record: _Record, begin: int, end: int, *, inputs: list[fx.Node], outputs: list[fx.Node], is_last: bool) -> None:
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
            if record.aliased(inputs):
                raise PlanError(
                    "two tensors that share memory, one changed in place later, cross a pipeline split; change a copy, or cut elsewhere"
                )
            copies |= {node: graph.call_method("clone", (copies[node],)) for node in inputs if node.meta["storage"] in changed}
        for node in body:
            copy(node)
        results = [copy(node) for node in outputs]
        if is_last:  # a schedule detaches a last stage's results in place, which must not reach what arrived
            results = [graph.call_method("view_as", (result, result)) if result in arrived.values() else result for result in results]
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
            " all micro-batches of a pipeline must have one shape and precision"
        )
    if value.stride() == expected.stride():
        return value
    return torch.empty_strided(expected.shape, expected.stride(), dtype=value.dtype, device=value.device).copy_(value)


class Partition:
    """A network cut into stages; `cut` makes it.

    Args:
        splits: the submodules that begin the second and later stages.
        parameters, buffers: their names by stage; what the forward never uses belongs to the last stage, where the user's step runs.
        boundaries: the tensors before the first stage, between stages and behind the last, as meta tensors; one tuple more than stages.
        opened: the submodules with a cut inside. They are not called as a whole: a hook or a wrapper on them would not run.
    """

    def __init__(self, record: _Record, splits: list[str], starts: list[int]) -> None:
        self.splits, self.opened = splits, record.opened - {""}
        self._record, self._starts = record, [0, *starts, len(record.order)]
        self._crossings = [record.inputs, *map(record.crossing, starts), record.outputs]
        self.boundaries = [tuple(record.spec(node).empty() for node in nodes) for nodes in self._crossings]
        self.parameters, self.buffers = self._ownership()

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
        tensors, (leaves, tree) = _flatten((args, kwargs))
        expected_leaves, expected_tree = self._record.input_structure
        if tree != expected_tree or any(a is not b and a != b for a, b in zip(leaves, expected_leaves, strict=True)):
            raise PlanError(
                f"self(...) was called with {_unflatten(map(_Shown, tensors), (leaves, tree))}, but the network was cut for"
                f" {_unflatten(map(_Shown, self.boundaries[0]), self._record.input_structure)}; all calls in a pipeline must be alike"
            )
        for tensor, expected in zip(tensors, self.boundaries[0], strict=True):
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise PlanError(
                    f"self(...) was given {_Shown(tensor)} where the network was cut for {_Shown(expected)};"
                    " all micro-batches of a pipeline must have one shape"
                )
        return tuple(tensors)

    def restore(self, results: Iterable[Tensor]) -> Any:
        """What the forward returns, out of the last stage's results."""
        return _unflatten(results, self._record.output_structure)

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
    record = _Record(
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
                f"pipeline_splits={split!r} is {times} by the forward of {type(module).__name__}; name a submodule that is called exactly once"
            )
    starts = [first_calls[split] for split in splits]
    for before, split in zip(splits, splits[1:], strict=False):
        if first_calls[split] < first_calls[before]:
            order = sorted(splits, key=lambda name: first_calls[name])
            raise PlanError(f"pipeline_splits has {split!r} after {before!r}, but the forward calls it before; the order is {order}")
    for place, (begin, end) in enumerate(zip([0, *starts], [*starts, len(record.order)], strict=True)):
        if not any(node.op == "call_module" for node in record.order[begin:end]):
            where = f"before {splits[place]!r}" if place < len(splits) else f"from {splits[-1]!r} on"
            raise PlanError(f"pipeline_splits={splits} leaves stage {place} ({where}) empty: it would call no submodule")
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

    A cut is possible before a submodule with parameters where no more values cross than at the beginning of the block around it:
    between residual blocks, not inside them. Neither gradients, buffers, mode nor random streams are changed.

    Args:
        module, args, kwargs, context: as in `cut`; the example's data is used, zeros where it is on the meta device.
        num_stages: stages to make.
        bandwidth: bytes per second between stages; a stage's time includes what it receives and sends, there and back.

    Returns:
        The names for `splits`, and a row for each stage.

    Raises:
        PlanError: the network has too few places to cut, or its forward cannot be cut at all.
    """
    record = _deep_record(module, args, kwargs or {}, context)
    candidates = _candidates(record)
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


def _deep_record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: MakeContext) -> _Record:
    """Write a forward down as deep as it can be: kinds of modules that cannot be gone into are taken whole."""
    whole: set[type] = {nn.MultiheadAttention}

    def goes_into(name: str, child: nn.Module) -> bool:
        hooked = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or "forward" in vars(child)
        return next(child.children(), None) is not None and type(child) not in whole and not hooked

    while True:
        try:
            return _Record(module, args, kwargs, goes_into, training=True, context=context)
        except _Untraceable as refusal:
            if refusal.module is module or type(refusal.module) in whole:
                raise
            whole.add(type(refusal.module))


def _candidates(record: _Record) -> dict[str, int]:
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
            and not record.aliased(crossing)
            and all(len(crossing) <= len(record.crossing(begins[outer])) for outer in around if outer in begins)
        ):
            found[place] = name
    return {name: place for place, name in sorted(found.items())}


def _measure(parts: Partition, args: tuple[Any, ...], kwargs: dict[str, Any], context: MakeContext) -> tuple[list[float], list[int]]:
    """Seconds (forward and backward) and bytes kept for the backward of each part of a network, for one micro-batch.

    Once to warm up, then up to three times or for ten seconds; the fastest counts.
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
        stack.enter_context(_borrowed(module, training=True, fake=None))
        stack.enter_context(torch.enable_grad())
        values = [_example(tensor, device, with_data=True) for tensor in parts.flatten(*args, **kwargs)]
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
                if time.perf_counter() - started > 10:
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
