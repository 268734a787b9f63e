"""The loaders that Lightning's loops receive, made of the user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ipu.data.evaluation import EvaluationData
from lightning_ipu.data.host_steps import TrainingLoader
from lightning_ipu.data.order import Share
from lightning_ipu.data.training import TrainingData
from lightning_ipu.engine.processes import Processes
from lightning_ipu.loop.events import batch_hooks
from lightning_ipu.loop.fit import Fit
from lightning_ipu.loop.position import Position, check_data, check_numbers
from lightning_ipu.loop.undo import Undo
from lightning_ipu.plan import Plan, PlanError


def training_loader(fit: Fit, loader: Any, *, undo: Undo) -> TrainingLoader:
    """The training loader as Lightning sees it; the fit's data and plan are complete then.

    Raises:
        PlanError: a loader that cannot be trained on under the plan, or from which the run cannot be resumed.
    """
    trainer = fit.trainer
    fit.data = data = TrainingData(loader, seed=fit.seed, share=_share(fit))
    if fit.processes is not None:
        _check_shared_data(data, fit.processes)
    if data.is_stream and data.samples is None and hasattr(data.loader.dataset, "__len__"):
        rank_zero_info(
            f"The number of micro-batches in an epoch of {type(data.loader.dataset).__name__} is not known in advance: each of"
            f" num_workers={data.loader.num_workers} forms its own from its share of the samples. With num_workers=1 it is known"
        )
    fit.plan = plan = replace(fit.plan, micro_batch_size=data.micro_batch_size)
    micro_batches = _trained_micro_batches(trainer, data, plan, limit=undo.user_setting(trainer, "limit_train_batches"))
    fit.progress.updates_per_epoch = updates = None if micro_batches is None else micro_batches // plan.micro_batches_per_update
    if updates is not None and data.samples is not None:
        fit.progress.samples_left_out = data.samples - micro_batches * plan.micro_batch_size
    _check_validation_interval(trainer, updates)
    fingerprint = getattr(trainer.datamodule, "fingerprint", None)
    fit.data_word = {"samples": data.samples, "fingerprint": str(fingerprint()) if callable(fingerprint) else None}
    if fit.restored is not None:
        _resume_data(fit)
    fit.events = None

    def is_loops(iterator: Any) -> bool:
        loaders = trainer.fit_loop._combined_loader
        return loaders._iterator is not None and any(one is iterator for one in loaders._iterator.iterators)

    return TrainingLoader(data, micro_batches=micro_batches, is_loops=is_loops)


def _share(fit: Fit) -> Share:
    """The micro-batches of every weight update that this process needs."""
    accumulation, replicas, processes = fit.plan.gradient_accumulation_factor, fit.replicas, fit.processes
    places = range(replicas.start * accumulation, replicas.stop * accumulation)
    if processes is not None and not (processes.is_first or processes.is_last):
        # Stages in the middle need no data, but hooks may want to see the first micro-batch.
        looks = any(batch_hooks(owner) for owner in (*fit.trainer.callbacks, fit.module))
        places = places[:1] if looks else range(0)
    return Share(places=places, per_update=fit.plan.micro_batches_per_update)


def _check_shared_data(data: TrainingData, processes: Processes) -> None:
    if data.is_stream:
        raise PlanError("an IterableDataset is trained on by one process only: its samples cannot be shared out; use devices=1")
    if len(set(processes.gathered(data.fingerprint()))) > 1:
        rank_zero_warn(
            "the processes see different training data (other samples, or another order): each made its own. Make it, or split it, with a"
            " generator of a fixed seed"
        )


def _resume_data(fit: Fit) -> None:
    """Check that the run can be resumed with this plan and these data, and bring their order to where the checkpoint stands."""
    saved, trainer, updates = fit.restored, fit.trainer, fit.progress.updates_per_epoch
    if remark := check_numbers(saved["numbers"], fit.plan, seed=fit.seed, precision=str(trainer.precision)):
        rank_zero_warn(remark)
    position = Position(**saved["position"])
    if remark := check_data(saved["data"], fit.data_word, within_epoch=position.begun and not position.ends_epoch):
        rank_zero_warn(remark)
    if updates is not None and not position.ends_epoch and (done := position.updates) > updates:
        raise PlanError(
            f"the run to be resumed stands after weight update {done} of its epoch, which now has {updates}:"
            " give limit_train_batches as it was"
        )
    reload = trainer.reload_dataloaders_every_n_epochs
    epoch = position.epoch + position.ends_epoch
    made_in, per_update, seen = epoch - epoch % reload if reload else 0, fit.plan.micro_batches_per_update, None
    if "batch_end" in saved:
        seen = position.epoch, (position.updates - saved["batch_end"]["updates"]) * per_update
    if saved["moves"] and epoch > made_in:
        name = type(fit.data.user_loader.dataset).__name__
        rank_zero_info(
            f"{name} changes as it is read and has neither state_dict nor set_epoch: it is read through {epoch - made_in} past epochs before the"
            " run goes on. Give it state_dict and load_state_dict to avoid this"
        )
    last = None if updates is None else updates * per_update
    fit.data.go_on(saved["order"], epoch=epoch, made_in=made_in, moves=saved["moves"], last=last, seen=seen)


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


def evaluation_loader(trainer: Trainer, loader: Any, *, seed: int, processes: Processes | None, share: tuple[int, int], undo: Undo) -> Any:
    """The loader of a validation, test or prediction, of whose batches this process gets its share.

    Raises:
        PlanError: a loader whose batches cannot be shared out over the processes.
    """
    index, count = share
    if not isinstance(loader, torch.utils.data.DataLoader):
        if count > 1 and sized_len(loader) != 0:  # an empty list stands for no loader
            raise PlanError(f"a {type(loader).__name__} is evaluated by one process only; give a torch DataLoader, or use devices=1")
        return loader
    shared: dict[str, Any] = {}
    if processes is not None and not trainer.predicting:
        name = "limit_test_batches" if trainer.testing else "limit_val_batches"
        limit = undo.user_setting(trainer, name)
        shared = {"limit": limit, "index": index, "count": count}
    data = EvaluationData(loader, seed=seed, **shared)
    if shared and isinstance(limit, float):
        setattr(trainer, name, 1.0)  # Lightning would take a share of this process's batches once more
    if data.left_out:
        rank_zero_info(f"Evaluation scores every sample: drop_last=True of the loader would leave out {data.left_out} and is not applied.")
    return data
