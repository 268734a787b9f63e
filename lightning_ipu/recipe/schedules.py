"""Learning-rate schedules counted in weight updates.

A schedule is a function of (k, total): what the base learning rate is multiplied by at weight update k = 0, 1, ..., total - 1 of a
run of `total`. Nothing else enters but, where a schedule counts epochs, the weight updates of one: so it cannot depend on micro-batches,
replicas or device iterations.

All take the same options for their start. The first W = int(warmup_fraction * total) updates rise evenly from 1 / (W + 1), so that none
is spent at 0, or from warmup_start; update W is the first at the full rate. In warmup_mode "shift" the decay begins after them, in "mask" it begins
with the run, and the warm-up multiplies it. A staircase holds the rate, warm-up included, from an epoch's first update to its last.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_ipu.errors import UserError

WARMUP_MODES = ("shift", "mask")


def constant(k: int, total: int, **start: Any) -> float:
    """The base learning rate throughout."""
    return _start(k, total, **start)[0]


def stepped(
    k: int,
    total: int,
    *,
    decay_values: Sequence[float] = (1.0, 0.1, 0.01),
    decay_fractions: Sequence[float] = (0.5, 0.75),
    decay_at_epochs: Sequence[float] | None = None,
    updates_per_epoch: int | None = None,
    **start: Any,
) -> float:
    """decay_values[i], where i is the number of past drops: at fractions of the run, or at epochs if these are given.

    Graphcore's PopART ResNet drops where k > int(f * total): update int(f * total), counted from 0, is the last before the drop. Programs
    that count epochs, such as torch's MultiStepLR, drop with the epoch's first update.
    """
    rise, k, _ = _start(k, total, updates_per_epoch=updates_per_epoch, **start)
    if decay_at_epochs is None:
        return rise * decay_values[sum(k > _updates(fraction, total) for fraction in decay_fractions)]
    return rise * decay_values[sum(k >= _updates(epoch, updates_per_epoch) for epoch in decay_at_epochs)]


def linear(k: int, total: int, *, warmup_fraction: float = 0.2, final_fraction: float = 0.02, **decay: Any) -> float:
    """Warm up, then fall in a straight line to final_fraction, reached after the last update."""
    rise, progress = _decay(k, total, warmup_fraction=warmup_fraction, **decay)
    return rise * (1 + (final_fraction - 1) * progress)


def cosine(k: int, total: int, *, warmup_fraction: float = 0.2, final_fraction: float = 0.02, **decay: Any) -> float:
    """Warm up, then fall along half a cosine to final_fraction, reached after the last update (https://arxiv.org/abs/1608.03983)."""
    rise, progress = _decay(k, total, warmup_fraction=warmup_fraction, **decay)
    return rise * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def polynomial(
    k: int, total: int, *, warmup_fraction: float = 0.2, final_fraction: float = 0.02, power: float = 2.0, **decay: Any
) -> float:
    """Warm up, then fall to final_fraction, reached after the last update, as a power of the time that is left."""
    rise, progress = _decay(k, total, warmup_fraction=warmup_fraction, **decay)
    return rise * (final_fraction + (1 - final_fraction) * (1 - progress) ** power)


def exponential(
    k: int,
    total: int,
    *,
    warmup_fraction: float = 0.2,
    final_fraction: float = 0.02,
    decay_rate: float | None = None,
    updates_per_epoch: int | None = None,
    **decay: Any,
) -> float:
    """Warm up, then fall by the same factor with every update: to final_fraction after the last, or by decay_rate with every epoch."""
    decay |= {"warmup_fraction": warmup_fraction, "updates_per_epoch": updates_per_epoch}
    if decay_rate is None:
        rise, progress = _decay(k, total, **decay)
        return rise * final_fraction**progress
    rise, k, _ = _start(k, total, **decay)
    return rise * decay_rate ** (k / updates_per_epoch)


def _start(
    k: int,
    total: int,
    *,
    warmup_fraction: float = 0.0,
    warmup_start: float | None = None,
    warmup_mode: str = "shift",
    staircase: bool = False,
    updates_per_epoch: int | None = None,
) -> tuple[float, int, int]:
    """How far the rate has risen at update k (0 to 1), the update that the decay stands at, and how many come before the decay."""
    if staircase:
        k -= k % updates_per_epoch
    warmup = _updates(warmup_fraction, total) if warmup_fraction else 0
    rise = 1.0
    if k < warmup:
        rise = (k + 1) / (warmup + 1) if warmup_start is None else warmup_start + (1 - warmup_start) * k / warmup
    if warmup_mode == "mask":
        return rise, k, 0
    return rise, max(0, k - warmup), warmup


def _decay(k: int, total: int, *, decay_fraction: float | None = None, **start: Any) -> tuple[float, float]:
    """How far the rate has risen at update k, and which part of the decay is over; both from 0 to 1.

    The decay lasts int(decay_fraction * total) updates, or from its beginning to the end of the run.
    """
    rise, k, before = _start(k, total, **start)
    length = total - before if decay_fraction is None else _updates(decay_fraction, total)
    return rise, min(1.0, k / max(length, 1)) if k > 0 else 0.0


def _updates(fraction: float, total: int) -> int:
    """int(fraction * total), had the product no rounding error: 0.29 of 100 updates are 29."""
    return math.floor(round(fraction * total, 6))


SCHEDULES: dict[str, Callable[..., float]] = {
    "const": constant,
    "stepped": stepped,
    "linear": linear,
    "cosine": cosine,
    "polynomial": polynomial,
    "exponential": exponential,
}

_INFERRED = "updates_per_epoch"  # given by build_schedule, not by its caller's options


def _options(function: Callable[..., Any]) -> list[str]:
    """Names of a schedule's keyword options, those that it passes on included."""
    parameters = inspect.signature(function).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    passed_to = {"start": _start, "decay": _decay}
    onward = [option for name in parameters if name in passed_to for option in _options(passed_to[name])]
    return list(dict.fromkeys(name for name in names + onward if name != _INFERRED))


def check_schedule(kind: str, **options: Any) -> None:
    """Raise UserError where `kind` is no schedule, does not take one of the options, or an option's value makes no sense.

    Beside a schedule's own options, warmup_epochs and decay_epochs may stand for warmup_fraction and decay_fraction.
    """
    if kind not in SCHEDULES:
        raise UserError(f"schedule={kind!r} is unknown: choose from {', '.join(SCHEDULES)}")
    taken = _options(SCHEDULES[kind])
    for name, value in options.items():
        same = name if name in taken else name.replace("_epochs", "_fraction")
        if same not in taken:
            raise UserError(f"{name}={value} means nothing to schedule={kind!r}, which takes {', '.join(taken)}")
        if same != name and same in options:
            raise UserError(f"{name}={value} and {same}={options[same]} say the same thing; give one of them")
        if same != name and not (value > 0 or value == 0 and name == "warmup_epochs"):
            raise UserError(f"{name}={value} must be {'at least' if name == 'warmup_epochs' else 'above'} 0")
    if not 0 <= (warmup := options.get("warmup_fraction", 0)) < 1:
        raise UserError(f"warmup_fraction={warmup} must be at least 0 and below 1")
    if (first := options.get("warmup_start")) is not None:
        rises = options.get("warmup_fraction", options.get("warmup_epochs", kind not in ("const", "stepped")))
        if not 0 <= first < 1 or not rises:
            raise UserError(f"warmup_start={first} must be at least 0 and below 1, and needs a warm-up")
    if not 0 <= (final := options.get("final_fraction", 0)) <= 1:
        raise UserError(f"final_fraction={final} must lie between 0 and 1")
    if not 0 < (decay := options.get("decay_fraction", 1)) <= 1:
        raise UserError(f"decay_fraction={decay} must be above 0 and at most 1")
    if (mode := options.get("warmup_mode", "shift")) not in WARMUP_MODES:
        raise UserError(f"warmup_mode={mode!r} is unknown: choose from {', '.join(WARMUP_MODES)}")
    if kind == "exponential" and options.get("final_fraction") == 0:
        raise UserError("final_fraction=0 is never reached by schedule='exponential'; give a number above 0, or decay_rate")
    if not 0 < (power := options.get("power", 1)) < math.inf:
        raise UserError(f"power={power} must be above 0")
    if "decay_rate" in options:
        if not 0 < options["decay_rate"] <= 1:
            raise UserError(f"decay_rate={options['decay_rate']} must be above 0 and at most 1")
        for name in ("final_fraction", "decay_fraction", "decay_epochs"):
            if name in options:
                raise UserError(f"decay_rate={options['decay_rate']} and {name}={options[name]} exclude each other; give one of them")
    if kind == "stepped":
        defaults = inspect.signature(stepped).parameters
        values = options.get("decay_values", defaults["decay_values"].default)
        fractions, epochs = options.get("decay_fractions", defaults["decay_fractions"].default), options.get("decay_at_epochs")
        if epochs is not None and "decay_fractions" in options:
            raise UserError(f"decay_at_epochs={list(epochs)} and decay_fractions={list(fractions)} say the same thing; give one of them")
        drops = f"decay_fractions={list(fractions)}" if epochs is None else f"decay_at_epochs={list(epochs)}"
        if len(values) != len(fractions if epochs is None else epochs) + 1:
            raise UserError(f"decay_values={list(values)} must have one value more than {drops}")
        if not all(value >= 0 for value in values):
            raise UserError(f"decay_values={list(values)} must not be negative")
        if epochs is None and (list(fractions) != sorted(fractions) or not all(0 <= fraction <= 1 for fraction in fractions)):
            raise UserError(f"{drops} must rise from 0 to 1")
        if epochs is not None and (list(epochs) != sorted(epochs) or not all(0 <= epoch < math.inf for epoch in epochs)):
            raise UserError(f"{drops} must rise, from at least 0")


def build_schedule(
    optimizer: Optimizer, kind: str, *, total: int | float, updates_per_epoch: int | None = None, **options: Any
) -> LambdaLR:
    """A torch scheduler, to be stepped after every weight update, that follows one of `SCHEDULES`.

    Args:
        optimizer: the learning rates it has now are the base rates.
        kind: a name in `SCHEDULES`.
        total: weight updates in the run; infinite only for "const" without warm-up.
        updates_per_epoch: needed only by options that count epochs: staircase, warmup_epochs, decay_epochs, decay_at_epochs and decay_rate.
        **options: the keyword arguments of that schedule's function; see `check_schedule`.

    Raises:
        UserError: see `check_schedule`; or a run of unknown length; or an epoch of unknown length.
    """
    check_schedule(kind, **options)
    rises = options.get("warmup_fraction") or options.get("warmup_epochs")
    if (kind != "const" or rises) and not (math.isfinite(total) and total > 0):
        raise UserError(f"schedule={kind!r} needs the length of the run, not {total} weight updates: set max_epochs or max_steps")
    by_epochs = ("staircase", "warmup_epochs", "decay_epochs", "decay_at_epochs", "decay_rate")
    counting_epochs = [name for name in by_epochs if options.get(name)]
    if counting_epochs and not updates_per_epoch:
        raise UserError(f"{counting_epochs[0]}={options[counting_epochs[0]]} needs epochs of a known length")
    lengths = {name: options.pop(f"{name}_epochs") for name in ("warmup", "decay") if f"{name}_epochs" in options}
    lengths = {name: _updates(epochs, updates_per_epoch) if epochs else 0 for name, epochs in lengths.items()}
    factor = SCHEDULES[kind]
    by_length = kind != "const" and not {"decay_rate", "decay_at_epochs"} & options.keys() or bool(options.get("warmup_fraction"))

    def rate(k: float, length: int | float) -> float:
        # Shares of the run, possibly above 1: a run of 1 epoch sees a fifth of a warm-up of 5 epochs.
        shares = {f"{name}_fraction": updates / length if updates else 0.0 for name, updates in lengths.items()}
        return factor(k, length, updates_per_epoch=updates_per_epoch, **options, **shares)

    return RunSchedule(optimizer, rate, total=total, by_length=by_length)


class RunSchedule(LambdaLR):
    """A schedule that spans a run, and goes on without a jump where the run is resumed with another length.

    The rest of the schedule is then stretched or compressed over the rest of the run: the learning rate goes on from the value it had, and
    reaches the schedule's end with the run's. A schedule that was over keeps its last value.

    Args:
        optimizer: the learning rates it has now are the base rates.
        factor: what they are multiplied by, of the weight update and the length of the run.
        total: weight updates in the run.
        by_length: whether the factor depends on the length at all.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[float, int | float], float], *, total: int | float, by_length: bool = True
    ) -> None:
        self.legs = [[0, total]]  # from this weight update on the run was to have this length
        self.by_length = by_length
        super().__init__(optimizer, lambda k: factor(self.place(k), self.legs[0][1]))

    def place(self, k: int) -> float:
        """Where weight update k stands in the schedule of the run's first length."""
        if len(self.legs) == 1 or not self.by_length:
            return k
        whole = self.legs[0][1]
        place, (start, total) = 0.0, self.legs[0]
        for next_start, next_total in [*self.legs[1:], [math.inf, None]]:
            until = min(k, next_start)
            left = total - start
            place = place + (until - start) * (whole - place) / left if left > 0 else whole
            if k <= next_start:
                break
            start, total = next_start, next_total
        return min(place, whole)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        total = self.legs[-1][1]
        super().load_state_dict(state_dict)
        self.legs = [list(leg) for leg in self.legs]
        before = self.legs[-1][1]
        if total == before or not self.by_length:
            return
        if self.place(self.last_epoch) >= self.legs[0][1]:
            rank_zero_info(f"The learning-rate schedule ended with weight update {before:,}: its last value holds until update {total:,}.")
        else:
            rank_zero_info(
                f"The learning-rate schedule was to end with weight update {before:,}: from update {self.last_epoch:,} on what is left of it is"
                f" spread over the updates until {total:,}."
            )
        self.legs.append([self.last_epoch, total])
