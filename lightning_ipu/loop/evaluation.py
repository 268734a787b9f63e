"""Lightning's evaluation loop under this package: every sample is scored once by all processes together, under seeds of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
from pytorch_lightning.plugins import Precision
from pytorch_lightning.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_ipu.data.evaluation import EvaluationData
from lightning_ipu.engine.evaluation import EvaluationPipeline
from lightning_ipu.engine.processes import Processes
from lightning_ipu.engine.stages import StageState
from lightning_ipu.loop.logs import LogRecorder, differing_names, undone_unless_finished
from lightning_ipu.loop.metrics import SharedMetrics, metrics_of, unchanged_metrics
from lightning_ipu.loop.progress import Stop
from lightning_ipu.loop.transfer import Transfer
from lightning_ipu.loop.undo import Undo
from lightning_ipu.plan import PlanError
from lightning_ipu.randomness import mix, name_word, preserved_streams, seed_all

_BATCHES_BETWEEN_AGREEMENTS = 4  # of a validation; between them several processes do not agree on whether a signal ends it
_EVALUATION, _STEP = (name_word(name) for name in ("evaluation", "step"))


class Evaluation:
    """The evaluations of a trainer: which batches this process scores, and how.

    Args:
        trainer, module: whose steps and loops they are.
        transfer: the user's transfer hooks.
        seed: of what is drawn.
        device: where the module is.
        processes: those that share the batches; None where there is one.
        metrics: of the module, merged over processes.
        most_replicas: copies of the whole network that evaluate at once, at most one in each process; None for one in each.
        pipeline_validation: validate during a fit over the stages where they are.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        transfer: Transfer,
        seed: int,
        device: torch.device,
        precision: Precision,
        processes: Processes | None,
        metrics: SharedMetrics | None,
        most_replicas: int | None,
        pipeline_validation: bool,
    ) -> None:
        self.trainer, self.module, self._seed, self._device, self._precision = trainer, module, seed, device, precision
        self.transfer, self.processes, self.metrics = transfer, processes, metrics
        self._most_replicas, self._pipeline_validation = most_replicas, pipeline_validation
        self._stages: StageState | None = None
        self._gather = processes and processes.gathered
        self._recorder: LogRecorder | None = None
        self._replays_every_batch = False
        self._unreplayed: str | None = None  # the step whose logs Lightning has not been told yet
        self._pipelines: dict[int, EvaluationPipeline] = {}
        self.warned_of: set[str] = set()  # names that processes have logged with different values

    def during_fit(self, stages: StageState | None) -> None:
        """Called once the network has been cut: validations of a fit may run over the stages."""
        self._stages = stages

    @property
    def over_stages(self) -> bool:
        """Whether evaluations run over the stages where they are."""
        return self._pipeline_validation and self._stages is not None

    @property
    def share(self) -> tuple[int, int]:
        """Which batches this process scores: the first, and the step to the next."""
        processes = self.processes
        if processes is None or self.trainer.predicting:
            return 0, 1
        if self.over_stages:
            return processes.group, processes.count // processes.parts
        return processes.rank, min(processes.count, self._most_replicas or processes.count)

    @property
    def in_step(self) -> bool:
        """Whether an evaluation step is running."""
        return self._recorder is not None and self._recorder.in_step

    @property
    def batch_number(self) -> int:
        """The number of the batch in progress, over all processes."""
        index, count = self.share
        return self.trainer._active_loop.batch_progress.current.completed * count + index

    @contextmanager
    def randomness(self, purpose: int = _STEP) -> Iterator[None]:
        """Seed what is drawn for a batch of an evaluation or prediction from (seed, purpose, number of the batch)."""
        with preserved_streams(self._device):
            seed_all(mix(self._seed, _EVALUATION, purpose, self.batch_number), self._device)
            yield

    def step(self, name: str, step: Callable[..., Any], batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Run the user's step on one batch; what it logs is passed to Lightning at the loader's end.

        Args:
            name: of the user's step.
            step: Lightning's own way to run it.
            batch, batch_idx, dataloader_idx: as Lightning numbers them in this process.
        """
        if is_param_in_hook_signature(getattr(self.module, name), "dataloader_iter", explicit=True):
            return step(batch)  # the step draws its batches itself and must give their sizes to self.log
        recorder = self._begin(batch, batch_idx, dataloader_idx)
        arguments = [batch]
        if is_param_in_hook_signature(getattr(self.module, name), "batch_idx", min_args=2):
            arguments.append(recorder.number)
        loop = self.trainer._evaluation_loop
        if loop.num_dataloaders > 1 and loop._is_sequential:
            arguments.append(dataloader_idx)
        with self.randomness(), recorder.recording():
            if self.over_stages:
                output = self._step_over_stages(partial(getattr(self.module, name), *arguments), dataloader_idx)
            else:
                output = step(*arguments)
        self._replay(name, batch_idx)
        return output

    def pass_over(self, name: str, batch_idx: int, dataloader_idx: int) -> None:
        """Called in place of `step` where the last round has no batch for this process: the others exchange what they have logged."""
        self._begin(None, batch_idx, dataloader_idx)
        self._replay(name, batch_idx)

    def _begin(self, batch: Any, batch_idx: int, dataloader_idx: int) -> LogRecorder:
        loop, processes = self.trainer._evaluation_loop, self.processes
        if batch_idx == 0 or self._recorder is None:
            self._recorder = LogRecorder(self.module, gather=self._gather)
            self._recorder.muted = self.over_stages and not processes.is_last
        recorder, loader = self._recorder, loop._combined_loader.flattened[dataloader_idx]
        one_by_one = loop._is_sequential and loop.max_batches[dataloader_idx] != float("inf")
        recorder.drawn = getattr(loader, "size", None) if one_by_one and isinstance(loader, EvaluationData) else None
        index, count = self.share
        recorder.begin_batch(batch, batch_idx * count + index)
        return recorder

    def _replay(self, name: str, batch_idx: int) -> None:
        recorder = self._recorder
        if batch_idx == 0:
            self._replays_every_batch = any(self._gather(recorder.wants_steps)) if self._gather else False
        if self._replays_every_batch or not self._gather and recorder.wants_steps:
            recorder.replay(name)
        else:
            self._unreplayed = name

    def replay_all(self) -> None:
        """Pass to Lightning what has been logged and is not known to it yet."""
        if self._unreplayed is not None:
            name, self._unreplayed = self._unreplayed, None
            self._recorder.replay(name)

    def _step_over_stages(self, step: Callable[[], Any], dataloader_idx: int) -> Any:
        if dataloader_idx not in self._pipelines:
            self._pipelines[dataloader_idx] = EvaluationPipeline(
                self.module, self.processes, state=self._stages, context=self._precision.val_step_context, remark=rank_zero_warn
            )
        recorder, metrics = self._recorder, metrics_of(self.module)

        def once() -> Any:  # it is run up to its call of `self(...)` everywhere, and then as a whole on the last stage
            with undone_unless_finished(recorder, metrics):
                return step()

        return self._pipelines[dataloader_idx].step(once)


class EvaluationLoop(_EvaluationLoop):
    """What Lightning's loops of validation and test become with several processes."""

    evaluation: Evaluation
    stop: Stop

    @override
    def setup_data(self) -> None:
        """Refuse, before the first step, loaders whose batches would not be scored exactly once by all processes together."""
        super().setup_data()
        kind = "test" if self.trainer.testing else "validation"
        if self._combined_loader is not None and not self._is_sequential:
            raise PlanError(
                f"the {kind} loader is a CombinedLoader with mode={self._combined_loader._mode!r}, whose batches several processes cannot"
                " share out: return a list of loaders, join the data sets with torch.utils.data.StackDataset, or use devices=1"
            )
        if is_param_in_hook_signature(getattr(self.evaluation.module, f"{kind}_step"), "dataloader_iter", explicit=True):
            raise PlanError(f"{kind}_step(dataloader_iter) draws its batches itself, for which it must run in one process: use devices=1")

    @override
    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        evaluation = self.evaluation
        if batch_idx == 0:
            evaluation.metrics.begin()
        if batch_idx % _BATCHES_BETWEEN_AGREEMENTS == 0 and self.trainer.state.fn == TrainerFn.FITTING:
            if (number := self.stop.ask_all()) is not None:
                self.stop.agree(number)
                (self.stop.end_by or _end)(number)
        # What hooks add to metrics counts on the last stage of a pipeline alone, which runs the whole step.
        counts = evaluation.processes.is_last or not evaluation.over_stages
        with nullcontext() if counts else unchanged_metrics(metrics_of(evaluation.module)):
            if getattr(self._combined_loader.flattened[dataloader_idx], "size", None) == 0:
                self._pass_over(batch_idx, dataloader_idx)
            else:
                super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)

    def _pass_over(self, batch_idx: int, dataloader_idx: int) -> None:
        """Count a place in the last round for which this process has no batch: nothing is scored, and no hook is called."""
        connector, several = self.trainer._logger_connector, self._is_sequential and self.num_dataloaders > 1
        connector.on_batch_start(None, dataloader_idx if several else None)
        self.evaluation.pass_over("test_step" if self.trainer.testing else "validation_step", batch_idx, dataloader_idx)
        connector.on_batch_end()
        progress = self.batch_progress
        for count in (progress.increment_ready, progress.increment_started, progress.increment_processed, progress.increment_completed):
            count()
        if not self.trainer.sanity_checking:
            self._has_run = True
            connector.update_eval_step_metrics(self._seen_batches_per_dataloader[dataloader_idx])
            self._seen_batches_per_dataloader[dataloader_idx] += 1


class LoggerConnector(_LoggerConnector):
    """Lightning's logger connector, which gets logged values and merged metrics before the end of an epoch or of an evaluation loader."""

    evaluation: Evaluation
    stop: Stop

    @override
    def epoch_end_reached(self) -> None:
        self.evaluation.replay_all()
        super().epoch_end_reached()
        if self.evaluation.metrics is not None:
            self.evaluation.metrics.share()

    @override
    def on_epoch_end(self) -> None:
        """After the hooks of an epoch's end: agree on whether to stop, and say which logged values are not the same in every process."""
        super().on_epoch_end()
        evaluation = self.evaluation
        if evaluation.processes is None:
            return
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.stop.share_wish(self.trainer)
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        for name in differing_names(evaluation.processes.gathered(logged)):
            if name not in evaluation.warned_of:
                evaluation.warned_of.add(name)
                rank_zero_warn(
                    f"self.log({name!r}, ...) was called outside of a step with a different value in each process; the first process's is shown."
                    " Log it in the step, or use a torchmetrics metric, which is merged over processes"
                )


def _end(signum: int) -> None:
    raise SIGTERMException(128 + signum)


def take_over_evaluations(trainer: Trainer, evaluation: Evaluation, stop: Stop, undo: Undo) -> None:
    """Let Lightning's evaluations run as `evaluation` says until `undo` is closed."""
    undo.specialize(trainer._logger_connector, LoggerConnector, evaluation=evaluation, stop=stop)
    if evaluation.processes is not None:
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            undo.specialize(loop, EvaluationLoop, evaluation=evaluation, stop=stop)
