"""Learning-rate schedules: every value against torch's own schedulers or written-out lists, and their unit, the weight update."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from lightning_ipu.recipe.schedules import (
    SCHEDULES,
    build_schedule,
    check_schedule,
    constant,
    cosine,
    exponential,
    linear,
    polynomial,
    stepped,
)

TOTALS = (1, 2, 3, 7, 20, 101)


def optimizer(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates_of(scheduler: torch.optim.lr_scheduler.LRScheduler, updates: int) -> list[float]:
    """The first group's learning rate at each of the next weight updates."""
    rates = []
    for _ in range(updates):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.1, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("final_fraction", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("kind", [linear, cosine])
def test_warmup_and_decay_equal_torchs_schedulers_joined(kind, final_fraction, warmup_fraction, total):
    warm = int(warmup_fraction * total)
    expected = rates_of(LinearLR(optimizer(1.0), start_factor=1 / (warm + 1), total_iters=warm), warm) if warm else []
    if kind is linear:
        decay = LinearLR(optimizer(1.0), start_factor=1.0, end_factor=final_fraction, total_iters=total - warm)
    else:
        decay = CosineAnnealingLR(optimizer(1.0), T_max=total - warm, eta_min=final_fraction)
    expected += rates_of(decay, total - warm + 1)

    got = [kind(k, total, warmup_fraction=warmup_fraction, final_fraction=final_fraction) for k in range(total + 1)]

    assert got == pytest.approx(expected, abs=1e-9)
    assert kind(total + 5, total, warmup_fraction=warmup_fraction, final_fraction=final_fraction) == pytest.approx(final_fraction)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("fractions", [(0.5, 0.75), (0.3, 0.3), (0.0, 1.0)])
def test_stepped_drops_after_the_update_at_each_fraction(fractions, total):
    first, second = (int(fraction * total) + 1 for fraction in fractions)
    expected = [1.0] * first + [0.3] * (second - first) + [0.2] * total

    assert [stepped(k, total, decay_values=(1.0, 0.3, 0.2), decay_fractions=fractions) for k in range(total)] == expected[:total]


def test_the_defaults_of_stepped_are_the_original_programs():
    assert [stepped(k, 8) for k in range(8)] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01]


def test_constant_never_moves_and_needs_no_end():
    assert rates_of(build_schedule(optimizer(0.3), "const", total=math.inf), 5) == [0.3] * 5
    assert constant(7, 3) == 1.0


def test_a_cosine_over_four_updates_has_the_values_known_by_hand():
    scheduler = build_schedule(optimizer(1.0), "cosine", total=4, warmup_fraction=0.0, final_fraction=0.0)

    assert rates_of(scheduler, 5) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_warmup_ends_at_its_update_and_the_rate_is_zero_after_the_last():
    rates = rates_of(build_schedule(optimizer(1.0), "cosine", total=20, warmup_fraction=0.2, final_fraction=0.0), 21)

    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4] == max(rates) and min(rates[:20]) > 0 and rates[20] == 0


def test_every_group_keeps_its_own_base_rate_and_a_restored_schedule_goes_on():
    scheduler = build_schedule(optimizer(1.0, 0.5), "linear", total=10)
    before = rates_of(scheduler, 4)
    saved = scheduler.state_dict(), scheduler.optimizer.state_dict()

    restored = build_schedule(optimizer(1.0, 0.5), "linear", total=10)
    restored.load_state_dict(saved[0])
    restored.optimizer.load_state_dict(saved[1])
    after = rates_of(restored, 6)

    assert before + after == [linear(k, 10) for k in range(10)]
    assert restored.get_last_lr() == pytest.approx([0.02, 0.01])


# ---- Against formulas written in epochs: Keras' decays under the warm-ups and the staircase of Graphcore's TensorFlow 2 programs --------


def in_epochs(shape, s, *, w, warmup_epochs, mode, staircase):
    """The learning rate at update s of a schedule `shape`, in epochs of w updates, for a base rate of 1."""
    if staircase:
        s = math.floor(s / w) * w
    warm = int(warmup_epochs * w)
    if s < warm:
        return shape(0 if mode == "shift" else s) * (s + 1) / (warm + 1)
    return shape(s - warm if mode == "shift" else s)


def keras_polynomial(s, *, horizon, end, power):
    return (1.0 - end) * (1 - min(s, horizon) / horizon) ** power + end


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize("mode", ["shift", "mask"])
@pytest.mark.parametrize("warmup_epochs", [0, 1.5, 3])
@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        ("const", {}, lambda s, w: 1.0),
        ("cosine", {"decay_epochs": 5, "final_fraction": 0.0}, lambda s, w: 0.5 * (1 + math.cos(math.pi * min(s, 5 * w) / (5 * w)))),
        (
            "polynomial",
            {"decay_epochs": 6, "final_fraction": 2.18e-5, "power": 3},
            lambda s, w: keras_polynomial(s, horizon=6 * w, end=2.18e-5, power=3),
        ),
        ("linear", {"decay_epochs": 20, "final_fraction": 0.1}, lambda s, w: keras_polynomial(s, horizon=20 * w, end=0.1, power=1)),
        ("exponential", {"decay_rate": 0.97}, lambda s, w: 0.97 ** (s / w)),
        (
            "stepped",
            {"decay_values": [1, 0.5, 0.2], "decay_fractions": [2 / 8, 6.5 / 8]},
            lambda s, w: 1 if s <= 2 * w else 0.5 if s <= int(6.5 * w) else 0.2,
        ),
    ],
)
def test_every_update_of_every_schedule_has_the_rate_of_its_formula_in_epochs(kind, options, shape, warmup_epochs, mode, staircase):
    w, epochs = 11, 8
    timing = {"warmup_epochs": warmup_epochs, "warmup_mode": mode, "staircase": staircase}

    got = rates_of(build_schedule(optimizer(1.0), kind, total=epochs * w, updates_per_epoch=w, **options, **timing), epochs * w)

    expected = [
        in_epochs(lambda s: shape(s, w), s, w=w, warmup_epochs=warmup_epochs, mode=mode, staircase=staircase) for s in range(epochs * w)
    ]
    assert got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("total", TOTALS)
def test_polynomial_and_exponential_fall_to_the_final_fraction_over_what_warm_up_leaves(total):
    warm = int(0.2 * total)
    for k in range(total + 1):
        rise, progress = ((k + 1) / (warm + 1), 0) if k < warm else (1, (k - warm) / (total - warm))
        assert polynomial(k, total) == pytest.approx(rise * (0.02 + 0.98 * (1 - progress) ** 2))
        assert exponential(k, total, final_fraction=0.1) == pytest.approx(rise * 10**-progress)


def test_a_run_that_ends_within_its_warm_up_or_decay_sees_their_beginning():
    short = rates_of(build_schedule(optimizer(1.0), "cosine", total=5, updates_per_epoch=5, warmup_epochs=3, decay_epochs=9), 5)
    assert short == pytest.approx([(k + 1) / 16 for k in range(5)])
    assert linear(10, 100, warmup_fraction=0.0, decay_fraction=0.2, final_fraction=0.5) == pytest.approx(0.75)
    assert linear(50, 100, warmup_fraction=0.0, decay_fraction=0.2, final_fraction=0.5) == pytest.approx(0.5)


def test_shares_of_a_run_are_whole_updates_where_they_are_so_in_decimals():
    assert [linear(k, 100, warmup_fraction=0.29) for k in (28, 29)] == pytest.approx([29 / 30, 1.0])  # 0.29 * 100 < 29 in binary


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sine", {}, "schedule='sine'.*const, stepped, linear, cosine, polynomial, exponential"),
        (
            "const",
            {"final_fraction": 0.1},
            "final_fraction=0.1.*'const', which takes warmup_fraction, warmup_start, warmup_mode, staircase",
        ),
        ("cosine", {"decay_values": [1, 0.1]}, "decay_values.*'cosine'.*warmup_fraction, final_fraction"),
        ("stepped", {"decay_epochs": 3}, "decay_epochs=3 means nothing to schedule='stepped'"),
        ("cosine", {"power": 2}, "power=2 means nothing"),
        ("cosine", {"updates_per_epoch": 2}, "updates_per_epoch=2 means nothing"),
        ("cosine", {"warmup_fraction": 0.1, "warmup_epochs": 1}, "warmup_epochs=1 and warmup_fraction=0.1 say the same"),
        ("cosine", {"warmup_epochs": -1}, "warmup_epochs=-1 must be at least 0"),
        ("cosine", {"decay_epochs": 0}, "decay_epochs=0 must be above 0"),
        ("cosine", {"decay_fraction": 1.5}, "decay_fraction=1.5 must be above 0 and at most 1"),
        ("linear", {"warmup_mode": "cut"}, "warmup_mode='cut' is unknown: choose from shift, mask"),
        ("polynomial", {"power": 0}, "power=0 must be above 0"),
        ("exponential", {"decay_rate": 1.5}, "decay_rate=1.5 must be above 0 and at most 1"),
        ("exponential", {"decay_rate": 0.9, "final_fraction": 0.1}, "decay_rate=0.9 and final_fraction=0.1 exclude each other"),
        ("exponential", {"final_fraction": 0}, "final_fraction=0 is never reached"),
        ("linear", {"warmup_fraction": 1.0}, "warmup_fraction=1.0 must be"),
        ("linear", {"warmup_fraction": math.nan}, "warmup_fraction=nan must be"),
        ("cosine", {"final_fraction": -0.1}, "final_fraction=-0.1 must"),
        ("stepped", {"decay_values": [1, 0.1]}, r"decay_values=\[1, 0.1\] must have one value more"),
        ("stepped", {"decay_values": [1, -0.1, 0]}, "decay_values.*negative"),
        ("stepped", {"decay_fractions": [0.75, 0.5]}, r"decay_fractions=\[0.75, 0.5\] must rise"),
        ("stepped", {"decay_fractions": [0.5, 1.5]}, "decay_fractions.*from 0 to 1"),
        ("stepped", {"decay_at_epochs": [60, 30]}, r"decay_at_epochs=\[60, 30\] must rise"),
        ("stepped", {"decay_at_epochs": [30]}, r"decay_values=\[1.0, 0.1, 0.01\] must have one value more than decay_at_epochs=\[30\]"),
        ("stepped", {"decay_at_epochs": [1, 2], "decay_fractions": [0.1, 0.2]}, "decay_at_epochs.* and decay_fractions.* say the same"),
        ("cosine", {"warmup_start": 1.0}, "warmup_start=1.0 must be at least 0 and below 1"),
        ("const", {"warmup_start": 0.5}, "warmup_start=0.5 .* needs a warm-up"),
        ("linear", {"warmup_start": 0.5, "warmup_epochs": 0}, "warmup_start=0.5 .* needs a warm-up"),
    ],
)
def test_wrong_options_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(kind, **options)


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind != "const"])
@pytest.mark.parametrize("total", [math.inf, 0])
def test_a_run_of_unknown_or_no_length_is_refused(kind, total):
    with pytest.raises(ValueError, match=f"'{kind}' needs the length of the run.*max_epochs or max_steps"):
        build_schedule(optimizer(1.0), kind, total=total)
    with pytest.raises(ValueError, match="staircase=True needs epochs of a known length"):
        build_schedule(optimizer(1.0), kind, total=7, staircase=True)


def test_stepped_drops_with_the_first_update_of_an_epoch_however_long_the_run_is():
    for epochs in (3, 5):
        options = {"updates_per_epoch": 7, "decay_at_epochs": [1, 2.5], "decay_values": [1.0, 0.3, 0.2]}
        expected = [1.0] * 7 + [0.3] * (17 - 7) + [0.2] * 100
        assert rates_of(build_schedule(optimizer(1.0), "stepped", total=7 * epochs, **options), 7 * epochs) == expected[: 7 * epochs]
    with pytest.raises(ValueError, match="needs epochs of a known length"):
        build_schedule(optimizer(1.0), "stepped", total=7, decay_at_epochs=[1, 2])


def test_a_warm_up_may_start_at_a_share_of_the_rate():
    warm = {"warmup_epochs": 2, "warmup_start": 0.2, "updates_per_epoch": 2}
    assert rates_of(build_schedule(optimizer(1.0), "const", total=6, **warm), 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates_of(build_schedule(optimizer(1.0), "const", total=6, staircase=True, **warm), 6) == pytest.approx(
        [0.2, 0.2, 0.6, 0.6, 1, 1]
    )


# -- a run that is resumed with another length --------------------------------------------------------------------------------


def rates(kind: str, *, changes: dict[int, int], total: int, until: int, **options) -> list[float]:
    """The rate of every update of a run that was resumed at some updates, each time with another length."""
    values, state = [], None
    for start, end in [(0, total), *changes.items()]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = build_schedule(optimizer, kind, total=end, updates_per_epoch=5, **options)
        if state is not None:
            schedule.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        stop = next((k for k in changes if k > start), until)
        for _ in range(start, stop):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        state = schedule.state_dict(), optimizer.state_dict()
    return values


def test_what_is_left_of_a_schedule_is_spread_over_what_is_left_of_the_run():
    straight = {"warmup_fraction": 0.0, "final_fraction": 0.0}
    assert rates("linear", changes={5: 15}, total=10, until=15, **straight) == pytest.approx(
        [1 - k / 10 for k in range(5)] + [0.5 - 0.05 * k for k in range(10)]
    )
    assert rates("linear", changes={4: 7}, total=10, until=7, **straight) == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2])
    twice = rates("linear", changes={5: 15, 10: 20}, total=10, until=20, **straight)  # 0.25 is left at update 10
    assert twice[10:] == pytest.approx([0.25 - 0.025 * k for k in range(10)])


@pytest.mark.parametrize("kind", ["linear", "cosine", "polynomial", "exponential", "stepped"])
def test_extending_a_run_never_lets_the_rate_jump_or_rise_again_and_ends_where_the_schedule_does(kind):
    plain = rates(kind, changes={}, total=40, until=40)
    longer = rates(kind, changes={20: 60}, total=40, until=60)
    assert longer[:21] == plain[:21] and all(late <= early for early, late in zip(longer[19:], longer[20:], strict=False))
    assert longer[20:60:2] == pytest.approx(plain[20:40])
    over = rates(kind, changes={40: 60}, total=40, until=60)  # the schedule was over
    assert len(set(over[40:])) == 1 and over[40] <= plain[-1]


@pytest.mark.parametrize("kind", ["linear", "cosine", "polynomial", "stepped"])
def test_epochs_of_warm_up_stay_as_long_as_they_were_when_a_run_is_extended(kind):
    changes = {"changes": {20: 60}, "total": 40, "until": 60}
    assert rates(kind, **changes, warmup_epochs=2) == pytest.approx(rates(kind, **changes, warmup_fraction=0.25))
    by_epochs = {"decay_at_epochs": [3, 9], "warmup_epochs": 1}
    assert rates("stepped", **changes, **by_epochs) == rates("stepped", changes={}, total=60, until=60, **by_epochs)


def test_resuming_with_the_same_length_and_schedules_without_one_change_nothing():
    for kind, options in (("cosine", {}), ("const", {}), ("exponential", {"decay_rate": 0.5})):
        assert rates(kind, changes={7: 20, 13: 20}, total=20, until=20, **options) == rates(kind, changes={}, total=20, until=20, **options)
    by_epochs = {"decay_rate": 0.5, "warmup_fraction": 0.0}
    assert rates("exponential", changes={7: 30}, total=20, until=30, **by_epochs) == rates(
        "exponential", changes={}, total=30, until=30, **by_epochs
    )
