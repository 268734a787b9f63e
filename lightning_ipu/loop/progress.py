"""The progress of a fit, and requests to stop it, which a display, a signal handler and the loop share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.trainer.states import TrainerFn

from lightning_ipu.engine.processes import Processes
from lightning_ipu.loop.undo import Undo
from lightning_ipu.plan import Plan


@dataclass
class TrainingProgress:
    """Where a fit stands; counters move while a host step runs, so that a display can follow them.

    `samples_done` counts since the fit began, `updates_done` within the epoch, `run_updates` in the run, those included that were skipped
    because scaled gradients overflowed. `step_updates`, `step_micro_batches` and `step_samples` are those of the host step, over all
    replicas and processes: in `on_train_batch_start` what it will hold, in `on_train_batch_end` what it held. A signal handler that
    stores its signal's number in `stop_signal` ends the host step after the current weight update.
    """

    updates_per_epoch: int | None = None
    samples_left_out: int = 0
    updates_done: int = 0
    run_updates: int = 0
    samples_done: int = 0
    step_updates: int = 0
    step_micro_batches: int = 0
    step_samples: int = 0
    latest: dict[str, Any] = field(default_factory=dict)
    stop_signal: int | None = None

    def hold(self, updates: int, plan: Plan) -> None:
        """Set how many weight updates the host step holds."""
        self.step_updates, self.step_micro_batches = updates, updates * plan.micro_batches_per_update
        self.step_samples = self.step_micro_batches * plan.micro_batch_size


class Stop:
    """Agrees among all processes on the signal by which a run ends."""

    def __init__(self, progress: TrainingProgress, processes: Processes | None) -> None:
        self._progress, self._processes = progress, processes
        self._agreed: int | None = None
        self.end_by: Callable[[int], None] | None = None  # ends a fit by a signal; None leaves it to Lightning, which saves nothing

    def forget(self) -> None:
        """Called when a host step begins."""
        self._agreed = None

    def agree(self, number: int) -> None:
        """Called in every process at the same weight update, after any of them has received signal `number`."""
        self._progress.stop_signal = self._agreed = number

    @property
    def agreed(self) -> int | None:
        """The signal by which all processes have ended the last host step; a single process takes its own."""
        return self._progress.stop_signal if self._processes is None else self._agreed

    @property
    def is_agreed_by_several(self) -> bool:
        """Whether several processes have agreed to stop."""
        return self._agreed is not None

    def take_over_sigterm(self, trainer: Trainer, undo: Undo) -> None:
        """Replace Lightning's handler of SIGTERM: it would start a collective at once, and act only after the host step."""
        undo.exchange(trainer._signal_connector, "_sigterm_notifier_fn", partial(self._on_sigterm, trainer))

    def _on_sigterm(self, trainer: Trainer, signum: int, frame: Any) -> None:
        if self._processes is not None and trainer.state.fn != TrainerFn.FITTING:
            raise SystemExit(128 + signum)
        self._progress.stop_signal = signum
        trainer._signal_connector.received_sigterm = self._processes is None  # of several processes, once they have agreed

    def share_wish(self, trainer: Trainer) -> None:
        """Set `trainer.should_stop` in all processes if one has set it; all must call this, after hooks and before Lightning reads it."""
        if self._processes is not None:
            trainer.should_stop = any(self._processes.gathered(trainer.should_stop))

    def ask_all(self) -> int | None:
        """The signal that a handler in any of the processes has stored in `progress.stop_signal`; all processes must call this."""
        number = self._progress.stop_signal or 0
        if self._processes is not None:
            number = self._processes.largest(number)
        return number or None
