"""Lightning's launcher of processes, with an eye on them: they end together, and the first that died is named."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from pytorch_lightning import Trainer
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_ipu.machine import LAUNCHED_BY, LAUNCHED_BY_VARIABLE

GRACE = 10.0  # seconds in which a process that lost another may still end by itself, with its own traceback


class Launcher(_SubprocessScriptLauncher):
    """Starts this node's other processes as Lightning does; none of them outlives another that died, or dies unnamed.

    Lightning's own observer looks every 5 s, names the process in a message of level INFO, and kills rank 0: a run that failed while its
    processes still met ended without a word.
    """

    @override
    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._named = threading.Event()
        finished = threading.Event()
        if not self.cluster_environment.creates_processes_externally:
            os.environ[LAUNCHED_BY_VARIABLE] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[LAUNCHED_BY_VARIABLE]
            threading.Thread(target=self._watch_launched, daemon=True).start()
        elif LAUNCHED_BY and os.name == "posix":  # elsewhere a virtual environment's python is a parent in between
            threading.Thread(target=self._watch_launcher, args=(finished,), daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        finally:
            finished.set()

    def name_the_dead(self) -> None:
        """After an exception in this process: wait for the name of another that died before it, and take no later one for the cause."""
        if self.procs:
            self._named.wait(timeout=3)
            self._named.set()

    def _watch_launched(self) -> None:
        """In rank 0, to its end: a launched process that failed ends them all."""
        failed: list[tuple[int, int]] = []
        while not failed:
            time.sleep(0.2)
            statuses = [process.poll() for process in self.procs]
            if all(status == 0 for status in statuses):
                return
            failed = [(status, local) for local, status in enumerate(statuses, start=1) if status]
        status, local = min(failed)  # signals are negative: they come before the exceptions of those that lost their neighbour
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        if not self._named.is_set():
            self._say(f"process {self._rank(local)} of {self.num_processes * self.num_nodes} ended {how}, and with it the run")
        self._named.set()
        time.sleep(GRACE)
        for process in self.procs:
            process.kill()
        self._end()

    def _watch_launcher(self, finished: threading.Event) -> None:
        """In a launched process, while it fits or evaluates: it does not outlive rank 0, which may be where no connection tells of it."""
        while os.getppid() == LAUNCHED_BY:
            if finished.wait(timeout=0.5):
                return
        if not finished.wait(timeout=GRACE):
            self._say(f"process {self._rank(0)} of {self.num_processes * self.num_nodes}, which started this one, is gone")
            self._end()

    def _rank(self, local: int) -> int:
        return self.cluster_environment.node_rank() * self.num_processes + local

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    @staticmethod
    def _end() -> None:
        sys.stdout.flush()
        os._exit(1)  # the main thread may be in a collective, where no exception reaches it
