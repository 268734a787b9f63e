"""What callbacks and the module keep in memory alone: a run that is resumed says what it has lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from lightning_ipu.data.attributes import attribute_fingerprints
from lightning_ipu.loop.events import KNOWN_HOOKS

_KEEPERS = {  # methods by which they can keep state in a checkpoint
    Callback: ("state_dict", "on_save_checkpoint", "load_state_dict", "on_load_checkpoint"),
    LightningModule: ("on_save_checkpoint", "on_load_checkpoint", "get_extra_state"),
}


class Unsaved:
    """Watches the attributes of callbacks and of the module, where these have none of the methods that keep state in a checkpoint.

    Args:
        trainer: has them; its training is about to start.
    """

    def __init__(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        known = [
            trainer,
            trainer.strategy,
            *trainer.callbacks,
            *trainer.loggers,
            *trainer.optimizers,
            trainer.datamodule,
            trainer.train_dataloader,
        ]
        self._kept_alive = [*known, *module.modules(), *module.parameters(), *module.buffers()]  # so that ids stay unique
        self._apart = {id(one) for one in self._kept_alive}
        self._owners = dict(_owners(trainer))
        self._before = {name: self._words(name) for name in self._owners}

    def changed(self) -> dict[str, dict[str, str]]:
        """Fingerprints of the attributes that have changed since training started, by owner."""
        return {name: changed for name in self._owners if (changed := _differing(self._words(name), self._before[name]))}

    def lost(self, saved: dict[str, dict[str, str]]) -> str | None:
        """A warning that names attributes which the run to be resumed had changed (`saved`, its `changed()`), and which this one starts without; or None."""
        lost = {name: _differing(saved[name], self._before[name]) for name in self._owners if name in saved}
        named = [f"{name} ({', '.join(sorted(attributes))})" for name, attributes in lost.items() if attributes]
        if not named:
            return None
        return (
            f"{', '.join(named)} kept state in memory that no checkpoint holds: the resumed run begins without it. Keep it by state_dict and"
            " load_state_dict (in a LightningModule: buffers, or on_save_checkpoint and on_load_checkpoint)"
        )

    def _words(self, name: str) -> dict[str, str]:
        base, owner = self._owners[name]
        own = {*vars(base()), "log", "log_dict"}  # which Lightning puts on callbacks
        # Private attributes of a module are caches more often than state, Lightning's own among them.
        wanted = {
            key: value
            for key, value in vars(owner).items()
            if key not in own and not hasattr(base, key) and (base is Callback or not key.startswith("_"))
        }
        return attribute_fingerprints(wanted, apart=self._apart)


def _owners(trainer: Trainer) -> Iterator[tuple[str, tuple[type, Any]]]:
    """The callbacks and module without such methods, by name, with their base class. Lightning's and this package's own keep what they need."""
    numbers: dict[str, int] = {}
    for owner in (*trainer.callbacks, trainer.lightning_module):
        base = next(base for base in _KEEPERS if isinstance(owner, base))
        if type(owner).__module__.partition(".")[0] in KNOWN_HOOKS:
            continue
        if any(getattr(type(owner), name, None) is not getattr(base, name, None) for name in _KEEPERS[base]):
            continue
        kind = type(owner).__qualname__.rpartition("<locals>.")[2]
        numbers[kind] = numbers.get(kind, 0) + 1
        yield kind if numbers[kind] == 1 else f"{kind} {numbers[kind]}", (base, owner)


def _differing(now: dict[str, str], before: dict[str, str]) -> dict[str, str]:
    return {name: word for name, word in now.items() if before.get(name) != word}
