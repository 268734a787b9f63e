"""A run's checkpoints, and how Ctrl-C and SIGTERM end it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_ipu.command.display import RunDisplay
from lightning_ipu.command.output import MetricsFile
from lightning_ipu.files import link, read_checkpoint
from lightning_ipu.loop.events import EventsPerEpoch
from lightning_ipu.loop.launcher import AgreedStop
from lightning_ipu.loop.position import KEY, VALIDATION, weight_updates_in
from lightning_ipu.recipe.averaging import OF_CHECKPOINTS

LAST = "last.ckpt"
SETTINGS = "command_settings"  # in a checkpoint: precision and data as LightningCLI keys


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint in ``directory`` from which its run resumes: ``last.ckpt``, else the one after the most weight updates."""
    if (directory / LAST).is_file():
        return directory / LAST
    loaded = {path: read_checkpoint(path) for path in directory.glob("*.ckpt")}
    found = {path: checkpoint["global_step"] for path, checkpoint in loaded.items() if OF_CHECKPOINTS not in checkpoint}
    return max(found, key=lambda path: (found[path], path.name), default=None)


def in_order(paths: Sequence[Path]) -> list[tuple[int, int, Path]]:
    """Checkpoints in the order of their weight updates: (weight updates, epochs done, file); ``last.ckpt`` only where it is not a link to one of them."""
    found = []
    for path in paths:
        checkpoint = read_checkpoint(path)
        epochs = checkpoint[KEY]["position"]["epoch"] if KEY in checkpoint else checkpoint["epoch"]
        found.append((weight_updates_in(checkpoint), epochs, path))
    others = {updates for updates, _, path in found if path.name != LAST}
    return sorted(one for one in found if one[2].name != LAST or one[0] not in others)


class SignalHandler:
    """Ctrl-C and SIGTERM: the first one asks a training run to end at the next weight update, the second one ends it at once.

    Signals within a second are one: `timeout` sends one to the process and one to its group, and so do a terminal and torchrun together.
    Python runs a handler between two of its own instructions, never inside a call of C++: a process that waits there for other processes,
    for up to half an hour, would not react. So a thread also reads every signal's number (from a socket that Python's C handler writes to)
    and ends the process 2 s after a signal that should have ended it.
    """

    def __init__(self) -> None:
        self.display: RunDisplay | None = None
        self.trainer: pl.Trainer | None = None  # while it trains
        self.received: int | None = None
        self._received_at = 0.0
        self._before: dict[int, Any] = {}  # handlers
        self._over = threading.Event()
        self._wakeup: socket.socket | None = None

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before.setdefault(signum, signal.getsignal(signum))
                signal.signal(signum, self._handle)

    def listen(self) -> None:
        """Start the thread that ends a process which does not react to a signal, until `release`."""
        if threading.current_thread() is threading.main_thread():
            signals, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._end_if_stuck, args=(signals,), daemon=True).start()

    def release(self) -> None:
        """End the handling of signals, since the run is over: the earlier handlers are restored."""
        self._over.set()
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakeup.close()
        if self.received is None:
            self._restore()

    @property
    def is_released(self) -> bool:
        """Whether the run is over."""
        return self._over.is_set()

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _end_if_stuck(self, signals: socket.socket) -> None:
        asked: float | None = None
        with signals:
            while number := signals.recv(1):
                signum = number[0]
                if signum not in (signal.SIGINT, signal.SIGTERM):
                    continue
                if self.trainer is not None and asked is None:
                    asked = time.monotonic()
                elif not _is_same_request(asked) and not self._over.wait(2):
                    os._exit(128 + signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and _is_same_request(self._received_at):
            return
        if self.is_released:
            self._restore()
            os.kill(os.getpid(), signum)
            return
        if self.trainer is None or self.received is not None:
            raise SystemExit(128 + signum)
        self.received, self._received_at = signum, time.monotonic()
        self.trainer.strategy.progress.stop_signal = signum
        # Written by a thread: this handler may have interrupted a write to the same stream.
        work = "current batch of the validation" if self.trainer.validating else "current weight update"
        again = "Ctrl-C again" if signum == signal.SIGINT else "the signal again"
        text = f"finishing the {work}, then saving ({again} ends at once)"
        threading.Thread(target=self.say, args=(text,)).start()

    @rank_zero_only
    def say(self, text: str) -> None:
        if self.display is not None:
            self.display.line(text)
        else:
            print(text, flush=True)


def _is_same_request(before: float | None) -> bool:
    """Whether a signal that arrives now counts as the same request as an earlier one."""
    return before is not None and time.monotonic() - before < 1


def _leave_signals_to_the_run() -> None:
    """In a forked process, such as a loader's: a terminal's Ctrl-C is for the run, which ends its loaders itself."""
    signal.set_wakeup_fd(-1)  # it would tell of this process's signals as if they were the run's
    if isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), SignalHandler):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_signals_to_the_run)


class RunCheckpoints(Callback):
    """Keeps ``last.ckpt``, the latest state: saved after every N weight updates, each epoch and the training, and when a signal ends the run.

    It saves when all that follows a weight update or an epoch is over (logs, validation, the epoch's end), so that the run that goes on
    from there repeats nothing and leaves nothing out. Only a signal during a validation does not wait for its end: the resumed run repeats
    the validation. Every checkpoint gets the ``settings`` that an evaluation needs beside the module's own.

    Args:
        directory: of the checkpoints.
        every: weight updates from one checkpoint to the next, None for one per epoch only.
        keep: how many of the latest are kept, under their numbers of weight updates; 1 keeps ``last.ckpt`` only.
        events: its number of checkpoints per epoch, if set, replaces ``every``; all of them are kept if ``keep`` is 1.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int | None,
        keep: int,
        signals: SignalHandler,
        settings: dict[str, Any],
        events: EventsPerEpoch | None = None,
    ) -> None:
        self.directory, self.every_n_updates, self.keep, self.events = directory, every, keep, events
        self.signals, self.settings = signals, settings
        self.trained = False  # whether there was anything left to train
        self._saved_after: int | None = None
        self._resumed_before_a_validation = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trained = True
        if not self._resumed_before_a_validation:  # else the position after the validation is worth another checkpoint
            self._saved_after = trainer.global_step
        self.signals.trainer = trainer
        trainer.strategy.stop.end_by = partial(self._end_if_asked, trainer)
        self.signals.install()  # in place of Lightning's own for SIGTERM, which ends with status 0
        if trainer.is_global_zero:
            for part in self.directory.glob(".*.ckpt.*.part"):  # of a write that was killed
                part.unlink()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self.every_n_updates and trainer.global_step % self.every_n_updates == 0 or self._is_due(trainer):
            self._save(trainer)
        self._end_if_asked(trainer, trainer.strategy.stop.agreed)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._per_epoch or self._is_due(trainer):
            self._save(trainer)
        self._end_if_asked(trainer, trainer.strategy.stop.ask_all())

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.world_size == 1:  # several processes agree in the strategy
            self._end_if_asked(trainer, trainer.strategy.stop.agreed)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer)
        self._end_if_asked(trainer, trainer.strategy.stop.ask_all())
        self.signals.trainer = None

    @override
    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._resumed_before_a_validation = KEY in checkpoint and checkpoint[KEY]["position"]["hook"] == VALIDATION

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS] = self.settings
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.flush()

    def _save(self, trainer: pl.Trainer) -> None:
        if self._saved_after == trainer.global_step:
            return
        self._saved_after = trainer.global_step
        if not self._is_due(trainer) if self._per_epoch else self.keep == 1:
            trainer.save_checkpoint(self.directory / LAST)
            return
        path = self.directory / f"update{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            link(path, self.directory / LAST)
            if self._per_epoch and self.keep == 1:
                return
            numbered = self.numbered()
            for number in sorted(number for number in numbered if number <= trainer.global_step)[: -self.keep]:
                numbered[number].unlink()

    @property
    def _per_epoch(self) -> bool:
        return self.events is not None and self.events.checkpoints is not None

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return self._per_epoch and self.events.checkpoint_due(trainer.global_step)

    def numbered(self) -> dict[int, Path]:
        """The checkpoints that are kept under their numbers of weight updates."""
        return {int(number): path for path in self.directory.glob("update*.ckpt") if (number := path.stem[len("update") :]).isdigit()}

    def _end_if_asked(self, trainer: pl.Trainer, signum: int | None) -> None:
        if signum is None or trainer is not self.signals.trainer:
            return
        trainer.strategy.progress.stop_signal = signum  # also where it was not received, so that the others' end is no failure
        self._save(trainer)
        self.signals.trainer = None
        self.signals.say(f"stopped after {trainer.global_step:,} weight updates; the state is saved in {self.directory / LAST}")
        raise AgreedStop(128 + signum)


class BestCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, whose state names its files relative to their directory: a run may be moved, and goes on."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._with_paths(super().state_dict(), lambda path: os.path.relpath(path, self.dirpath)) | {"dirpath": ""}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        placed = self._with_paths(state_dict, lambda path: os.path.join(self.dirpath, path))
        super().load_state_dict(placed | {"dirpath": self.dirpath})

    @staticmethod
    def _with_paths(state: dict[str, Any], change: Any) -> dict[str, Any]:
        changed = {name: change(state[name]) if state[name] else state[name] for name in state if name.endswith("_path")}
        return {**state, **changed, "best_k_models": {change(path): score for path, score in state["best_k_models"].items()}}
