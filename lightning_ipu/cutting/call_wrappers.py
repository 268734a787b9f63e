"""Wrap the calls of chosen modules, only while a step runs: at any other time nothing is attached to the modules.

torch's own hooks would stay on the modules for the whole run, where they cannot be pickled or scripted, and torch.compile traces them or
fails. A global hook on all modules slows down every call of every module. The wrapper is therefore kept in the attribute that
`nn.Module.compile` sets: other modules are not slowed down, pickles and copies leave it out, and a compiled graph does not contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.jit import ScriptModule

_PLACE = "_compiled_call_impl"  # nn.Module.__call__ calls it, where a module has one, in place of its hooks and its forward

# Called with what runs the module, then with the module's own arguments.
Around = Callable[..., Any]


class _CallWrapper:
    """The wrapper that is called in place of one module."""

    def __init__(self, around: Around, call: Callable[..., Any]) -> None:
        self._around, self._inner = around, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a function of the user's is compiled, with the call of this module in it
            return self._inner(*args, **kwargs)
        return self._around(self._inner, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the module has none


class CallWrappers:
    """Wrappers around the calls of a network's modules; of several around one module, the one added last is called first."""

    def __init__(self) -> None:
        self._added: list[tuple[nn.Module, Around]] = []
        self._before: list[tuple[nn.Module, Any]] = []
        self.is_active = False

    def add(self, module: nn.Module, around: Around) -> None:
        """Have `around` called in place of a module."""
        self._added.append((module, around))
        if self.is_active:
            self._put(module, around)

    def leave_out(self, around: Around) -> None:
        """Remove a wrapper from all modules; to be called while none is active."""
        self._added = [(module, added) for module, added in self._added if added is not around]

    def begin(self) -> None:
        """Activate the wrappers."""
        if not self.is_active:
            self.is_active = True
            for module, around in self._added:
                self._put(module, around)

    def end(self) -> None:
        """Remove the wrappers from the modules, which are then as they were."""
        for module, before in reversed(self._before):
            if before is None:
                vars(module).pop(_PLACE, None)
            else:
                vars(module)[_PLACE] = before
        self._before.clear()
        self.is_active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Activate the wrappers within a `with` statement."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def _put(self, module: nn.Module, around: Around) -> None:
        before = vars(module).get(_PLACE)
        self._before.append((module, before))
        vars(module)[_PLACE] = _CallWrapper(around, module._call_impl if before is None else before)


def is_called_otherwise(module: nn.Module) -> bool:
    """Whether a module is wrapped here, or has been compiled by its own `compile`."""
    return vars(module).get(_PLACE) is not None


def is_one_piece(module: nn.Module) -> bool:
    """Whether a module is compiled, so that Python does not call the modules inside it."""
    place = vars(module).get(_PLACE)
    while isinstance(place, _CallWrapper):
        place = place._inner
    compiled_in_place = place is not None and place != module._call_impl
    return compiled_in_place or isinstance(module, (OptimizedModule, ScriptModule))


def called_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that Python calls, by name: not what is inside a compiled one."""
    inside: set[int] = set()
    for name, child in module.named_modules():
        if id(child) not in inside and child is not module:
            if is_one_piece(child):
                inside.update(map(id, child.modules()))
            yield name, child
