"""Processes of a run without the seconds that it takes to start Python and torch: forked from the test's own."""

import atexit
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ipu import machine
from lightning_ipu.data import index


def launched(processes: int, function: Callable[[], Any], *, temporary: Path) -> list[Any]:
    """What a function gives in some processes at once, the others known as launched by the first, as our launcher has it."""
    temporary.mkdir()
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()

    def start(rank: int, first: int) -> None:
        tempfile.tempdir = str(temporary)
        index._folder_of_this_run.cache_clear()  # of the test's own process
        atexit._clear()
        others = [fork.Process(target=start, args=(other, os.getpid())) for other in range(1, processes) if not rank]
        machine.LAUNCHED_BY = first
        for other in others:
            other.start()
        results.put(function())
        for other in others:
            other.join(60)
        atexit._run_exitfuncs()  # a forked process leaves them out

    first = fork.Process(target=start, args=(0, 0))
    first.start()
    found = [results.get(timeout=60) for _ in range(processes)]
    first.join(60)
    return found
