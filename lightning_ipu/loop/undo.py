"""Changes that a fit or an evaluation makes to objects of others, and takes back however it ends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pytorch_lightning import Trainer


class Undo(ExitStack):
    """Changes that `close` takes back, the latest first; new ones may follow."""

    def __init__(self) -> None:
        super().__init__()
        self._user_settings: dict[str, Any] = {}

    def exchange(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; if the object had none of its own, it is deleted again."""
        if name in vars(owner):
            self.callback(object.__setattr__, owner, name, vars(owner)[name])
        else:
            self.callback(object.__delattr__, owner, name)
        object.__setattr__(owner, name, value)

    def specialize(self, owner: Any, subclass: type, **attributes: Any) -> None:
        """Change an object's class to a subclass of it, and set further attributes."""
        for name, value in attributes.items():
            self.exchange(owner, name, value)
        self.callback(setattr, owner, "__class__", type(owner))
        owner.__class__ = subclass

    def user_setting(self, trainer: Trainer, name: str) -> Any:
        """The user's value of a Trainer setting, which may have been replaced since."""
        if name not in self._user_settings:
            self._user_settings[name] = getattr(trainer, name)
            self.callback(lambda: setattr(trainer, name, self._user_settings.pop(name)))
        return self._user_settings[name]

    def ignore_warnings(self, message: str) -> None:
        """Ignore warnings that match a message; filters that others set meanwhile stay."""
        self.enter_context(_ignored(message))


@contextmanager
def _ignored(message: str) -> Iterator[None]:
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=message)
    added = [entry for entry in warnings.filters if entry not in before]
    try:
        yield
    finally:
        for entry in added:
            if entry in warnings.filters:
                warnings.filters.remove(entry)
