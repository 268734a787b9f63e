"""The subcommands fit, validate, test and predict, with the lines and files that each ends with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.cli import LightningCLI
from rich.console import Console

from lightning_ipu.command.display import RunDisplay, closing_lines, counted, score_table
from lightning_ipu.command.lifecycle import LAST, BestCheckpoint, RunCheckpoints, in_order
from lightning_ipu.command.output import OutputDirectory, set_aside, write_scores
from lightning_ipu.errors import UserError
from lightning_ipu.files import atomic_write, check_writable

VAL_LOSS, VAL_ACCURACY = "val_loss", "val_accuracy"


class Scoring(LightningCLI):
    """LightningCLI whose subcommands end with closing lines in place of Lightning's tables, and score the checkpoints that were made."""

    checkpoints: RunCheckpoints | None
    output: OutputDirectory | None
    display: RunDisplay | None
    resumed: dict[str, Any] | None
    averaged: str | None
    ckpt_path: str | None

    def fit(self, **arguments: Any) -> None:
        """Lightning's ``fit``, from the checkpoint that `parse_arguments` has found."""
        self.trainer.fit(**{**arguments, "ckpt_path": self.ckpt_path})

    def after_fit(self) -> None:
        if self.resumed is not None and self.checkpoints is not None and not self.checkpoints.trained:
            done = f"{counted(self.trainer.global_step, 'weight update')}, {counted(self.trainer.current_epoch, 'epoch')}"
            self._close([f"already complete: {done} in {self.ckpt_path}; nothing was changed"])
            return
        final = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        validated = self.display is not None and self.display.validated_at == self.trainer.global_step
        validates = self.config.fit.then_validate and self.trainer.limit_val_batches != 0
        scored_below = validates and not self.config.fit.checkpoint_input_dir and self.trainer.global_step in self._made_per_epoch()
        if scored_below or not self.trainer.strategy.broadcast(validated):
            final.pop(VAL_LOSS, None), final.pop(VAL_ACCURACY, None)
            if validates and not scored_below:
                scores = self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
                final = scores[0] if scores else {}
        self._close(
            closing_lines(throughput=self.display and self.display.throughput, accuracy=final.get(VAL_ACCURACY), loss=final.get(VAL_LOSS))
        )
        if self.config.fit.then_test:
            scores = self._only(self.trainer.test(self.model, datamodule=self.datamodule, verbose=False), "test")
            lines = closing_lines(accuracy=scores.get("test_accuracy"), loss=scores.get("test_loss"))
            self._close([f"test {line}" for line in lines])
        if validates:  # last, since it leaves other weights behind
            rows = self._score_checkpoints()
            if scored_below:
                self._close(closing_lines(accuracy=rows[-1].get(VAL_ACCURACY), loss=rows[-1].get(VAL_LOSS)))
        self._close(self._places())
        if note := self.command.note(self):
            self._close([note])

    def _places(self) -> list[str]:
        """Where a training has left what, in one line."""
        if self.output is None or self.checkpoints is None:
            return []
        last, best = self.checkpoints.directory / LAST, self.trainer.checkpoint_callback
        parts = [f"last checkpoint {last}"] if last.exists() else []
        if isinstance(best, BestCheckpoint) and best.monitor is not None and best.best_model_path:
            if (path := self.checkpoints.directory / Path(best.best_model_path).name).exists():
                parts.append(f"best {path} ({best.monitor} {float(best.best_model_score):.4f})")
        return [f"results in {self.output.path}{': ' if parts else ''}{', '.join(parts)}"]

    def validate(self, **arguments: Any) -> None:
        """Lightning's ``validate`` with this command's closing lines in place of its table."""
        if self.ckpt_path is None and self._score_checkpoints():
            self._close_evaluation([])
            return
        self._warn_of_random_weights()
        scores = self._only(self.trainer.validate(**{**arguments, "ckpt_path": self.ckpt_path, "verbose": False}), "validate")
        self._close_evaluation(closing_lines(accuracy=scores.get(VAL_ACCURACY), loss=scores.get(VAL_LOSS)))

    def test(self, **arguments: Any) -> None:
        """Lightning's ``test`` with this command's closing lines in place of its table."""
        self._warn_of_random_weights()
        scores = self._only(self.trainer.test(**{**arguments, "ckpt_path": self.ckpt_path, "verbose": False}), "test")
        self._close_evaluation(closing_lines(accuracy=scores.get("test_accuracy"), loss=scores.get("test_loss")))

    def predict(self, **arguments: Any) -> None:
        """Lightning's ``predict``; what it returns is saved in ``predictions.pt``, in the order of the data, an earlier file aside."""
        self._warn_of_random_weights()
        if self.trainer.is_global_zero:
            check_writable(self.trainer.default_root_dir)
        batches = self.trainer.predict(**{**arguments, "ckpt_path": self.ckpt_path, "return_predictions": True})
        self._only(batches, "predict")
        tensors = bool(batches) and all(isinstance(batch, torch.Tensor) for batch in batches)
        predictions = torch.cat(batches) if tensors else batches
        path = Path(self.trainer.default_root_dir) / "predictions.pt"
        if self.trainer.is_global_zero:
            set_aside(path)
            with atomic_write(path) as file:
                torch.save(predictions, file)
            if tensors and hasattr(self.datamodule, "write_predictions"):
                self.datamodule.write_predictions(predictions, path.with_suffix(".csv"))
        shape = " x ".join(map(str, predictions.shape)) if tensors else f"{len(batches)} batches"
        self._close_evaluation([f"predictions: {path} ({shape})"])

    def _only(self, results: Sequence[Any] | None, what: str) -> Any:
        """What an evaluation of the one loader gave; an error where the data had nothing to evaluate."""
        if not results:
            data = getattr(self.datamodule, "description", type(self.datamodule).__name__)
            raise UserError(f"there is nothing to {what}: {data} has no samples for it")
        return results[0]

    def _score_checkpoints(self) -> list[dict[str, Any]]:
        """Validate all checkpoints in ``checkpoint_input_dir``, or those that the run made per epoch: a table, ``validation.csv``, and rows."""
        config, made = self.config[self.subcommand], self._made_per_epoch()
        paths = list(made.values())
        if (folder := config.checkpoint_input_dir) is not None:
            if not Path(folder).is_dir():
                raise UserError(f"checkpoint_input_dir: there is no directory {folder}")
            paths = sorted(Path(folder).glob("*.ckpt"))
            if not paths:
                warnings.warn(f"there is no checkpoint (*.ckpt) in {folder}", stacklevel=2)
        if paths and self.trainer.is_global_zero:
            check_writable(self.trainer.default_root_dir)
        rows: list[dict[str, Any]] = []
        loggers = self.trainer.loggers
        for updates, epochs, path in in_order(paths):
            is_final = updates == self.trainer.global_step and path in made.values()
            self.trainer.loggers = loggers if is_final else []  # whose x axis stands at the run's end
            scores = self._only(
                self.trainer.validate(self.model, datamodule=self.datamodule, ckpt_path=str(path), verbose=False), "validate"
            )
            rows.append({"step": updates, "epochs": epochs, "checkpoint": path.name, **scores})
        self.trainer.loggers = loggers
        if rows and self.trainer.is_global_zero:
            path = write_scores(Path(self.trainer.default_root_dir), rows)
            Console().print(score_table(rows))
            self._close([f"the same in {path}"])
        if rows and config.clean_dir and self.trainer.is_global_zero:
            for path in made.values():
                path.unlink()
        return rows

    def _made_per_epoch(self) -> dict[int, Path]:
        """The checkpoints that the run has kept for their frequency per epoch, by their weight updates."""
        kept = self.checkpoints is not None and self.checkpoints.events.checkpoints is not None
        return self.checkpoints.numbered() if kept else {}

    def _warn_of_random_weights(self) -> None:
        if self.ckpt_path is None and not getattr(self.model, "pretrained", None):
            warnings.warn(f"{self.subcommand} without --ckpt_path: the weights are RANDOM, not trained", stacklevel=2)

    def _close_evaluation(self, lines: list[str]) -> None:
        note = self.command.note(self)
        weights = [f"weights: {self.averaged}"] if self.averaged else []
        self._close([*weights, *lines, *([note] if note else [])])

    def _close(self, lines: list[str]) -> None:
        if lines and self.trainer.is_global_zero:
            print("\n".join(lines), flush=True)
