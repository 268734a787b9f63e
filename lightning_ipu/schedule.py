"""Learning-rate schedules counted in weight updates.

A schedule is a function of (k, total): what the base learning rate is multiplied by at weight update k = 0, 1, ..., total - 1 of a
run of `total`. Nothing else enters, so it cannot depend on micro-batches, replicas, device iterations or epochs.
"""

import inspect
import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant(k: int, total: int) -> float:
    """The base learning rate throughout."""
    return 1.0


def stepped(
    k: int, total: int, *, decay_values: Sequence[float] = (1.0, 0.1, 0.01), decay_fractions: Sequence[float] = (0.5, 0.75)
) -> float:
    """decay_values[i], where i counts the fractions f of the run with k > int(f * total).

    The comparison is that of Graphcore's PopART ResNet: update int(f * total), counted from 0, is the last before the drop.
    """
    return decay_values[sum(k > int(fraction * total) for fraction in decay_fractions)]


def linear(k: int, total: int, *, warmup_fraction: float = 0.2, final_fraction: float = 0.02) -> float:
    """Warm up, then fall in a straight line to final_fraction, reached after the last update."""
    rise, progress = _warmup(k, total, warmup_fraction)
    return rise * (1 + (final_fraction - 1) * progress)


def cosine(k: int, total: int, *, warmup_fraction: float = 0.2, final_fraction: float = 0.02) -> float:
    """Warm up, then fall along half a cosine to final_fraction, reached after the last update (https://arxiv.org/abs/1608.03983)."""
    rise, progress = _warmup(k, total, warmup_fraction)
    return rise * (final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def _warmup(k: int, total: int, fraction: float) -> tuple[float, float]:
    """How far the learning rate has risen at update k, and which part of the time after warm-up is over; both from 0 to 1.

    The first W = int(fraction * total) updates rise evenly from 1 / (W + 1), so that none is spent at 0 and update W is the first at
    the full rate.
    """
    updates = int(fraction * total)
    if k < updates:
        return (k + 1) / (updates + 1), 0.0
    return 1.0, min(1.0, (k - updates) / (total - updates))


SCHEDULES: dict[str, Callable[..., float]] = {"const": constant, "stepped": stepped, "linear": linear, "cosine": cosine}


def check_schedule(kind: str, **options: float | Sequence[float]) -> None:
    """Raise ValueError where `kind` is no schedule, does not take one of the options, or an option's value makes no sense."""
    if kind not in SCHEDULES:
        raise ValueError(f"schedule={kind!r} is unknown: choose from {', '.join(SCHEDULES)}")
    taken = list(inspect.signature(SCHEDULES[kind]).parameters)[2:]
    for name, value in options.items():
        if name not in taken:
            raise ValueError(f"{name}={value} means nothing to schedule={kind!r}, which takes {', '.join(taken) or 'no options'}")
    if not 0 <= (warmup := options.get("warmup_fraction", 0)) < 1:
        raise ValueError(f"warmup_fraction={warmup} must be at least 0 and below 1")
    if not 0 <= (final := options.get("final_fraction", 0)) <= 1:
        raise ValueError(f"final_fraction={final} must lie between 0 and 1")
    if kind == "stepped":
        defaults = inspect.signature(stepped).parameters
        values = options.get("decay_values", defaults["decay_values"].default)
        fractions = options.get("decay_fractions", defaults["decay_fractions"].default)
        if len(values) != len(fractions) + 1:
            raise ValueError(f"decay_values={list(values)} must have one value more than decay_fractions={list(fractions)}")
        if not all(value >= 0 for value in values):
            raise ValueError(f"decay_values={list(values)} must not be negative")
        if list(fractions) != sorted(fractions) or not all(0 <= fraction <= 1 for fraction in fractions):
            raise ValueError(f"decay_fractions={list(fractions)} must rise from 0 to 1")


def build_schedule(optimizer: Optimizer, kind: str, *, total: int | float, **options: float | Sequence[float]) -> LambdaLR:
    """A torch scheduler, to be stepped after every weight update, that follows one of `SCHEDULES`.

    Args:
        optimizer: the learning rates it has now are the base rates.
        kind: a name in `SCHEDULES`.
        total: weight updates in the run; infinite only for "const".
        **options: the keyword arguments of that schedule's function.

    Raises:
        ValueError: see `check_schedule`; or a run of unknown length.
    """
    check_schedule(kind, **options)
    if kind != "const" and not (math.isfinite(total) and total > 0):
        raise ValueError(f"schedule={kind!r} needs the length of the run, not {total} weight updates: set max_epochs or max_steps")
    factor = SCHEDULES[kind]
    return LambdaLR(optimizer, lambda k: factor(k, total, **options))
