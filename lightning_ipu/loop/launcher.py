"""Lightning's launcher of processes, which also watches them: they end together, and the first that died is named."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from lightning_fabric.utilities.distributed import _set_num_threads_if_needed
from pytorch_lightning import Trainer
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException, _TunerExitException
from typing_extensions import override

from lightning_ipu.machine import GRACE, LAUNCHED_BY, LAUNCHED_BY_VARIABLE, check_processes, own_cores
from lightning_ipu.plan import PlanError

LONG_WAIT = 30.0  # seconds until the first process reports that it waits for others: on a busy machine loading torch takes ten
AFTER_THE_REPORT = 3.0  # seconds in which a process may end by itself once the cause of the run's end has been reported

_OTHER_IS_GONE = (  # what gloo and torch's store say of it
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "recvd EOF",
    "failed to connect",
    "failed to recv",
    "Socket closed",
    "Timed out waiting",
    "Application timeout",
)


class AgreedStop(SystemExit):
    """All processes end by a signal, after the same weight update: none of these ends is a failure."""


def lost_another(error: BaseException) -> bool:
    """Whether the error only says that another process is gone: gloo raises plain RuntimeErrors, which their texts tell apart."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_IS_GONE)


def check_can_start_again(processes: int) -> None:
    """Refuse several processes for a program without a file: each process is started by running that file.

    Raises:
        PlanError: the program comes from standard input, `python -c`, a notebook or another interactive session.
    """
    check_processes(processes, "devices")
    main, path = sys.modules["__main__"], os.path.abspath(sys.argv[0])
    if not hasattr(sys, "ps1") and (main.__spec__ or os.path.isfile(path) and not path.startswith(("/dev/", "/proc/"))):
        return
    source = {"-": "standard input", "-c": "python -c"}.get(sys.argv[0], "an interactive session" if hasattr(sys, "ps1") else path)
    raise PlanError(
        f"{processes} processes cannot be started from {source}: each process runs the program's file again. Save the program to a file,"
        " start it with torchrun, or use devices=1, which gives the same numbers"
    )


class Launcher(_SubprocessScriptLauncher):
    """Starts this node's other processes as Lightning does; none of them outlives another that died, or dies unnamed.

    Lightning's own observer looks every 5 s, names the process in a message of level INFO, and kills rank 0: a run that failed while its
    processes still met ended without a word.
    """

    children: Children | None = None  # of this process, whichever of its Trainers started them

    @override
    def launch(self, function: Callable, *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        finished = threading.Event()
        if not self.cluster_environment.creates_processes_externally:
            os.environ[LAUNCHED_BY_VARIABLE] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[LAUNCHED_BY_VARIABLE]
            Launcher.children = Children(self.procs, first=self._rank(0), total=self.num_processes * self.num_nodes)
        elif LAUNCHED_BY and os.name == "posix":  # elsewhere a virtual environment's python is a parent in between
            threading.Thread(target=self._watch_launcher, args=(finished,), daemon=True).start()
        threads, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if Launcher.children is not None:
            Launcher.children.begin(trainer)
        binds = trainer.strategy.bind_cores and trainer.strategy.root_device.type == "cpu"
        place = self.cluster_environment.local_rank(), self.num_processes
        try:
            with own_cores(*place, threads=torch.get_num_threads()) if binds else nullcontext():
                return function(*args, **kwargs)
        except BaseException as error:
            if lost_another(error) and isinstance(error.__context__, SystemExit):  # it was leaving, and met nobody at a barrier on its way
                error = error.__context__
            if Launcher.children is not None:
                if Launcher.children.end_by(error):
                    raise SystemExit(1) from None
            elif lost_another(error):
                self._leave_the_report_to_the_launcher(trainer)
            raise error
        finally:
            finished.set()
            if variable is None:
                os.environ.pop("OMP_NUM_THREADS", None)
                torch.set_num_threads(threads)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Context in which all processes connect. Afterwards a process that is lost breaks a connection. The first reports what it waits for."""
        environment, total = self.cluster_environment, self.num_processes * self.num_nodes
        place = f"{environment.main_address}:{environment.main_port}"
        reminder = threading.Timer(LONG_WAIT, _say, [f"still waiting for all {total} processes at {place}"])
        reminder.daemon = True
        if environment.global_rank() == 0:
            reminder.start()
        try:
            yield
        except torch.distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise PlanError(
                f"the processes cannot meet at {place} (MASTER_ADDR, MASTER_PORT): another program uses this port; give a free one, or unset"
                " MASTER_PORT to have one found"
            ) from None
        finally:
            reminder.cancel()
        if Launcher.children is not None:
            Launcher.children.met = True

    def _leave_the_report_to_the_launcher(self, trainer: Trainer) -> None:
        """In a process that lost another: end without a message if the launcher ends it or is gone itself.

        What happened is known there: torchrun and rank 0 name the process that died, and rank 0 prints an error of its own.
        """
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if trainer.strategy.progress.stop_signal is not None or trainer.received_sigterm:
                raise SystemExit(1)
            if self._launcher_is_gone():
                self._say_so()
                raise SystemExit(1)
            time.sleep(0.1)

    def _watch_launcher(self, finished: threading.Event) -> None:
        """In a launched process, while it fits or evaluates: end it when rank 0 is gone, even if no broken connection shows that."""
        while not self._launcher_is_gone():
            if finished.wait(timeout=0.5):
                return
        if not finished.wait(timeout=AFTER_THE_REPORT):
            self._say_so()
            _end()

    @staticmethod
    def _launcher_is_gone() -> bool:
        return bool(LAUNCHED_BY) and os.name == "posix" and os.getppid() != LAUNCHED_BY

    def _say_so(self) -> None:
        if self.cluster_environment.local_rank() == 1:  # once for this node
            _say(f"process {self._rank(0)} of {self.num_processes * self.num_nodes}, which started this one, is gone")

    def _rank(self, local: int) -> int:
        return self.cluster_environment.node_rank() * self.num_processes + local


class Children:
    """The processes that this one, the first on its node, has started: watched by a thread, and ended with this one.

    Args:
        first: rank of this process; those of the others follow.
        total: processes of the run, on all nodes.
    """

    def __init__(self, processes: list[subprocess.Popen], *, first: int, total: int) -> None:
        self.processes, self.first, self.total = processes, first, total
        self.met = False  # whether all processes of the run have found each other
        self._trainer: Trainer | None = None
        self._failed = self._is_missing_one = False
        self._named = threading.Event()
        atexit.register(self._end_together)
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, trainer: Trainer) -> None:
        """This process begins to fit or evaluate."""
        self._trainer, self._failed = trainer, False

    def end_by(self, error: BaseException) -> bool:
        """After an exception in this process: wait a moment for a message about a process that died before it.

        Returns whether that message explains the error: this process has only lost its connection to the other.
        """
        self._failed = not isinstance(error, (AgreedStop, SIGTERMException, _TunerExitException))
        self._is_missing_one = lost_another(error)
        is_named = isinstance(error, RuntimeError) and self._named.wait(timeout=AFTER_THE_REPORT)
        if self._failed:
            self._named.set()
        return is_named and self._is_missing_one

    def fail(self) -> None:
        """This process ends with an error that has been reported: the others are to end as well, and none of them is the cause."""
        self._failed = True
        self._named.set()

    def _watch(self) -> None:
        """To the end of this process: another one that failed ends them all."""
        while not (failed := self._dead()):
            time.sleep(0.2)
        self._name(failed)
        for process in self.processes:  # those that wait for the report of the cause need not wait longer
            process.terminate()
        time.sleep(AFTER_THE_REPORT)
        for process in self.processes:
            process.kill()
        _end()

    def _dead(self) -> list[tuple[int, int]]:
        """The processes that have ended and should not have: their statuses and local ranks."""
        ended = [(process.poll(), local) for local, process in enumerate(self.processes, start=1)]
        good = {None}
        if self.met and not self._is_missing_one:
            good.add(0)
            if self._trainer is not None and (signum := self._trainer.strategy.progress.stop_signal) is not None:
                good |= {128 + signum, -signum}  # the latter by a second signal, at the very end
        return [(status, local) for status, local in ended if status not in good]

    def _name(self, failed: list[tuple[int, int]]) -> None:
        status, local = min(failed)  # signals are negative: they come before the exceptions of those that lost their neighbour
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        if not self._named.is_set():
            _say(f"process {self.first + local} of {self.total} ended {how}, and with it the run")
        self._named.set()

    def _end_together(self) -> None:
        """At this process's end: wait for the others to end well, or end them if it failed itself."""
        let_signals_end()
        failed = self._failed or hasattr(sys, "last_value")  # an exception that nobody caught
        if failed:
            self._named.set()
            for process in self.processes:
                process.terminate()
        deadline = time.monotonic() + (1.0 if failed else GRACE)  # after a failure they have nothing to save or report
        for local, process in enumerate(self.processes, start=1):
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if failed:
                    process.kill()
                else:
                    _say(f"waiting for process {self.first + local} of {self.total} to end")
                process.wait()
        if not failed and (dead := self._dead()):
            self._name(dead)
            _end()


def let_signals_end() -> None:
    """Let signals end the process from now on: at the program's end, exceptions of handlers (a DataLoader's, too) would only be printed."""
    for name in ("SIGINT", "SIGTERM", "SIGCHLD"):
        if hasattr(signal, name):
            signum = getattr(signal, name)
            if not getattr(getattr(signal.getsignal(signum), "__self__", None), "is_released", False):  # a released handler already lets it
                signal.signal(signum, signal.SIG_DFL)


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)


def _end() -> None:
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(1)  # the main thread may be in a collective, where no exception reaches it
