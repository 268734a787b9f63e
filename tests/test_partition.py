"""Names and numbers of stages are checked before anything runs; stages give the network's numbers; every refusal says what would be legal."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import pytorch_lightning as pl
import torch
from runs import Net, blocks, classes, fit, loader
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from lightning_ipu.cutting.balance import balanced_splits, choose_cuts
from lightning_ipu.cutting.partition import cut
from lightning_ipu.cutting.splits import check_num_stages, check_splits
from lightning_ipu.engine.recomputation import Recomputation
from lightning_ipu.engine.seeding import NamedRandomness
from lightning_ipu.engine.stages import StageState
from lightning_ipu.loop.logs import LogRecorder, without_logs
from lightning_ipu.plan import PlanError
from resnet_ipu.module import ResNetModule
from resnet_ipu.networks import resnet


class TwoPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = blocks(depth=2)


@pytest.mark.parametrize("splits", [[], ["network.1"], ["network.0.1"], ["network.0.0.drop", "network.0.1.linear", "network.1"]], ids=str)
def test_submodules_in_their_order_begin_stages(splits):
    check_splits(TwoPart(), splits)


@pytest.mark.parametrize(
    ("splits", "parts"),
    [
        (["layer9"], ["'layer9'", "TwoPart", "network"]),
        (["network.0.7"], ["'network.0.7'", "network.0.1"]),
        ([""], ["''"]),
        (["network.1", "network.1"], ["'network.1'", "twice"]),
        (["network.1", "network.0.1"], ["'network.0.1'", "after", "order"]),
        (["network.0.1", "network.0.1.linear"], ["same place", "empty"]),
        (["network"], ["first stage would be empty"]),
        (["network.0.0"], ["first stage would be empty"]),
        (["network.0.0.linear"], ["first stage would be empty"]),
    ],
    ids=str,
)
def test_a_split_that_cannot_begin_a_stage_is_refused_with_what_would_be_right(splits, parts):
    with pytest.raises(PlanError) as refusal:
        check_splits(TwoPart(), splits)
    assert "\n" not in str(refusal.value) and "pipeline_splits" in str(refusal.value)
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_more_stages_than_layers_with_parameters_are_refused():
    check_num_stages(TwoPart(), 3)
    with pytest.raises(PlanError, match=r"num_stages=4 is more than the 3 layers .* TwoPart"):
        check_num_stages(TwoPart(), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_splits": ["layer9"]}, "pipeline_splits='layer9'"),
        ({"num_stages": 9}, "num_stages=9"),
        ({"num_stages": 3, "pipeline_splits": ["network.1"]}, "num_stages=3 contradicts pipeline_splits"),
        ({"pipeline_schedule": "zigzag"}, "pipeline_schedule='zigzag' is unknown; legal are 1F1B"),
    ],
    ids=str,
)
def test_a_fit_refuses_wrong_stages_before_its_first_step(options, message):
    module = Net()
    with pytest.raises(PlanError, match=message):
        fit(module, loader(classes(8)), **options)
    assert not module.seen


# ---- Cuts: stages one after the other are the whole network, to the last bit -------------------------------------------------


class SkipNet(nn.Module):
    """U-shaped: what the first blocks made is needed by the last ones."""

    def __init__(self, norm):
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 8, norm), self.block(8, 8, norm), self.block(8, 8, norm)])
        self.up = nn.ModuleList([self.block(16, 8, norm), self.block(16, 8, norm)])
        self.head = nn.Conv2d(8 + 3, 4, 1)

    @staticmethod
    def block(inputs, outputs, norm):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm(outputs), nn.ReLU(inplace=True), nn.Dropout(0.3))

    def forward(self, x):
        kept = []
        y = x
        for block in self.down:
            y = block(y)
            kept.append(y)
            y = F.max_pool2d(y, 2)
        for block, skip in zip(self.up, [kept[1], kept[0]], strict=True):
            y = F.interpolate(y, size=skip.shape[-2:])
            y = F.interpolate(block(torch.cat([y, skip], 1)), scale_factor=2)
        return self.head(torch.cat([y, F.interpolate(x, size=y.shape[-2:])], 1))


class Branchy(nn.Module):
    """Everything at once: nested inputs and outputs, constants, integers, state of its own, gradients off, in place at the cut."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mix = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.randn(8))
        self.out = nn.Linear(8, 3)

    def forward(self, batch, *, flip=False, weight=None):
        words, (numbers, extra) = batch["words"], batch["rest"]
        count, length = words.shape
        place = torch.arange(length, device=words.device).float()[None, :, None] / length
        x = self.embed(words) + place
        with torch.no_grad():
            numbers = self.frozen(numbers)
        x = x + numbers
        if flip and count > 1:
            x = x.flip(1)
        attended, weights = self.attend(x, x, x)
        y = self.mix(attended + extra["a"])
        y[:, 0] = 0
        y = y.gather(2, words[..., None].clamp(max=7).expand(-1, -1, 8)) + place * self.scale + self.shift
        first, *_ = y.unbind(1)
        y = -((y.abs() + 1) ** 2) / 2 + torch.linspace(0, 1, 8, dtype=y.dtype)
        return {"logits": self.out(y), "first": (first, weights.detach()), "x": x, "count": count, "weight": weight}


class Grows(nn.Module):
    """Another forward in training than in evaluation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        x = self.b(x)
        return (self.c(x), x) if self.training else self.c(x)


class Wilful(nn.Module):
    """Branches on data, keeps a count, draws by itself: allowed in a submodule without a cut inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


def branchy_call():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 11, (3, 5), generator=generator)
    tensors = [torch.randn(3, 5, 8, generator=generator) for _ in range(3)]
    return ({"words": words, "rest": (tensors[0], {"a": tensors[1]})},), {"flip": True, "weight": tensors[2]}


def image_call(batch=3, side=16):
    return (torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1)),), {}


def loss_of(output):
    return sum(
        value.double().square().sum() for value in tree_flatten(output)[0] if isinstance(value, torch.Tensor) and value.requires_grad
    )


def result(module, output):
    """Output, gradients and state after a step; the gradients are taken away."""
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return output, gradients, {name: value.clone() for name, value in module.state_dict().items()}


def run_whole(module, args, kwargs, randomness):
    randomness.begin(0, 0, 0)
    output = module(*args, **kwargs)
    loss_of(output).backward()
    return result(module, output)


def run_staged(partition, groups, module, args, kwargs, randomness):
    """Stage after stage on leaves of its own, then backward, as a pipeline does it."""
    randomness.begin(0, 0, 0)
    values, runs = partition.flatten(*args, **kwargs), []
    for stage in [partition.stage(*group) for group in groups]:
        leaves = [value.detach().requires_grad_(spec.requires_grad) for value, spec in zip(values, stage.inputs, strict=True)]
        values = stage(*leaves)
        runs.append((leaves, values))
    output = partition.restore(values)
    loss_of(output).backward()
    for (_, results), (leaves, _) in reversed(list(itertools.pairwise(runs))):
        pairs = [(value, leaf.grad) for value, leaf in zip(results, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))
    return result(module, output)


def assert_same(left, right):
    leaves, tree = tree_flatten(left)
    others, other_tree = tree_flatten(right)
    assert tree == other_tree
    for one, other in zip(leaves, others, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def through(partition, *args, **kwargs):
    """The output of stage after stage."""
    values = partition.flatten(*args, **kwargs)
    for stage in partition.stages:
        values = stage(*values)
    return partition.restore(values)


CASES = {
    "8": (lambda: resnet("8", num_classes=10), ["layer2.0.bn2", "layer3"], image_call),
    "20": (lambda: resnet("20", num_classes=10), ["layer1.1.conv2", "layer2.0.conv2", "layer3.0.bn2"], image_call),
    "18-group": (lambda: resnet("18", num_classes=10, norm="group"), ["layer2.0.bn1", "layer4"], image_call),
    "34-imagenet": (lambda: resnet("34", num_classes=10, stem="imagenet"), ["layer3.2"], lambda: image_call(2, 64)),
    "50": (lambda: resnet("50", num_classes=10), ["layer2.0.conv2", "layer3", "fc"], lambda: image_call(2)),
    "x50": (lambda: resnet("x50", num_classes=10), ["layer1.0.downsample", "layer3.4.conv3"], lambda: image_call(2)),
    "u-net": (lambda: SkipNet(nn.BatchNorm2d), ["down.1", "down.2.3", "up.0.1", "up.1", "head"], image_call),
    "u-net-group": (lambda: SkipNet(lambda width: nn.GroupNorm(2, width)), ["down.2", "head"], image_call),
    "branchy": (Branchy, ["frozen", "attend", "mix", "out"], branchy_call),
    "branchy-2": (Branchy, ["mix.1", "out"], branchy_call),
    "branch on data": (lambda: nn.Sequential(nn.Linear(4, 4), Wilful(), nn.Linear(4, 4)), ["1", "2"], lambda: ((torch.ones(2, 4),), {})),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CASES)
def test_stages_are_the_network_to_the_last_bit(name, training):
    make, splits, call = CASES[name]
    module = make().train(training)
    args, kwargs = call()
    randomness = NamedRandomness(module, seed=3, device=torch.device("cpu"))
    start = {key: value.clone() for key, value in module.state_dict().items()}
    stream = torch.get_rng_state()
    partition = cut(module, args, kwargs, splits=splits, training=training)
    assert torch.equal(torch.get_rng_state(), stream) and module.training == training
    assert_same(dict(module.state_dict()), start)

    whole = run_whole(module, args, kwargs, randomness)
    count = len(partition)
    for groups in ([(place,) for place in range(count)], [(0, count - 1)], [(0, 0), (1, count - 1)]):
        module.load_state_dict(start)
        assert_same(run_staged(partition, groups, module, args, kwargs, randomness), whole)

    parameters, buffers = ({name for name, _ in found()} for found in (module.named_parameters, module.named_buffers))
    assert sum(map(len, partition.parameters)) == len(parameters) and set().union(*partition.parameters) == parameters
    assert sum(map(len, partition.buffers)) == len(buffers) and set().union(*partition.buffers) == buffers
    for stage, names, buffer_names in zip(partition.stages, partition.parameters, partition.buffers, strict=True):
        assert {name: id(tensor) for name, tensor in stage.named_parameters()} == {name: id(module.get_parameter(name)) for name in names}
        assert {name for name, _ in stage.named_buffers()} == buffer_names


def test_a_forward_that_differs_in_training_is_cut_for_each():
    module, x = Grows(), torch.randn(2, 4)
    for training, results in ((True, 2), (False, 1)):
        module.train(training)
        partition = cut(module, (x.to("meta"),), splits=["b"], training=training)
        assert len(partition.boundaries[-1]) == results
        assert_same(through(partition, x), module(x))


@pytest.mark.parametrize("autocast", [False, True], ids=["32 bit", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_boundaries_are_known_before_anything_runs(autocast, channels_last):
    def context():
        return torch.autocast("cpu", torch.bfloat16, enabled=autocast)

    module = ResNetModule(size="18", channels_last=channels_last)
    x = image_call()[0][0]
    partition = cut(module, (x.to("meta"),), splits=["network.layer1.1.bn2", "network.layer2.0.conv2", "network.layer4"], context=context)
    values = partition.flatten(x)
    for place, stage in enumerate(partition.stages):
        with context():
            values = stage._network["run"](*values)  # before it is made to fit
        assert [(v.shape, v.stride(), v.dtype, v.requires_grad) for v in values] == [
            (b.shape, b.stride(), b.dtype, b.requires_grad) for b in partition.boundaries[place + 1]
        ]
    assert partition.boundaries[1][1].dtype == (torch.bfloat16 if autocast else torch.float32)


def test_only_what_is_needed_later_crosses_and_only_what_is_learnt_from_wants_gradients():
    args, kwargs = branchy_call()
    partition = cut(Branchy(), args, kwargs, splits=["mix", "out"])
    first, second = ({(tuple(b.shape), b.dtype, b.requires_grad) for b in boundary} for boundary in partition.boundaries[1:3])
    assert ((3, 5), torch.int64, False) in first and ((3, 5), torch.int64, False) not in second
    assert len(partition.boundaries[1]) == 5  # words, weight, x, attended + extra, weights
    assert len(partition.boundaries[2]) == 5  # weight, x, weights, y, first
    assert [b.requires_grad for b in partition.boundaries[1]].count(True) == 3


def test_recomputed_blocks_and_hooks_of_the_network_work_in_its_stages():
    module = SkipNet(nn.BatchNorm2d)
    seen = []
    module.up[1].register_forward_hook(lambda *_: seen.append(1))
    args, kwargs = image_call()
    randomness = NamedRandomness(module, seed=3, device=torch.device("cpu"))
    start = {key: value.clone() for key, value in module.state_dict().items()}
    whole = run_whole(module, args, kwargs, randomness)
    module.load_state_dict(start)
    blocks = ["down.0", "down.1", "up.0", "up.1"]
    Recomputation(module, blocks, randomness=randomness, without_logs=partial(without_logs, LogRecorder(ResNetModule(size="8"))))
    partition = cut(module, args, kwargs, splits=["down.2.1", "up.1"])
    seen.clear()
    assert_same(run_staged(partition, [(0,), (1,), (2,)], module, args, kwargs, randomness), whole)
    assert seen == [1]
    with pytest.raises(PlanError, match="'up.0' has hooks, is recomputed or is compiled as a whole"):
        cut(module, args, kwargs, splits=["up.0.1"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 4)}, r"given float32\[2, 4\] where the network was cut for float32\[3, 4\].* one shape"),
        ({"x": torch.randn(3, 4).double()}, "float64"),
        ({"flag": True}, r"called with .*'flag': True.* cut for .*'flag': False"),
    ],
    ids=["shape", "dtype", "flag"],
)
def test_a_call_unlike_the_one_that_was_cut_is_refused(change, message):
    class Flagged(nn.Sequential):
        def forward(self, x, *, flag):
            return -super().forward(x) if flag else super().forward(x)

    call = {"x": torch.randn(3, 4), "flag": False}
    partition = cut(Flagged(nn.Linear(4, 4), nn.Linear(4, 4)), (), call, splits=["1"])
    with pytest.raises(PlanError, match=message):
        partition.flatten(**{**call, **change})


class Forward(nn.Module):
    """Three layers under a forward that is given."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.Dropout()
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.unused = nn.Linear(4, 4)
        self.function, self.calls, self.seen = forward, 0, []

    def forward(self, x):
        return self.function(self, x)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def twice(net, x):
    x = net.b(net.a(x))
    return net.c(net.b(x))


def keeps(net, x):
    net.latest = net.a(x)
    return net.c(net.b(net.latest))


def counts(net, x):
    net.calls += 1
    return net.c(net.b(net.a(x)))


def collects(net, x):
    net.seen.append(x.shape)
    return net.c(net.b(net.a(x)))


def freezes(net, x):
    net.drop.eval()
    return net.c(net.b(net.drop(net.a(x))))


def by_chance(draw):
    return lambda net, x: net.c(net.b(net.a(x)) if draw() > 0.5 else net.a(x))


def alias(net, x):
    y = net.a(x)
    z = y[:, :2]
    y = net.b(y) + y.mul_(2)
    return net.c(y), z


@pytest.mark.parametrize(
    ("forward", "splits", "parts"),
    [
        (lambda net, x: net.c(net.b(net.a(x))), ["layer9"], ["'layer9'", "near names"]),
        (lambda net, x: net.c(net.b(net.a(x))), ["b", "b"], ["'b'", "twice"]),
        (lambda net, x: net.b(net.c(net.a(x))), ["b", "c"], ["'c' after 'b'", "['c', 'b']"]),
        (lambda net, x: net.c(net.b(net.a(x))), ["unused"], ["'unused'", "not called"]),
        (lambda net, x: net.c(net.b(net.a(x))), ["a"], ["stage 0 (before 'a') empty"]),
        (lambda net, x: net.c(net.b(net.a(x))), ["b", "b.0"], ["stage 1 (before 'b.0') empty"]),
        (twice, ["b"], ["'b'", "called 2 times"]),
        (twice, ["c"], []),
        (lambda net, x: net.c(net.b(net.a(x))) if x.sum() > 0 else x, ["b"], ["looks at the values", "__bool__", "submodule"]),
        (lambda net, x: net.c(F.dropout(net.b(net.a(x)), training=net.training)), ["b"], ["dropout", "nn.Dropout"]),
        (lambda net, x: net.c(net.b(net.a(x)) + torch.rand(4)), ["b"], ["rand", "nn.Dropout"]),
        (lambda net, x: net.c(net.drop(net.b(net.drop(net.a(x))))), ["b"], ["'drop'", "stages 0 and 1"]),
        (lambda net, x: net.tied(net.b(net.a(x))), ["tied"], ["parameter 'a.weight' = 'tied.weight'", "stages 0 and 1"]),
        (lambda net, x: net.norm(net.b(net.norm(net.a(x)))), ["b"], ["buffer 'norm.running_mean'", "stages 0 and 1"]),
        (lambda net, x: net.c(net.b(net.a(x)) @ net.a.weight), ["b"], ["'a.weight'", "stages 0 and 1"]),
        (lambda net, x: net.c(Doubling.apply(net.b(net.a(x)))), ["b"], ["autograd.Function"]),
        (by_chance(random.random), ["b"], ["random numbers by random,", "submodule of its own"]),
        (by_chance(numpy.random.rand), ["b"], ["random numbers by numpy.random,", "submodule of its own"]),
        (keeps, ["b"], ["sets 'latest'", "submodule"]),
        (counts, ["b"], ["sets 'calls'"]),
        (collects, ["b"], ["changes what seen holds"]),
        (freezes, ["b"], ["sets 'drop.training'"]),
        (alias, ["b"], ["before 'b'", "share memory", "in place"]),
        (alias, ["c"], []),
        (lambda net, x: 3, ["b"], ["returns no tensor"]),
        (lambda net, x: (net.c(net.b(net.a(x))), object()), ["b"], ["returns a object"]),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_name_and_what_to_do(forward, splits, parts):
    net, x = Forward(forward), torch.randn(3, 4)
    if not parts:
        assert_same(through(cut(net, (x,), splits=splits), x), net(x))
        return
    with pytest.raises(PlanError) as refusal:
        cut(net, (x,), splits=splits)
    assert "\n" not in str(refusal.value)
    assert all(part in str(refusal.value) for part in parts), refusal.value
    assert (
        nn.Module.__call__ is nn.Module._wrapped_call_impl
        and "__getattribute__" not in vars(nn.Module)
        and net.norm.num_batches_tracked == 0
        and not hasattr(net, "latest")
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: setattr(net, "scale", 2.0), "scale"),
        (lambda net: net.settings.update(sign=-1), "settings"),
        (lambda net: setattr(net.head, "power", 3), "head.power"),
        (lambda net: net.first.requires_grad_(False), "first.weight.requires_grad"),
        (lambda net: (setattr(net, "unread", 1), setattr(net.first, "unread", 1), net.train(False), net.train()), ""),
    ],
    ids=["number", "dict", "below", "frozen", "unread"],
)
def test_what_a_forward_reads_may_not_change_behind_its_stages(change, name):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act, self.power = nn.Linear(4, 4), nn.ReLU(), 2

        def forward(self, x):
            return self.act(self.linear(x)) ** self.power

    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head, self.scale, self.settings, self.unread = nn.Linear(4, 4), Head(), 1.0, {"sign": 1}, 0

        def forward(self, x):
            return self.head(self.first(x) * self.scale * self.settings["sign"])

    net = Scheduled()
    partition = cut(net, (torch.randn(2, 4),), splits=["head.act"])
    partition.check_unchanged()
    change(net)
    if name:
        with pytest.raises(PlanError, match=f"'{name}' of Scheduled has changed since"):
            partition.check_unchanged()
    else:
        partition.check_unchanged()


@pytest.mark.parametrize("name", ["current_epoch", "global_step", "trainer", "log"])
def test_a_forward_that_asks_the_trainer_is_refused(name):
    class Asks(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x) * (getattr(self, name) is not None))

    with pytest.raises(PlanError, match=rf"Asks uses self\.{name}, .* into the step around"):
        cut(Asks(), (torch.randn(2, 4),), splits=["last"])


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, numpy.random.rand], ids=["torch", "Python", "numpy"])
def test_random_draws_in_a_composite_submodule_are_refused(draw):
    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x * draw() if self.training else x)

    net = nn.Sequential(nn.Linear(4, 4), Noisy(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"submodule '1' \(Noisy\) draws random numbers"):
        cut(net, (torch.randn(2, 4),), splits=["2"])
    assert len(cut(net, (torch.randn(2, 4),), splits=["2"], training=False)) == 2


# ---- Balanced cuts -----------------------------------------------------------------------------------------------------------


def test_chosen_cuts_are_the_best_of_all():
    generator = random.Random(0)
    for _ in range(200):
        count = generator.randint(1, 8)
        stages = generator.randint(1, count)
        seconds = [generator.choice([1, 2, 3, 5.5]) for _ in range(count)]
        transfer = [generator.choice([0, 0.5, 2]) for _ in range(count - 1)]

        def cost(cuts, seconds=seconds, transfer=transfer):
            at = [0, *transfer, 0]
            ends = [*cuts, len(seconds)]
            slowest = max(sum(seconds[begin:end]) + at[begin] + at[end] for begin, end in zip([0, *cuts], ends, strict=True))
            return slowest, sum(at[place] for place in cuts)

        chosen = choose_cuts(seconds, transfer, stages)
        assert len(chosen) == stages - 1 and chosen == sorted(set(chosen))
        assert cost(chosen) == min(map(cost, itertools.combinations(range(1, count), stages - 1)))


def test_measuring_leaves_a_network_as_it_was_and_cuts_it_between_its_blocks():
    module = resnet("20", num_classes=10).eval()
    module.layer2[0].requires_grad_(False)
    args, kwargs = image_call()
    start, stream = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    splits, rows = balanced_splits(module, args, kwargs, num_stages=3)
    assert_same(dict(module.state_dict()), start)
    assert torch.equal(torch.get_rng_state(), stream) and not module.training and not module.layer3[0].conv1.training
    assert all(parameter.grad is None for parameter in module.parameters())

    assert len(splits) == 2 and all(name == "fc" or "conv" not in name for name in splits)
    partition = cut(module, args, kwargs, splits=splits)
    assert [row.begins_at for row in rows] == ["", *splits]
    assert [row.parameters for row in rows] == [sum(module.get_parameter(name).numel() for name in names) for names in partition.parameters]
    assert [row.boundary_bytes for row in rows] == [sum(b.numel() * 4 for b in boundary) for boundary in partition.boundaries[1:-1]] + [0]
    assert sum(row.time_share for row in rows) == pytest.approx(1) and sum(row.blocks for row in rows) == 12
    assert all(row.seconds > 0 and row.activation_bytes > 0 for row in rows)


def test_the_expensive_block_gets_a_stage_of_its_own():
    wide = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 16))
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), wide, nn.Linear(16, 16), nn.Linear(16, 16))
    splits, rows = balanced_splits(module, (torch.randn(512, 16),), num_stages=3, bandwidth=1e12)
    assert splits[0].startswith("2") and max(rows, key=lambda row: row.seconds).begins_at.startswith("2")


def test_no_balanced_stage_begins_where_evaluation_does_not_pass():
    class Helped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.helper, self.b = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            return (self.b(x), self.helper(x)) if self.training else self.b(x)

    module, x = Helped(), torch.randn(2, 4)
    splits, _ = balanced_splits(module, (x,), num_stages=2)
    assert splits == ["b"] and all(len(cut(module, (x,), splits=splits, training=training)) == 2 for training in (True, False))


def test_more_balanced_stages_than_places_to_cut_are_refused():
    with pytest.raises(PlanError, match=r"num_stages=7 needs 6 cuts, but ResNet has 5 places for one: bn1, layer1, layer2, layer3, fc"):
        balanced_splits(resnet("8", num_classes=10), *image_call(), num_stages=7)


def test_a_module_under_two_names_is_held_by_one_process_under_both():
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.again, self.same, self.end = self.first, self.norm, self.last

        def forward(self, x):
            return self.end(self.same(self.again(x)))

    module = Aliased()
    partition = cut(module, (torch.randn(3, 4),), splits=["last"])
    first, last = (StageState(module, partition, SimpleNamespace(parts=2, part=k, stages=range(k, k + 1))) for k in range(2))
    for name in module.state_dict():
        assert first.here(name) == name.startswith(("first", "again", "norm", "same")) == (not last.here(name))
    first.give_up()
    assert module.end.weight.isnan().all() and module.again.weight.isfinite().all()
