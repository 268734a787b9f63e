"""IPUStrategy: Lightning's hooks around an engine, and nothing else.

Lightning's loop sees an epoch of micro-batches and fetches one host step at a time. In place of Lightning's optimisation of a batch its
weight updates run in a tight loop, which moves Lightning's counters, learning-rate schedules and logs as if the loop had made each itself.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning_fabric.utilities.data import sized_len
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.accelerators import Accelerator, CPUAccelerator
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from pytorch_lightning.plugins import CheckpointIO, ClusterEnvironment, DoublePrecision, HalfPrecision, MixedPrecision, Precision
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, Strategy, StrategyRegistry
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_ipu import machine
from lightning_ipu.cutting.balance import StageCost
from lightning_ipu.cutting.splits import check_num_stages, check_splits
from lightning_ipu.cutting.stand_ins import is_one_piece
from lightning_ipu.data.evaluation import EvaluationData
from lightning_ipu.data.host_steps import HostStep, HostSteps
from lightning_ipu.data.order import Shard
from lightning_ipu.data.training import TrainingData
from lightning_ipu.data.workers import Loader
from lightning_ipu.engine.buffers import make_room
from lightning_ipu.engine.evaluation import EvaluationPipeline
from lightning_ipu.engine.local import LocalEngine
from lightning_ipu.engine.processes import Processes, broadcast_state, process_groups
from lightning_ipu.engine.stages import StageState
from lightning_ipu.loop import continuation
from lightning_ipu.loop.assembly import Assembly
from lightning_ipu.loop.checkpoint_io import AtomicCheckpointIO, loads_not
from lightning_ipu.loop.decisions import Decisions
from lightning_ipu.loop.events import batch_hooks, events_of, validation_interval
from lightning_ipu.loop.launcher import Launcher, check_can_start_again, let_signals_end
from lightning_ipu.loop.position import (
    BATCH_END,
    BATCH_START,
    EPOCH_END,
    EPOCH_START,
    KEY,
    VALIDATION,
    VALIDATION_END,
    Hook,
    Position,
    check_data,
    check_numbers,
    hook_in_progress,
    numbers_of,
    read_position,
    write_position,
)
from lightning_ipu.loop.user_step import (
    LogRecorder,
    SharedMetrics,
    contents,
    load_metric_states,
    metric_states,
    metrics_of,
    names_apart,
    set_aside,
    unchanged_metrics,
    undone_unless_finished,
)
from lightning_ipu.placement import Placement
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.precision.plugin import SixteenBit
from lightning_ipu.randomness import mix, name_word, preserved_streams, seed_all
from lightning_ipu.recipe.averaging import KEPT, TRAINED, AveragedWeights, kept_buffers

# torch's names for the schedules, and Graphcore's for the same: their Interleaved is 1F1B, their Grouped is GPipe.
SCHEDULES = {"1f1b": "1F1B", "interleaved": "1F1B", "gpipe": "GPipe", "grouped": "GPipe", "sequential": "Sequential"}

_SEVERAL_OPTIMIZERS = "configure_optimizers returned {number} optimizers; IPUStrategy needs exactly one (use parameter groups)"
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BATCHES_BETWEEN_AGREEMENTS = 4  # of a validation; between them several processes do not agree on whether a signal ends it
_TRANSFER, _STEP, _EVALUATION = (name_word(name) for name in ("transfer", "step", "evaluation"))


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


class IPUStrategy(DDPStrategy):
    """Gives any LightningModule the execution model of Graphcore's IPU, on whatever hardware there is.

    The plan (the first seven arguments and the DataLoader's batch size, which is the micro-batch) decides the numbers. One process runs
    all replicas and stages in turn; more of them (torchrun's, or the Trainer's `devices` and `num_nodes`) share them out.

    Args:
        replication_factor: copies of the network whose gradients are averaged (R).
        gradient_accumulation_factor: micro-batches per replica and weight update (A).
        device_iterations: weight updates between two returns to Lightning's loop and callbacks, at most (D).
        pipeline_splits: names of the submodules that each begin a new stage.
        num_stages: number of stages, in place of `pipeline_splits`.
        pipeline_schedule: 1F1B (Graphcore's Interleaved), GPipe (Grouped) or Sequential.
        recompute: recompute the activations of the network's blocks in the backward pass; a list of regular expressions chooses them.
        loss_scaling: factor of the loss in 16-bit computing, "auto", or None: "auto" for float16 and none for bfloat16.
        stochastic_rounding: of the weight update where weights are 16-bit (the Trainer's precision bf16-true or 16-true).
        pipeline_validation: validate during a fit over the stages where they are, forward only, where processes hold a stage each; without
            it each of them fetches the whole network and validates a share of the batches.
        validation_replicas: copies of the whole network that validate at once, at most one in each process; by default all.
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
        self.loss_scaling, self.stochastic_rounding, self.bind_cores = loss_scaling, stochastic_rounding, bind_cores
        if cluster_environment is None:
            machine.forget_leftovers()  # before the Trainer looks for a launcher
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        splits = list(pipeline_splits or [])
        if splits and num_stages not in (None, len(splits) + 1):
            raise PlanError(f"num_stages={num_stages} contradicts pipeline_splits, whose {len(splits)} names make {len(splits) + 1} stages")
        if pipeline_schedule.lower() not in SCHEDULES:
            raise PlanError(
                f"pipeline_schedule={pipeline_schedule!r} is unknown; legal are 1F1B (Interleaved), GPipe (Grouped) and Sequential"
            )
        most = (num_stages or len(splits) + 1) * replication_factor
        if validation_replicas is not None and not (1 <= validation_replicas <= most and not pipeline_validation):
            raise PlanError(
                f"validation_replicas={validation_replicas} must be from 1 to {most} (replicas x stages), and without pipeline_validation,"
                f" which validates on the {replication_factor} replicas"
            )
        if pipeline_validation and most == replication_factor:
            raise PlanError("pipeline_validation needs a pipeline: give pipeline_splits or num_stages")
        self.pipeline_splits, self.recompute = splits, recompute
        self.pipeline_validation, self.validation_replicas = pipeline_validation, validation_replicas
        self.pipeline_schedule = SCHEDULES[pipeline_schedule.lower()]
        self.plan = Plan(
            replication_factor=replication_factor,
            gradient_accumulation_factor=gradient_accumulation_factor,
            num_stages=num_stages or len(splits) + 1,
            device_iterations=device_iterations,
        )
        self.progress = TrainingProgress()
        self.seed = 0
        self._engine: LocalEngine | None = None
        self._recorder: LogRecorder | None = None
        self._evaluation: dict[str, Any] = {}
        self._user_settings: dict[str, Any] = {}  # of the Trainer, where the plan needs other values
        self._undo = ExitStack()  # what is restored when a fit or an evaluation ends, however it ends
        self._loaders: list[Loader] = []
        self._processes: Processes | None = None
        self._stages: StageState | None = None
        self._restored: dict[str, Any] | None = None  # this package's entry of a checkpoint, until the fit has resumed from it
        self._epoch: int | None = None  # that `progress.updates_done` counts in
        self._agreed_stop: int | None = None
        self.end_by: Callable[[int], None] | None = None  # ends a fit by a signal; None leaves it to Lightning, which saves nothing
        self._decisions: Decisions | None = None  # while several processes fit
        self._shown: tuple[list[Any], list[Any]] | None = None  # what was in the batch that hooks were given
        self._under_way: HostStep | None = None  # the host step in progress, or the one that an error has ended
        self._reached: str | None = None  # the latest hook after a host step that is over; None once the next one begins
        self._shown_before: dict[str, Any] | None = None  # the latest metrics before the validation in progress
        self._rest_of_step: int | None = None  # weight updates that an error left in the host step from which the run resumes
        self._unheard = ExitStack()  # keeps a hook from those on whom it was called before the checkpoint
        self.stage_costs: list[StageCost] = []  # of stages that were chosen by measurement

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Take Lightning's plugin; one that computes in 16 bits is exchanged for ours, under the same name of precision."""
        if type(plugin) in (HalfPrecision, MixedPrecision):
            device = "cpu" if isinstance(self.accelerator, CPUAccelerator) else "cuda"
            plugin = SixteenBit(
                plugin.precision,
                device=device,
                loss_scaling=self.loss_scaling,
                stochastic_rounding=self.stochastic_rounding,
                scaler=getattr(plugin, "scaler", None),
            )
        self._precision_plugin = plugin

    # ---- Environment: processes ---------------------------------------------------------------------------------------------

    @override
    def set_world_ranks(self) -> None:
        """Called first when the Trainer is made: settle how many processes there are, torchrun's word before the Trainer's."""
        environment = self.cluster_environment
        if isinstance(environment, TorchElasticEnvironment):
            local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), environment.world_size()
            first = self.parallel_devices[0]
            self.parallel_devices = [first] * local if first.type == "cpu" else self.parallel_devices[:local]
            self.num_nodes = world // local
        elif isinstance(environment, SLURMEnvironment) and (machine.launcher() != "srun" or environment.world_size() == 1):
            self.cluster_environment = LightningEnvironment()  # inside an allocation, but not one of several that srun started
        elif isinstance(environment, SLURMEnvironment) and environment.world_size() != self._process_count:
            raise PlanError(
                f"srun started {environment.world_size()} processes (SLURM_NTASKS), but devices x num_nodes is {self._process_count}: they must"
                " be the same"
            )
        if type(self.cluster_environment) is LightningEnvironment and self.num_nodes == 1 and "LOCAL_RANK" not in os.environ:
            for variable in ("NODE_RANK", "GROUP_RANK", "MASTER_ADDR"):  # they name other nodes, and this run has none
                os.environ.pop(variable, None)
        if self._process_count == 1 and type(self.cluster_environment) is LightningEnvironment:
            self.cluster_environment = _OneProcess()
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        self._launcher = None
        Placement(plan=self.plan, processes=self._process_count)  # before any is started
        if self._process_count > 1:
            _refuse_leftovers(self.cluster_environment)
            if not self.cluster_environment.creates_processes_externally:
                check_can_start_again(self._process_count)
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @property
    def _process_count(self) -> int:
        return max(1, self.num_nodes * self.num_processes)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def setup_environment(self) -> None:
        trainer = self.lightning_module.trainer
        placement = Placement(plan=self.plan, processes=self._process_count)
        self._undo.close()  # of an earlier run, if an error kept it from its teardown
        self.end_by = None
        # The order of samples is the strategy's: Lightning would shuffle every training loader, even in one process.
        self._exchange(trainer._accelerator_connector, "use_distributed_sampler", False)
        self._seed_is_given = bool(os.environ.get("PL_GLOBAL_SEED"))  # else one that seed_everything would take
        self.seed = int(os.environ["PL_GLOBAL_SEED"]) if self._seed_is_given else torch.initial_seed() % (1 << 32)
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_what_cannot_be_honoured(trainer)
            self.progress = TrainingProgress(run_updates=trainer.fit_loop.epoch_loop._batches_that_stepped)
            self._restored, self._epoch, self._under_way, self._reached, self._rest_of_step = None, None, None, None, None
            self._row, self._logged_in_epoch, self._shown_before, self._has_saved = {}, False, None, False
            self._left_over: tuple[int, int] | None = None  # of a stream: samples and weight updates that were announced
        Strategy.setup_environment(self)
        if self._process_count > 1:
            with self._launcher.meeting():
                self._meet_apart_from_earlier_attempts()
                self.setup_distributed()
            atexit.unregister(_leave_process_group)
            atexit.register(_leave_process_group)
            # Averages are over all processes already when Lightning sees them.
            self._undo.enter_context(_ignored(".*sync_dist=True.*when logging on epoch level"))
            self._processes = Processes(placement, device=self.root_device)
            self.seed = self.broadcast(self.seed)

    def _exchange(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the fit or evaluation ends; if the object had none of its own, it is deleted then."""
        if name in vars(owner):
            self._undo.callback(object.__setattr__, owner, name, vars(owner)[name])
        else:
            self._undo.callback(object.__delattr__, owner, name)
        object.__setattr__(owner, name, value)

    def _user_setting(self, name: str) -> Any:
        """The user's value of a Trainer setting, which the strategy may have replaced for this fit or evaluation."""
        if name not in self._user_settings:
            trainer = self.lightning_module.trainer
            self._user_settings[name] = getattr(trainer, name)
            self._undo.callback(lambda: setattr(trainer, name, self._user_settings.pop(name)))
        return self._user_settings[name]

    def _meet_apart_from_earlier_attempts(self) -> None:
        """After a restart by torchrun, let the processes find each other under names of their own.

        torchrun's store lives on, and with it the addresses of the processes that have ended (seen with torch 2.14: whoever reads an old
        one waits for ever, or is refused).
        """
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
            return
        environment = self.cluster_environment
        store = torch.distributed.TCPStore(environment.main_address, environment.main_port, is_master=False, timeout=self._timeout)
        torch.distributed.init_process_group(
            self._get_process_group_backend(),
            store=torch.distributed.PrefixStore(f"attempt {attempt}", store),
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=self._timeout,
        )

    @override
    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        check_splits(module, self.pipeline_splits)
        check_num_stages(module, self.plan.num_stages)
        self._own_transfer()
        self._exchange(trainer._signal_connector, "_sigterm_notifier_fn", self._hear_sigterm)
        self._own_epochs(trainer)
        if self._processes is not None:
            for name, parameter in module.named_parameters():
                if isinstance(parameter, UninitializedParameter):
                    raise PlanError(f"{name!r} has no shape yet, so processes cannot start alike: run a batch through the network first")
            broadcast_state(module)
            self._metrics = SharedMetrics(module, self._processes.gathered)
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_what_is_compiled(module, recompute=self.recompute, parts=self._processes.parts if self._processes else 1)
            self._exchange(trainer, "accumulate_grad_batches", self.plan.micro_batches_per_update)
            try:
                self.setup_optimizers(trainer)
            except RuntimeError as error:
                if "multiple optimizers" not in str(error):
                    raise
                raise PlanError(_SEVERAL_OPTIMIZERS.format(number="several")) from None
            self.setup_precision_plugin()
            _refuse_optimizers(self.optimizers)
            self._recorder = LogRecorder(module, self.progress.latest)
            if self._processes is not None:
                self._recorder = LogRecorder(
                    module, self.progress.latest, gather=self._processes.gathered, speaker=self._processes.parts - 1
                )
                self._recorder.muted = not self._processes.is_last  # the last stage runs the whole step
            self._own_schedules()
            self._own_batches(trainer)
            if self._processes is not None:
                self._decisions = Decisions(trainer, gathered=self._processes.gathered, exchange=self._exchange, undo=self._undo)
                self._undo.callback(setattr, self, "_decisions", None)
            made = Assembly(
                trainer,
                optimizer=self.optimizers[0],
                precision=self.precision_plugin,
                plan=self.plan,
                processes=self._processes,
                recorder=self._recorder,
                progress=self.progress,
                seed=self.seed,
                device=self.root_device,
                recompute=self.recompute,
                pipeline_splits=self.pipeline_splits,
                pipeline_schedule=self.pipeline_schedule,
                ready=self._ready,
                on_micro_batch=self._count_micro_batch,
                on_stop=self._stop,
                undo=self._undo,
            )
            self.pipeline_splits, self.stage_costs = made.splits, made.stage_costs
            self._engine, self._stages, self._scaling, self._undoes = made.engine, made.stages, made.scaling, made.undoes
            self._lr_step, self._late_hooks = made.lr_scheduler_step, made.late_hooks
        else:
            self.setup_precision_plugin()

    def _own_batches(self, trainer: Trainer) -> None:
        """Run host steps where Lightning would optimise one batch, and let its progress bars follow them."""
        owners = (*trainer.callbacks, self.lightning_module)
        self._starters = [type(owner).__name__ for owner in owners if "on_train_batch_start" in batch_hooks(owner)]
        self._exchange(trainer.fit_loop.epoch_loop.automatic_optimization, "run", self._run_host_step)
        for callback in trainer.callbacks:
            self._exchange(callback, "log", partial(_log, self.lightning_module))  # else Lightning's own, whoever stands in for it
            if isinstance(callback, ProgressBar):
                self._exchange(callback, "on_train_batch_end", partial(self._move_bar, callback))

    def _move_bar(self, bar: ProgressBar, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Pass the number of the host step's last micro-batch to a bar; other callbacks get the first."""
        type(bar).on_train_batch_end(bar, trainer, module, outputs, batch, trainer.fit_loop.epoch_loop.batch_idx)

    def _own_transfer(self) -> None:
        """Keep Lightning's transfer hooks off host steps; the strategy calls them for every micro-batch, under seeds of its own."""
        module = self.lightning_module
        original = LightningModule._on_before_batch_transfer
        self._before_transfer = partial(original, module)

        def untouched(owner: LightningModule, batch: Any, dataloader_idx: int = 0) -> Any:
            return batch if owner is module else original(owner, batch, dataloader_idx)

        # On the class, so that the module itself can be copied and pickled.
        LightningModule._on_before_batch_transfer = untouched
        self._undo.callback(setattr, LightningModule, "_on_before_batch_transfer", original)
        selector = module.trainer._data_connector._datahook_selector
        self._user_transfers = any(is_overridden(hook, selector.get_instance(hook)) for hook in _TRANSFER_HOOKS)
        self._transfers = self._user_transfers or self.root_device.type != "cpu" or type(self.precision_plugin) is DoublePrecision

    def _own_schedules(self) -> None:
        """Take the learning-rate schedules that step per weight update over from Lightning, which would step them per host step."""
        self._schedules: list[tuple[Any, int]] = []
        for config in self.lr_scheduler_configs:
            if config.interval != "step":
                continue
            if config.reduce_on_plateau:
                config.frequency *= self.plan.micro_batches_per_update  # Lightning counts micro-batches here
            else:
                self._schedules.append((config.scheduler, config.frequency))
                config.frequency = float("inf")  # never due in Lightning's eyes; `interval` stays for LearningRateMonitor

    def _hear_sigterm(self, signum: int, frame: Any) -> None:
        """In place of Lightning's handler, which starts a collective wherever this process is, and takes effect only after a host step."""
        trainer = self.lightning_module.trainer
        if self._processes is not None and trainer.state.fn != TrainerFn.FITTING:
            raise SystemExit(128 + signum)
        self.progress.stop_signal = signum
        trainer._signal_connector.received_sigterm = self._processes is None  # of several processes, once they have agreed

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and not exception.code:
            exception.code = 128 + signal.SIGTERM  # the training is not complete
        if isinstance(exception, SIGTERMException) and self._stages is not None and not self._stages.is_whole:
            self._stages.fetch()  # in all processes alike
        super().on_exception(exception)

    def _stop(self, number: int) -> None:
        """Called in every process in the same weight update: one of them had been asked to stop before it."""
        self.progress.stop_signal = self._agreed_stop = number

    @property
    def agreed_stop(self) -> int | None:
        """The signal after which all processes have ended the last host step together; a process that is alone needs nobody's consent."""
        return self.progress.stop_signal if self._processes is None else self._agreed_stop

    def agree_on_stop(self) -> int | None:
        """The signal that a handler in any of the processes has stored in `progress.stop_signal`; to be called by all of them alike."""
        number = self.progress.stop_signal or 0
        if self._processes is not None:
            number = self._processes.largest(number)
        return number or None

    def _count_micro_batch(self) -> None:
        self.progress.samples_done += self.plan.micro_batch_size * self.plan.replication_factor // len(self._replicas)

    @property
    def _replicas(self) -> range:
        """Replicas that run in this process."""
        return range(self.plan.replication_factor) if self._processes is None else self._processes.replicas

    # ---- Checkpoints, and the whole network where it is needed -----------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if names := kept_buffers(self.lightning_module):
            checkpoint[KEPT] = names
        begun = self._recorder is not None and self.lightning_module.trainer.fit_loop._combined_loader is not None
        if begun and "loops" in checkpoint:
            if self._recorder.recording_hook:
                raise PlanError(
                    f"save_checkpoint was called in {self._recorder.recording_hook}, within a weight update, where no state can be"
                    " resumed; save in on_train_batch_start, on_train_batch_end or any hook after it"
                )
            self._add_position(checkpoint, filepath)
            self._check_hyperparameters(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _check_hyperparameters(self, checkpoint: dict[str, Any]) -> None:
        """Warn at a fit's first checkpoint of hyperparameters that would keep it from being loaded."""
        if self._has_saved:
            return
        self._has_saved = True
        for key in ("hyper_parameters", "datamodule_hyper_parameters"):
            for name, types in loads_not(checkpoint.get(key) or {}).items():
                rank_zero_warn(
                    f"save_hyperparameters puts {name!r} into the checkpoints. Because it holds {types}, they load only with weights_only=False,"
                    f" given to fit, validate, test or load_from_checkpoint. Leave it out with save_hyperparameters(ignore=[{name!r}])"
                )

    def _add_position(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Add to a checkpoint the position of the run and the state that only this package keeps."""
        trainer, module = self.lightning_module.trainer, self.lightning_module
        loops = checkpoint["loops"]["fit_loop"]
        if self._restored is not None:  # resumed, but before the first new weight update
            position = Position(**self._restored["position"])
            checkpoint[KEY] = self._restored
        else:
            hook = hook_in_progress(trainer)
            position = self._position(hook)
            data: TrainingData = trainer.fit_loop._combined_loader.flattened[0].data
            shown = self._shown_before if position.hook == VALIDATION else None
            checkpoint[KEY] = saved = {
                "numbers": numbers_of(self.plan, seed=self.seed, precision=str(trainer.precision)),
                "data": self._data_word,
                "position": {**vars(position), "heard_by": list(position.heard_by)},
                "beside": continuation.state_beside(trainer, hook, filepath, shown=shown or continuation.latest_metrics(trainer)),
                "order": data.order_state(position.epoch + position.ends_epoch),
            }
            if position.begun:
                gathered = self._engine is not None and self._processes is not None
                metrics = self._metrics.merged() if gathered else metric_states(module)
                saved |= {"averages": self._recorder.state_dict(), "metrics": metrics}
                saved |= {"row": dict(self._row), "logged": self._logged_in_epoch}
            if position.hook == BATCH_END and hook is not None and len(hook.arguments) == 3:
                outputs, _, number = hook.arguments
                saved["batch_end"] = {
                    "outputs": continuation.kept_outputs(outputs),
                    "number": number,
                    "updates": self.progress.step_updates,
                }
        write_position(loops, position, plan=self.plan)
        checkpoint["epoch"] = position.epoch

    def _position(self, hook: Hook | None) -> Position:
        """The position of the run, whatever Lightning is doing at the moment; `hook` is the one that it is calling."""
        trainer, progress = self.lightning_module.trainer, self.progress
        epoch_loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        batches, name = epoch_loop.batch_progress, hook and hook.name
        updates, completed, per_epoch = progress.updates_done, epochs.completed, progress.updates_per_epoch
        ended_within = 0 < updates < (per_epoch or updates + 1) and trainer.global_step == trainer.max_steps and not batches.is_last_batch
        rest = None
        if self._epoch is None or completed > self._epoch and not ended_within:  # between two epochs
            if name != EPOCH_START:
                hook = Hook.over(EPOCH_START, trainer) if epochs.started > completed else None
            epoch, updates = completed, 0
        else:
            epoch = self._epoch
            if self._under_way is not None:
                hook, rest = Hook.over(BATCH_START, trainer), self._under_way.weight_updates - self._under_way.done
            elif completed > epoch:
                hook = None
            elif trainer.validating and name not in (VALIDATION_END, "on_validation_model_train"):
                hook = Hook(name=VALIDATION, callbacks=(), module=False)
            elif name not in (BATCH_START, BATCH_END, VALIDATION_END, EPOCH_END):
                # In a hook that is none of these, or in none: an error in a logger or a loader, say.
                last = EPOCH_END if epochs.processed > completed else self._reached
                if last == BATCH_END and batches.current.completed == batches.current.processed:
                    last = VALIDATION  # if one is due
                hook = None if last is None else Hook.over(last, trainer)
        position = Position(
            epoch=epoch,
            updates=updates,
            run_updates=progress.run_updates,
            hook=hook and hook.name,
            heard_by=[callback.state_key for callback in hook.callbacks] if hook else (),
            module_heard=hook is not None and hook.module,
            rest_of_step=rest,
        )
        return replace(position, ends_epoch=position.follows and batches.is_last_batch)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            if TRAINED in checkpoint and not any(
                isinstance(callback, (AveragedWeights, WeightAveraging)) for callback in trainer.callbacks
            ):
                raise PlanError(
                    f"{checkpoint_path} holds an average of weights that its run kept: give the callback AveragedWeights (--ema) again to go on"
                )
            self._restored = checkpoint.get(KEY)
            if self._restored is not None:
                if read_position(self._restored, checkpoint_path).follows:
                    continuation.keep_open(trainer)
                    self._undo.callback(continuation.close, trainer)
                if not self._seed_is_given and self.seed != (before := self._restored["numbers"]["seed"]):
                    rank_zero_info(f"No seed was given: the run goes on with the seed in its checkpoint, {before}.")
                    self.seed = before
        return checkpoint

    def _resume(self) -> None:
        """Go on where the checkpoint stands; called when training starts."""
        trainer, saved, module = self.lightning_module.trainer, self._restored, self.lightning_module
        position, self._restored = Position(**saved["position"]), None
        continuation.enter(trainer, position, per_update=self.plan.micro_batches_per_update)
        self._own_validation_interval(trainer, ends_early=position.ends_epoch and position.updates != self.progress.updates_per_epoch)
        ended: dict[str, Any] = {}
        if "batch_end" in saved:
            outputs = apply_to_collection(saved["batch_end"]["outputs"], torch.Tensor, torch.Tensor.to, self.root_device)
            updates, places = saved["batch_end"]["updates"], self._training_data.shard.places
            self.progress.hold(updates, self.plan)
            self.progress.run_updates = position.run_updates - updates  # by which transfer hooks draw
            batch: Any = ()
            if places:  # else a stage in the middle
                number = (position.updates - updates) * self.plan.micro_batches_per_update + places.start
                with preserved_streams(self.root_device):
                    batch = self._ready(self._training_data.again(position.epoch, number), 0)
            ended = {"outputs": outputs, "batch": batch, "batch_idx": saved["batch_end"]["number"]}
        self.progress.updates_done, self.progress.run_updates = position.updates, position.run_updates
        self._reached, self._rest_of_step = position.hook if position.follows else None, position.rest_of_step
        continuation.load_state_beside(trainer, saved["beside"])
        if position.begun:
            self._epoch = position.epoch
            trainer._logger_connector._first_loop_iter = False  # else Lightning drops the values at the epoch's first step
            self._recorder.load_state_dict(saved["averages"])
            if not position.updates:
                trainer._logger_connector._first_loop_iter = None
            self._row, self._logged_in_epoch = dict(saved["row"]), saved["logged"]
            if self._processes is None or self._processes.rank == self._processes.parts - 1:  # the first that runs whole steps
                load_metric_states(module, saved["metrics"])
            every = trainer.log_every_n_steps
            unlogged = position.hook == BATCH_START and position.rest_of_step is not None
            if unlogged and self._row and every and position.run_updates % every == 0:
                row = {"epoch": torch.tensor(position.epoch), **_as_tensors(self._row)}
                trainer._logger_connector.log_metrics(row, step=position.run_updates - 1)
        continuation.go_on(trainer, position, **ended)
        if continuation.awaits(position):
            self._unheard.enter_context(continuation.unheard(trainer, position))
            self._undo.callback(self._unheard.close)
        if self.progress.updates_per_epoch is None:  # of a stream a host step is fetched ahead
            if trainer.current_epoch > position.epoch:
                trainer.fit_loop.epoch_loop.batch_progress.reset_on_run()
            iter(trainer.fit_loop._data_fetcher)

    def holds(self, name: str) -> bool:
        """Whether a parameter or buffer of the module is in this process; all are where it runs whole networks."""
        return self._stages is None or name not in self._stages.owners or self._stages.here(name)

    def merged(self, held: dict[str, Any]) -> dict[str, Any]:
        """What the processes of a replica hold by parameter's or buffer's name, as one dictionary in each; to be called by all alike."""
        return held if self._stages is None else self._stages.merged(apply_to_collection(held, torch.Tensor, torch.Tensor.cpu))

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._stages is None or self._stages.is_whole:
            return state
        own = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in self._stages.own(state).items()}
        merged = self._stages.merged(own)
        return {name: merged[name] for name in state if name in merged} | merged  # a stage may have filled or emptied a buffer

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        make_room(self.lightning_module, checkpoint["state_dict"])
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._stages is not None:
            held = self._stages.merged(apply_to_collection(state["state"], torch.Tensor, torch.Tensor.cpu))
            state["state"] = {number: held[number] for number in sorted(held)}
        return state

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._stages is not None:
            for name, parameter in self.lightning_module.named_parameters():
                if not self._stages.here(name):
                    self.optimizers[0].state.pop(parameter, None)

    @override
    def on_validation_start(self) -> None:
        if self._reached is not None:
            self._shown_before = continuation.latest_metrics(self.lightning_module.trainer)
        if self._stages is not None and not self._stages.is_whole and not self._evaluates_in_pipeline:
            self._stages.fetch()

    @override
    def on_validation_end(self) -> None:
        if self._reached is not None:
            self._reached, self._shown_before = VALIDATION_END, None
        if self._decisions is not None:
            self._decisions.agree()
        trains = self._engine is not None and not self.lightning_module.trainer.sanity_checking
        if self._stages is not None and trains and not self._evaluates_in_pipeline:
            self._stages.give_up()

    @override
    def on_train_end(self) -> None:
        self._unheard.close()
        if self._stages is not None:
            self._stages.fetch()

    # ---- Data ---------------------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return self._evaluation_loader(dataloader)
        accumulation, replicas = self.plan.gradient_accumulation_factor, self._replicas
        places = range(replicas.start * accumulation, replicas.stop * accumulation)
        if self._processes is not None and not (self._processes.is_first or self._processes.is_last):
            # Stages in the middle need no data, but hooks may want to see the first micro-batch.
            looks = any(batch_hooks(owner) for owner in (*trainer.callbacks, self.lightning_module))
            places = places[:1] if looks else range(0)
        shard = Shard(places=places, per_update=self.plan.micro_batches_per_update)
        self._training_data = data = TrainingData(dataloader, seed=self.seed, shard=shard)
        self._loaders.append(data.loader)
        if data.is_stream and self._processes is not None:
            raise PlanError("an IterableDataset is trained on by one process only: its samples cannot be shared out; use devices=1")
        if data.is_stream and data.samples is None and hasattr(data.loader.dataset, "__len__"):
            rank_zero_info(
                f"The number of micro-batches in an epoch of {type(data.loader.dataset).__name__} is not known in advance: each of"
                f" num_workers={data.loader.num_workers} forms its own from its share of the samples. With num_workers=1 it is known"
            )
        if self._processes is not None and len(set(self._processes.gathered(data.fingerprint()))) > 1:
            rank_zero_warn(
                "the processes see different training data (other samples, or another order): each made its own. Make it, or split it, with a"
                " generator of a fixed seed"
            )
        self.plan = plan = _with(self.plan, micro_batch_size=data.micro_batch_size)
        micro_batches = _trained_micro_batches(trainer, data, plan, limit=self._user_setting("limit_train_batches"))
        self.progress.updates_per_epoch = updates = None if micro_batches is None else micro_batches // plan.micro_batches_per_update
        if updates is not None and data.samples is not None:
            self.progress.samples_left_out = data.samples - micro_batches * plan.micro_batch_size
        _check_validation_interval(trainer, updates)
        word = getattr(trainer.datamodule, "fingerprint", None)
        self._data_word = {"samples": data.samples, "fingerprint": str(word()) if callable(word) else None}
        if self._restored is not None:
            if remark := check_numbers(self._restored["numbers"], plan, seed=self.seed, precision=str(trainer.precision)):
                rank_zero_warn(remark)
            position = Position(**self._restored["position"])
            if remark := check_data(self._restored["data"], self._data_word, within_epoch=position.begun and not position.ends_epoch):
                rank_zero_warn(remark)
            if updates is not None and not position.ends_epoch and (done := position.updates) > updates:
                raise PlanError(
                    f"the run to be resumed stands after weight update {done} of its epoch, which now has {updates}:"
                    " give limit_train_batches as it was"
                )
            reload = trainer.reload_dataloaders_every_n_epochs
            epoch = position.epoch + position.ends_epoch
            data.go_on(self._restored["order"], epoch=epoch, made_in=epoch - epoch % reload if reload else 0)
        self._events = None
        return HostSteps(
            data,
            plan=plan,
            micro_batches=micro_batches,
            is_loops=self._is_loops,
            begin=self._begin_epoch,
            next_updates=self._next_updates,
            ready=self._ready,
            left_over=self._say_left_over,
        )

    def _is_loops(self, iterator: Any) -> bool:
        loaders = self.lightning_module.trainer.fit_loop._combined_loader
        return loaders._iterator is not None and any(one is iterator for one in loaders._iterator.iterators)

    def _evaluation_loader(self, loader: object) -> object:
        trainer = self.lightning_module.trainer
        if not isinstance(loader, torch.utils.data.DataLoader):
            if self._evaluation_share[1] > 1 and sized_len(loader) != 0:  # an empty list stands for no loader
                raise PlanError(f"a {type(loader).__name__} is evaluated by one process only; give a torch DataLoader, or use devices=1")
            return loader
        shared: dict[str, Any] = {}
        if self._processes is not None and not trainer.predicting:
            name = "limit_test_batches" if trainer.testing else "limit_val_batches"
            limit = self._user_setting(name)
            index, count = self._evaluation_share
            shared = {"limit": limit, "index": index, "count": count}
        data = EvaluationData(loader, seed=self.seed, **shared)
        if isinstance(data.loader, Loader):
            self._loaders.append(data.loader)
        if shared and isinstance(limit, float):
            setattr(trainer, name, 1.0)  # Lightning would take a share of this process's batches once more
        if data.left_out:
            rank_zero_info(
                f"Evaluation scores every sample: drop_last=True of the loader would leave out {data.left_out} and is not applied."
            )
        return data

    @property
    def _evaluation_share(self) -> tuple[int, int]:
        """Which of the batches of an evaluation this process scores: every so many-th, from which on."""
        processes = self._processes
        if processes is None or self.lightning_module.trainer.predicting:
            return 0, 1
        if self._evaluates_in_pipeline:
            return processes.group, processes.count // processes.parts
        return processes.rank, min(processes.count, self.validation_replicas or processes.count)

    @property
    def _evaluates_in_pipeline(self) -> bool:
        return self.pipeline_validation and self._stages is not None and self._engine is not None

    def _begin_epoch(self) -> tuple[int, int] | None:
        """Called when Lightning draws an epoch's first host step: the numbers of the epoch and of the first micro-batch; None until a run has resumed."""
        trainer = self.lightning_module.trainer
        if self._restored is not None:
            return None  # Lightning fetches from a stream when it sets up, and once more from `_resume`
        epoch_loop = trainer.fit_loop.epoch_loop
        first = epoch_loop.batch_progress.current.ready
        if self._events is None:
            self._events = events_of(trainer, self.plan, self.progress.updates_per_epoch)
            self._announce()
        self._own_validation_interval(trainer)
        if first == 0:
            self._recorder.begin_epoch()
            self._row, self._logged_in_epoch = {}, False
        self._epoch, self.progress.updates_done = trainer.current_epoch, first // self.plan.micro_batches_per_update
        return trainer.current_epoch, first

    def _own_validation_interval(self, trainer: Trainer, *, ends_early: bool = False) -> None:
        """Lightning compares the interval with micro-batches, and sets it anew, in its own way, with every training loader."""
        interval = validation_interval(trainer, self.progress.updates_per_epoch)
        if interval is not None:
            at_the_end = interval == self.progress.updates_per_epoch and trainer.check_val_every_n_epoch is not None
            trainer.val_check_batch = float("inf") if ends_early and at_the_end else interval * self.plan.micro_batches_per_update

    @override
    def on_train_start(self) -> None:
        trainer = self.lightning_module.trainer
        loaders = trainer.fit_loop._combined_loader
        if not isinstance(loaders.iterables, HostSteps):
            raise PlanError(
                f"train_dataloader gave several training loaders ({len(loaders.flattened)} in a {type(loaders.iterables).__name__});"
                " IPUStrategy needs exactly one: join the data sets, e.g. with torch.utils.data.StackDataset or ConcatDataset"
            )
        if self._decisions is not None:
            self._decisions.agree()
        self._own_validation_interval(trainer)
        if self._stages is not None:  # only now: after a refusal the user has the whole network
            self._stages.give_up()
        if self._restored is not None:
            self._resume()
            return
        self.progress.run_updates = trainer.global_step + (self._scaling.skipped if self._scaling else 0)
        position = trainer.fit_loop.epoch_loop.batch_progress
        if self.progress.updates_per_epoch is None and position.is_last_batch:
            # Resumed at the end of a stream's epoch. Not knowing its length, Lightning would go on counting in the old one, and the host
            # step that it has fetched already begins where that one ended.
            position.reset_on_run()
            position.current.completed -= trainer.fit_loop.epoch_loop.restarted_on_train_batch_end  # which Lightning is about to count
            iter(trainer.fit_loop._data_fetcher)

    @override
    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._unheard.close()

    def _announce(self) -> None:
        if self.progress.samples_left_out:
            rank_zero_info(
                f"{self.progress.samples_left_out} samples are left out of every epoch: it holds {self.progress.updates_per_epoch} whole weight"
                f" updates ({self.plan.factors()})."
            )
        if self._events.reduction:
            rank_zero_info(self._events.reduction)

    def _say_left_over(self, samples: int, updates: int) -> None:
        """Called at the end of an epoch of a stream of unknown length, which is when these numbers are known."""
        if updates == 0:
            raise PlanError(
                f"the training stream gave {samples} samples, fewer than one weight update needs: {self.plan.factors()}."
                " Lower one of these factors, or give more samples"
            )
        asked, told = self.progress.updates_per_epoch, self._left_over
        self._left_over, self.progress.samples_left_out = (samples, updates), samples
        if asked is not None and told != self._left_over:
            rank_zero_info(
                f"The stream ended in epoch {self._epoch} after {updates} of the {asked} weight updates that limit_train_batches asks for:"
                f" {samples} samples were left out."
            )
        elif samples and (told is None or samples != told[0]):
            rank_zero_info(
                f"{samples} samples of the stream were left out of epoch {self._epoch}: it held {updates} whole weight updates"
                f" ({self.plan.factors()})."
            )

    def _next_updates(self) -> int:
        """Called when Lightning fetches a host step: its weight updates, as so many micro-batches fetched."""
        trainer = self.lightning_module.trainer
        updates = self._events.updates_until_due(run_update=trainer.global_step, epoch_update=self.progress.updates_done)
        if trainer.should_stop:  # it may not stop yet, and looks after every update whether it may
            updates = 1
        if self._rest_of_step is not None:
            updates, self._rest_of_step = min(updates, self._rest_of_step), None
        trainer.fit_loop._data_fetcher.fetched += updates * self.plan.micro_batches_per_update - 1  # Lightning itself counts one
        return updates

    def _begin_host_step(self, host_step: HostStep) -> Any:
        """Called when Lightning begins a host step; returns what its hooks get: this process's first micro-batch, unchanged."""
        self._reached, self._host_step = None, host_step
        self.progress.hold(host_step.weight_updates, self.plan)
        data = self._training_data
        if not data.shard.places:
            return ()  # a stage in the middle, where nobody looks
        with preserved_streams(self.root_device) if self._transfers or data.draws_here else nullcontext():
            batch = host_step.first()
        self._shown = contents(batch) if self._starters and self.progress.step_micro_batches > 1 else None
        return batch

    def _move_batch_progress(self, micro_batches: int) -> None:
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
        for counts in (progress.total, progress.current):
            counts.ready += micro_batches
            counts.started += micro_batches
            counts.processed += micro_batches
            counts.completed += micro_batches

    def _ready(self, batch: Any, number: int) -> Any:
        """A micro-batch of a host step through the transfer hooks, under seeds of its own."""
        if batch is None:
            raise PlanError("the collate_fn of the training loader gave None for a micro-batch; each one counts in its weight update")
        if not self._transfers:
            return batch
        module = self.lightning_module
        batch = self.precision_plugin.convert_input(batch)
        accumulation, replicas = self.plan.gradient_accumulation_factor, self._replicas
        replica, micro_batch = divmod(number % (len(replicas) * accumulation), accumulation)
        place = self.progress.run_updates, replicas.start + replica, micro_batch
        seed_all(mix(self.seed, _TRANSFER, *place), self.root_device)
        batch = self._before_transfer(batch)
        return module._apply_batch_transfer_handler(batch, device=self.root_device, dataloader_idx=0)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if type(batch) is HostStep:
            return self._begin_host_step(batch)
        if batch is None:  # one that only fills up the last round
            return None
        if not self._user_transfers:
            return super().batch_to_device(batch, device, dataloader_idx)
        with self._evaluation_randomness(_TRANSFER):
            return super().batch_to_device(self._before_transfer(batch, dataloader_idx=dataloader_idx), device, dataloader_idx)

    @contextmanager
    def _evaluation_randomness(self, purpose: int) -> Iterator[None]:
        """Seed what is drawn for a batch of an evaluation or prediction from (seed, purpose, number of the batch)."""
        index, count = self._evaluation_share
        number = self.lightning_module.trainer._active_loop.batch_progress.current.completed * count + index
        with preserved_streams(self.root_device):
            seed_all(mix(self.seed, _EVALUATION, purpose, number), self.root_device)
            yield

    # ---- Training -----------------------------------------------------------------------------------------------------------

    def _run_host_step(self, optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Run the weight updates of the host step that was begun in a tight loop, in place of Lightning's optimisation of a batch.

        Returns:
            What hooks get as the step's outputs: of the first micro-batch here.
        """
        trainer, host_step = self.lightning_module.trainer, self._host_step
        epoch_loop = trainer.fit_loop.epoch_loop
        recorder, progress, engine, schedules = self._recorder, self.progress, self._engine, self._schedules
        recorder.drawn = self.plan.micro_batch_size
        per_update = self.plan.micro_batches_per_update
        first_update = progress.updates_done
        self._move_batch_progress(host_step.weight_updates * per_update - 1)  # Lightning itself counts one
        if self._shown is not None and contents(kwargs["batch"])[0] != self._shown[0]:
            raise PlanError(
                f"on_train_batch_start of {' or '.join(self._starters)} changes the batch, which is one of the"
                f" {progress.step_micro_batches} micro-batches of the host step. Change each of them in on_after_batch_transfer"
            )
        steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step
        self._agreed_stop, self._under_way = None, host_step
        put_back, metrics = None, metrics_of(self.lightning_module) if self._undoes else []
        if self._processes is not None:
            self._metrics.begin()

        try:
            with preserved_streams(self.root_device), recorder.recording():
                for done in range(host_step.weight_updates):
                    recorder.update = done
                    put_back = set_aside(metrics) if self._undoes else None
                    loss, extra, made = engine.weight_update(
                        host_step.take, update=progress.run_updates, first_micro_batch=(first_update + done) * per_update
                    )
                    if done == 0:
                        outputs = {"loss": loss, **extra}
                    progress.updates_done += 1
                    progress.run_updates += 1
                    host_step.done = done + 1
                    if made:
                        steps.increment_ready()
                        steps.increment_completed()
                        for schedule, frequency in schedules:
                            if steps.current.completed % frequency == 0:
                                self._lr_step(schedule, None) if self._lr_step else schedule.step()
                    # With several processes a signal of this moment waits: the others could not know of it.
                    if self._should_stop(trainer) or self.agreed_stop is not None or host_step.ends_epoch:
                        break
        except BaseException:  # a checkpoint that is written on the way out stands at the last whole weight update
            self._move_batch_progress((progress.updates_done - first_update - host_step.weight_updates) * per_update + 1)
            epoch_loop.batch_progress.is_last_batch = False
            engine.undo()
            if put_back is not None:
                put_back()
            recorder.forget_from(host_step.done)
            if host_step.done and self._processes is None:  # else the others would be waited for
                with suppress(Exception):  # the error itself matters more
                    self._log_rows(trainer, host_step.done, ends=False)
            raise
        done += 1
        progress.hold(done, self.plan)
        if self._processes is not None and (first_update == 0 or epoch_loop.batch_progress.is_last_batch):
            self._processes.check_alike(self.lightning_module, optimizer, holds=self.holds)
        self._settle(trainer, epoch_loop, done - host_step.weight_updates, done)
        if self._agreed_stop is not None and self.end_by is None:
            trainer._signal_connector.received_sigterm = True
        self._under_way, self._reached = None, BATCH_END
        return outputs

    def _should_stop(self, trainer: Trainer) -> bool:
        """Whether `trainer.should_stop` has been set in any process; true after the same weight update in all."""
        if self._processes is not None:
            stops = self._engine.asked_to_stop
            if self._late_hooks:
                stops = bool(self._processes.largest(int(trainer.should_stop)))
            trainer.should_stop |= stops
            return stops
        return trainer.should_stop

    def _settle(self, trainer: Trainer, epoch_loop: Any, missing: int, done: int) -> None:
        """Bring Lightning's counters and logs to where they would be had its loop made these weight updates one by one."""
        fetcher = trainer.fit_loop._data_fetcher
        if missing:  # ended early: the rest is still to be trained on
            undone = missing * self.plan.micro_batches_per_update
            self._move_batch_progress(undone)
            fetcher.fetched, fetcher.done, epoch_loop.batch_progress.is_last_batch = fetcher.fetched + undone, False, False
        if self._host_step.ends_epoch:
            fetcher.done = epoch_loop.batch_progress.is_last_batch = True
            self._own_validation_interval(trainer, ends_early=True)

        ends = epoch_loop.batch_progress.is_last_batch or trainer.global_step == trainer.max_steps
        if self._events.logs_are_given:
            ends &= trainer.global_step == trainer.max_steps or trainer.current_epoch + 1 == trainer.max_epochs
        self._log_rows(trainer, done, ends=ends)

    def _log_rows(self, trainer: Trainer, done: int, *, ends: bool) -> None:
        """Log what so many weight updates have recorded, all but the last row, which is Lightning's; where the epoch `ends`, one at least."""
        rows = self._recorder.replay("training_step")
        connector, every, epoch_loop = trainer._logger_connector, trainer.log_every_n_steps, trainer.fit_loop.epoch_loop
        first = epoch_loop._batches_that_stepped
        row = self._row  # like Lightning's own, a row shows the last value of what this update did not log
        for update in range(done):
            row.update(rows[update] if update < len(rows) else {})
            epoch_loop._batches_that_stepped = first + update  # which a logger is told, but for a `step` that was logged
            if update < done - 1 and row and every and (first + update + 1) % every == 0:
                connector.log_metrics(_as_tensors(row))
                self._logged_in_epoch = True
        self._logged_in_epoch |= connector.should_update_logs
        if ends and every and row and not self._logged_in_epoch:
            connector.log_metrics(_as_tensors(row))  # a short epoch still shows one training loss

    # ---- Evaluation ---------------------------------------------------------------------------------------------------------

    def _own_epochs(self, trainer: Trainer) -> None:
        """Register calls before an epoch's end and, with several processes, after the hooks of its end and around evaluations."""
        connector = trainer._logger_connector
        self._exchange(connector, "epoch_end_reached", partial(self._epoch_end_reached, connector))
        if self._process_count == 1:
            return
        self._exchange(connector, "on_epoch_end", partial(self._epoch_ended, connector))
        self._told_apart: set[str] = set()
        for loop in _evaluation_loops(trainer):
            self._exchange(loop, "setup_data", partial(self._set_up_evaluation, loop))
            self._exchange(loop, "_evaluation_step", partial(self._evaluate_batch, loop))

    def _epoch_end_reached(self, connector: Any) -> None:
        """At every end of an epoch, and after every evaluation loader: pass the logged values to Lightning, and merge the processes' metrics."""
        if name := self._evaluation.pop("untold", None):
            self._evaluation["recorder"].replay(name)
        type(connector).epoch_end_reached(connector)
        if self._processes is not None:
            self._metrics.share()

    def _epoch_ended(self, connector: Any) -> None:
        """After the hooks of an epoch's end: say which logged values are not the same in every process."""
        type(connector).on_epoch_end(connector)
        if self._decisions is not None:
            self._decisions.agree()
        logged = {name: float(value) for name, value in connector.trainer.callback_metrics.items()}
        for name in names_apart(self._processes.gathered(logged)):
            if name not in self._told_apart:
                self._told_apart.add(name)
                rank_zero_warn(
                    f"self.log({name!r}, ...) was given another value in every process, outside of a step; what is shown is the first process's."
                    " Log it in the step, or use a torchmetrics metric, which is merged over processes"
                )

    def _set_up_evaluation(self, loop: Any) -> None:
        """Refuse, before the first step, loaders whose batches would not be scored exactly once by all processes together."""
        type(loop).setup_data(loop)
        stage = "test" if loop.trainer.testing else "validation"
        if loop._combined_loader is not None and not loop._is_sequential:
            raise PlanError(
                f"the {stage} loader is a CombinedLoader with mode={loop._combined_loader._mode!r}, whose batches several processes cannot"
                " share out: return a list of loaders, join the data sets with torch.utils.data.StackDataset, or use devices=1"
            )
        if is_param_in_hook_signature(getattr(self.lightning_module, f"{stage}_step"), "dataloader_iter", explicit=True):
            raise PlanError(f"{stage}_step(dataloader_iter) draws its batches itself, for which it must run in one process: use devices=1")

    def _evaluate_batch(self, loop: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        """Lightning's evaluation of a batch with the hooks around it, which do not hear of one that only fills up the last round."""
        if batch_idx == 0:
            self._metrics.begin()
        if batch_idx % _BATCHES_BETWEEN_AGREEMENTS == 0 and self._engine is not None:
            if (number := self.agree_on_stop()) is not None:
                self._stop(number)
                (self.end_by or _end)(number)
        is_filler = getattr(loop._combined_loader.flattened[dataloader_idx], "size", None) == 0
        # What a pipeline's hooks add to metrics counts on the last stage, where the step is.
        counts = self._processes.is_last or not self._evaluates_in_pipeline
        with (
            _unheard_batch(loop.trainer) if is_filler else nullcontext(),
            nullcontext() if counts else unchanged_metrics(metrics_of(self.lightning_module)),
        ):
            type(loop)._evaluation_step(loop, None if is_filler else batch, batch_idx, dataloader_idx, dataloader_iter)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_randomness(_STEP):
            return super().predict_step(*args, **kwargs)

    def _evaluation_step(self, name: str, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Run the user's step on one batch of an evaluation; what it logs is passed to Lightning at the loader's end."""
        module = self.lightning_module
        loop = module.trainer._evaluation_loop
        processes = self._processes
        gather = processes and processes.gathered
        if batch_idx == 0 or "recorder" not in self._evaluation:
            recorder = LogRecorder(module, gather=gather)
            recorder.muted = self._evaluates_in_pipeline and not processes.is_last
            self._evaluation |= {"recorder": recorder}
        recorder: LogRecorder = self._evaluation["recorder"]
        step = getattr(super(), name)
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            return step(batch)  # the step draws its batches itself and must give their sizes to self.log
        one_by_one = loop._is_sequential and loop.max_batches[dataloader_idx] != float("inf")
        loader = loop._combined_loader.flattened[dataloader_idx]
        recorder.drawn = getattr(loader, "size", None) if one_by_one and isinstance(loader, EvaluationData) else None
        index, count = self._evaluation_share
        recorder.begin_batch(batch, batch_idx * count + index)
        output = None
        if recorder.drawn != 0:  # a batch that only fills up the last round is not scored
            arguments = [batch]
            if is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2):
                arguments.append(recorder.number)
            if loop.num_dataloaders > 1 and loop._is_sequential:
                arguments.append(dataloader_idx)
            with self._evaluation_randomness(_STEP), recorder.recording():
                if self._evaluates_in_pipeline:
                    output = self._pipeline_step(partial(getattr(module, name), *arguments), loader, dataloader_idx)
                else:
                    output = step(*arguments)
        if batch_idx == 0:
            self._evaluation["every batch"] = any(gather(recorder.wants_steps)) if processes else False
        if self._evaluation["every batch"] or not processes and recorder.wants_steps:
            recorder.replay(name)
        else:
            self._evaluation["untold"] = name
        return output

    def _pipeline_step(self, step: Any, loader: EvaluationData, dataloader_idx: int) -> Any:
        """A validation step over the stages where they are."""
        pipelines = self._evaluation.setdefault("pipelines", {})
        if dataloader_idx not in pipelines:
            pipelines[dataloader_idx] = EvaluationPipeline(
                self.lightning_module,
                self._processes,
                state=self._stages,
                context=self.precision_plugin.val_step_context,
                remark=rank_zero_warn,
            )
        recorder, metrics = self._evaluation["recorder"], metrics_of(self.lightning_module)

        def once() -> Any:  # it is run up to its call of `self(...)` everywhere, and then as a whole on the last stage
            with undone_unless_finished(recorder, metrics):
                return step()

        return pipelines[dataloader_idx].step(once)

    # ---- End ----------------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        self._engine, self._evaluation = None, {}
        for loader in self._loaders:
            loader.end_workers()
        self._loaders = []
        self._undo.close()
        super().teardown()

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor from all processes, outside of steps: how often a process runs a step depends on the placement."""
        if self._processes is not None and any(
            recorder.in_step for recorder in (self._recorder, self._evaluation.get("recorder")) if recorder
        ):
            raise PlanError(
                "all_gather in a training or evaluation step cannot be honoured: processes do not run the same micro-batches. Use a metric of"
                " torchmetrics, or gather in on_train_epoch_end or on_validation_epoch_end"
            )
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="The execution model of Graphcore's IPU, under its default plan")


def _leave_process_group() -> None:
    """At the program's end, while Python is whole: let gloo's threads give back the tensors of the last message.

    For that they need Python's lock. A thread that asks for it once Python is being taken down ends the program with an abort (pytorch
    issue 190489; seen with torch 2.14 after a run that had succeeded). Destroying the group joins its threads unless somebody still
    refers to it, so they are given a moment as well.
    """
    let_signals_end()
    process_groups.cache_clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    time.sleep(0.1)


def _end(signum: int) -> None:
    raise SIGTERMException(128 + signum)


@contextmanager
def _ignored(message: str) -> Iterator[None]:
    """Ignore warnings that match a message; filters that others set meanwhile stay."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=message)
    added = [entry for entry in warnings.filters if entry not in before]
    try:
        yield
    finally:
        for entry in added:
            if entry in warnings.filters:
                warnings.filters.remove(entry)


@contextmanager
def _unheard_batch(trainer: Trainer) -> Iterator[None]:
    """Let no callback and no hook of the module hear of the batch that is evaluated."""
    callbacks, attributes = trainer.callbacks, vars(trainer.lightning_module)
    names = [f"on_{'test' if trainer.testing else 'validation'}_batch_{end}" for end in ("start", "end")]
    before = {name: attributes[name] for name in names if name in attributes}
    trainer.callbacks = []
    attributes.update(dict.fromkeys(names))
    try:
        yield
    finally:
        trainer.callbacks = callbacks
        for name in names:
            del attributes[name]
        attributes.update(before)


def _evaluation_loops(trainer: Trainer) -> list[Any]:
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]


def _log(module: LightningModule, *arguments: Any, **options: Any) -> None:
    """What a callback's `self.log` is while a fit runs."""
    module.log(*arguments, **options)


def _with(plan: Plan, **changed: int) -> Plan:
    return Plan(**{**vars(plan), **changed})


def _as_tensors(row: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in row.items()}


def _trained_micro_batches(trainer: Trainer, data: TrainingData, plan: Plan, *, limit: int | float) -> int | None:
    """Micro-batches trained on in an epoch: whole weight updates within `limit_train_batches`; None for a stream of unknown length."""
    available = data.micro_batches
    samples = f"{data.samples} samples"
    if trainer.fast_dev_run:
        limit = trainer.fast_dev_run * plan.micro_batches_per_update  # so many weight updates
    if available is None:
        if isinstance(limit, float) and limit != 1.0:
            raise PlanError(
                f"limit_train_batches={limit} needs a data set with a length; {type(data.loader.dataset).__name__} has none: give a number"
                " of micro-batches"
            )
        if isinstance(limit, float):
            return None
        available, samples = float("inf"), "a stream"
    within = min(available, limit) if isinstance(limit, int) else int(available * limit)
    micro_batches = within - within % plan.micro_batches_per_update
    if micro_batches == 0:
        cause = f"limit_train_batches={limit} leaves {within} micro-batches of" if within < available else "the training set has"
        raise PlanError(
            f"{cause} {samples}, fewer than one weight update needs: {plan.factors()}. Lower one of these factors, or give more samples"
        )
    trainer.limit_train_batches = micro_batches if limit != 1.0 else 1.0  # Lightning applies it once more: to what is left
    return micro_batches


def _check_validation_interval(trainer: Trainer, updates: int | None) -> None:
    interval = getattr(trainer, "val_check_interval", None)  # Lightning sets none where it is a time
    if isinstance(interval, int) and updates is not None and trainer.enable_validation and trainer.check_val_every_n_epoch is not None:
        if interval > updates:
            raise PlanError(
                f"val_check_interval={interval} is in weight updates, and an epoch has {updates}; lower it, use a fraction of an epoch,"
                " or count over epochs with check_val_every_n_epoch=None"
            )


def _refuse_what_cannot_be_honoured(trainer: Trainer) -> None:
    """Refuse, by name, what Lightning offers and this execution model has no place for."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if trainer.accumulate_grad_batches != 1:
        raise PlanError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} is not used under IPUStrategy:"
            f" give IPUStrategy(gradient_accumulation_factor={trainer.accumulate_grad_batches}), which weighs every sample alike"
        )
    if not module.automatic_optimization:
        raise PlanError(
            "automatic_optimization=False (manual optimisation) cannot be honoured by IPUStrategy, which makes the weight updates itself"
        )
    for name in ("optimizer_step", "on_before_batch_transfer_handler"):
        if is_overridden(name, module):
            raise PlanError(
                f"{type(module).__name__}.{name} is overridden; IPUStrategy makes the weight updates in a loop of its own and would not call it."
                " Use on_before_optimizer_step, configure_gradient_clipping or lr_scheduler_step"
            )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise PlanError("training_step(dataloader_iter) cannot be honoured: IPUStrategy draws the micro-batches; take (batch, batch_idx)")
    if strategy._layer_sync is not None:
        raise PlanError(
            "sync_batchnorm=True contradicts the plan: BatchNorm normalises by the micro-batch; give larger micro-batches instead"
        )
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.SyncBatchNorm):
            raise PlanError(
                f"{name!r} is a SyncBatchNorm, which contradicts the plan: BatchNorm normalises by the micro-batch; use BatchNorm and larger"
                " micro-batches"
            )
    plugin = strategy.precision_plugin
    if type(plugin) not in (Precision, DoublePrecision, SixteenBit):
        raise PlanError(
            f"precision={plugin.precision!r} cannot be honoured by IPUStrategy; legal are 32-true, 64-true, bf16-mixed, 16-mixed, bf16-true"
            " and 16-true"
        )
    if strategy.loss_scaling is not None and not isinstance(plugin, SixteenBit):
        raise PlanError(f"loss_scaling={strategy.loss_scaling} makes no sense in precision={plugin.precision}; it is for 16-bit gradients")
    for callback in trainer.callbacks:
        if isinstance(callback, (GradientAccumulationScheduler, BatchSizeFinder, StochasticWeightAveraging)):
            raise PlanError(f"the callback {type(callback).__name__} changes the plan while it runs and cannot be honoured by IPUStrategy")
        plan = strategy.plan
        each_sees_all = plan.gradient_accumulation_factor == 1 and plan.replication_factor == strategy._process_count
        if isinstance(callback, (SpikeDetection, ThroughputMonitor)) and not each_sees_all:
            raise PlanError(
                f"the callback {type(callback).__name__} would see only one of the {plan.micro_batches_per_update} micro-batches of a weight update"
                " (gradient_accumulation_factor x replication_factor); it needs 1 in each process. trainer.strategy.progress counts samples"
            )


def _refuse_what_is_compiled(module: LightningModule, *, recompute: bool | list[str], parts: int) -> None:
    """Refuse recomputation and pipelines inside a LightningModule that is compiled as a whole, by torch.compile(module) or its compile()."""
    if module._compiler_ctx is None and not is_one_piece(module):
        return
    if recompute:
        raise PlanError(
            f"recompute={recompute} cannot reach into {type(module).__name__}, which is compiled as a whole: compile its submodules"
            " instead, e.g. self.network = torch.compile(self.network), or leave recomputing to torch.compile"
        )
    if parts > 1:
        raise PlanError(
            f"{type(module).__name__} is compiled as a whole, so that it cannot be cut into stages over {parts} processes: compile its"
            " submodules instead, e.g. self.network = torch.compile(self.network)"
        )


class _OneProcess(LightningEnvironment):
    """The environment of a run of one process: the first of its kind, whatever another run has left in the environment's variables."""

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


def _refuse_leftovers(environment: ClusterEnvironment) -> None:
    """Refuse to wait for processes that nobody starts: LOCAL_RANK left over in the environment, without an address to meet at."""
    alone = isinstance(environment, LightningEnvironment) and "LOCAL_RANK" in os.environ and "MASTER_ADDR" not in os.environ
    if alone:
        raise PlanError(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set in the environment, but no MASTER_ADDR: it looks left over from another run."
            " Unset LOCAL_RANK to have the processes started, or set MASTER_ADDR and MASTER_PORT if you start them yourself"
        )


def _refuse_optimizers(optimizers: list[Optimizer]) -> None:
    if len(optimizers) != 1:
        raise PlanError(_SEVERAL_OPTIMIZERS.format(number=len(optimizers)))
    if isinstance(optimizers[0], LBFGS):
        raise PlanError("LBFGS evaluates the loss several times in a step, which IPUStrategy cannot honour; use another optimizer")


if "ipu" not in StrategyRegistry:
    IPUStrategy.register_strategies(StrategyRegistry)
