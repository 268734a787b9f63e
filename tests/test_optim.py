"""Optimizers by name against formulas written out in float64, and which parameters decay."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_ipu.recipe.optimizers import LARS, OPTIMIZERS, SGDWithDecoupledDecay, build_optimizer, check_optimizer, parameter_groups

LR, DECAY, L2 = 0.05, 0.3, 0.2
BETA1, BETA2, ALPHA = 0.9, 0.999, 0.99


def sgd(w, g, s, k, rate):
    return rate * g


def momentum(w, g, s, k, rate):
    s["v"] = 0.9 * s.get("v", 0) + g
    return rate * s["v"]


def nesterov(w, g, s, k, rate):
    s["v"] = 0.9 * s.get("v", 0) + g
    return rate * (g + 0.9 * s["v"])


def adam(w, g, s, k, rate):
    s["m"] = BETA1 * s.get("m", 0) + (1 - BETA1) * g
    s["v"] = BETA2 * s.get("v", 0) + (1 - BETA2) * g**2
    return rate * (s["m"] / (1 - BETA1**k)) / ((s["v"] / (1 - BETA2**k)).sqrt() + 1e-8)


def rmsprop(w, g, s, k, rate):
    s["v"] = ALPHA * s.get("v", 0) + (1 - ALPHA) * g**2
    s["b"] = 0.5 * s.get("b", 0) + g / (s["v"].sqrt() + 1e-8)
    return rate * s["b"]


FORMULAS = {
    "sgd": ("sgd", {}, sgd),
    "momentum": ("sgd", {"momentum": 0.9}, momentum),
    "nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}, nesterov),
    "adamw": ("adamw", {"betas": [BETA1, BETA2]}, adam),
    "rmsprop": ("rmsprop", {"momentum": 0.5}, rmsprop),
}


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def set_gradients(module: nn.Module, update: int) -> None:
    torch.manual_seed(1000 + update)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize(("weight_decay", "l2"), [(0, 0), (DECAY, 0), (0, L2), (DECAY, L2)])
@pytest.mark.parametrize("name", FORMULAS)
def test_decay_is_beside_the_optimizer_and_l2_goes_through_it_both_at_the_scheduled_rate(name, weight_decay, l2, decay_all):
    kind, options, direction = FORMULAS[name]
    module = network()
    expected, states = [p.detach().clone() for p in module.parameters()], [{} for _ in module.parameters()]
    optimizer = build_optimizer(module, kind, lr=LR, weight_decay=weight_decay, l2_regularization=l2, decay_all=decay_all, **options)

    for k in range(1, 5):
        rate = LR / k  # a schedule
        for group in optimizer.param_groups:
            group["lr"] = rate
        set_gradients(module, k)
        optimizer.step()
        for w, p, state in zip(expected, module.parameters(), states, strict=True):
            decays = decay_all or p.ndim > 1
            step = direction(w, p.grad + l2 * decays * w, state, k, rate)
            w -= step + rate * weight_decay * decays * w

    for w, p in zip(expected, module.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("weight_decay", "l2", "eps"), [(0.0, 0.0, 0.0), (DECAY, L2, 1e-7)])
def test_lars_follows_its_formula_and_adapts_neither_norms_nor_biases(weight_decay, l2, eps):
    module = network()
    nn.init.zeros_(module[2].weight)  # its first update has no norm to go by
    optimizer = build_optimizer(
        module, "lars", lr=LR, momentum=0.9, trust_coefficient=0.02, eps=eps, weight_decay=weight_decay, l2_regularization=l2
    )
    expected, velocity = [p.detach().clone() for p in module.parameters()], [0.0] * 6
    for k in range(1, 5):
        for group in optimizer.param_groups:
            group["lr"] = rate = LR / k
        set_gradients(module, k)
        optimizer.step()
        for index, (w, p) in enumerate(zip(expected, module.parameters(), strict=True)):
            matrix = p.ndim > 1
            trust = 1.0
            if matrix and w.norm() > 0:
                trust = 0.02 * w.norm() / (p.grad.norm() + l2 * w.norm() + eps)
            velocity[index] = 0.9 * velocity[index] + rate * trust * (p.grad + l2 * matrix * w)
            w -= velocity[index] + rate * weight_decay * matrix * w

    for w, p in zip(expected, module.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("weight_decay", "l2"), [(0.0, 0.0), (DECAY, L2)])
def test_lamb_follows_its_formula_and_adapts_neither_norms_nor_biases(weight_decay, l2):
    module = network()
    nn.init.zeros_(module[2].weight)  # its first update has no norm to go by
    optimizer = build_optimizer(module, "lamb", lr=LR, betas=[0.8, 0.9], eps=1e-3, weight_decay=weight_decay, l2_regularization=l2)
    expected, means, squares = [p.detach().clone() for p in module.parameters()], [0.0] * 6, [0.0] * 6
    for k in range(1, 5):
        for group in optimizer.param_groups:
            group["lr"] = rate = LR / k
        set_gradients(module, k)
        optimizer.step()
        for index, (w, p) in enumerate(zip(expected, module.parameters(), strict=True)):
            matrix = p.ndim > 1
            gradient = p.grad + l2 * matrix * w
            means[index] = 0.8 * means[index] + 0.2 * gradient
            squares[index] = 0.9 * squares[index] + 0.1 * gradient**2
            change = means[index] / (1 - 0.8**k) / ((squares[index] / (1 - 0.9**k)).sqrt() + 1e-3) + weight_decay * matrix * w
            w -= rate * (w.norm() / change.norm() if matrix and w.norm() > 0 else 1.0) * change

    for w, p in zip(expected, module.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


def test_adamw_is_torchs():
    ours, theirs = network(), network()
    optimizer = build_optimizer(ours, "adamw", lr=LR, weight_decay=DECAY, decay_all=True)
    reference = torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=DECAY)
    for k in range(4):
        for module, stepped in ((ours, optimizer), (theirs, reference)):
            set_gradients(module, k)
            stepped.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_closures_hooks_checkpoints_and_parameters_without_gradient_work_as_in_torchs_optimizers(kind):
    if kind != "lamb":  # all of it is one class
        OPTIMIZERS[kind].__mro__[2]([nn.Parameter(torch.zeros(1))], lr=1.0)  # torch now has wrapped that class's own step
    module = network()
    optimizer = build_optimizer(module, kind, lr=LR, weight_decay=DECAY)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        optimizer.zero_grad()
        loss = module[0](torch.ones(1, 4).double()).sum()  # the other layers get no gradient
        loss.backward()
        return loss.item()

    untouched = module[2].weight.detach().clone()
    first = optimizer.step(closure)
    assert isinstance(first, float) and calls == ["before", "after"] and torch.equal(module[2].weight, untouched)

    twin = network()
    twin.load_state_dict(module.state_dict())
    restored = build_optimizer(twin, kind, lr=1.0)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for which, stepped in ((module, optimizer), (twin, restored)):
        set_gradients(which, 7)
        stepped.step()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), twin.parameters(), strict=True))


def test_groups_put_what_is_one_dimensional_apart_and_leave_out_what_is_frozen():
    module = network()
    module[0].weight.requires_grad_(False)
    decaying, others = parameter_groups(module, weight_decay=0.1, decoupled_decay=0.2)
    assert decaying == {"params": [module[2].weight], "weight_decay": 0.1, "decoupled_decay": 0.2}
    assert [p.ndim for p in others.pop("params")] == [1] * 4 and others == {"weight_decay": 0.0, "decoupled_decay": 0.0}
    (everything,) = parameter_groups(module, decay_all=True, weight_decay=0.1)
    assert len(everything["params"]) == 5


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sgdm", {}, "optimizer='sgdm' is unknown: choose from sgd, adamw, rmsprop, lars, lamb"),
        ("adamw", {"momentum": 0.9}, "momentum=0.9 means nothing to optimizer='adamw', which takes betas, eps, amsgrad"),
        ("lars", {"nesterov": True}, "nesterov=True means nothing to optimizer='lars'"),
        ("sgd", {"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ("sgd", {"nesterov": True}, "nesterov=True needs momentum above 0"),
        ("sgd", {"weight_decay": -1e-4}, "weight_decay=-0.0001 must be at least 0"),
        ("sgd", {"l2_regularization": math.nan}, "l2_regularization=nan must be at least 0"),
        ("rmsprop", {"alpha": 1.5}, "alpha=1.5 must be"),
        ("adamw", {"betas": [0.9]}, r"betas=\[0.9\] must be two numbers"),
        ("lars", {"trust_coefficient": -1}, "trust_coefficient=-1 must be at least 0"),
    ],
)
def test_wrong_options_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        check_optimizer(kind, **options)


def test_the_classes_take_groups_of_their_own_and_later_ones():
    first, second, third = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    optimizer = SGDWithDecoupledDecay([{"params": [first], "decoupled_decay": 0.5}, {"params": [second]}], lr=1.0, decoupled_decay=0.25)
    optimizer.add_param_group({"params": [third]})
    for parameter in (first, second, third):
        parameter.grad = torch.zeros(2, 2)
    optimizer.step()
    assert [p[0, 0].item() for p in (first, second, third)] == [0.5, 0.75, 0.75]
    assert LARS([first], lr=0.1).param_groups[0]["trust_coefficient"] == 0.001
