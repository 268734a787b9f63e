"""Notice that training has become much slower than it was, and say once why and what to do."""

from __future__ import annotations

import operator
import os
import time
import warnings
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from typing_extensions import override


@dataclass(frozen=True)
class Usage:
    """What a process has used so far: seconds of wall time, of CPU time and of waiting for a core, and samples."""

    wall: float
    cpu: float
    waiting: float
    samples: int

    @classmethod
    def now(cls, samples: int) -> Usage:
        return cls(wall=time.monotonic(), cpu=time.process_time(), waiting=_seconds_waited(), samples=samples)

    def since(self, before: Usage) -> Usage:
        return Usage(*map(operator.sub, astuple(self), astuple(before)))

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, astuple(self), astuple(other)))

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.wall


NOTHING = Usage(wall=0.0, cpu=0.0, waiting=0.0, samples=0)


class SlowdownWatch(Callback):
    """Warns once when two measurements in a row find training at less than half of its best speed so far.

    Only host steps are measured, not validations or the time between epochs; a measurement covers ``seconds`` of them. The cause is read
    from this process: its threads wait for cores (Linux counts that in ``/proc/self/task/*/schedstat``), it computes much less than before,
    or it computes as much as before and trains on fewer samples.

    Args:
        seconds: of training in one measurement.
    """

    def __init__(self, *, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.warned = False
        self._best: Usage | None = None
        self._window = NOTHING
        self._slow_before = False

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._start = Usage.now(trainer.strategy.progress.samples_done)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._window += Usage.now(trainer.strategy.progress.samples_done).since(self._start)
        if self._window.wall < self.seconds or self.warned:
            return
        window, self._window = self._window, NOTHING
        if self._best is None or window.rate > self._best.rate:
            self._best = window
        slow = window.rate < self._best.rate / 2
        if slow and self._slow_before:
            self.warned = True
            warnings.warn(explanation(window, self._best), stacklevel=2)
        self._slow_before = slow


def explanation(now: Usage, best: Usage) -> str:
    """Why training is slower in ``now`` than in ``best``, and what to do, in one line."""
    slower = f"training is {best.rate / now.rate:.1f} times slower than it was ({now.rate:.3g} samples/s, before {best.rate:.3g})"
    if now.waiting > 0.2 * now.wall:
        return f"{slower}: other programs use the cores that it runs on; stop them, or give this run fewer --threads"
    if now.cpu / now.wall < 0.6 * best.cpu / best.wall:
        return f"{slower}: it computes less and waits more, for its data or for other processes; --data-benchmark measures the data alone"
    return (
        f"{slower}: it computes as much as before, so the processor or its memory is slower; other programs on the same machine may be why"
    )


def _seconds_waited() -> float:
    """Seconds in which threads of this process were ready to run and had no core; 0 where the system does not say."""
    nanoseconds = 0
    for thread in Path("/proc/self/task").glob("*/schedstat") if os.path.isdir("/proc/self/task") else ():
        try:
            nanoseconds += int(thread.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return nanoseconds * 1e-9
