"""Rows of training logs: one for each weight update that is due, as if Lightning's loop had made each by itself."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import Trainer


class LogRows:
    """Passes what weight updates have logged to the loggers.

    Like Lightning's own, a row shows the last value of what its update did not log.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._row: dict[str, float] = {}
        self._logged_in_epoch = False

    def begin_epoch(self) -> None:
        """Forget the last epoch."""
        self._row, self._logged_in_epoch = {}, False

    def log(self, rows: list[dict[str, float]], *, updates: int, ends: bool) -> None:
        """Log the rows of `updates` weight updates but the last, which Lightning logs. An epoch that `ends` has at least one row."""
        trainer, row = self._trainer, self._row
        connector, every, epoch_loop = trainer._logger_connector, trainer.log_every_n_steps, trainer.fit_loop.epoch_loop
        first = epoch_loop._batches_that_stepped
        for update in range(updates):
            row.update(rows[update] if update < len(rows) else {})
            epoch_loop._batches_that_stepped = first + update  # the step that loggers get, unless a `step` was logged
            if update < updates - 1 and row and every and (first + update + 1) % every == 0:
                connector.log_metrics(_as_tensors(row))
                self._logged_in_epoch = True
        self._logged_in_epoch |= connector.should_update_logs
        if ends and every and row and not self._logged_in_epoch:
            connector.log_metrics(_as_tensors(row))  # a short epoch still shows one training loss

    def log_last(self, *, epoch: int, update: int) -> None:
        """Log the row of the run's latest weight update, if it is due: an error had kept the run from it."""
        every = self._trainer.log_every_n_steps
        if self._row and every and update % every == 0:
            row = {"epoch": torch.tensor(epoch), **_as_tensors(self._row)}
            self._trainer._logger_connector.log_metrics(row, step=update - 1)

    def state_dict(self) -> dict[str, Any]:
        """The last values, and whether the epoch has a row, for a checkpoint."""
        return {"row": dict(self._row), "logged": self._logged_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; other keys are left alone."""
        self._row, self._logged_in_epoch = dict(state["row"]), state["logged"]


def _as_tensors(row: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in row.items()}
