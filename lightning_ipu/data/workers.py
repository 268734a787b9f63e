"""Loader workers that ignore a run's signals and end within a second when the run ends them.

A signal often reaches all processes of a run at once (Ctrl-C, `timeout`, a batch system). The current weight update still needs its
workers then, so they ignore it. But torch and multiprocessing use the same signal to end a worker that does not end by itself:
multiprocessing would wait for it for ever at the program's end, torch for 5 s each. Therefore workers are killed here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_ipu import machine

_PR_SET_PDEATHSIG = 1  # Linux' linux/prctl.h
GRACE = 1.0  # seconds in which workers may end by themselves: they finish the current sample


class Loader(DataLoader):
    """A DataLoader whose workers, however busy, end when asked, and never outlive the program."""

    def __init__(self, *args: Any, num_workers: int = 0, worker_init_fn: Callable[[int], Any] | None = None, **options: Any) -> None:
        machine.check_processes(num_workers, "num_workers")
        if num_workers:
            worker_init_fn = partial(_start, worker_init_fn)
        super().__init__(*args, num_workers=num_workers, worker_init_fn=worker_init_fn, **options)
        self._running: weakref.WeakSet[_Batches] = weakref.WeakSet()

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        batches = _Batches(self)
        self._running.add(batches)
        return batches

    def end_workers(self) -> None:
        """End all of them, whoever still holds an iterator."""
        for batches in list(self._running):
            batches._shutdown_workers()
        self._iterator = None


class _Batches(_MultiProcessingDataLoaderIter):
    """torch's iterator over the workers' batches, with a shutdown that takes at most a second."""

    def __init__(self, loader: Loader) -> None:
        self._maker = os.getpid()
        try:
            super().__init__(loader)
        except BaseException:
            _kill(getattr(self, "_workers", []))
            raise
        Finalize(self, _kill, args=(self._workers,), exitpriority=0)  # before multiprocessing's exit function waits for them

    def _shutdown_workers(self) -> None:
        if self._shutdown or self._maker != os.getpid():  # a worker has a copy of this
            return
        workers, queues = self._workers, self._index_queues
        self._workers, self._index_queues = [], []
        super()._shutdown_workers()  # all but the workers: the thread that pins memory, which must end first, and the events
        if not self._shutdown:  # Python is exiting
            return
        for queue in queues:
            queue.put(None)
            queue.cancel_join_thread()
            queue.close()
        deadline = time.monotonic() + GRACE
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        _kill(workers)


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()


def _start(worker_init_fn: Callable[[int], Any] | None, worker: int) -> None:
    """In a worker: leave Ctrl-C and SIGTERM to the run's process, as long as there is one, and do not outlive it."""
    maker = os.getppid()
    with suppress(
        OSError, AttributeError, TypeError
    ):  # torch's own check runs every 5 s between batches; this one (Linux only) acts at once
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def terminate(signum: int, frame: Any) -> None:
        if os.getppid() != maker:
            os._exit(128 + signum)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, terminate)
    if worker_init_fn is not None:
        worker_init_fn(worker)
