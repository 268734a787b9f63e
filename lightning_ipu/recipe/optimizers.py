"""Optimizers by name, with what torch's lack: LARS and LAMB, and weight decay beside the optimizer; norms and biases do not decay.

Two penalties are told apart. With O the optimizer's direction, lr the scheduled learning rate and λ the factor, decoupled weight decay
makes the update -lr·(O(g) + λ·w) (Loshchilov and Hutter, 2019), L2 regularisation -lr·O(g + λ·w): there the penalty goes through
momentum and scaling. The classes take both: `weight_decay` is the second in all of them, as in torch's SGD and Adam (not in torch's AdamW),
`decoupled_decay` the first. The option `weight_decay` of `build_optimizer`, and of the commands, is the decoupled one, whatever the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ipu.errors import UserError


def parameter_groups(module: nn.Module, *, decay_all: bool = False, **decays: float) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer in which norms and biases do not decay.

    Args:
        module: its trainable parameters are grouped; frozen ones are left out.
        decay_all: decay the one-dimensional tensors, the weights of norms and all biases, as well.
        **decays: settings of the decaying group, such as weight_decay=1e-4, that are 0 in the other. The weights of convolutions and
            linear layers decay: every tensor of two or more dimensions.

    Returns:
        The decaying group, then the other; a group without parameters is left out.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decaying = [parameter for parameter in parameters if decay_all or parameter.ndim > 1]
    others = [parameter for parameter in parameters if not decay_all and parameter.ndim <= 1]
    groups = [{"params": decaying, **decays}, {"params": others, **dict.fromkeys(decays, 0.0)}]
    return [group for group in groups if group["params"]]


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, None without one."""
    with torch.enable_grad():
        return None if closure is None else closure()


class _DecoupledDecay(Optimizer):
    """Adds -lr · decoupled_decay · w, of the weights before the step, to the step of the class that it is mixed into."""

    def __init__(self, params: Any, *, decoupled_decay: float = 0.0, **options: Any) -> None:
        super().__init__(params, **options)
        self.defaults["decoupled_decay"] = decoupled_decay
        for group in self.param_groups:
            group.setdefault("decoupled_decay", decoupled_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure`, if given, computes loss and gradients first."""
        loss = _evaluated(closure)
        decays: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and (decay := group["decoupled_decay"]):
                decays.append((parameters, torch._foreach_mul(parameters, group["lr"] * decay)))
        step = super().step
        if getattr(step, "hooked", False):  # a plain optimizer of that class exists, which made torch wrap the class's step:
            step = step.__wrapped__.__get__(self)  # the step hooks are called around ours already
        step()
        for parameters, decay in decays:
            torch._foreach_sub_(parameters, decay)
        return loss


class SGDWithDecoupledDecay(_DecoupledDecay, torch.optim.SGD):
    """torch's SGD, whose `weight_decay` is L2 regularisation, with `decoupled_decay` beside it."""


class RMSpropWithDecoupledDecay(_DecoupledDecay, torch.optim.RMSprop):
    """torch's RMSprop, whose `weight_decay` is L2 regularisation, with `decoupled_decay` beside it."""


class AdamWithDecoupledDecay(_DecoupledDecay, torch.optim.Adam):
    """torch's Adam, whose `weight_decay` is L2 regularisation, with `decoupled_decay` beside it; with that alone it is torch's AdamW."""


class _LARS(Optimizer):
    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-7,
    ) -> None:
        options = {"momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "eps": eps}
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _evaluated(closure)
        for group in self.param_groups:
            lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, rate = parameter.grad, lr
                if parameter.ndim > 1:
                    weight_norm, gradient_norm = parameter.norm(), gradient.norm()
                    trust = group["trust_coefficient"] * weight_norm / (gradient_norm + weight_decay * weight_norm + group["eps"])
                    rate = lr * torch.where((weight_norm > 0) & (gradient_norm > 0), trust, 1.0)
                if weight_decay:
                    gradient = gradient.add(parameter, alpha=weight_decay)
                change = gradient * rate
                if momentum:
                    state = self.state[parameter]
                    if "momentum_buffer" in state:
                        change = state["momentum_buffer"].mul_(momentum).add_(change)
                    else:
                        state["momentum_buffer"] = change
                parameter.sub_(change)
        return loss


class LARS(_DecoupledDecay, _LARS):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, 2017): SGD whose rate goes by each tensor's own norms.

    A tensor w of two or more dimensions with gradient g moves by v = momentum·v + lr·trust·(g + weight_decay·w), with
    trust = trust_coefficient·‖w‖ / (‖g‖ + weight_decay·‖w‖ + eps), or 1 where either norm is 0. Norms' parameters and biases have trust 1.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate, which multiplies the trust ratio.
        momentum: of v, which holds changes and not gradients, so that a new learning rate acts on new gradients alone.
        weight_decay: L2 regularisation, inside the trust ratio.
        trust_coefficient: called eeta in Graphcore's programs.
        eps: keeps the ratio finite.
        decoupled_decay: beside all that.
    """


class LAMB(Optimizer):
    """Adam whose rate goes by each tensor's own norms, for large batches (You et al., https://arxiv.org/abs/1904.00962).

    A tensor w of two or more dimensions moves by -lr·(‖w‖ / ‖r‖)·r with r = m̂ / (√v̂ + eps) + decoupled_decay·w, where m̂ and v̂ are Adam's
    averages of the gradient and of its square, corrected for their start; the ratio is 1 where either norm is 0. Norms' parameters and
    biases have ratio 1. Unlike in the other optimizers the decoupled decay is inside the ratio, as the paper has it.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate.
        betas: of the averages of the gradient and of its square.
        eps: keeps the quotient finite.
        weight_decay: L2 regularisation, added to the gradient.
        decoupled_decay: inside the ratio.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        decoupled_decay: float = 0.0,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled_decay": decoupled_decay}
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure`, if given, computes loss and gradients first."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            (first_beta, second_beta), eps = group["betas"], group["eps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                step, gradient = state["step"].item(), parameter.grad
                if group["weight_decay"]:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                mean = state["exp_avg"].lerp_(gradient, 1 - first_beta)
                square = state["exp_avg_sq"].mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
                root = square.sqrt().div_((1 - second_beta**step) ** 0.5).add_(eps)
                change = mean / (1 - first_beta**step) / root
                if group["decoupled_decay"]:
                    change.add_(parameter, alpha=group["decoupled_decay"])
                rate = group["lr"]
                if parameter.ndim > 1:
                    weight_norm, change_norm = parameter.norm(), change.norm()
                    rate = rate * torch.where((weight_norm > 0) & (change_norm > 0), weight_norm / change_norm, 1.0)
                parameter.sub_(change.mul_(rate))
        return loss


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGDWithDecoupledDecay,
    "adamw": AdamWithDecoupledDecay,
    "rmsprop": RMSpropWithDecoupledDecay,
    "lars": LARS,
    "lamb": LAMB,
}

_OWN_OPTIONS = {
    "sgd": ("momentum", "nesterov", "dampening"),
    "adamw": ("betas", "eps", "amsgrad"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
    "lars": ("momentum", "trust_coefficient", "eps"),
    "lamb": ("betas", "eps"),
}


def check_optimizer(kind: str, *, weight_decay: float = 0.0, l2_regularization: float = 0.0, **options: Any) -> None:
    """Raise UserError where `kind` is no optimizer, does not take one of the options, or a value makes no sense."""
    if kind not in OPTIMIZERS:
        raise UserError(f"optimizer={kind!r} is unknown: choose from {', '.join(OPTIMIZERS)}")
    for name, value in options.items():
        if name not in _OWN_OPTIONS[kind]:
            raise UserError(f"{name}={value} means nothing to optimizer={kind!r}, which takes {', '.join(_OWN_OPTIONS[kind])}")
    for name, value in (("weight_decay", weight_decay), ("l2_regularization", l2_regularization)):
        if not 0 <= value < float("inf"):
            raise UserError(f"{name}={value} must be at least 0")
    for name in ("momentum", "alpha"):
        if not 0 <= (value := options.get(name, 0)) < 1:
            raise UserError(f"{name}={value} must be at least 0 and below 1")
    for name in ("eps", "trust_coefficient"):
        if not 0 <= (value := options.get(name, 0)) < float("inf"):
            raise UserError(f"{name}={value} must be at least 0")
    if not (len(betas := options.get("betas", (0, 0))) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise UserError(f"betas={list(betas)} must be two numbers of at least 0 and below 1")
    if options.get("nesterov") and not options.get("momentum"):
        raise UserError("nesterov=True needs momentum above 0")


def build_optimizer(
    module: nn.Module,
    kind: str,
    *,
    lr: float,
    weight_decay: float = 0.0,
    l2_regularization: float = 0.0,
    decay_all: bool = False,
    **options: Any,
) -> Optimizer:
    """One of `OPTIMIZERS` over a module's trainable parameters.

    Args:
        module: see `parameter_groups`.
        kind: sgd, adamw, rmsprop, lars or lamb.
        lr: learning rate.
        weight_decay: λ of decoupled decay, whatever the optimizer; in LAMB it counts in the trust ratio.
        l2_regularization: λ of L2 regularisation, whatever the optimizer; in LARS it counts in the trust ratio as well.
        decay_all: apply both to norms and biases as well.
        **options: momentum, nesterov, dampening (sgd); betas, eps, amsgrad (adamw); momentum, alpha, eps, centered (rmsprop);
            momentum, trust_coefficient, eps (lars); betas, eps (lamb).

    Raises:
        UserError: see `check_optimizer`.
    """
    check_optimizer(kind, weight_decay=weight_decay, l2_regularization=l2_regularization, **options)
    groups = parameter_groups(module, decay_all=decay_all, weight_decay=l2_regularization, decoupled_decay=weight_decay)
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return OPTIMIZERS[kind](groups, lr=lr, **options)
