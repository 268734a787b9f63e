"""What a person sees of a run: the plan in a table, a progress line that moves inside a host step, one line per epoch, the result.

On a terminal the progress line is drawn by a thread that reads the strategy's counters a few times a second, so it costs the
training nothing and moves while thousands of weight updates pass without a callback. Where standard output is a file or a pipe, plain lines without
control codes are printed instead: one about every ten seconds and one per epoch.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_ipu.loop.events import events_of

SECONDS_BETWEEN_LINES = 10.0
REFRESHES_PER_SECOND = 2.0


# -- the plan -----------------------------------------------------------------------------------------------------------------


def plan_rows(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """The plan that a strategy carries out, in words: what enters a weight update and what an epoch is."""
    plan, progress = trainer.strategy.plan, trainer.strategy.progress
    stages = f"{plan.num_stages:,} ({counted(plan.num_ipus, 'virtual IPU')})"
    if plan.num_stages > 1 and trainer.world_size == 1:
        stages += "; one process runs the network whole"
    if progress.updates_per_epoch is None:
        epoch = "as long as the stream"
    else:
        epoch = f"{counted(progress.updates_per_epoch, 'weight update')}, {counted(progress.samples_left_out, 'sample')} left out"
    host_step = f"{counted(plan.device_iterations, 'weight update')} per host step, at most"
    if (bound := events_of(trainer, plan, progress.updates_per_epoch).bound) is not None:
        host_step += f"; here {bound[0]:,}: {bound[1]}"
    return [
        ("micro-batch", f"{plan.micro_batch_size:,}"),
        ("gradient accumulation A", f"{plan.gradient_accumulation_factor:,}"),
        ("replicas R", f"{plan.replication_factor:,}"),
        ("stages S", stages),
        ("global batch", f"{counted(plan.samples_per_update, 'sample')} per weight update"),
        ("device iterations D", host_step),
        ("epoch", epoch),
    ]


def plan_table(title: str, rows: Sequence[tuple[str, str]]) -> Panel:
    """A small table of names and values with a title."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return Panel(table, title=title, title_align="left", expand=False)


def closing_lines(*, throughput: float | None = None, accuracy: float | None = None, loss: float | None = None) -> list[str]:
    """The lines that end a run, in the original program's format; what was not measured is left out.

    ``throughput`` is in samples per second, ``accuracy`` a share between 0 and 1.
    """
    lines = []
    if throughput is not None:
        lines.append(f"throughput: {throughput:.1f} samples/sec")
    if accuracy is not None:
        lines.append(f"accuracy: {100 * accuracy:.2f} %")
    if loss is not None:
        lines.append(f"loss: {loss:.4f}")
    return lines


def score_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of what checkpoints scored: one row each, with accuracies in percent."""
    table = Table(title="checkpoints", title_justify="left")
    for name in rows[0]:
        words = {"step": "weight updates"}.get(name, name.removeprefix("val_"))
        table.add_column(words, justify="left" if name == "checkpoint" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_score(name, value) for name, value in row.items()))
    return table


def _score(name: str, value: Any) -> str:
    if name.endswith("accuracy"):
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


# -- the run ------------------------------------------------------------------------------------------------------------------


class RunDisplay(ProgressBar):
    """Shows a run as described above; knows of the network and the data only the ``facts`` it is given.

    Args:
        title: of the table.
        facts: rows for the table beside the plan's, as (name, value).
        train_loss, val_loss, val_accuracy: names under which the module logs them.
        log_interval: seconds between plain lines; None is 10 where standard output is no terminal, and no such lines where it is one.
    """

    def __init__(
        self,
        *,
        title: str,
        facts: Sequence[tuple[str, str]] = (),
        train_loss: str = "train_loss",
        val_loss: str = "val_loss",
        val_accuracy: str = "val_accuracy",
        log_interval: float | None = None,
        console: Console | None = None,
    ) -> None:
        super().__init__()
        self.title, self.facts = title, list(facts)
        self.names = {"train": train_loss, "loss": val_loss, "accuracy": val_accuracy}
        self.console = console or Console(highlight=False, soft_wrap=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 100)
        self.log_interval = log_interval
        self.enabled = True
        self.started = False  # whether training or an evaluation has begun: errors after that have another exit status
        self.validated_at: int | None = None  # weight updates after which the last validation ran
        self._live: Live | None = None
        self._ticker: _Ticker | None = None
        self._clock = _TrainingClock()
        self._evaluation = ""  # what an evaluation is called while it runs
        self._batches_done, self._batches_total = 0, 0
        self._epoch, self._epoch_start = 1, 0.0  # Lightning's own count already rises at an epoch's end
        self._last_evaluation_seconds = 0.0

    # -- what Lightning asks of a progress bar

    @override
    def enable(self) -> None:
        self.enabled = True

    @override
    def disable(self) -> None:
        self.enabled = False

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        self.line(" ".join(map(str, args)))

    def line(self, text: str) -> None:
        """Print a line above the progress line."""
        if self.enabled:
            self.console.print(text, markup=False)

    # -- training

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started, self._epoch, self._epoch_start = True, trainer.current_epoch + 1, time.monotonic()
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        rows = [*self.facts[:1], ("parameters", f"{parameters:,}"), *self.facts[1:], *plan_rows(trainer)]
        if self.enabled:
            self.console.print(plan_table(self.title, rows))
        self._clock.start(trainer.strategy.progress)
        self._begin_drawing()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch, self._epoch_start = trainer.current_epoch + 1, time.monotonic()
        self._clock.resume()

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._clock.resume()  # after a validation within the epoch

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.pause()
        metrics = trainer.callback_metrics
        parts = [f"epoch {trainer.current_epoch + 1}{_of(trainer.max_epochs)}"]
        train = metrics.get(f"{self.names['train']}_epoch", metrics.get(self.names["train"]))
        if train is not None:
            parts.append(f"train loss {float(train):.4f}")
        if self.validated_at == trainer.global_step:
            if (loss := metrics.get(self.names["loss"])) is not None:
                parts.append(f"val loss {float(loss):.4f}")
            if (accuracy := metrics.get(self.names["accuracy"])) is not None:
                parts.append(f"val accuracy {100 * float(accuracy):.2f} %")
        parts.append(_duration(time.monotonic() - self._epoch_start))
        self.line(" · ".join(parts))
        if self._ticker is not None:
            self._ticker.postpone()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.pause()
        self._end_drawing()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_drawing()

    @property
    def throughput(self) -> float | None:
        """Samples per second of training, evaluations and what happens between epochs excluded; None before the first micro-batch."""
        return self._clock.rate

    # -- evaluation

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_evaluation(trainer, "validating", trainer.num_val_batches)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_evaluation(trainer, "testing", trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_evaluation(trainer, "predicting", trainer.num_predict_batches)

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._batches_done += 1

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated_at = trainer.global_step
        self._end_evaluation(trainer)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation(trainer)

    on_predict_end = on_test_end

    def _begin_evaluation(self, trainer: pl.Trainer, name: str, batches: Any) -> None:
        self.started = True
        self._clock.pause()
        total = sum(batches) if isinstance(batches, list) else batches
        self._evaluation, self._batches_done, self._batches_total = name, 0, int(total) if math.isfinite(total) else 0
        self._evaluation_start = time.monotonic()
        if trainer.state.fn != "fit":
            self._begin_drawing()

    def _end_evaluation(self, trainer: pl.Trainer) -> None:
        self._last_evaluation_seconds = time.monotonic() - self._evaluation_start
        self._evaluation = ""
        if trainer.state.fn != "fit":
            self._end_drawing()

    # -- drawing

    def _begin_drawing(self) -> None:
        if not self.enabled or self._live is not None or self._ticker is not None:
            return
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=REFRESHES_PER_SECOND, transient=True)
            self._live.start()
        if self.log_interval is not None or not self.console.is_terminal:
            self._ticker = _Ticker(lambda: self.line(self._words()), seconds=self.log_interval or SECONDS_BETWEEN_LINES)
            self._ticker.start()

    def _end_drawing(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None

    def _draw(self) -> Table:
        """The progress line: a bar and the words beside it."""
        done, total = self._position()
        total = total or 0
        table = Table.grid(padding=(0, 1))
        table.add_row(
            Bar(total=total or None, completed=done, width=20, pulse=not total), Text(self._words(), overflow="ellipsis", no_wrap=True)
        )
        return table

    def _position(self) -> tuple[int, int | None]:
        if self._evaluation:
            return self._batches_done, self._batches_total
        progress = self.trainer.strategy.progress
        return progress.updates_done, progress.updates_per_epoch

    def _words(self) -> str:
        """Where the run is, in one line, from the live counters."""
        trainer = self.trainer
        done, total = self._position()
        if self._evaluation:
            return f"{self._evaluation} · batch {done:,}{_of(self._batches_total)}"
        parts = [f"epoch {self._epoch}{_of(trainer.max_epochs)}", f"update {done:,}{_of(total)}"]
        latest = trainer.strategy.progress.latest
        loss = latest.get(self.names["train"], latest.get(f"{self.names['train']}_step"))
        if loss is not None:
            parts.append(f"loss {float(loss):.4f}")
        if trainer.optimizers:
            parts.append(f"lr {float(trainer.optimizers[0].param_groups[0]['lr']):.3g}")
        if rate := self._clock.rate:
            parts.append(f"{rate:.1f} samples/s")
            if (left := self._seconds_left(rate)) is not None:
                parts.append(f"{_duration(left)} left")
        return " · ".join(parts)

    def _seconds_left(self, rate: float) -> float | None:
        """Seconds until training ends, validations included at the length of the last one; None where no end is set."""
        trainer, progress = self.trainer, self.trainer.strategy.progress
        epoch = progress.updates_per_epoch
        if not epoch:
            return None
        ends = [trainer.max_epochs * epoch] if trainer.max_epochs is not None and trainer.max_epochs > 0 else []
        ends += [trainer.max_steps] if trainer.max_steps > 0 else []
        if not ends:
            return None
        updates = max(0, min(ends) - trainer.current_epoch * epoch - progress.updates_done)
        validations = math.ceil(updates / epoch)
        return updates * trainer.strategy.plan.samples_per_update / rate + validations * self._last_evaluation_seconds


class _TrainingClock:
    """Seconds spent in training and the samples trained in them; stands still during evaluations."""

    def __init__(self) -> None:
        self._seconds, self._since, self._progress = 0.0, None, None

    def start(self, progress: Any) -> None:
        self._progress, self._seconds, self._since = progress, 0.0, time.monotonic()
        self._samples_before = progress.samples_done

    def pause(self) -> None:
        if self._since is not None:
            self._seconds, self._since = self._seconds + time.monotonic() - self._since, None

    def resume(self) -> None:
        if self._progress is not None and self._since is None:
            self._since = time.monotonic()

    @property
    def rate(self) -> float | None:
        if self._progress is None:
            return None
        since = self._since  # another thread may pause the clock between two looks
        seconds = self._seconds + (time.monotonic() - since if since is not None else 0.0)
        samples = self._progress.samples_done - self._samples_before
        return samples / seconds if samples and seconds > 0 else None


class _Ticker(threading.Thread):
    """Calls ``report`` every so many ``seconds`` until it is stopped."""

    def __init__(self, report: Any, *, seconds: float) -> None:
        super().__init__(name="progress lines", daemon=True)
        self._report, self._seconds, self._wake, self._stopped = report, seconds, threading.Event(), False

    def run(self) -> None:
        while not self._stopped:
            if not self._wake.wait(self._seconds):
                self._report()
            self._wake.clear()

    def postpone(self) -> None:
        """Start the wait anew: a line has just been printed."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self.join()


def counted(number: int, what: str) -> str:
    """A number of things in words: 1 sample, 2 samples."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _of(total: int | None) -> str:
    return f"/{total:,}" if total is not None and total > 0 else ""


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
