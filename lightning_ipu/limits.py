"""What IPUStrategy cannot honour: refused by name, with what would be right, before the first step."""

from __future__ import annotations

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from pytorch_lightning.plugins import DoublePrecision, Precision
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.precision.plugin import SixteenBit

# torch's names for the schedules, and Graphcore's for the same: their Interleaved is 1F1B, their Grouped is GPipe.
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "1F1B", "gpipe": "GPipe", "grouped": "GPipe", "sequential": "Sequential"}


def schedule_named(name: str) -> str:
    """The name of a pipeline schedule in this package."""
    if name.lower() not in _SCHEDULES:
        raise PlanError(f"pipeline_schedule={name!r} is unknown; legal are 1F1B (Interleaved), GPipe (Grouped) and Sequential")
    return _SCHEDULES[name.lower()]


def check_arguments(
    splits: list[str],
    num_stages: int | None,
    replication_factor: int,
    pipeline_validation: bool,
    validation_replicas: int | None,
) -> None:
    """Refuse arguments of IPUStrategy that contradict each other."""
    if splits and num_stages not in (None, len(splits) + 1):
        raise PlanError(f"num_stages={num_stages} contradicts pipeline_splits, whose {len(splits)} names make {len(splits) + 1} stages")
    most = (num_stages or len(splits) + 1) * replication_factor
    if validation_replicas is not None and not (1 <= validation_replicas <= most and not pipeline_validation):
        raise PlanError(
            f"validation_replicas={validation_replicas} must be from 1 to {most} (replicas x stages), and without pipeline_validation,"
            f" which validates on the {replication_factor} replicas"
        )
    if pipeline_validation and most == replication_factor:
        raise PlanError("pipeline_validation needs a pipeline: give pipeline_splits or num_stages")


def check_fit(trainer: Trainer, *, plan: Plan, processes: int, loss_scaling: float | str | None, layer_sync: bool) -> None:
    """Refuse what Lightning offers and this execution model has no place for."""
    if trainer.accumulate_grad_batches != 1:
        raise PlanError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} is not used under IPUStrategy:"
            f" give IPUStrategy(gradient_accumulation_factor={trainer.accumulate_grad_batches}), which weighs every sample alike"
        )
    _check_module(trainer.lightning_module)
    if layer_sync:
        raise PlanError(
            "sync_batchnorm=True normalises over all processes, so that their number would change the results; leave it out, and give larger"
            " micro-batches instead"
        )
    _check_precision(trainer.precision_plugin, loss_scaling=loss_scaling)
    _check_callbacks(trainer, plan, processes=processes)


def _check_module(module: LightningModule) -> None:
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
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.SyncBatchNorm):
            raise PlanError(
                f"{name!r} is a SyncBatchNorm, which normalises over all processes, so that their number would change the results; use BatchNorm"
                " and larger micro-batches"
            )


def _check_precision(plugin: Precision, *, loss_scaling: float | str | None) -> None:
    if type(plugin) not in (Precision, DoublePrecision, SixteenBit):
        raise PlanError(
            f"precision={plugin.precision!r} cannot be honoured by IPUStrategy; legal are 32-true, 64-true, bf16-mixed, 16-mixed, bf16-true"
            " and 16-true"
        )
    if loss_scaling is not None and not isinstance(plugin, SixteenBit):
        raise PlanError(f"loss_scaling={loss_scaling} makes no sense in precision={plugin.precision}; it is for 16-bit gradients")


def _check_callbacks(trainer: Trainer, plan: Plan, *, processes: int) -> None:
    each_sees_all = plan.gradient_accumulation_factor == 1 and plan.replication_factor == processes
    for callback in trainer.callbacks:
        if isinstance(callback, (GradientAccumulationScheduler, BatchSizeFinder, StochasticWeightAveraging)):
            raise PlanError(
                f"the callback {type(callback).__name__} changes the micro-batch or the accumulation during a run, which IPUStrategy keeps: leave it out"
            )
        if isinstance(callback, (SpikeDetection, ThroughputMonitor)) and not each_sees_all:
            raise PlanError(
                f"the callback {type(callback).__name__} would see only one of the {plan.micro_batches_per_update} micro-batches of a weight update"
                " (gradient_accumulation_factor x replication_factor); it needs 1 in each process. trainer.strategy.progress counts samples"
            )


def check_shapes(module: LightningModule) -> None:
    """Refuse parameters that several processes could not begin with alike, since their shapes are not known yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise PlanError(f"{name!r} has no shape yet, so processes cannot start alike: run a batch through the network first")


def check_compiled(module: LightningModule, *, recompute: bool | list[str], parts: int) -> None:
    """Refuse recomputation and pipelines inside a LightningModule that is compiled as a whole, by torch.compile(module) or its compile()."""
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


def several_optimizers(number: int | str) -> PlanError:
    """The refusal of more than one optimizer."""
    return PlanError(f"configure_optimizers returned {number} optimizers; IPUStrategy needs exactly one (use parameter groups)")


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Refuse any number of optimizers but one, and one that evaluates the loss by itself."""
    if len(optimizers) != 1:
        raise several_optimizers(len(optimizers))
    if isinstance(optimizers[0], LBFGS):
        raise PlanError("LBFGS evaluates the loss several times in a step, which IPUStrategy cannot honour; use another optimizer")
