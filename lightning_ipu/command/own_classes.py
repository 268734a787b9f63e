"""A command with classes of the user's own: `fit --model CLASS --data CLASS`, LightningCLI's subclass mode.

A class is given by its path, such as `flowers.Net`, and is imported from the current directory or wherever Python finds it. What is not
given stays the package's. The arguments of module and data module are not linked then: neither takes values from the other.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl

from lightning_ipu.command.words import pairs, value_of
from lightning_ipu.errors import UserError

C = TypeVar("C")  # run.Command; this file may not import it, since run.py imports this one
_KINDS = {"model": pl.LightningModule, "data": pl.LightningDataModule}
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_LATEST = {"checkpoint.monitor": None, "checkpoint.filename": "update{step}"}  # a module may log other metrics than the package's


def with_own_classes(command: C, words: Sequence[str]) -> C:
    """The command, changed for the classes that the words or their configurations give; unchanged if they give none."""
    own = frozenset(section for section in _KINDS if _class_path(words, section) is not None)
    if not own:
        return command
    for section in own:
        _check(words, section)
    changed: dict[str, Any] = {"own": own, "links": [], "facts": _facts}
    if "model" in own:
        kept = {name: value for name, value in command.defaults.items() if not name.startswith(("model.", "checkpoint."))}
        changed |= {"model_class": pl.LightningModule, "defaults": kept | _LATEST}
    if "data" in own:
        changed |= {"datamodule_class": pl.LightningDataModule, "epochs": _unknown_epochs}
        changed |= {"note": lambda line: None, "settle": lambda data: None}
    return replace(command, **changed)


def clear_error(error: Exception) -> UserError | None:
    """jsonargparse's error about an argument that a class does not take, as one line; None for other errors."""
    found = re.search(r"Problem with given class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted", str(error))
    return found and UserError(f"{found[1]} takes no argument {found[2]}")


def _class_path(words: Sequence[str], section: str) -> str | None:
    """The class that a section is given, typed or by a configuration; None where it is given none."""
    typed = [value for name, value in pairs(words) if name == f"--{section}"]
    if typed and _CLASS_PATH.fullmatch(typed[-1]) and not Path(typed[-1]).is_file():
        return typed[-1]
    return value_of(words, section, "class_path")


def _check(words: Sequence[str], section: str) -> None:
    """Refuse a class that is not there, or of another kind."""
    path, kind = str(_class_path(words, section)), _KINDS[section]
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of a module that the user's own imports
        raise UserError(f"--{section} {path}: there is no module {error.name}, neither in this directory nor installed") from None
    if not (isinstance(found, type) and issubclass(found, kind)):
        what = "is none" if found is not None else "is not there"
        raise UserError(f"--{section} {path} must be the path of a {kind.__name__}, such as flowers.Net, and {what}")


def _unknown_epochs(data: pl.LightningDataModule) -> tuple[int, str | None]:
    raise UserError("how long is training? Give --epochs, --trainer.max_epochs or --trainer.max_steps: your own data have no default")


def _facts(line: Any) -> list[tuple[str, str]]:
    """Rows for the table: the classes, device, precision."""
    data = getattr(line.datamodule, "description", None) or _path(line.datamodule)
    return [("module", _path(line.model)), ("data", data), *line.machine_facts()]


def _path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
