"""Which warnings and errors a run shows to its user: one line each."""

from __future__ import annotations

import dis
import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from pytorch_lightning.utilities.exceptions import MisconfigurationException

_MISFIT = "Error(s) in loading state_dict"  # how torch begins when a checkpoint is another network's


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
    """Whether the error was raised on purpose, by this project or Lightning, about something that its user can put right.

    A ValueError that a slip of ours caused deep in torch, or by a faulty expression here, is not: that needs its traceback.
    """
    if isinstance(error, (MisconfigurationException, ArgumentError)) or str(error).startswith(_MISFIT):
        return True
    if _missing_package(error) is not None:
        return True
    if isinstance(error, OSError):
        return error.filename is not None or _raised_here(error)
    return isinstance(error, ValueError) and _raised_here(error)


def _missing_package(error: Exception) -> str | None:
    """What a class that a configuration names says of a package that it needs and that is not installed."""
    named, cause = re.search(r"Problem with given class_path '([\w.]+)'", str(error)), error
    while named and cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            return f"{named[1]}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return None


def _raised_here(error: Exception) -> bool:
    """Whether a ``raise`` statement in this project's packages or in Lightning made the error."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    by_statement = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return by_statement and (package.endswith("_ipu") or package in ("pytorch_lightning", "lightning_fabric", "__main__"))


def one_line(error: Exception) -> str:
    if str(error).startswith(_MISFIT):
        return f"the checkpoint does not fit the network: {textwrap.shorten(str(error).splitlines()[1], 160)}"
    return " ".join((_missing_package(error) or str(error)).split()) or type(error).__name__
