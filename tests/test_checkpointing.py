"""A network's own torch.utils.checkpoint: what is computed a second time draws what it drew the first time."""

import random
from functools import partial

import numpy
import pytest
import torch
from runs import Net, classes, difference, equal_states, fit, loader, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ipu.engine.buffers import BackwardWatch


class Scaled(nn.Module):
    """A layer of one's own that draws from torch's, numpy's and Python's streams."""

    def forward(self, x):
        return x * (torch.rand((), dtype=x.dtype) + float(numpy.random.rand()) + random.random()) / 2 if self.training else x


class Part(nn.Module):
    """Linear in its input; calls one dropout twice and a layer of one's own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.drop, self.own = nn.Linear(width, width, bias=False), nn.Dropout(0.4), Scaled()

    def forward(self, x):
        return self.drop(self.own(self.drop(self.linear(x))))


class Checkpointed(nn.Module):
    """Three parts, of which one is called again, run as they are or under checkpoints, one by one or one within another."""

    def __init__(self, how: str | None, reentrant: bool) -> None:
        super().__init__()
        self.parts, self.drop, self.head = nn.ModuleList(Part() for _ in range(3)), nn.Dropout(0.2), nn.Linear(8, 3, bias=False)
        self.how, self.reentrant = how, reentrant

    def run(self, function, *values):
        return checkpoint(function, *values, use_reentrant=self.reentrant) if self.how else function(*values)

    def forward(self, x):
        first, second, third = self.parts
        x = self.drop(x)
        if self.reentrant:
            x = x.clone().requires_grad_()
        if self.how == "nested":
            x = self.run(lambda x: self.run(second, self.drop(self.run(first, x))), x)
        else:
            x = self.run(second, self.run(self.drop, self.run(first, x)))
        x = self.run(third, self.run(first, x))
        return self.head(self.drop(x))


def trained(how: str | None, reentrant: bool = False, **plan) -> Net:
    module = Net(lambda: Checkpointed(how, reentrant), partial(torch.optim.SGD, lr=0.02))
    fit(module, loader(classes(24, dtype=torch.float64), 2), precision="64-true", **plan)
    return module


PLANS = [{}, {"R": 2, "A": 3, "D": 2}, {"A": 2, "num_stages": 2}, {"A": 3, "recompute": ["network.parts.1", "network.drop"]}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_checkpoint_of_ones_own_changes_no_number_of_a_run_with_dropout(plan):
    without = trained(None, **plan)
    for how in ("one by one", "nested"):
        for reentrant in (False, True):
            ours = trained(how, reentrant, **plan)
            assert ours.losses == pytest.approx(without.losses, rel=1e-9), (
                how,
                reentrant,
            )  # gradients of a part called twice: in another order
            assert difference(weights(ours), weights(without)) < 1e-9 and equal_states(ours, without) >= (
                how == "one by one" and not reentrant
            )


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_gradients_of_a_checkpointed_dropout_are_those_of_the_mask_of_the_forward(reentrant):
    class Linear(Net):
        """The loss is linear in w: it is the product of w and its gradient."""

        def __init__(self):
            super().__init__(nn.Identity)
            self.w, self.drop, self.pairs = nn.Parameter(torch.rand(64)), nn.Dropout(0.5), []

        def training_step(self, batch, batch_idx):
            self.loss = checkpoint(lambda w: self.drop(self.drop(w)), self.w, use_reentrant=reentrant).mean() + self.drop(self.w).mean()
            return self.loss

        def on_before_optimizer_step(self, optimizer):
            self.pairs.append((self.loss.item(), (self.w.grad @ self.w.detach()).item()))

    module = Linear()
    fit(module, loader(classes(4)))
    assert len({loss for loss, _ in module.pairs}) == 4 and all(b == pytest.approx(a, rel=1e-5) for a, b in module.pairs)


def test_statistics_inside_a_checkpoint_of_ones_own_move_as_in_plain_pytorch():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(checkpoint(self.part, x, use_reentrant=False))

    module, plain = Net(Normed), Net(Normed)
    fit(module, loader(classes(8), 4))
    optimizer = plain.configure_optimizers()
    for batch in loader(classes(8), 4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(batch[0]), batch[1]).backward()
        optimizer.step()
    assert equal_states(module, plain) and int(module.network.part[1].num_batches_tracked) == 4
    stored = Net(Normed)
    fit(stored, loader(classes(8), 4), recompute=True)
    assert equal_states(stored, module)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, affine=True, track_running_stats=True), nn.LayerNorm], ids=str)
def test_a_backward_pass_that_changes_buffers_is_noticed(norm, reentrant):
    network = nn.Sequential(nn.Conv1d(4, 4, 1), norm(4))
    watch = BackwardWatch(network, {name for name, _ in network.named_buffers()})
    x = torch.randn(4, 4, 4, requires_grad=True)
    found = []
    for run in (network, partial(checkpoint, network, use_reentrant=reentrant)):
        watch.changed, watch._is_first = "", True
        output, before = run(x), [buffer.clone() for buffer in network.buffers()]
        with watch.watching():
            output.sum().backward()
        assert bool(watch.changed) != all(map(torch.equal, before, network.buffers()))
        found.append(watch.changed)
    assert not found[0] and (norm is not nn.BatchNorm1d or found[1])
