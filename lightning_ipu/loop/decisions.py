"""What one of several processes decides in a hook outside of weight updates holds in all of them.

A hook may set `trainer.should_stop` or return -1 from `on_train_batch_start`, by what only its process has seen, and each process has a clock of
its own for validations that are due after some time. Lightning's loops look at these in every process by itself: processes that decide
otherwise would wait for each other for ever. They therefore meet after such hooks, before Lightning looks. Within a weight update
the engine does the same, in the reduction of the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden

from lightning_ipu.loop.events import batch_hooks

_START = "on_train_batch_start"


class Decisions:
    """Lets the processes of a fit agree.

    Args:
        trainer: whose hooks and loops they are.
        gathered: gives every process's value.
        exchange: sets an attribute of an object until the fit ends.
        undo: what is restored when the fit ends.
    """

    def __init__(
        self, trainer: Trainer, *, gathered: Callable[[Any], list[Any]], exchange: Callable[[Any, str, Any], None], undo: ExitStack
    ) -> None:
        self._trainer, self._gathered = trainer, gathered
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        exchange(loop, "reset", functools.partial(self._before, loop, "reset"))  # after on_train_epoch_start
        owners = (*trainer.callbacks, trainer.lightning_module)
        if trainer._val_check_time_interval is not None:
            exchange(loop, "_should_check_val_fx", self._should_validate)
        if any("on_train_batch_end" in batch_hooks(owner) for owner in owners):
            exchange(connector, "on_batch_end", functools.partial(self._before, connector, "on_batch_end"))
        if is_overridden(_START, trainer.lightning_module):
            self._share_start(trainer.lightning_module, undo)

    def agree(self) -> None:
        """To be called in all processes after hooks, before Lightning looks at what they have decided."""
        self._trainer.should_stop = any(self._gathered(self._trainer.should_stop))

    def _should_validate(self, fetcher: Any) -> bool:
        loop = self._trainer.fit_loop.epoch_loop
        return any(self._gathered(type(loop)._should_check_val_fx(loop, fetcher)))

    def _before(self, owner: Any, name: str) -> None:
        """Agree before one of Lightning's methods; `on_batch_end` is called for batches of a validation as well."""
        if self._trainer.training:
            self.agree()
        getattr(type(owner), name)(owner)

    def _share_start(self, module: LightningModule, undo: ExitStack) -> None:
        """Let -1 from the module's `on_train_batch_start` be the answer in all processes."""
        # On the class, so that the module itself can be copied and pickled, unless the hook is the module's own.
        owner = module if _START in vars(module) else type(module)
        hook, inherited = getattr(owner, _START), _START not in vars(owner)

        @functools.wraps(hook)
        def shared(*arguments: Any, **options: Any) -> Any:
            response = hook(*arguments, **options)
            if owner is not module and arguments[0] is not module:
                return response
            return -1 if any(self._gathered(response == -1)) else response

        setattr(owner, _START, shared)
        undo.callback(delattr, owner, _START) if inherited else undo.callback(setattr, owner, _START, hook)
