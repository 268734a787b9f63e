"""Micro-batches on their way to the device: the user's transfer hooks, called for each under seeds of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins import DoublePrecision, Precision
from pytorch_lightning.utilities.model_helpers import is_overridden

from lightning_ipu.loop.undo import Undo
from lightning_ipu.plan import Plan, PlanError
from lightning_ipu.randomness import mix, name_word, seed_all

TRANSFER = name_word("transfer")
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Brings micro-batches to the device by the user's three transfer hooks.

    Args:
        module: has the hooks, or its data module has.
        precision: converts a batch's numbers.
        device: where to.
        seed: of what the hooks draw.
        undo: keeps Lightning from calling `on_before_batch_transfer` by itself until it is closed.
    """

    def __init__(self, module: LightningModule, *, precision: Precision, device: torch.device, seed: int, undo: Undo) -> None:
        self._module, self._precision, self._device, self._seed = module, precision, device, seed
        original = LightningModule._on_before_batch_transfer
        self.before = partial(original, module)

        def untouched(owner: LightningModule, batch: Any, dataloader_idx: int = 0) -> Any:
            return batch if owner is module else original(owner, batch, dataloader_idx)

        # On the class, so that the module itself can be copied and pickled.
        LightningModule._on_before_batch_transfer = untouched
        undo.callback(setattr, LightningModule, "_on_before_batch_transfer", original)
        selector = module.trainer._data_connector._datahook_selector
        self.has_hooks = any(is_overridden(hook, selector.get_instance(hook)) for hook in _HOOKS)
        self.does_something = self.has_hooks or device.type != "cpu" or type(precision) is DoublePrecision

    def ready(self, batch: Any, *, plan: Plan, replicas: range, update: int, number: int) -> Any:
        """A micro-batch of training, on the device.

        Args:
            batch: on the host.
            plan: of the run.
            replicas: those that run in this process.
            update: number of the weight update in the run.
            number: of the micro-batch among those of this process in a host step.
        """
        if batch is None:
            raise PlanError("the collate_fn of the training loader gave None for a micro-batch; each one counts in its weight update")
        if not self.does_something:
            return batch
        batch = self._precision.convert_input(batch)
        accumulation = plan.gradient_accumulation_factor
        replica, micro_batch = divmod(number % (len(replicas) * accumulation), accumulation)
        seed_all(mix(self._seed, TRANSFER, update, replicas.start + replica, micro_batch), self._device)
        batch = self.before(batch)
        return self._module._apply_batch_transfer_handler(batch, device=self._device, dataloader_idx=0)
