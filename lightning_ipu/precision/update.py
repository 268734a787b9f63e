"""Step any optimizer over 16-bit weights: widened to 32 bits one tensor at a time, and rounded back.

In 16.16 the weights and the optimizer's state live in 16 bits; gradients are summed in 32, for sums of many micro-batches would not fit
into fewer. The alternative, 32-bit copies of all weights beside the 16-bit ones, is 16.32 and costs their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_ipu.errors import UserError
from lightning_ipu.precision.rounding import OVERFLOW, rounding_seed, stochastic_round_

# Elements of parameters that an optimizer is given at once: small tensors share the cost of its step, large ones come alone.
_AT_ONCE = 1 << 20


class SixteenBitUpdate:
    """Steps an optimizer over 16-bit parameters as if they were 32-bit, without keeping 32-bit copies of them.

    A few tensors at a time, weights, gradients and state are widened to float32, the optimizer's own `step` runs on those alone, and
    weights and state are rounded back. The parameter objects stay the same throughout, so any optimizer that treats its tensors one
    by one works unmodified; one that couples them (a norm over all of them) would see a few at a time. State tensors of one element,
    such as step counters, stay as the optimizer made them. 32-bit parameters among the others are stepped as usual. From here on the
    gradients of 16-bit parameters are summed in float32.

    Args:
        optimizer: any but LBFGS; its `state_dict` is what it always was, in 16 bits.
        module: names the optimizer's parameters.
        seed: of the run.
        stochastic: round stochastically; False rounds to nearest, which loses every change below half a spacing.

    Raises:
        UserError: a parameter of the optimizer is not the module's, so that it has no name.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, *, seed: int, stochastic: bool = True) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        nameless = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
        if nameless:
            shapes = ", ".join(str(tuple(p.shape)) for p in nameless[:3])
            raise UserError(
                f"the optimizer holds {len(nameless)} parameters that are not the module's (shapes {shapes}); 16.16 rounds parameters by name"
            )
        self._optimizer, self._names, self._seed, self._stochastic = optimizer, names, seed, stochastic
        # Frozen parameters as well: they may be unfrozen later.
        self._summed_in_32_bits = [p for p in names if p.dtype in OVERFLOW and p.grad_dtype != torch.float32]
        for parameter in self._summed_in_32_bits:
            parameter.grad_dtype = torch.float32  # autograd casts every micro-batch's gradient before it adds
        self._generators: dict[torch.device, torch.Generator] = {}
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._note_scalars),
            optimizer.register_load_state_dict_post_hook(self._restore_scalars),
        ]

    def step(self, update: int) -> None:
        """Make the optimizer's step number `update` of the run; on the same weights and gradients it always gives the same."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        with _hooks_called_once(optimizer):
            try:
                for group in groups:
                    self._step_group(group, update)
            finally:
                optimizer.param_groups = groups

    def remove(self) -> None:
        """Take the hooks off the optimizer, and give the parameters gradients of their own type again."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._summed_in_32_bits:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def _step_group(self, group: dict[str, Any], update: int) -> None:
        parameters = group["params"]
        # Some optimizers count their steps in the group: each portion must find, and together they must leave, one step.
        before = {name: value for name, value in group.items() if isinstance(value, (int, float))}
        self._optimizer.param_groups = [group]
        try:
            for portion in _portions(parameters):
                group.update(before)
                group["params"] = portion
                with self._widened(portion, update):
                    self._optimizer.step()
        finally:
            group["params"] = parameters

    @contextmanager
    def _widened(self, portion: list[nn.Parameter], update: int) -> Iterator[None]:
        states, narrow = self._optimizer.state, {}
        for parameter in portion:
            if parameter.dtype not in OVERFLOW:
                continue
            weights, gradient = parameter.data, parameter.grad
            state = {key: value for key, value in states.get(parameter, {}).items() if _is_narrowed(value)}
            narrow[parameter] = weights, gradient, state
            if gradient.dtype != torch.float32:
                parameter.grad = None
            parameter.data = weights.float()
            parameter.grad = gradient.float()
            states[parameter].update({key: value.float() for key, value in state.items()})
        try:
            yield
        finally:
            for parameter, (weights, gradient, before) in narrow.items():
                name, state = self._names[parameter], states[parameter]
                self._narrow(weights, parameter.data, update, name, "")
                for key, wide in state.items():
                    if not _is_narrowed(wide):
                        continue
                    target = before.get(key)
                    if target is None or target.dtype != weights.dtype or target.shape != wide.shape:
                        target = torch.empty_like(wide, dtype=weights.dtype)
                    state[key] = self._narrow(target, wide, update, name, key)
                if not state:
                    del states[parameter]  # as the optimizer left it
                parameter.grad = None
                parameter.data = weights
                parameter.grad = gradient

    def _narrow(self, target: Tensor, source: Tensor, update: int, name: str, key: str) -> Tensor:
        if not self._stochastic:
            return target.copy_(source)
        device = source.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        generator = self._generators[device].manual_seed(rounding_seed(self._seed, update, name, key))
        return stochastic_round_(target, source, generator=generator)

    # torch gives every loaded state tensor but "step" the parameter's type. The scalars that the optimizer keeps beside it
    # (NAdam's and ASGD's) are not rounded here, and must not be by a restart.

    def _note_scalars(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._scalars = [
            (index, key, value)
            for index, state in state_dict["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == 1
        ]

    def _restore_scalars(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, key, value in self._scalars:
            loaded = optimizer.state[parameters[index]][key]
            optimizer.state[parameters[index]][key] = value.to(loaded.device, copy=True)
        del self._scalars


def _is_narrowed(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1


def _portions(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters that have a gradient, in order, as many at a time as hold `_AT_ONCE` elements, and at least one."""
    portion: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if portion and elements + parameter.numel() > _AT_ONCE:
            yield portion
            portion, elements = [], 0
        portion.append(parameter)
        elements += parameter.numel()
    if portion:
        yield portion


@contextmanager
def _hooks_called_once(optimizer: Optimizer) -> Iterator[None]:
    """Call an optimizer's step hooks before and after, when all parameters are in their groups, and not at its steps within."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    kept = [dict(of) for of in hooks]
    own_before, own_after, all_before, all_after = kept
    for hook in chain(all_before.values(), own_before.values()):
        if hook(optimizer, (), {}) is not None:
            raise UserError("an optimizer's step hook that changes the step's arguments cannot be honoured in 16.16")
    for of in hooks:
        of.clear()
    try:
        yield
    finally:
        for of, hook in zip(hooks, kept, strict=True):
            of.update(hook)
    for hook in chain(own_after.values(), all_after.values()):
        hook(optimizer, (), {})
