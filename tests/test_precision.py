"""16-bit weights, stochastic rounding and loss scaling, in a plain training loop made of the package's pieces."""

import copy
import hashlib
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ipu.precision import names as precision
from lightning_ipu.precision.loss_scaling import LossScaling
from lightning_ipu.precision.plugin import SixteenBit
from lightning_ipu.precision.rounding import rounding_seed, stochastic_round
from lightning_ipu.precision.update import SixteenBitUpdate
from lightning_ipu.recipe import optimizers as optim
from lightning_ipu.recipe.schedules import build_schedule

HALF = (torch.bfloat16, torch.float16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- Stochastic rounding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
def test_no_16_bit_number_is_moved_by_rounding(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)

    for seed in range(4):
        rounded = stochastic_round(every.float(), dtype, generator=generator(seed))
        assert torch.equal(rounded.isnan(), every.isnan())
        assert torch.equal(rounded.view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("number", [1.0001, -3.3, 65503.9, 6.2e-5, 1e-5, -5e-8, 2e-9, 1e-39])
def test_rounding_is_unbiased_between_the_two_neighbours(number, dtype):
    if dtype == torch.float16 and number == 1e-39:
        number = 3e-13  # goes up once in 200,000 times, which takes more than 16 random bits
    copies = torch.full((1 << 21 if number == 3e-13 else 1 << 19,), number)

    rounded = stochastic_round(copies, dtype, generator=generator(1)).double()

    exact = copies[0].double()
    low, high = rounded.min(), rounded.max()
    assert rounded.unique().numel() == 2 and low < exact < high
    assert torch.nextafter(low.to(dtype), torch.tensor(math.inf, dtype=dtype)) == high
    share = (exact - low) / (high - low)
    assert abs(rounded.mean() - exact) < 3 * (high - low) * (share * (1 - share) / copies.numel()) ** 0.5


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_never_makes_an_infinity_of_what_lies_near_the_largest_number_and_keeps_what_is_not_finite(dtype):
    largest = torch.finfo(dtype).max
    near = [largest, largest * (1 + 2.0**-12), -largest * (1 + 2.0**-12)]
    numbers = torch.tensor([*near, math.inf, -math.inf, math.nan]).repeat(1000, 1)

    rounded = stochastic_round(numbers, dtype, generator=generator()).float()

    assert (rounded[:, :3] == torch.tensor([largest, largest, -largest])).all()
    assert (rounded[:, 3:5] == torch.tensor([math.inf, -math.inf])).all() and rounded[:, 5].isnan().all()
    payload = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaNs whose bits a carry would ruin
    assert stochastic_round(payload, dtype, generator=generator()).isnan().all()


def test_every_layout_is_rounded_element_by_element():
    numbers = torch.randn(6, 4, 5, 3, generator=generator(1))
    channels_last = numbers.contiguous(memory_format=torch.channels_last)
    for tensor in (numbers, channels_last, numbers[:, ::2], numbers[0, 0, 0, :1], torch.randn(3, 300_001), numbers[:0], torch.tensor(1.3)):
        rounded = stochastic_round(tensor, torch.bfloat16, generator=generator())
        assert rounded.shape == tensor.shape
        assert ((rounded.float() - tensor).abs() <= tensor.abs() * 2**-7).all()


def test_the_noise_of_tensors_updates_and_states_is_uncorrelated_and_follows_from_their_names():
    copies = torch.full((1 << 16,), 1.0 + 2**-8)

    def ups(*names) -> torch.Tensor:
        return stochastic_round(copies, torch.bfloat16, generator=generator(rounding_seed(*names))).double() - 1.0

    places = [(7, 0, "a"), (7, 0, "b"), (7, 1, "a"), (8, 0, "a"), (7, 0, "a", "exp_avg")]
    correlations = torch.corrcoef(torch.stack([ups(*place) for place in places]))
    assert (correlations - torch.eye(len(places))).abs().max() < 4 / len(copies) ** 0.5
    assert torch.equal(ups(*places[0]), ups(*places[0]))


# ---- Any optimizer on 16-bit weights ----------------------------------------------------------------------------------------------


class CountsInItsGroup(torch.optim.Optimizer):
    """Divides the rate by a number of steps that it keeps in the parameter group, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter -= group["lr"] / group["k"] * parameter.grad


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, decoupled": lambda p: optim.SGDWithDecoupledDecay(p, lr=0.1, momentum=0.9, decoupled_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, amsgrad, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "LARS": lambda p: optim.LARS(p, lr=1.0, weight_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "its own counter": lambda p: CountsInItsGroup(p, lr=0.1),
}


def small_network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 5))


def in_groups(network: nn.Module) -> list[dict]:
    parameters = list(network.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:]}]


@pytest.fixture
def few_at_once(monkeypatch):
    monkeypatch.setattr("lightning_ipu.precision.update._AT_ONCE", 250)  # so that the small network makes several portions


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_optimizers_own_in_32_bits_then_rounded_bit_for_bit(name, stochastic, few_at_once):
    dtype = torch.bfloat16
    ours = SixteenBit("bf16-true", device="cpu").convert_module(small_network())
    reference = copy.deepcopy(ours).float()
    optimizer, plain = OPTIMIZERS[name](in_groups(ours)), OPTIMIZERS[name](in_groups(reference))
    narrow = SixteenBitUpdate(optimizer, ours, seed=5, stochastic=stochastic)

    def rounded(tensor: torch.Tensor, update: int, *names: str) -> torch.Tensor:
        if not stochastic:
            return tensor.to(dtype)
        return stochastic_round(tensor, dtype, generator=generator(rounding_seed(5, update, *names)))

    names = [name for name, _ in ours.named_parameters()]
    for update in range(4):
        for index, (p, q) in enumerate(zip(ours.parameters(), reference.parameters(), strict=True)):
            q.grad = torch.randn(q.shape, generator=generator(100 * update + index))
            p.grad = q.grad.clone()
        narrow.step(update)
        plain.step()
        for parameter_name, q in zip(names, reference.parameters(), strict=True):
            q.data.copy_(rounded(q.data, update, parameter_name))
            for key, value in plain.state[q].items():
                if torch.is_tensor(value) and value.numel() > 1:
                    value.copy_(rounded(value, update, parameter_name, key))

        for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
            assert p.dtype == dtype and torch.equal(p.float(), q)
            assert optimizer.state.get(p, {}).keys() == plain.state.get(q, {}).keys()
            for key, value in optimizer.state.get(p, {}).items():
                expected = plain.state[q][key]
                if torch.is_tensor(value):
                    assert value.dtype == (dtype if value.numel() > 1 else torch.float32)
                    assert torch.equal(value.float(), expected)
    for group, expected in zip(optimizer.param_groups, plain.param_groups, strict=True):
        assert {key: value for key, value in group.items() if key != "params"} == {k: v for k, v in expected.items() if k != "params"}
        assert len(group["params"]) == len(expected["params"])


def test_hooks_see_the_whole_optimizer_once_and_parameters_keep_their_identity_storage_and_gradients(few_at_once):
    network = SixteenBit("bf16-true", device="cpu").convert_module(small_network())
    optimizer = torch.optim.SGD(in_groups(network), lr=0.1, momentum=0.9)
    narrow = SixteenBitUpdate(optimizer, network, seed=0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda which, _, __: seen.append([len(group["params"]) for group in which.param_groups]))
    before = [(id(p), p.data_ptr()) for p in network.parameters()]
    frozen = next(network.parameters()).requires_grad_(False)
    network(torch.randn(2, 3, 6, 6, dtype=torch.bfloat16)).sum().backward()
    gradients = [p.grad for p in network.parameters()]

    narrow.step(0)
    schedule.step()  # would warn, had the optimizer not been stepped

    assert seen == [[3, 3], [3, 3]]
    assert [(id(p), p.data_ptr()) for p in network.parameters()] == before
    assert all(p.grad is gradient for p, gradient in zip(network.parameters(), gradients, strict=True))
    assert frozen.grad is None and frozen not in optimizer.state and frozen.dtype == torch.bfloat16
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_failing_step_leaves_16_bit_weights_and_whole_groups():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    network = SixteenBit("bf16-true", device="cpu").convert_module(small_network())
    optimizer = Fails(in_groups(network), lr=0.1)
    narrow = SixteenBitUpdate(optimizer, network, seed=0)
    for parameter in network.parameters():
        parameter.grad = torch.ones(parameter.shape)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(RuntimeError, match="no"):
        narrow.step(0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]
    assert all(torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in network.state_dict().items())


def test_parameters_that_are_not_the_modules_have_no_name_and_are_refused():
    with pytest.raises(ValueError, match=r"1 parameters that are not the module's \(shapes \(3,\)\)"):
        SixteenBitUpdate(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1), small_network(), seed=0)


# ---- The plugin -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)])
def test_weights_are_16_bit_while_norms_statistics_losses_and_gradient_sums_are_32(name, dtype, norm):
    plugin = SixteenBit(name, device="cpu")
    network = plugin.convert_module(
        nn.Sequential(copy.deepcopy(norm), nn.Conv2d(4, 4, 3), copy.deepcopy(norm), nn.Flatten(), nn.Linear(64, 3))
    )
    narrow = plugin.narrow_update(torch.optim.SGD(network.parameters(), lr=0.1), network, seed=0)
    x, y = torch.randn(5, 4, 6, 6, generator=generator()), torch.arange(5) % 3
    with plugin.train_step_context():
        logits = network(x)  # float32 images, as the user's data set gives them
        loss = F.cross_entropy(logits, y)
    loss.backward()

    assert logits.dtype == dtype and loss.dtype == torch.float32
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}
    assert {parameter.grad.dtype for parameter in network.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in network.buffers() if buffer.is_floating_point()} <= {torch.float32}
    before = copy.deepcopy(network.state_dict())
    narrow.step(0)
    assert not torch.equal(network[0].weight, before["0.weight"]) and {value.dtype for value in network.parameters()} == {dtype}
    assert list(network.state_dict()) == list(before) and "weight" not in network[0].__dict__
    if isinstance(norm, nn.BatchNorm2d):
        torch.testing.assert_close(network[0].running_mean, 0.1 * x.mean((0, 2, 3)))  # not of rounded values


def test_16_32_keeps_the_network_as_it_is_and_steps_the_optimizer_itself():
    plugin = SixteenBit("bf16-mixed", device="cpu")
    network = plugin.convert_module(small_network())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert plugin.narrow_update(torch.optim.SGD(network.parameters(), lr=1), network, seed=0) is None and plugin.scaling is None


@pytest.mark.parametrize(
    ("name", "scaling", "message"),
    [
        ("32-true", None, "precision='32-true' is not one of"),
        ("bf16-true", "auto", "loss_scaling=auto makes no sense in bf16"),
        ("bf16-mixed", 0, "loss_scaling=0 must be a number above 0"),
        ("16-true", math.inf, "loss_scaling=inf must be"),
        ("16-true", "some", "loss_scaling='some' must be"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(name, scaling, message):
    with pytest.raises(ValueError, match=message):
        SixteenBit(name, device="cpu", loss_scaling=scaling)


def test_names_of_precision_are_settled_or_refused():
    assert precision.resolve("16", accelerator="cpu") == precision.resolve("16.16", accelerator="gpu") == "16.16"
    assert [precision.lightning_precision("16.16", half) for half in precision.HALF_TYPES] == ["bf16-true", "16-true"]
    assert [precision.name_and_type(name)[0] for name in ("16-true", "16-mixed", "32-true", "64-true")] == ["16.16", "16.32", "32.32", None]
    for half, name, accelerator, message in (
        ("fp16", "16.16", "cpu", "fp16 is for GPUs; a CPU computes in bf16"),
        ("fp16", "32.32", "gpu", "fp16 needs precision 16.16 or 16.32, not 32.32"),
        ("fp16", "auto", "gpu", "fp16 needs precision 16.16 or 16.32, not auto"),
        ("half", "16.16", "gpu", "unknown 16-bit type 'half'; known are bf16, fp16"),
    ):
        with pytest.raises(ValueError, match=message):
            precision.resolve(name, accelerator=accelerator, half_type=half)
    assert "makes no sense in precision 32.32" in precision.scaling_refusal("32.32", half_type="bf16", loss_scaling=128)
    assert precision.scaling_refusal("16.16", half_type="bf16", loss_scaling=128) is None
    assert SixteenBit("16-true", device="cpu").scaling.automatic  # float16 is scaled unless a factor is given


# ---- In a training loop -----------------------------------------------------------------------------------------------------------


class Training:
    """A plain training loop over micro-batches, as an engine makes it of these pieces."""

    def __init__(self, network: nn.Module, loss, plugin: SixteenBit | None, make_optimizer, *, accumulation=1, clip=None, updates=None):
        self.loss, self.plugin, self.accumulation, self.clip = loss, plugin, accumulation, clip
        self.network = plugin.convert_module(network) if plugin else network
        self.optimizer = make_optimizer(self.network.parameters())
        self.narrow = plugin.narrow_update(self.optimizer, self.network, seed=11) if plugin else None
        self.scaling = plugin.scaling if plugin else None
        self.schedule = build_schedule(self.optimizer, "linear", total=updates, warmup_fraction=0.0) if updates else None
        self.reported, self.applied = [], 0

    def update(self, number: int, batches: Iterator) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.accumulation):
            if self.plugin:
                with self.plugin.train_step_context():
                    loss = self.loss(self.network, next(batches))
            else:
                loss = self.loss(self.network, next(batches))
            self.reported.append(loss.item())
            loss = loss / self.accumulation
            (self.scaling.scale(loss) if self.scaling else loss).backward()
        if self.scaling:
            finite = self.scaling.unscale_and_check(self.network.parameters())
            self.scaling.update(finite)
            if not finite:
                return
        if self.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
        self.narrow.step(number) if self.narrow else self.optimizer.step()
        self.applied += 1
        if self.schedule:
            self.schedule.step()


class Weights(nn.Module):
    def __init__(self, count: int, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((count,), value))


def sgd(lr: float, **options):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


@pytest.mark.parametrize("name", ["16-true", "bf16-true"])
def test_tiny_updates_add_up_with_stochastic_rounding_and_vanish_without(name):
    def run(plugin: SixteenBit | None) -> torch.Tensor:
        training = Training(Weights(2000, 1.0), lambda network, _: network.w.float().sum(), plugin, sgd(1e-4))
        for update in range(1000):
            training.update(update, iter([None]))
        return training.network.w.detach().double()

    assert (run(SixteenBit(name, device="cpu", loss_scaling=1, stochastic_rounding=False)) == 1.0).all()
    rounded = run(SixteenBit(name, device="cpu", loss_scaling=1))
    assert rounded.mean() == pytest.approx(0.9, abs=0.001)
    assert rounded.std() == pytest.approx({"16-true": 0.0062, "bf16-true": 0.0194}[name], rel=0.1)
    assert torch.allclose(run(SixteenBit("bf16-mixed", device="cpu")), torch.tensor(0.9, dtype=torch.double), atol=1e-5)
    assert torch.allclose(run(None), torch.tensor(0.9, dtype=torch.double), atol=1e-5)


@pytest.mark.parametrize(("name", "norm"), [("bf16-true", 10), ("16-mixed", 10), ("16-true", 0.25)])  # 10 x 65536 is none in float16
def test_clipping_sees_unscaled_gradients_whatever_the_scale_and_the_accumulation(name, norm):
    target = torch.tensor([0.6, 0.8]) * norm
    moved = []
    for scale in (1, 65536):
        for accumulation in (1, 4):
            training = Training(
                Weights(2, 0.0),
                lambda network, _: (network.w.float() * target).sum(),
                SixteenBit(name, device="cpu", loss_scaling=scale, stochastic_rounding=False),
                sgd(0.5),
                accumulation=accumulation,
                clip=norm / 10,
            )
            training.update(0, iter([None] * 4))
            moved.append(training.network.w.detach().float())
    assert all(torch.equal(other, moved[0]) for other in moved)
    assert moved[0].norm() == pytest.approx(0.5 * norm / 10, rel=3e-3)


@pytest.mark.parametrize("name", ["16-true", "16-mixed"])
def test_an_update_that_overflows_is_skipped_with_its_rate_and_counters_and_halves_the_scale(name):
    training = Training(
        Weights(3, 1.0),
        lambda network, factor: (network.w.float() ** 2 * factor).sum(),
        SixteenBit(name, device="cpu"),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        updates=10,
    )
    factors, rates = iter([0.1, math.inf, 0.1, 0.1, 0.1]), []
    for update in range(5):
        before = copy.deepcopy([training.network.state_dict(), training.optimizer.state_dict()])
        rates.append(training.optimizer.param_groups[0]["lr"])
        training.update(update, factors)
        after = [training.network.state_dict(), training.optimizer.state_dict()]
        assert (repr(after) == repr(before)) == (update == 1)
    assert training.applied == 4 and training.scaling.factor == 32768 and training.scaling.skipped == 1
    assert rates[1] == rates[2] and training.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 - 0.98 * 4 / 10))
    assert training.optimizer.state_dict()["state"][0]["step"] == 4
    assert training.reported[0] == pytest.approx(0.3)  # not scaled


def digest(network: nn.Module) -> str:
    values = (value.flatten().view(torch.uint8).numpy().tobytes() for value in network.state_dict().values())
    return hashlib.sha256(b"".join(values)).hexdigest()


def test_replicas_stay_equal_runs_repeat_and_a_resumed_run_is_the_uninterrupted_one():
    def start(name: str = "bf16-true") -> Training:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        plugin = SixteenBit(name, device="cpu")
        return Training(network, lambda net, xy: F.cross_entropy(net(xy[0]), xy[1]), plugin, lambda p: torch.optim.NAdam(p, lr=0.01))

    def batch(update: int) -> Iterator:
        x = torch.randn(8, 6, generator=generator(update))
        return iter([(x, (x[:, 0] > 0).long())])

    replicas = [start() for _ in range(4)]
    trace = []
    for update in range(200):
        for replica in replicas:
            replica.update(update, batch(update))
        (common,) = {digest(replica.network) for replica in replicas}
        trace.append(common)
        if update == 99:
            saved = copy.deepcopy([replicas[0].network.state_dict(), replicas[0].optimizer.state_dict()])
    assert len(set(trace)) == 200

    resumed = start()
    resumed.network.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    for update in range(100, 200):
        resumed.update(update, batch(update))
    assert digest(resumed.network) == trace[-1]
    for ours, theirs in zip(resumed.optimizer.state.values(), replicas[0].optimizer.state.values(), strict=True):
        assert all(torch.equal(value, theirs[key]) and value.dtype == theirs[key].dtype for key, value in ours.items())


# ---- Loss scaling -----------------------------------------------------------------------------------------------------------------


def with_gradient(*values: float) -> list[nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return [parameter, nn.Parameter(torch.zeros(2))]


def test_one_process_without_finite_gradients_makes_all_skip_and_gradients_stay_untouched():
    said = []
    scaling = LossScaling(4.0, agree=lambda finite: said.append(finite) or False)
    parameters = with_gradient(8.0)
    assert not scaling.unscale_and_check(parameters) and said == [True] and parameters[0].grad.item() == 8.0
    scaling.agree = None
    assert scaling.unscale_and_check(parameters) and parameters[0].grad.item() == 2.0
    for value in (math.inf, math.nan):
        assert not scaling.unscale_and_check(with_gradient(1.0, value))
    narrow = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    narrow.grad = torch.ones(1, dtype=torch.float16)
    with pytest.raises(TypeError, match="keep gradients in float32"):
        scaling.unscale_and_check([narrow])


def test_an_automatic_scale_grows_after_2000_updates_to_a_limit_and_goes_on_from_a_checkpoint():
    scaling = LossScaling("auto")
    for _ in range(1999):
        scaling.update(True)
    restored = LossScaling("auto")
    restored.load_state_dict(scaling.state_dict())
    restored.update(True)
    assert (scaling.factor, restored.factor) == (65536, 131072)
    for _ in range(2000 * 20):
        restored.update(True)
    assert restored.factor == 2**24
    restored.update(False)
    assert restored.factor == 2**23
    fixed = LossScaling(128)
    fixed.load_state_dict(restored.state_dict())
    fixed.update(False)
    assert fixed.factor == 128 and fixed.skipped == 2


def test_a_run_that_only_skips_ends_with_the_reason():
    scaling = LossScaling(8)
    for _ in range(49):
        scaling.update(False)
    with pytest.raises(
        FloatingPointError, match="not finite in 50 weight updates in a row, at a scale of 8 now: .*or the scale is too large"
    ):
        scaling.update(False)
