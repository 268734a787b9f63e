"""Seed hooks outside of weight updates by name: what a hook draws depends on seed, hook, owner and weight update alone.

The owner is the callback or module that has the hook.

Lightning calls every hook inside `trainer.profiler.profile(ACTION)`, whose argument names both: there it is seeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden

from lightning_ipu.loop.evaluation import Evaluation
from lightning_ipu.loop.events import KNOWN_HOOKS
from lightning_ipu.loop.progress import TrainingProgress
from lightning_ipu.loop.undo import Undo
from lightning_ipu.randomness import mix, name_word, preserved_streams, seed_all

_HOOK = name_word("hook of a loop")
_PREFIXES = ("on_train_", "on_validation_", "on_test_", "on_predict_", "on_sanity_check_", "on_save_checkpoint")
_HOOKS = sorted(name for name in {*dir(Callback), *dir(LightningModule)} if name.startswith(_PREFIXES))


class NamedHooks:
    """Seeds the hooks that callbacks and the module of a trainer override.

    Args:
        trainer: whose hooks they are.
        evaluation: numbers the batches of evaluations.
        seed: of the run.
        device: whose streams are seeded, beside those of the CPU, numpy and Python.
        progress: counts the weight updates.
        undo: leaves the hooks alone again.
    """

    def __init__(
        self, trainer: Trainer, evaluation: Evaluation, *, seed: int, device: torch.device, progress: TrainingProgress, undo: Undo
    ) -> None:
        self._trainer, self._evaluation, self._seed, self._device, self._progress = trainer, evaluation, seed, device, progress
        self._update, self._calls = -1, Counter()
        self._words = {
            action: name_word(action)
            for owner, action_of in self._owners()
            for hook in _HOOKS
            if is_overridden(hook, owner)
            for action in [f"{action_of}.{hook}"]
        }
        if self._words:
            self._profile = trainer.profiler.profile
            undo.exchange(trainer.profiler, "profile", self._profiled)

    def _owners(self) -> Iterator[tuple[Any, str]]:
        """The module and the callbacks, with their names in Lightning's profiler actions."""
        module = self._trainer.lightning_module
        yield module, f"[LightningModule]{type(module).__name__}"
        for callback in self._trainer.callbacks:
            if type(callback).__module__.partition(".")[0] not in KNOWN_HOOKS:  # whose callbacks draw nothing
                yield callback, f"[Callback]{callback.state_key}"

    def _profiled(self, action_name: str) -> AbstractContextManager[Any]:
        word = self._words.get(action_name)
        return self._profile(action_name) if word is None else self._seeded(action_name, word)

    @contextmanager
    def _seeded(self, action_name: str, word: int) -> Iterator[Any]:
        with preserved_streams(self._device), self._profile(action_name) as action:
            seed_all(mix(self._seed, _HOOK, word, self._progress.run_updates, self._number(action_name)), self._device)
            yield action

    def _number(self, action_name: str) -> int:
        """The number of this call among the hook's calls between two weight updates; around a batch of an evaluation, the batch's number."""
        if "_batch_" in action_name and not self._trainer.training:
            return self._evaluation.batch_number
        if self._update != self._progress.run_updates:
            self._update = self._progress.run_updates
            self._calls.clear()
        self._calls[action_name] += 1
        return self._calls[action_name]
