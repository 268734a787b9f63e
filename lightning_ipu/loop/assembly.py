"""Make the engine of a fit out of the user's module, the Trainer's settings and the plan, and refuse what it could not honour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import BaseFinetuning, ModelPruning, OnExceptionCheckpoint
from pytorch_lightning.plugins import Precision
from pytorch_lightning.utilities import GradClipAlgorithmType
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_ipu.cutting.balance import stage_table
from lightning_ipu.cutting.partition import Partition
from lightning_ipu.cutting.training_step import cut_by_step, measured_splits
from lightning_ipu.cutting.trial import state_restored
from lightning_ipu.engine.buffers import ReplicaBuffers
from lightning_ipu.engine.pipeline import PipelinedReplica
from lightning_ipu.engine.recomputation import Recomputation, recompute_blocks
from lightning_ipu.engine.reduction import ReplicaSums, StageResults, Stopping
from lightning_ipu.engine.replica import TrainingStep, WholeReplica
from lightning_ipu.engine.seeding import NamedRandomness
from lightning_ipu.engine.stages import StageState
from lightning_ipu.engine.update import Engine, Hooks
from lightning_ipu.loop.fit import Fit
from lightning_ipu.loop.logs import LogRecorder, undone_unless_finished, without_logs
from lightning_ipu.loop.metrics import metrics_of, unchanged_metrics
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.precision.plugin import SixteenBit
from lightning_ipu.randomness import preserved_streams, set_torch_streams, torch_streams


class Progress(Protocol):
    """Where a run stands: weight updates done, and a signal's number once one has come."""

    run_updates: int
    stop_signal: int | None


class UpdateHooks:
    """Calls the hooks of a weight update. What a hook draws depends on its name, the callback or module that has it, and the update alone."""

    def __init__(
        self, trainer: Trainer, *, randomness: NamedRandomness, recorder: LogRecorder, progress: Progress, device: torch.device
    ) -> None:
        self._trainer, self._randomness, self._recorder, self._progress, self._device = trainer, randomness, recorder, progress, device

    def of(self, name: str) -> list[Callable[..., None]]:
        """The calls of a hook: of the callbacks and the module that override it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        calls, alike = [], Counter()
        for callback in trainer.callbacks:
            if is_overridden(name, callback):
                kind = type(callback).__qualname__
                call = partial(getattr(callback, name), trainer, module)
                calls.append(partial(self._call, name, call, owner=f"{kind} {alike[kind]}"))
                alike[kind] += 1
        return calls + ([of_module] if (of_module := self.of_module(name)) else [])

    def of_module(self, name: str, *arguments: Any) -> Callable[..., None] | None:
        """The call of a hook of the module alone, with these arguments first; None where it is not overridden."""
        module = self._trainer.lightning_module
        return partial(self._call, name, partial(getattr(module, name), *arguments)) if is_overridden(name, module) else None

    def _call(self, name: str, call: Callable[..., None], *arguments: Any, owner: str = "") -> None:
        streams = torch_streams(self._device)
        self._randomness.begin_hook(self._progress.run_updates, f"{owner} {name}")
        self._recorder.hook = name
        try:
            call(*arguments)
        finally:
            self._recorder.hook = None
            set_torch_streams(streams, self._device)  # the backward pass continues the step's random streams


class Assembly:
    """The engine of a fit, and what else was settled in making it.

    Args:
        fit: whose engine it is.
        optimizer: the module's one optimizer.
        precision: the plugin in use.
        recompute, pipeline_splits, pipeline_schedule: as in IPUStrategy.
        undo: closed when the fit ends, however it ends.

    Attributes:
        engine: makes the weight updates.
        stages: the network's parts over processes; None where each has the whole.
        splits, stage_costs: the submodules that begin stages, and what the stages cost where they were chosen by measurement.
        lr_scheduler_step: the module's own, if it has one.
        late_hooks: whether hooks run after the reduction in which processes exchange whether to stop.

    Raises:
        PlanError: a module, step or callback that the plan's processes cannot honour.
    """

    def __init__(
        self,
        fit: Fit,
        *,
        optimizer: Optimizer,
        precision: Precision,
        recompute: bool | list[str],
        pipeline_splits: list[str],
        pipeline_schedule: str,
        undo: ExitStack,
    ) -> None:
        trainer, processes = fit.trainer, fit.processes
        self._fit, self._trainer, self._plan, self._processes, self._recorder = fit, trainer, fit.plan, processes, fit.recorder
        self._device, self._recompute, self._ready, self._schedule = fit.device, recompute, fit.ready, pipeline_schedule
        self._module = module = trainer.lightning_module
        self.stages: StageState | None = None
        self.splits, self.stage_costs = pipeline_splits, []
        blocks = recompute_blocks(module, recompute, pipeline_splits)
        if recompute is True and not blocks:
            rank_zero_info(
                f"recompute=True recomputes nothing in {type(module).__name__}: it is built of bare layers alone. Group them into blocks,"
                " or name layers, e.g. recompute=['network.0']"
            )
        self._randomness = NamedRandomness(module, seed=fit.seed, device=fit.device, steps_are_compiled=fit.steps_are_compiled)
        self._recomputation = Recomputation(module, blocks, randomness=self._randomness, without_logs=partial(without_logs, fit.recorder))
        self._step = TrainingStep(
            self._noted_step() if processes is None else self._shared_step(),
            context=None if type(precision) is Precision else precision.train_step_context,
            randomness=self._randomness,
        )
        ours = precision if isinstance(precision, SixteenBit) else None
        narrow = ours and ours.narrow_update(optimizer, module, seed=fit.seed)
        if narrow:
            undo.callback(narrow.remove)
        self.scaling = ours and ours.scaling
        self.undoes = any(
            isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False) for callback in trainer.callbacks
        )
        hooks = UpdateHooks(trainer, randomness=self._randomness, recorder=fit.recorder, progress=fit.progress, device=fit.device)
        self.lr_scheduler_step = hooks.of_module("lr_scheduler_step")
        self.engine = self._make(optimizer, hooks, update_weights=narrow and narrow.step)

    def _make(self, optimizer: Optimizer, hooks: UpdateHooks, *, update_weights: Callable[[int], None] | None) -> Engine:
        fit, plan, processes, module = self._fit, self._plan, self._processes, self._module
        update_hooks = Hooks(**{name: hooks.of(f"on_{name}") for name in Hooks._fields})
        own = any(is_overridden(name, module) for name in ("configure_gradient_clipping", "lr_scheduler_step"))
        self.late_hooks = bool(own or update_hooks.after_backward or update_hooks.before_optimizer_step)
        stopping = sums = None
        if processes is not None:
            stopping = Stopping(
                received=lambda: fit.progress.stop_signal or 0, wanted=lambda: fit.trainer.should_stop, on_signal=fit.stop.agree
            )
            sums = ReplicaSums(processes, stopping=stopping)
        in_stages = processes is not None and processes.parts > 1
        placed = self._in_stages(stopping) if in_stages else self._whole(self._clip(hooks, optimizer))
        keeps_buffers = plan.replication_factor > 1 or self.scaling is not None or self.undoes
        return Engine(
            accumulation=plan.gradient_accumulation_factor,
            replicas=range(plan.replication_factor) if processes is None else processes.replicas,
            optimizer=optimizer,
            randomness=self._randomness,
            hooks=update_hooks,
            buffers=ReplicaBuffers(module, plan.replication_factor, self.stages and self.stages.own_buffers) if keeps_buffers else None,
            sums=sums,
            stopping=stopping,
            zero_grad=self._zero_grad(hooks, optimizer),
            scaling=self.scaling,
            update_weights=update_weights,
            **placed,
        )

    def _whole(self, clip: Callable[[], None] | None) -> dict[str, Any]:
        """The arguments of `Engine` that are special where each process holds whole replicas."""
        module, plan = self._module, self._plan
        replica = WholeReplica(
            self._step,
            accumulation=plan.gradient_accumulation_factor,
            per_update=plan.micro_batches_per_update,
            scaling=self.scaling,
            backward=module.backward if is_overridden("backward", module) else None,
            on_micro_batch=self._fit.count_micro_batch,
        )
        return {"replica": replica, "clip": clip and (lambda _: clip())}

    def _in_stages(self, stopping: Stopping) -> dict[str, Any]:
        """The arguments of `Engine` that are special where this process holds some of the stages of one replica."""
        trainer, module, processes = self._trainer, self._module, self._processes
        _refuse_in_pipeline(trainer, self._plan, schedule=self._schedule, parts=processes.parts)
        self.stages = StageState(module, self._cut(), processes)
        replica = PipelinedReplica(
            self._step,
            module=module,
            state=self.stages,
            processes=processes,
            accumulation=self._plan.gradient_accumulation_factor,
            per_update=self._plan.micro_batches_per_update,
            schedule=self._schedule,
            scaling=self.scaling,
            on_micro_batch=self._fit.count_micro_batch,
            remark=rank_zero_warn,
        )
        results = StageResults(processes, stopping=stopping)
        if self.scaling is not None:
            self.scaling.agree = results.all_finite
        held = {id(parameter) for name, parameter in module.named_parameters() if name in self.stages.own_parameters}
        clip: Callable[..., None] | None = None
        if value := trainer.gradient_clip_val:
            by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
            clip = partial(nn.utils.clip_grad_value_, clip_value=value) if by_value else partial(results.clip_norm, largest=value)
        return {"replica": replica, "held": held, "share": results.share, "clip": clip}

    def _noted_step(self) -> Callable[[Any, int], Any]:
        """The user's step, which tells the recorder of logs first which micro-batch it runs on."""
        step, recorder = self._module.training_step, self._recorder
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)

        def noted_step(batch: Any, number: int) -> Any:
            recorder.begin_batch(batch, number)
            return step(batch, number) if takes_index else step(batch)

        return noted_step

    def _shared_step(self) -> Callable[[Any, int], Any]:
        """The user's step where each process runs it for a share of the micro-batches."""
        module, recorder, is_last = self._module, self._recorder, self._processes.is_last
        noted_step, tried, metrics = self._noted_step(), self._plan.replication_factor == 1, metrics_of(module)

        def shared_step(batch: Any, number: int) -> Any:
            nonlocal tried
            versions = None if tried else [parameter._version for parameter in module.parameters()]
            # Stages before the last leave the step at its call of `self(...)`. What it logged before counts on the last stage alone.
            with nullcontext() if is_last else undone_unless_finished(recorder, metrics):
                output = noted_step(batch, number)
            if versions is not None:
                tried = True
                _refuse_changed_parameters(module, versions)
            return output

        return shared_step

    def _zero_grad(self, hooks: UpdateHooks, optimizer: Optimizer) -> Callable[[], None] | None:
        """The module's own `optimizer_zero_grad`; None where the optimizer's does."""
        trainer, call = self._trainer, hooks.of_module("optimizer_zero_grad")
        return call and (lambda: call(trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, optimizer))

    def _clip(self, hooks: UpdateHooks, optimizer: Optimizer) -> Callable[[], None] | None:
        """Clips gradients of the whole network as the Trainer says, or as the module's own hook does; None where nothing does."""
        value, algorithm = self._trainer.gradient_clip_val, self._trainer.gradient_clip_algorithm
        if own := hooks.of_module("configure_gradient_clipping", optimizer, value, algorithm):
            return own
        return partial(self._module.configure_gradient_clipping, optimizer, value, algorithm) if value else None

    def _cut(self) -> Partition:
        """Cut the network into stages by what the user's step calls `self(...)` with for the first micro-batch; in all processes alike."""
        module, trainer, recorder = self._module, self._trainer, self._recorder
        trainer.fit_loop.setup_data()
        data = trainer.fit_loop._combined_loader.flattened[0].data
        seeded = self._randomness.wrappers.active
        muted, recorder.muted = recorder.muted, True
        with (
            preserved_streams(self._device),
            recorder.recording(),
            unchanged_metrics(metrics_of(module)),
            state_restored(module),
            _noting_where("while IPUStrategy tried the training step once, before on_fit_start, to cut the network into stages"),
        ):
            partition = cut_by_step(
                module,
                self._step.step,
                example=lambda: self._ready(data.example(), 0),
                splits=self._settled_splits,
                parts=self._processes.parts,
                device=self._device,
                context=self._step.context,
                seeded=seeded,
            )
        recorder.muted = muted
        return partition

    def _settled_splits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The user's splits, or else those that the first process measures."""
        if self.splits:
            return self.splits
        found: Any = None
        if self._processes.rank == 0:
            try:
                found = measured_splits(
                    self._module,
                    args,
                    kwargs,
                    num_stages=self._plan.num_stages,
                    context=self._step.context,
                    seeded=self._randomness.wrappers.active,
                    may_cut_blocks=self._recompute is True,
                )
            except PlanError as refusal:
                found = refusal
        found = self._processes.gathered(found)[0]
        if isinstance(found, PlanError):
            raise found
        self.splits, self.stage_costs = found
        for line in stage_table(self.stage_costs):
            rank_zero_info(line)
        if self._recompute is True:
            self._recomputation.choose(recompute_blocks(self._module, True, self.splits))
        return self.splits


@contextmanager
def _noting_where(where: str) -> Any:
    """Add to an exception's message where it came up."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"({where})")
        raise


def _refuse_in_pipeline(trainer: Trainer, plan: Plan, *, schedule: str, parts: int) -> None:
    """Refuse what is not possible where the stages of a replica are in several processes (`parts`)."""
    module, accumulation = trainer.lightning_module, plan.gradient_accumulation_factor
    if schedule == "1F1B" and accumulation < parts:
        raise PlanError(
            f"pipeline_schedule=1F1B over {parts} processes needs gradient_accumulation_factor of at least {parts}, not {accumulation};"
            " raise it, or take GPipe"
        )
    for hook in ("configure_gradient_clipping", "backward"):
        if is_overridden(hook, module):
            raise PlanError(f"{type(module).__name__}.{hook} is overridden, which several processes with a stage each cannot honour")
    for callback in trainer.callbacks:
        if any(base.__name__ == "WeightAveraging" for base in type(callback).__mro__):
            raise PlanError(
                f"the callback {type(callback).__name__} needs the whole network in one process; a pipeline has a stage in each"
            )
        if isinstance(callback, (BaseFinetuning, ModelPruning)):
            raise PlanError(
                f"the callback {type(callback).__name__} changes which parameters are trained, but a pipeline is cut for them at the"
                " start; change them before training, or take no more processes than replicas"
            )


def _refuse_changed_parameters(module: LightningModule, versions: list[int]) -> None:
    """Refuse a step that changes parameters itself: each process runs a share of the steps, so its parameters would change less often."""
    for (name, parameter), version in zip(module.named_parameters(), versions, strict=True):
        if parameter._version != version:
            raise PlanError(
                f"the training step of {type(module).__name__} changes the parameter {name!r}, and of several processes each runs a share of"
                " the steps; change it once per weight update, in on_before_zero_grad, or use one process"
            )
