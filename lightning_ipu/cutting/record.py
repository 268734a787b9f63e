"""Write a network's forward down: what it calls, in order, and which values it hands from call to call.

The unmodified forward runs once, on tensors without data: chosen submodules are written down whole, whatever they do, and the tensor operations
between them one by one. Alternatives: torch.export refuses a value that feeds more than one later stage; torch.fx's own tracer refuses
control flow on shapes, and freezes `self.training` and `torch.no_grad` without a word. Here shapes are part of the record, which so holds for
micro-batches of one shape.
"""

from __future__ import annotations

import numbers
import operator
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from types import ModuleType
from typing import Any, NamedTuple

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_ipu.cutting.stand_ins import is_called_otherwise, is_one_piece
from lightning_ipu.engine.stage import _may_draw
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import drawn_between, host_streams, preserved_streams

MakeContext = Callable[[], AbstractContextManager]

# Tensor methods and functions that turn data into Python values, on which a forward may then branch.
_READS_DATA = {
    *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__array__"),
    *("equal", "allclose", "is_nonzero"),
}
# What of a LightningModule depends on where training stands, or speaks to the Trainer.
_OF_TRAINER = {"trainer", "_trainer", "fabric", "current_epoch", "global_step", "log", "log_dict"}
_OF_EVERY_MODULE = {*vars(nn.Module()), *vars(nn.Module)}
# Functions and methods that ask what a tensor is like, not for its values.
_DESCRIBES = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "requires_grad_", "data_ptr", "__hash__", "__len__", "__set__"),
}
_TOUCHES_GRAPH = {"backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__set__"}
_STATIC = (int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)


def called_as_a_whole(module: nn.Module) -> bool:
    """Whether hooks, wrappers or compilation surround the call of a module; they would be lost if a stage began inside it."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooked) or "forward" in vars(module) or is_called_otherwise(module) or is_one_piece(module)


class Untraceable(PlanError):
    """Something in the forward of a module that has a cut inside; the same would be fine in a module without."""

    def __init__(self, message: str, module: nn.Module) -> None:
        super().__init__(message)
        self.module = module


class Spec(NamedTuple):
    """What a receiver must know of a tensor; dense strides, whatever the sender's are."""

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


def _spec(tensor: Tensor) -> Spec:
    with torch._C.DisableTorchFunction():
        shape, stride = tensor.shape, tensor.stride()
        room = 1
        for size, step in sorted((pair for pair in zip(shape, stride, strict=True) if pair[0] != 1), key=lambda pair: pair[1]):
            if step != room:  # gaps or overlaps do not cross a cut: row by row
                stride = tuple(shape[place + 1 :].numel() for place in range(len(shape)))
                break
            room *= size
        return Spec(shape, stride, tensor.dtype, tensor.requires_grad)


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


def _saving_hooks() -> Any:
    """The hooks on tensors that are saved for the backward pass: torch.utils.checkpoint works by them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_aggregate(value, lambda item: found.append(item) if isinstance(item, Tensor) else None)
    return found


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function under a name that torch.fx need not look up: not all of torch's can be found where they say they are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = re.sub(r"\W", "_", name)
    return call


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
        self.left: dict[tuple[str, str], int] = {}  # attributes that submodules set, by module and name, and how many nodes came before
        self.read: dict[tuple[str, str], Any] = {}  # plain attributes that were read, by module and name, and what they held
        self._stack: list[nn.Module] = [module]
        self._function = ""
        self._host = host_streams()
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Take note of what the modules hold, and of the context."""
        self._autocast, self._saving = _autocast_state(), _saving_hooks()
        named = [*self._root.named_parameters(remove_duplicate=False), *self._root.named_buffers(remove_duplicate=False)]
        # By name, because a forward may put a new tensor in a buffer's place; tied ones share a key.
        self.keys = {name: id(tensor) for name, tensor in named}
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
            if called_as_a_whole(module):
                raise Untraceable(
                    f"{name!r} has hooks, is recomputed or is compiled as a whole, and a stage would begin inside it; cut elsewhere", module
                )
            self.opened[name] = module
            return self._enter(original, module, args, kwargs)
        versions = _versions((args, kwargs))
        for inner, _ in [*module.named_parameters(), *module.named_buffers()]:
            self._use(self.keys.get(f"{name}.{inner}", inner), len(self.order))
        self.leaf = name
        output = self._enter(original, module, args, kwargs)  # after an exception `leaf` says where it came from
        self.leaf = None
        self._write("call_module", name, args, kwargs, output, versions)
        return output

    def _enter(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.check_host_streams()
        self._stack.append(module)
        output = original(module, *args, **kwargs)
        self.check_host_streams()
        self._stack.pop()
        return output

    def asked(self, module: nn.Module, name: str) -> bool:
        """Told of every attribute that is asked for; whether its value is to be told as well."""
        if self.leaf is not None or name in _OF_EVERY_MODULE or threading.get_ident() != self._thread:
            return False
        if self._names.get(id(module)) not in self.opened:
            return False
        if name in _OF_TRAINER and isinstance(module, LightningModule):
            raise self.refusal(f"uses self.{name}, which a stage would not do anew in each step", "or into the step around self(...)")
        return True

    def found(self, module: nn.Module, name: str, value: Any) -> None:
        """Told of the value of such an attribute."""
        if isinstance(value, _STATIC) or (name in vars(module) and not isinstance(value, (Tensor, nn.Module))):
            self.read.setdefault((self._names[id(module)], name), plain(value))

    def puts(self, module: nn.Module, name: str) -> None:
        """Told of every attribute that is set."""
        path = self._names.get(id(module))
        if path is None or threading.get_ident() != self._thread:
            return
        self.left[path, name] = len(self.order)
        if self.leaf is None:
            raise self.refusal(f"sets {f'{path}.{name}' if path else name!r}, which a stage would not do")

    def check_host_streams(self) -> None:
        """Refuse draws from numpy's and Python's global streams like those from torch's."""
        before, self._host = self._host, host_streams()
        if drawn := drawn_between(before, self._host):
            self._function = drawn
            self.drew(drawn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.leaf is not None:
            return func(*args, **kwargs)
        name = self._function = getattr(func, "__name__", str(func))
        inputs = _tensors((args, kwargs))
        if name == "__iter__":  # tensors inside an iterator would not be seen
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if inputs and name in _READS_DATA:
            raise self.refusal(f"looks at the values of a tensor ({name}), so that its control flow may depend on data")
        if name in _TOUCHES_GRAPH:
            raise self.refusal(f"calls {name} on a tensor")
        versions = _versions(inputs)
        output = func(*args, **kwargs)
        if _tensors(output) or (output is None and inputs):
            if name == "__get__":
                self._write("call_function", getattr, (args[0], func.__self__.__name__), {}, output, versions)
            elif getattr(torch.Tensor, name, None) == func and isinstance(args[0], Tensor):
                self._write("call_method", name, args, kwargs, output, versions)
            else:
                self._write("call_function", _named(func, name), args, kwargs, output, versions)
        return output

    def drew(self, operation: str) -> None:
        """Told of every operation that draws random numbers: only a module that is seeded by its name may."""
        module = next(filter(is_one_piece, self._stack), self._stack[-1])
        name = self._names.get(id(module), "")
        if self.leaf is not None and name and (_may_draw(module) or is_one_piece(module)) and module.training:
            self._use(name, len(self.order))
            return
        where = f"submodule {name!r} ({type(module).__name__})" if name else type(module).__name__
        drawn = self._function if self.leaf is None and self._function else operation
        raise Untraceable(
            f"the forward of {where} draws random numbers by {drawn}, which in a pipeline would depend on the stages;"
            " use a module such as nn.Dropout, or draw in a submodule of its own that holds no others, and in training only",
            module,
        )

    # The record

    def placeholder(self, tensor: Tensor) -> fx.Node:
        """The node of an input."""
        node = self.graph.placeholder(f"input_{len(self._alive)}")
        self._bind(tensor, node)
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node whose value a tensor is; a parameter, buffer or other tensor that a module holds is read where it is used."""
        if id(tensor) in self._nodes:
            node = self._nodes[id(tensor)]
            if tensor.requires_grad != node.meta["spec"].requires_grad:
                raise self.refusal(f"uses a tensor {list(tensor.shape)} whose gradient is made by a custom autograd.Function")
            return node
        if id(tensor) not in self._owners:
            raise self.refusal(
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
            raise self.refusal("switches autocast between its submodules; do so inside a submodule")
        if _saving_hooks() is not self._saving:
            raise self.refusal(
                "uses torch.utils.checkpoint, or other hooks on saved tensors, between its submodules, which a stage would not do",
                "or name blocks in IPUStrategy(recompute=[...])",
            )
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
        if isinstance(value, numbers.Real):  # numpy's
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        raise self.refusal(f"passes a {type(value).__name__} on; only tensors, numbers, strings and tuples, lists and dicts of them can be")

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

    def refusal(self, what: str, instead: str = "") -> Untraceable:
        module = self._stack[-1]
        name = self._names.get(id(module)) or type(module).__name__
        return Untraceable(
            f"the forward of {name} {what}; with a pipeline split inside it, it must be plain. Move that into a submodule without a split inside"
            + (f", {instead}" if instead else ""),
            module,
        )


class _WatchDraws(TorchDispatchMode):
    """Tells a recorder of every operation that draws random numbers."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            schema = func._schema.arguments
            given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
            given |= dict(zip((argument.name for argument in schema), args, strict=False)) | (kwargs or {})
            if given.get("dropout_p") != 0 and given.get("dropout") != 0 and given.get("train") is not False:
                self._recorder.drew(str(func))
        return func(*args, **(kwargs or {}))


def plain(value: Any, depth: int = 4) -> Any:
    """What an attribute holds, to be compared later: numbers and strings, and those in short tuples, lists, dicts and plain objects."""
    if isinstance(value, _STATIC):
        return repr(value)
    if isinstance(value, (Tensor, nn.Module, type, ModuleType)) or callable(value) or not depth:
        return id(value)
    if isinstance(value, Sized) and len(value) > 100:  # a table: compared in every weight update, it would take too long
        return id(value), len(value)
    if isinstance(value, Mapping):
        return {key: plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth - 1) for item in value]
    return id(value), {key: plain(item, depth - 1) for key, item in getattr(value, "__dict__", {}).items()}


@contextmanager
def watched(recorder: _Recorder) -> Iterator[None]:
    """Tell a recorder of what is called, read and set on modules."""
    call, put = nn.Module.__call__, nn.Module.__setattr__

    def read(module: nn.Module, name: str) -> Any:
        told = recorder.asked(module, name)
        value = object.__getattribute__(module, name)
        if told:
            recorder.found(module, name, value)
        return value

    def write(module: nn.Module, name: str, value: Any) -> None:
        recorder.puts(module, name)
        put(module, name, value)

    nn.Module.__call__ = lambda self, *args, **kwargs: recorder.call(call, self, args, kwargs)
    nn.Module.__getattribute__, nn.Module.__setattr__ = read, write
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__setattr__ = call, put
        del nn.Module.__getattribute__


class Uses(TorchFunctionMode):
    """Takes note of what code outside the network's forward uses of it while this mode is on.

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
            self.tensors |= {self._tensors[id(tensor)] for tensor in _tensors((args, kwargs)) if id(tensor) in self._tensors}
        return func(*args, **kwargs)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Leave what modules hold (attributes, lists and dicts among them, and buffers) as it was, whatever a step does to it inside."""
    held = [(child, vars(child).copy(), child._buffers.copy()) for child in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    own = [value for _, attributes, _ in held for name, value in attributes.items() if name not in _OF_EVERY_MODULE]
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
                buffer.copy_(before)
        for value, before in containers:
            value.clear()
            value.extend(before) if type(value) is list else value.update(before)


@contextmanager
def borrowed(module: nn.Module, *, training: bool, fake: FakeTensorMode | None) -> Iterator[None]:
    """Lend a network out: training or not, with copies in place of its tensors, and afterwards exactly as it was.

    The copies are without data where `fake` is given; else only buffers are copied, parameters are used and not changed.
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


_TENSOR = object()  # stands for a tensor in a flat list of leaves
Structure = tuple[list[Any], TreeSpec]


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """The tensors in nested tuples, lists and dicts, and the rest of them."""
    leaves, tree = tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], ([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def unflatten(tensors: Iterable[Tensor], structure: Structure) -> Any:
    """The opposite of `flatten`."""
    flat = iter(tensors)
    return tree_unflatten([next(flat) if leaf is _TENSOR else leaf for leaf in structure[0]], structure[1])


def example(tensor: Tensor, device: torch.device, *, with_data: bool) -> Tensor:
    """A tensor like a given one: its copy, or without data (under a fake mode); on the meta device it stands for zeros on `device`."""
    if with_data and not tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    spec = _spec(tensor)
    made = spec.empty(device if tensor.is_meta else tensor.device)
    return made.detach().zero_().requires_grad_(spec.requires_grad) if with_data else made


class Record:
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
        except PlanError:
            raise
        except Exception:
            if recorder.leaf is None:
                raise
            # A submodule whose control flow asks for data gets some; it may do what it likes in there.
            recorder = _Recorder(module, goes_into)
            self._run(recorder, args, kwargs, training=training, context=context, fake=None)
        self.order, self.entries, self.opened, self.uses = recorder.order, recorder.entries, set(recorder.opened), recorder.uses
        self.called = Counter(name for name, _ in self.entries)
        self.constants: set[fx.Node] = set()  # made of nothing: made anew in each stage instead of crossing cuts
        self._last_use: dict[fx.Node, int] = {}
        for place, node in enumerate(self.order):
            steady = node.meta["steady"] and not node.meta["changes"] and node.meta.get("storage") not in recorder.changed
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
        module = self.module
        given, self.input_structure = flatten((args, kwargs))
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        with ExitStack() as stack:
            for entered in (
                torch.inference_mode(False),
                borrowed(module, training=training, fake=fake),
                fake,
                torch.enable_grad(),
                torch.compiler.set_stance("force_eager"),  # so that compiled modules can be recorded, they run uncompiled
                context(),
            ):
                stack.enter_context(entered or nullcontext())
            stack.callback(torch.clear_autocast_cache)
            inputs = [example(tensor, device, with_data=fake is None) for tensor in given]
            recorder.begin()
            self.names: dict[int, list[str]] = {}
            for name, key in recorder.keys.items():
                self.names.setdefault(key, []).append(name)
            self.inputs = [recorder.placeholder(tensor) for tensor in inputs]
            forward, (args, kwargs) = module.forward, unflatten(inputs, self.input_structure)
            with watched(recorder), _WatchDraws(recorder), recorder:
                output = forward(*args, **kwargs)
                recorder.check_host_streams()
            self.read, self.left = recorder.read, recorder.left
            if changed := self.changed():
                raise recorder.refusal(f"changes what {changed} holds, which a stage would not do")
            tensors, self.output_structure = flatten(output)
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

    def aliased(self, place: int) -> bool:
        """Whether values that cross a cut share memory that is changed in place behind it, where they no longer would share it."""
        changed = set().union(*(node.meta["changes"] for node in self.order[place:]))
        shared = Counter(node.meta["storage"] for node in self.crossing(place))
        return any(count > 1 and storage in changed for storage, count in shared.items())

    def changed(self) -> str:
        """Name of an attribute that the forward read, and that holds something else since; empty if there is none."""
        for (path, name), before in self.read.items():
            if plain(getattr(self.module.get_submodule(path), name, None)) != before:
                return f"{path}.{name}" if path else name
        return ""

    def spec(self, node: fx.Node) -> Spec:
        """What a node's value is like."""
        return node.meta["spec"]

    def state_names(self, key: Any) -> str:
        """How messages call a piece of state that is used by more than one stage."""
        if isinstance(key, str):
            return f"the submodule {key!r}, which draws random numbers,"
        kind = "parameter" if self.names[key][0] in dict(self.module.named_parameters(remove_duplicate=False)) else "buffer"
        return f"the {kind} {' = '.join(map(repr, self.names[key]))}"
