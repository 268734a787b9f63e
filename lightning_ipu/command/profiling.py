"""Where the time of a run goes, operator by operator, as torch.profiler sees it: ``train_report.txt`` and ``eval_report.txt``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from lightning_ipu.command.output import EVAL_REPORT, TRAIN_REPORT, set_aside
from lightning_ipu.files import atomic_write

EVALUATION_BATCHES = 10
ROWS = 40


class ProfileReports(Callback):
    """Profiles a little of the training and of each kind of evaluation, and writes a table of operators for each.

    Of training it is the second host step, or the first where there is no other (first steps allocate memory and choose kernels); of a
    validation or test outside of a fit, up to 10 batches. The reports go to the Trainer's ``default_root_dir``; an
    evaluation's earlier report is kept as ``eval_report-1.txt``, .... Of several processes the first one is profiled, as the report says.
    """

    def __init__(self) -> None:
        self._profiler: profile | None = None
        self._text: str | None = None  # of the first host step, until there is a second
        self._host_steps = 0

    # -- training

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._host_steps, self._text = 0, None

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._host_steps < 2:
            self._updates_before = trainer.global_step
            self._begin(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._profiler is None:
            return
        first, last = self._updates_before + 1, trainer.global_step
        samples = (last - first + 1) * trainer.strategy.plan.samples_per_update
        self._text = self._end(f"training, weight updates {first:,} to {last:,}, {samples:,} samples", samples=samples)
        self._host_steps += 1
        if self._host_steps == 2:
            self._write(trainer, TRAIN_REPORT)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._host_steps == 1:
            self._write(trainer, TRAIN_REPORT)

    # -- evaluation

    @override
    def on_test_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 0 and trainer.state.fn != "fit":
            self._batches = 0
            self._begin(trainer)

    @override
    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._batches += 1
            if self._batches == EVALUATION_BATCHES:
                self._text = self._end(f"evaluation, the first {self._batches} batches")

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profiler is not None:
            self._text = self._end(f"evaluation, all {self._batches} batches")
        if trainer.state.fn != "fit" and self._text is not None:
            self._write(trainer, EVAL_REPORT)

    on_validation_batch_start = on_test_batch_start
    on_validation_batch_end = on_test_batch_end
    on_validation_end = on_test_end

    # -- both

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _begin(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            self._whose = f", of the first of {trainer.world_size} processes alone" if trainer.world_size > 1 else ""
            self._cuda = trainer.strategy.root_device.type == "cuda"
            self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])])
            self._profiler.start()
            self._began = time.perf_counter()

    def _end(self, what: str, *, samples: int | None = None) -> str:
        """Stop the profiler; returns the report."""
        assert self._profiler is not None
        if self._cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        self._profiler.stop()
        order = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        self._profiler = None
        rate = f", {samples / seconds:,.1f} samples/s" if samples else ""
        threads = torch.get_num_threads()
        where = torch.cuda.get_device_name() if self._cuda else f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        return f"{what}{self._whose}: {seconds:.3f} s{rate}, slowed by being profiled\ntorch {torch.__version__} on {where}\n\n{table}\n"

    def _write(self, trainer: pl.Trainer, name: str) -> None:
        path = Path(trainer.default_root_dir) / name
        set_aside(path)
        with atomic_write(path, "w") as file:
            file.write(self._text)
        self._text = None
        show = print if trainer.progress_bar_callback is None else trainer.progress_bar_callback.print
        show(f"{path}: where the time went{self._whose}, by torch.profiler")
