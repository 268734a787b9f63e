"""How far work before a run is."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere; gives the function to call with what has been done."""
    if sys.stdout.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield functools.partial(bar.advance, task)
        return
    done, shown = 0, time.monotonic()

    def advance(number: int) -> None:
        nonlocal done, shown
        done += number
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{what}: {done:,}/{total:,}", flush=True)

    yield advance
