"""IPUStrategy: its arguments, and Lightning's hooks, each of which is one call into `loop` or `engine`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.plugins import CheckpointIO, ClusterEnvironment, Precision
from pytorch_lightning.strategies import Strategy, StrategyRegistry
from pytorch_lightning.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ipu import limits
from lightning_ipu.cutting.balance import StageCost
from lightning_ipu.cutting.call_wrappers import is_one_piece
from lightning_ipu.cutting.splits import check_num_stages, check_splits
from lightning_ipu.data.workers import Loader
from lightning_ipu.engine.buffers import make_room
from lightning_ipu.engine.processes import Processes, broadcast_state
from lightning_ipu.engine.stages import StageState
from lightning_ipu.loop import environment, saving, training
from lightning_ipu.loop.assembly import Assembly
from lightning_ipu.loop.evaluation import Evaluation, take_over_evaluations
from lightning_ipu.loop.fit import Fit
from lightning_ipu.loop.hooks import NamedHooks
from lightning_ipu.loop.loaders import evaluation_loader, training_loader
from lightning_ipu.loop.logs import LogRecorder
from lightning_ipu.loop.metrics import SharedMetrics
from lightning_ipu.loop.process_strategy import ProcessStrategy
from lightning_ipu.loop.progress import Stop, TrainingProgress
from lightning_ipu.loop.transfer import TRANSFER, Transfer
from lightning_ipu.loop.undo import Undo
from lightning_ipu.placement import Placement
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.recipe.averaging import KEPT, TRAINED, AveragedWeights, kept_buffers


class IPUStrategy(ProcessStrategy):
    """Gives any LightningModule the execution model of Graphcore's IPU, on whatever hardware there is.

    The plan is the first five arguments and the DataLoader's batch size, which is the micro-batch. Micro-batch, R and A decide the numbers.
    One process runs all replicas and stages in turn; several (torchrun's, or the Trainer's `devices` and `num_nodes`) share them out.

    Args:
        replication_factor: copies of the network whose gradients are averaged (R).
        gradient_accumulation_factor: micro-batches per replica and weight update (A).
        device_iterations: weight updates between two returns to Lightning's loop and callbacks, at most (D).
        pipeline_splits: names of the submodules that each begin a new stage.
        num_stages: number of stages, in place of `pipeline_splits`.
        pipeline_schedule: 1F1B (Graphcore's Interleaved), GPipe (Grouped) or Sequential.
        recompute: recompute the activations of the network's blocks in the backward pass; a list of regular expressions chooses them.
        loss_scaling: factor of the loss in 16-bit computing, "auto", or None: "auto" for float16 and none for bfloat16.
        stochastic_rounding: round weight updates stochastically where weights are 16-bit (the Trainer's precision bf16-true or 16-true).
        pipeline_validation: where processes hold a stage each, run a fit's validations over these stages. Without it each process fetches
            the whole network and validates a share of the batches.
        validation_replicas: copies of the whole network that validate at once, at most and by default one in each process.
        bind_cores: keep each of several processes that compute on the CPU to its own share of the machine's cores.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout: as in DDPStrategy.

    Raises:
        PlanError: a plan, trainer, module or loader that cannot be honoured, before the first step.
    """

    strategy_name = "ipu"

    def __init__(
        self,
        *,
        replication_factor: int = 1,
        gradient_accumulation_factor: int = 1,
        device_iterations: int = 1,
        pipeline_splits: list[str] | None = None,
        num_stages: int | None = None,
        pipeline_schedule: str = "1F1B",
        recompute: bool | list[str] = False,
        loss_scaling: float | Literal["auto"] | None = None,
        stochastic_rounding: bool = True,
        pipeline_validation: bool = False,
        validation_replicas: int | None = None,
        bind_cores: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        splits = list(pipeline_splits or [])
        limits.check_arguments(splits, num_stages, replication_factor, pipeline_validation, validation_replicas)
        plan = Plan(
            replication_factor=replication_factor,
            gradient_accumulation_factor=gradient_accumulation_factor,
            num_stages=num_stages or len(splits) + 1,
            device_iterations=device_iterations,
        )
        super().__init__(
            plan=plan,
            loss_scaling=loss_scaling,
            stochastic_rounding=stochastic_rounding,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.bind_cores = bind_cores
        self.pipeline_splits, self.pipeline_schedule, self.recompute = splits, limits.schedule_named(pipeline_schedule), recompute
        self.pipeline_validation, self.validation_replicas = pipeline_validation, validation_replicas
        self.progress = TrainingProgress()
        self.seed = 0
        self.stage_costs: list[StageCost] = []  # of stages that were chosen by measurement
        self._processes: Processes | None = None
        self.stop = Stop(self.progress, None)
        self._fit: Fit | None = None  # the fit in progress, or the last one
        self._evaluation: Evaluation | None = None
        self._loaders: list[Loader] = []
        self._undo = Undo()

    # ---- Begin --------------------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        trainer = self.lightning_module.trainer
        placement = Placement(plan=self.plan, processes=self.process_count)
        self._undo.close()  # of an earlier run, if an error kept it from its teardown
        environment.leave_samplers_alone(trainer, self._undo)
        seed_is_given = bool(os.environ.get("PL_GLOBAL_SEED"))  # else one that seed_everything would take
        self.seed = int(os.environ["PL_GLOBAL_SEED"]) if seed_is_given else torch.initial_seed() % (1 << 32)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            limits.check_fit(
                trainer,
                plan=self.plan,
                processes=self.process_count,
                loss_scaling=self.loss_scaling,
                layer_sync=self.synchronizes_layers,
            )
            self.progress = TrainingProgress(run_updates=training.updates_of_loggers(trainer))
        Strategy.setup_environment(self)
        if self.process_count > 1:
            self._join(placement)
        self.stop = Stop(self.progress, self._processes)
        if fits:
            self._fit = Fit(
                trainer=trainer,
                module=self.lightning_module,
                device=self.root_device,
                plan=self.plan,
                seed=self.seed,
                seed_is_given=seed_is_given,
                processes=self._processes,
                progress=self.progress,
                stop=self.stop,
            )

    def _join(self, placement: Placement) -> None:
        """Meet the other processes, and agree on the seed with them."""
        self.meet()
        # Averages are over all processes already when Lightning sees them.
        self._undo.ignore_warnings(".*sync_dist=True.*when logging on epoch level")
        self._processes = Processes(placement, device=self.root_device)
        self.seed = self.broadcast(self.seed)

    @override
    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        check_splits(module, self.pipeline_splits)
        check_num_stages(module, self.plan.num_stages)
        transfer = Transfer(module, precision=self.precision_plugin, device=self.root_device, seed=self.seed, undo=self._undo)
        metrics = None
        if self._processes is not None:
            limits.check_shapes(module)
            broadcast_state(module)
            metrics = SharedMetrics(module, self._processes.gathered)
        self._evaluation = Evaluation(
            trainer,
            module,
            transfer=transfer,
            seed=self.seed,
            device=self.root_device,
            precision=self.precision_plugin,
            processes=self._processes,
            metrics=metrics,
            most_replicas=self.validation_replicas,
            pipeline_validation=self.pipeline_validation,
        )
        take_over_evaluations(trainer, self._evaluation, self.stop, self._undo)
        NamedHooks(trainer, self._evaluation, seed=self.seed, device=self.root_device, progress=self.progress, undo=self._undo)
        self.stop.take_over_sigterm(trainer, self._undo)
        if trainer.state.fn == TrainerFn.FITTING:
            self._fit.transfer, self._fit.metrics = transfer, metrics
            self._set_up_fit(self._fit)
        else:
            self.setup_precision_plugin()

    def _set_up_fit(self, fit: Fit) -> None:
        """Make optimizers and engine, and put this package's loop in the place of Lightning's."""
        trainer, processes = fit.trainer, fit.processes
        if fit.steps_are_compiled or is_one_piece(fit.module):
            limits.check_compiled(fit.module, recompute=self.recompute, parts=processes.parts if processes else 1)
        training.take_over(fit, self._undo)
        try:
            self.setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise limits.several_optimizers("several") from None
        self.setup_precision_plugin()
        limits.check_optimizers(self.optimizers)
        gathering = {"gather": processes.gathered, "last_stage_rank": processes.parts - 1} if processes else {}
        fit.recorder = LogRecorder(fit.module, self.progress.latest, **gathering)
        fit.recorder.muted = processes is not None and not processes.is_last  # the last stage runs the whole step
        assembly = Assembly(
            fit,
            optimizer=self.optimizers[0],
            precision=self.precision_plugin,
            recompute=self.recompute,
            pipeline_splits=self.pipeline_splits,
            pipeline_schedule=self.pipeline_schedule,
            undo=self._undo,
        )
        fit.engine, fit.stages, fit.scaling, fit.undoes = assembly.engine, assembly.stages, assembly.scaling, assembly.undoes
        fit.lr_step, fit.late_hooks = assembly.lr_scheduler_step, assembly.late_hooks
        self._evaluation.during_fit(fit.stages)
        self.pipeline_splits, self.stage_costs = assembly.splits, assembly.stage_costs

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if trainer.training:
            loader = training_loader(self._fit, dataloader, undo=self._undo)
            self.plan = self._fit.plan
        else:
            loader = evaluation_loader(
                trainer, dataloader, seed=self.seed, processes=self._processes, share=self._evaluation.share, undo=self._undo
            )
        if isinstance(own := getattr(loader, "loader", None), Loader):
            self._loaders.append(own)
        return loader

    @override
    def on_train_start(self) -> None:
        training.start(self._fit, self._undo)

    # ---- Steps --------------------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        move = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        if not self._evaluation.transfer.has_hooks:
            return move(batch)
        with self._evaluation.randomness(TRANSFER):
            return move(self._evaluation.transfer.before(batch, dataloader_idx=dataloader_idx))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step("validation_step", super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step("test_step", super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation.randomness():
            return super().predict_step(*args, **kwargs)

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor from all processes, outside of steps: how often a process runs a step depends on the placement."""
        if self._processes is not None and any(one is not None and one.in_step for one in (self._fit, self._evaluation)):
            raise PlanError(
                "all_gather in a training or evaluation step cannot be honoured: processes do not run the same micro-batches. Use a metric of"
                " torchmetrics, or gather in on_train_epoch_end or on_validation_epoch_end"
            )
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    # ---- Checkpoints, and the whole network where it is needed -----------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if names := kept_buffers(self.lightning_module):
            checkpoint[KEPT] = names
        if self._fit is not None and self._fit.data is not None and "loops" in checkpoint:
            saving.add_position(self._fit, checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            saving.take_position(self._fit, checkpoint, checkpoint_path, averages=TRAINED, averagers=(AveragedWeights,), undo=self._undo)
            self.seed = self._fit.seed
        return checkpoint

    def holds(self, name: str) -> bool:
        """Whether a parameter or buffer of the module is in this process; all are where it runs whole networks."""
        return self._fit is None or self._fit.holds(name)

    def merged(self, held: dict[str, Any]) -> dict[str, Any]:
        """What the processes of a replica hold, by the name of a parameter or buffer, as one dictionary in each; all must call this."""
        return held if self._stages is None else self._stages.merged(held)

    @property
    def _stages(self) -> StageState | None:
        return self._fit and self._fit.stages

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        return state if self._stages is None else self._stages.whole_state(state)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        make_room(self.lightning_module, checkpoint["state_dict"])
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._stages is not None:
            held = self._stages.merged(state["state"])
            state["state"] = {number: held[number] for number in sorted(held)}
        return state

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._stages is not None:
            self._stages.forget_elsewhere(self.optimizers[0].state)

    @override
    def on_validation_start(self) -> None:
        if self._fit is not None:
            self._fit.begin_validation(over_stages=self._evaluation.over_stages)

    @override
    def on_validation_end(self) -> None:
        if self._fit is not None:
            self._fit.end_validation(over_stages=self._evaluation.over_stages)

    # ---- End ----------------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self._fit.without_repeated_hook.close()
        if self._stages is not None:
            self._stages.fetch()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if training.ends_by_sigterm(exception) and self._stages is not None and not self._stages.is_whole:
            self._stages.fetch()  # in all processes alike
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._evaluation = None
        if self._fit is not None:
            self._fit.engine = None
        for loader in self._loaders:
            loader.end_workers()
        self._loaders = []
        self._undo.close()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="The execution model of Graphcore's IPU, under its default plan")


if "ipu" not in StrategyRegistry:
    IPUStrategy.register_strategies(StrategyRegistry)
