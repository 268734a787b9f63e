"""Intercept a module's `self(...)`: the one call in the user's step that a pipeline carries out instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_ipu.plan import PlanError


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call something else in place of a module's `forward`."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        vars(module).pop("forward")
        vars(module).update(own)


class _Called(BaseException):
    """Carries what the user's step called `self(...)` with out of the step."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


def arguments_of_call(
    module: nn.Module, step: Callable[[], Any], what: str = "the training step"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a step calls `self(...)` with; the step is aborted at that call.

    Raises:
        PlanError: the step does not call it.
    """

    def leave(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    try:
        with replaced_forward(module, leave):
            step()
    except _Called as call:
        return call.args, call.kwargs
    raise PlanError(f"{what} of {type(module).__name__} does not call self(...), which is what a pipeline runs; call it once")


def step_around(module: nn.Module, output: Any, step: Callable[[], Any], what: str = "the training step") -> Any:
    """The result of a step whose call of `self(...)` returns `output`.

    Raises:
        PlanError: the step calls it several times, or never.
    """
    calls = 0

    def forward(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        return output

    with replaced_forward(module, forward):
        result = step()
    if calls != 1:
        raise PlanError(f"{what} of {type(module).__name__} calls self(...) {calls} times; a pipeline needs exactly one call")
    return result
