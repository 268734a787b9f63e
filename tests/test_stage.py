"""One stage at work: draws are seeded by name, and recomputation repeats nothing but activations."""

import copy
import random
from functools import partial

import numpy
import pytest
import torch
import torchvision
from runs import Net, blocks, classes, equal_states, fit, loader
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn.utils import parametrizations, spectral_norm
from torchmetrics import CatMetric, MeanMetric

from lightning_ipu.engine.recomputation import Recomputation, recompute_blocks
from lightning_ipu.engine.seeding import NamedRandomness
from lightning_ipu.loop.logs import LogRecorder, without_logs
from lightning_ipu.plan import PlanError

CPU = torch.device("cpu")


def recomputed(module: nn.Module, blocks: list[str]) -> Recomputation:
    """A module whose blocks are recomputed, at the beginning of a step."""
    randomness = NamedRandomness(module, seed=1, device=CPU)
    randomness.begin(0, 0, 0)
    return Recomputation(module, blocks, randomness=randomness, without_logs=partial(without_logs, LogRecorder(Net(lambda: nn.Identity()))))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def one_step(network: nn.Module, x: torch.Tensor, names: list[str] | None) -> dict[str, torch.Tensor]:
    """Output, gradients, state and the place in the random streams after one forward and backward."""
    network = copy.deepcopy(network)
    recomputed(network, names or [])
    output = network(x)
    output.square().mean().backward()
    gradients = {f"{name}.grad": p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {
        "output": output.detach(),
        "next draw": torch.tensor([torch.rand(()), numpy.random.rand(), random.random()]),
        **gradients,
        **state(network),
    }


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- Recomputation ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [None, ["0"]], ids=["stored", "recomputed"])
def test_batchnorm_counts_a_recomputed_batch_once(names):
    network = nn.Sequential(nn.BatchNorm1d(1, momentum=0.1))
    after = one_step(network, torch.tensor([[1.0], [3.0]]), names)

    assert after["0.running_mean"].item() == pytest.approx(0.2)
    assert after["0.running_var"].item() == pytest.approx(1.1)
    assert after["0.num_batches_tracked"].item() == 1


@pytest.mark.parametrize("grad", [True, False])
def test_statistics_still_move_in_a_training_forward_without_a_backward(grad):
    network = nn.Sequential(nn.BatchNorm1d(1))
    recomputed(network, ["0"])
    with torch.set_grad_enabled(grad):
        network(torch.tensor([[1.0], [3.0]]))
    assert network[0].running_mean.item() == pytest.approx(0.2) and network[0].num_batches_tracked.item() == 1

    network.eval()(torch.tensor([[1.0], [3.0]]))
    assert network[0].num_batches_tracked.item() == 1


class Counter(nn.Module):
    """Side effects of a user's block: a counter, an average put anew in its place, and draws from every stream but its own."""

    def __init__(self, average: torch.Tensor | None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", average)

    def forward(self, x):
        self.average = torch.zeros(8) if self.average is None else self.average
        x = self.linear(x) * self.average.add(1) + torch.rand(()) + nn.functional.dropout(x, 0.5, self.training)
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x


class StatisticsOfItsOwn(nn.BatchNorm1d):
    """A norm whose forward does not ask `track_running_stats`."""

    def forward(self, x):
        self.running_mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.running_mean


class Chance(nn.Module):
    """Leaves its layer out or scales it, as a draw from numpy's or Python's stream has it."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x):
        return x + self.linear(x) * self.draw() if self.draw() > 0.4 else x.square()


class Twice(nn.Module):
    """Calls one block two times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, x):
        return self.block(self.block(x))


NETWORKS = {
    "BatchNorm and dropout": (lambda: blocks(norm=True, dropout=0.5), ["0.0", "0.1", "0.2", "1"], (6, 8)),
    "momentum None": (lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))), ["0"], (6, 8)),
    "frozen BatchNorm": (lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval())), ["0"], (6, 8)),
    "InstanceNorm": (lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)), ["0"], (4, 3, 5)),
    "a norm of its own": (lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), StatisticsOfItsOwn(8))), ["0"], (6, 8)),
    "spectral norm": (lambda: nn.Sequential(nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)))), ["0"], (6, 8)),
    "spectral norm, old": (lambda: nn.Sequential(nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.ReLU())), ["0"], (6, 8)),
    "counter": (lambda: nn.Sequential(Counter(torch.ones(8)), Counter(None)), ["0", "1"], (6, 8)),
    "ranges for quantisation": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), FusedMovingAvgObsFakeQuantize(), nn.Linear(8, 8))),
        ["0"],
        (6, 8),
    ),
    "Python's draws": (lambda: nn.Sequential(*[Chance(lambda: random.random()) for _ in range(4)]), ["0", "1", "2", "3"], (6, 8)),
    "numpy's draws": (lambda: nn.Sequential(*[Chance(lambda: numpy.random.rand()) for _ in range(4)]), ["0", "1", "2", "3"], (6, 8)),
    "one block called twice": (lambda: nn.Sequential(Twice()), ["0.block"], (6, 8)),
    "LSTM": (lambda: Last(nn.LSTM(8, 8, 2, dropout=0.5)), ["rnn"], (5, 6, 8)),
    "ResNet": (
        partial(torchvision.models.resnet18, num_classes=5),
        ["conv1", "bn1", *(f"layer{k}.{b}" for k in (1, 2, 3, 4) for b in (0, 1))],
        (2, 3, 32, 32),
    ),
}


class Last(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0][-1]


@pytest.mark.parametrize("name", NETWORKS)
def test_recomputation_changes_no_bit_of_output_gradients_buffers_and_random_streams(name):
    make, names, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, x = make(), torch.randn(shape)
    if name == "ranges for quantisation":
        network(torch.randn(shape))  # which they begin with
    stored, again = one_step(network, x, None), one_step(network, x, names)

    assert equal(again, stored), [key for key in stored if not torch.equal(stored[key], again[key])]
    before = state(network)
    assert (
        next(network.buffers(), None) is None
        or name == "frozen BatchNorm"
        or any(not torch.equal(before[key], stored[key]) for key in before)
    )


def test_what_a_recomputed_block_logs_is_heard_once():
    class Telling(Net):
        def __init__(self):
            super().__init__()
            self.network[0][1].register_forward_hook(lambda *_: self.log("calls", 1.0, on_epoch=True, reduce_fx="sum"))

    for recompute in (False, True, ["network"]):
        trainer = fit(Telling(), loader(classes(24), 2), R=2, A=3, recompute=recompute)
        assert trainer.callback_metrics["calls_epoch" if "calls_epoch" in trainer.callback_metrics else "calls"].item() == 12


def test_a_layer_that_makes_tensors_of_the_default_type_makes_them_alike_in_a_recomputed_run():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.rand(8)

    modules = [Net(lambda: nn.Sequential(Noisy(8, 8), nn.Linear(8, 3))) for _ in range(2)]
    for module, recompute in zip(modules, (False, [r"network\.0"]), strict=True):
        fit(module, loader(classes(8, dtype=torch.float64), 4), recompute=recompute, precision="64-true")
    assert equal_states(*modules)


def test_metrics_in_a_recomputed_block_count_a_batch_once():
    class Measured(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.mean, self.all = nn.Linear(8, 8), MeanMetric(), CatMetric()

        def forward(self, x):
            x = self.inner(x)
            self.mean(x)
            self.all.update(x)
            return x.relu()

    values = {}
    for names in ([], ["0"]):
        torch.manual_seed(0)
        network = nn.Sequential(Measured(), nn.Linear(8, 3))
        recomputed(network, names)
        for _ in range(2):
            network(torch.randn(4, 8)).sum().backward()
            mean, everything = network[0].mean, network[0].all
        values[len(names)] = mean.compute(), mean._update_count, everything.compute(), everything._update_count
    assert len(values[1][2]) == 8 and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*values.values(), strict=True)
    )


@pytest.mark.parametrize("recompute", [True, ["network"], [r"network\.0\.\d", r"network\.1"]], ids=str)
def test_every_parameter_has_a_gradient_when_every_block_is_recomputed(recompute):
    class Watched(Net):
        def on_before_optimizer_step(self, optimizer):
            self.without = [name for name, p in self.named_parameters() if p.grad is None or not p.grad.any()]

    module = Watched(partial(blocks, norm=True))
    fit(module, loader(classes(16), 8), recompute=recompute)
    assert [name for name in module.without if "linear.bias" not in name] == []  # a bias before a BatchNorm has none


def test_recomputation_stores_less():
    def stored(names) -> int:
        network = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        recomputed(network, names)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            network(torch.randn(512, 64))
            return sum(sizes)

    assert stored(["0", "1", "2", "3"]) < stored([]) / 3


def test_blocks_have_their_own_forward_back_after_a_fit():
    module = Net()
    fit(module, loader(classes(8), 4), recompute=True)
    assert not any("forward" in vars(child) or child._forward_pre_hooks for child in module.modules())
    copied = copy.deepcopy(module)
    fit(copied, loader(classes(8), 4), recompute=["network"])
    assert not equal_states(module, copied)


@pytest.mark.parametrize(
    ("make", "recompute", "expected"),
    [
        (lambda: Net(blocks), True, ["network.0.0", "network.0.1", "network.0.2"]),
        (lambda: Net(blocks), False, []),
        (lambda: Net(blocks), [], []),
        (lambda: Net(blocks), [r"network\.0\.[02]"], ["network.0.0", "network.0.2"]),
        (lambda: Net(blocks), [r"network\.0", r".*linear"], ["network.0"]),
        (lambda: Net(torchvision.models.resnet18), True, [f"network.layer{k}.{b}" for k in (1, 2, 3, 4) for b in (0, 1)]),
    ],
)
def test_blocks_to_recompute_are_found_or_chosen_by_whole_names(make, recompute, expected):
    assert recompute_blocks(make(), recompute) == expected


@pytest.mark.parametrize(
    ("recompute", "message"),
    [(["network.0.9"], "'network.0.9' matches none"), (["linear"], "'linear' matches none"), (["network", "nothing"], "'nothing'")],
    ids=str,
)
def test_a_pattern_that_matches_nothing_is_refused(recompute, message):
    with pytest.raises(PlanError, match=message):
        recompute_blocks(Net(), recompute)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(PlanError, match=r"recompute pattern '\(' is no regular expression"):
        recompute_blocks(Net(), ["("])


def convolution(*channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(*channels, 3, padding=1), nn.BatchNorm2d(channels[1]), nn.ReLU(), nn.Dropout(0.3))


class Plain(nn.Module):
    """A CNN whose parts are attributes, in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = convolution(1, 4), convolution(4, 4), convolution(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.b(self.a(self.stem(x.reshape(-1, 1, 2, 4)))).mean((2, 3)))


class Direct(Net):
    """The same, with the parts on the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        parts = Plain()
        for name, part in parts.named_children():
            setattr(self, name, part)
        self.forward = partial(Plain.forward, self)


class Sided(nn.Module):
    """An encoder with a head that is built of layers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Plain(), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("make", "splits", "expected"),
    [
        (lambda: Net(Plain), [], ["network.stem", "network.a", "network.b"]),
        (Direct, [], ["stem", "a", "b"]),
        (Direct, ["a.1", "b"], ["stem", "b"]),
        (lambda: Net(Sided), [], ["network.encoder.stem", "network.encoder.a", "network.encoder.b", "network.head"]),
        (lambda: Net(blocks), ["network.0.1.linear"], ["network.0.0", "network.0.2"]),
        (lambda: Net(lambda: nn.Sequential(Plain(), nn.Flatten())), [], ["network.0.stem", "network.0.a", "network.0.b"]),
        (
            partial(Net, partial(torchvision.models.efficientnet_b0, num_classes=3)),
            ["network.features.1.0.block.1.fc1"],
            ["network.features.0", "network.features.1.0.block.0", "network.features.1.0.block.2", "network.features.2.0"],
        ),
        (lambda: Net(lambda: nn.Linear(8, 3)), [], []),
        (lambda: Net(lambda: nn.Sequential(nn.Linear(8, 8), parametrizations.weight_norm(nn.Linear(8, 3)))), [], []),
    ],
)
def test_the_outermost_composite_children_of_any_network_are_its_blocks_unless_a_stage_begins_inside(make, splits, expected):
    found = recompute_blocks(make(), True, splits)
    assert found[: len(expected)] == expected and (len(found) == len(expected) or "efficientnet" in str(make))


@pytest.mark.parametrize("make", [lambda: Net(Plain), Direct])
def test_recomputing_a_plain_cnn_stores_less_and_changes_no_bit(make):
    states = []
    for recompute in (False, True):
        module, sizes = make(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            fit(module, loader(classes(24), 4), R=2, A=3, recompute=recompute)
        states.append((module, sum(sizes)))
    (stored, most), (recomputed, least) = states
    assert equal_states(stored, recomputed) and stored.losses == recomputed.losses and least < 0.7 * most


def test_a_network_of_bare_layers_is_left_alone_with_a_remark(caplog):
    bare, stored = (Net(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))) for _ in "ab")
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        fit(bare, loader(classes(8), 4), recompute=True)
    fit(stored, loader(classes(8), 4))
    assert "recompute=True recomputes nothing in Net: it is built of bare layers alone" in caplog.text and equal_states(bare, stored)


def test_a_container_that_is_never_called_stands_for_its_members():
    network = nn.Sequential()
    network.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert recompute_blocks(network, ["layers"]) == ["layers.0", "layers.1"]


# ---- Randomness -------------------------------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """A user's layer that draws with torch's functions, or with others'."""

    def __init__(self, draw=lambda size: torch.rand(size, 1)):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * (self.draw(len(x)) > 0.5)


def from_numpy(size):
    return torch.from_numpy(numpy.random.rand(size, 1))


def from_python(size):
    return torch.tensor([[random.random()] for _ in range(size)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Dropout(0.5),
        DropPath,
        partial(DropPath, from_numpy),
        partial(DropPath, from_python),
        nn.RReLU,
        lambda: torchvision.ops.StochasticDepth(0.5, "row"),
        lambda: nn.AlphaDropout(0.3),
    ],
)
def test_a_layers_draws_are_named_after_it_its_place_in_the_run_and_its_call(make):
    def draws(before: list[nn.Module], update=0, replica=0, micro_batch=0, seed=1):
        network = nn.ModuleDict({**{f"before{k}": module for k, module in enumerate(before)}, "layer": make()})
        randomness = NamedRandomness(network, seed=seed, device=CPU)
        randomness.begin(update, replica, micro_batch)
        for module in before:
            module(torch.ones(5, 8))
        both = [network["layer"](-torch.ones(32, 8)) for _ in range(2)]
        randomness.end()
        return both

    first, second = draws([])
    assert not torch.equal(first, second)
    for again in (draws([]), draws([nn.Dropout(0.5)]), draws([DropPath(from_numpy), DropPath(from_python), nn.Dropout(0.1)])):
        assert torch.equal(again[0], first) and torch.equal(again[1], second)
    others = [draws([], **place)[0] for place in ({"update": 1}, {"replica": 1}, {"micro_batch": 1}, {"seed": 2})]
    for k, other in enumerate(others):
        assert not torch.equal(other, first) and not any(torch.equal(other, later) for later in others[k + 1 :])


def test_layers_of_other_names_draw_other_numbers():
    network = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    NamedRandomness(network, seed=1, device=CPU).begin(0, 0, 0)
    assert not torch.equal(network[0](torch.ones(64)), network[1](torch.ones(64)))


def test_a_step_begins_with_all_streams_seeded():
    randomness = NamedRandomness(nn.Linear(1, 1), seed=1, device=CPU)

    def draw(*place):
        randomness.begin(*place)
        return torch.rand(()).item(), numpy.random.rand(), random.random()

    assert draw(3, 1, 2) == draw(3, 1, 2)
    streams = [draw(update, replica, micro_batch) for update in range(3) for replica in range(3) for micro_batch in range(3)]
    assert all(len(set(numbers)) == 27 for numbers in zip(*streams, strict=True))


def test_nothing_is_drawn_anew_in_evaluation():
    network = nn.Sequential(nn.Dropout(0.5)).eval()
    NamedRandomness(network, seed=1, device=CPU).begin(0, 0, 0)
    torch.manual_seed(5)
    network(torch.ones(3))
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(5))
