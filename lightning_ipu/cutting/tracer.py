"""Trace what a forward calls, reads and sets while it runs; refuse what a stage could not repeat.

The call of a chosen submodule is one node of a torch.fx graph, whatever it does inside; between them each tensor operation is a node.
"""

from __future__ import annotations

import numbers
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ipu.cutting.call_wrappers import is_called_otherwise, is_one_piece
from lightning_ipu.cutting.tensors import buffer_places, spec_of, tensors_in
from lightning_ipu.cutting.trial import OF_EVERY_MODULE
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import drawn_between, host_streams, may_draw

# Tensor methods and functions that turn data into Python values, on which a forward may then branch.
_READS_DATA = {
    *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__array__"),
    *("equal", "allclose", "is_nonzero"),
}
# What of a LightningModule depends on where training stands, or speaks to the Trainer.
_OF_TRAINER = {"trainer", "_trainer", "fabric", "current_epoch", "global_step", "log", "log_dict"}

_TOUCHES_GRAPH = {"backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__set__"}
STATIC = (int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)


def called_as_a_whole(module: nn.Module) -> bool:
    """Whether hooks, wrappers or compilation surround the call of a module; they would be lost if a stage began inside it."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooked) or "forward" in vars(module) or is_called_otherwise(module) or is_one_piece(module)


class Untraceable(PlanError):
    """Something in the forward of a module that has a cut inside; the same would be fine in a module without."""

    def __init__(self, message: str, module: nn.Module) -> None:
        super().__init__(message)
        self.module = module


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    with torch._C.DisableTorchFunction():
        return [(tensor, tensor._version) for tensor in tensors_in(value)]


def _changed(versions: list[tuple[Tensor, int]]) -> set[int]:
    with torch._C.DisableTorchFunction():
        return {tensor.untyped_storage()._cdata for tensor, version in versions if tensor._version != version}


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _saving_hooks() -> Any:
    """The hooks on tensors that are saved for the backward pass: torch.utils.checkpoint works by them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


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


class Tracer(TorchFunctionMode):
    """Traces what a forward calls, in order, as nodes of a torch.fx graph.

    Args:
        module: whose forward it is.
        goes_into: called with a submodule's name and the submodule; true if the calls inside it are traced, false if it becomes one node.
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
        self.leaf: str | None = None  # the submodule that is running as one node
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
        """Note what the modules hold, and the autocast and saved-tensor contexts."""
        self._autocast, self._saving = _autocast_state(), _saving_hooks()
        named = [*self._root.named_parameters(remove_duplicate=False), *self._root.named_buffers(remove_duplicate=False)]
        # By name, because a forward may put a new tensor in a buffer's place; tied ones share a key.
        self.keys: dict[str, Any] = {name: id(tensor) for name, tensor in named}
        # Buffers that are None have no tensor; a forward may fill them.
        self.keys |= {name: (id(owner), key) for name, owner, key in buffer_places(self._root) if owner._buffers[key] is None}
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
        """Called in place of nn.Module.__call__."""
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
        for inner in [*(inner for inner, _ in module.named_parameters()), *(inner for inner, *_ in buffer_places(module))]:
            self._use(self.keys.get(f"{name}.{inner}", inner), len(self.order))
        self.leaf = name
        output = self._enter(original, module, args, kwargs)  # after an exception `leaf` says where it came from
        self.leaf = None
        self._trace("call_module", name, args, kwargs, output, versions)
        return output

    def _enter(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.check_host_streams()
        self._stack.append(module)
        output = original(module, *args, **kwargs)
        self.check_host_streams()
        self._stack.pop()
        return output

    def asked(self, module: nn.Module, name: str) -> bool:
        """Called before an attribute of a module is read; returns whether `found` is to be called with its value."""
        if self.leaf is not None or name in OF_EVERY_MODULE or threading.get_ident() != self._thread:
            return False
        if self._names.get(id(module)) not in self.opened:
            return False
        if name in _OF_TRAINER and any(kind.__name__ == "LightningModule" for kind in type(module).__mro__):
            raise self.refusal(f"uses self.{name}, which a stage would not do anew in each step", "or into the step around self(...)")
        return True

    def found(self, module: nn.Module, name: str, value: Any) -> None:
        """Called with the value of an attribute that was read."""
        if isinstance(value, STATIC) or (name in vars(module) and not isinstance(value, (Tensor, nn.Module))):
            self.read.setdefault((self._names[id(module)], name), plain(value))

    def puts(self, module: nn.Module, name: str) -> None:
        """Called before an attribute of a module is set."""
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
        inputs = tensors_in((args, kwargs))
        if name == "__iter__":  # tensors inside an iterator would not be seen
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if inputs and name in _READS_DATA:
            raise self.refusal(f"looks at the values of a tensor ({name}), so that its control flow may depend on data")
        if name in _TOUCHES_GRAPH:
            raise self.refusal(f"calls {name} on a tensor")
        versions = _versions(inputs)
        output = func(*args, **kwargs)
        if tensors_in(output) or (output is None and inputs):
            if name == "__get__":
                self._trace("call_function", getattr, (args[0], func.__self__.__name__), {}, output, versions)
            elif getattr(torch.Tensor, name, None) == func and isinstance(args[0], Tensor):
                self._trace("call_method", name, args, kwargs, output, versions)
            else:
                self._trace("call_function", _named(func, name), args, kwargs, output, versions)
        return output

    def drew(self, operation: str) -> None:
        """Called for every operation that draws random numbers: only a module that is seeded by its name may."""
        module = next(filter(is_one_piece, self._stack), self._stack[-1])
        name = self._names.get(id(module), "")
        if self.leaf is not None and name and (may_draw(module) or is_one_piece(module)) and module.training:
            self._use(name, len(self.order))
            return
        where = f"submodule {name!r} ({type(module).__name__})" if name else type(module).__name__
        drawn = self._function if self.leaf is None and self._function else operation
        raise Untraceable(
            f"the forward of {where} draws random numbers by {drawn}, which in a pipeline would depend on the stages;"
            " use a module such as nn.Dropout, or draw in a submodule of its own that holds no others, and in training only",
            module,
        )

    # The graph

    def placeholder(self, tensor: Tensor) -> fx.Node:
        """The node of an input."""
        node = self.graph.placeholder(f"input_{len(self._alive)}")
        self._bind(tensor, node)
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that computes a tensor; for a parameter, buffer or other tensor of a module, a new node that reads it."""
        if id(tensor) in self._nodes:
            node = self._nodes[id(tensor)]
            if tensor.requires_grad != node.meta["spec"].requires_grad:
                raise self.refusal(f"uses a tensor {list(tensor.shape)} whose gradient is made by a custom autograd.Function")
            return node
        if id(tensor) not in self._owners:
            raise self.refusal(
                f"uses a tensor {list(tensor.shape)} that no traced operation made (a custom autograd.Function, a container that is"
                " neither tuple, list nor dict, or a tensor from outside the network)"
            )
        self._use(id(tensor), len(self.order))
        node = self.graph.create_node("get_attr", self._owners[id(tensor)])
        node.meta.update(spec=spec_of(tensor), storage=_storage(tensor))
        return node

    def _use(self, key: Any, place: int) -> None:
        self.uses.setdefault(key, []).append(place)

    def _trace(self, op: str, target: Any, args: Any, kwargs: Any, output: Any, versions: list[tuple[Tensor, int]]) -> None:
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
        if isinstance(value, STATIC):
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
                if tensors_in(item):
                    child = self._append("call_function", operator.getitem, (node, key), {})
                    child.meta["steady"] = node.meta["steady"]
                    self._take(item, child)

    def _bind(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        node.meta.update(spec=spec_of(tensor), storage=_storage(tensor))

    def refusal(self, what: str, instead: str = "") -> Untraceable:
        module = self._stack[-1]
        name = self._names.get(id(module)) or type(module).__name__
        return Untraceable(
            f"the forward of {name} {what}; with a pipeline split inside it, it must be plain. Move that into a submodule without a split inside"
            + (f", {instead}" if instead else ""),
            module,
        )


class WatchDraws(TorchDispatchMode):
    """Tells a tracer of every operation that draws random numbers."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            schema = func._schema.arguments
            given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
            given |= dict(zip((argument.name for argument in schema), args, strict=False)) | (kwargs or {})
            if given.get("dropout_p") != 0 and given.get("dropout") != 0 and given.get("train") is not False:
                self._tracer.drew(str(func))
        return func(*args, **(kwargs or {}))


def plain(value: Any, depth: int = 4) -> Any:
    """What an attribute holds, to be compared later: numbers and strings, and those in short tuples, lists, dicts and plain objects."""
    if isinstance(value, STATIC):
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
def watched(tracer: Tracer) -> Iterator[None]:
    """Tell a tracer of what is called, read and set on modules."""
    call, put = nn.Module.__call__, nn.Module.__setattr__

    def read(module: nn.Module, name: str) -> Any:
        is_wanted = tracer.asked(module, name)
        value = object.__getattribute__(module, name)
        if is_wanted:
            tracer.found(module, name, value)
        return value

    def write(module: nn.Module, name: str, value: Any) -> None:
        tracer.puts(module, name)
        put(module, name, value)

    nn.Module.__call__ = lambda self, *args, **kwargs: tracer.call(call, self, args, kwargs)
    nn.Module.__getattribute__, nn.Module.__setattr__ = read, write
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__setattr__ = call, put
        del nn.Module.__getattribute__
