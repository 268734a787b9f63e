"""Which warnings and errors a run shows to its user: one line each."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_ipu.errors import UserError

_MISFIT = "Error(s) in loading state_dict"  # how torch begins when a checkpoint is another network's
_OF_A_WORKER = "\nOriginal Traceback (most recent call last):"  # in the message of what a loader worker raised


_CHATTER = (
    "does not have many workers",  # data sets here are whole in memory: workers would slow them down
    "could not find the monitored key",  # a run that ended before its first validation
    "is smaller than the logging interval",  # every epoch logs its average
    "exists and is not empty",  # what was there has been moved aside
    "args parameter is intended to run from within Python",
    "Consider setting `persistent_workers=True`",
    "samples are left out of every epoch",  # the table says so
    "host steps hold at most",  # so it does
    "Total length of `list` across ranks is zero",  # no validation was asked for
    "isinstance(treespec, LeafSpec)",  # a note from torch to Lightning
)


@contextmanager
def keep_quiet(prog: str) -> Iterator[None]:
    """Silence Lightning's remarks on devices, tips and sanity; show warnings as one line each."""

    def wanted(record: logging.LogRecord) -> bool:
        lightnings_own = {"pytorch_lightning", "lightning_fabric"} & set(Path(record.pathname).parts)
        return record.levelno > logging.INFO or not (lightnings_own or any(words in record.getMessage() for words in _CHATTER))

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        print(f"{prog}: warning: {' '.join(str(message).split())}", file=file or sys.stderr)

    names = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    with ExitStack() as undo:
        for handler in handlers:
            if type(handler) is logging.StreamHandler:  # Lightning's own, not one that somebody listens with
                handler.addFilter(wanted)
                undo.callback(handler.removeFilter, wanted)
        undo.enter_context(warnings.catch_warnings())
        for words in _CHATTER:
            warnings.filterwarnings("ignore", message=f".*{re.escape(words)}")
        warnings.showwarning = show
        if hasattr(sys.stdout, "reconfigure"):  # names of files may hold bytes that are no text: they are shown, as on stderr, not refused
            undo.callback(sys.stdout.reconfigure, errors=sys.stdout.errors)
            sys.stdout.reconfigure(errors="backslashreplace")
        yield


def is_meant_for_people(error: Exception) -> bool:
    """Whether an error is about something that the user can put right; any other is a fault of the program, and keeps its traceback.

    Such are `UserError`s, files that cannot be opened, checkpoints of another network, and what Lightning and jsonargparse refuse.
    """
    if isinstance(error, (UserError, MisconfigurationException, ArgumentError)) or str(error).startswith(_MISFIT):
        return True
    if isinstance(error, OSError):
        return error.filename is not None
    return _missing_package(error) is not None or isinstance(error, ValueError) and _raised_by_lightning(error)


def _missing_package(error: Exception) -> str | None:
    """What a class that a configuration names says of a package that it needs and that is not installed."""
    named, cause = re.search(r"Problem with given class_path '([\w.]+)'", str(error)), error
    while named and cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            return f"{named[1]}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return None


def _raised_by_lightning(error: Exception) -> bool:
    """Whether the innermost call on the way to an error is one of Lightning's functions."""
    calls = traceback.extract_tb(error.__traceback__)
    return bool(calls) and not {"pytorch_lightning", "lightning_fabric"}.isdisjoint(Path(calls[-1].filename).parts)


def one_line(error: Exception) -> str:
    """What an error says, in one line; of one that a loader worker raised, without the worker's traceback."""
    text = _missing_package(error) or str(error)
    if text.startswith(_MISFIT):
        return f"the checkpoint does not fit the network: {textwrap.shorten(text.splitlines()[1], 160)}"
    if _OF_A_WORKER in text:
        text = re.split(r"^[\w.]+Error: ", text, flags=re.M)[-1]
    return " ".join(text.split()) or type(error).__name__
