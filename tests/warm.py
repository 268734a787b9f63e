"""`python WORDS` without the five seconds of CPU time that Python takes to load torch and Lightning: forked from a process that has loaded them.

`start` and `run` are subprocess.Popen and subprocess.run of such a process. The one that it is forked from (this file, as a script) has loaded
the libraries, run nothing and has one thread. A process that starts others itself, as our launcher and torchrun do, gets them from `spares`
that were forked before it ran anything, so that they are its children. COLD=1 in the environment starts Python each time instead.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
SECONDS = 400  # after which a process is ended, also where whoever started it is gone
_LARGEST = 1 << 20


# -- in a test ----------------------------------------------------------------------------------------------------------------


class Process:
    """What subprocess.Popen has, of a forked process; `wait_for(block)` gives its status, None while it runs."""

    def __init__(self, words: list[str], pid: int, wait_for: Callable[[bool], int | None], **streams: IO[str]) -> None:
        self.args, self.pid, self._wait_for, self.returncode = words, pid, wait_for, None
        self.stdout, self.stderr = streams.get("stdout"), streams.get("stderr")
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and (status := self._wait_for(False)) is not None:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        begun = time.monotonic()
        while self.poll() is None:
            if timeout is not None and time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        texts: dict[str, str] = {}
        names = [name for name in ("stdout", "stderr") if getattr(self, name) is not None]
        readers = [
            threading.Thread(target=lambda name=name: texts.update({name: getattr(self, name).read()}), daemon=True) for name in names
        ]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return texts.get("stdout"), texts.get("stderr")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(words: list[str], *, spares: int = 0, stdout: Any = None, stderr: Any = None, **options: Any) -> Process | subprocess.Popen:
    """`subprocess.Popen([sys.executable, *words], text=True, ...)`: cwd, env, stdout, stderr, start_new_session.

    Args:
        spares: processes that it may start itself, warm as well.
    """
    if os.environ.get("COLD"):
        return subprocess.Popen([sys.executable, *words], stdout=stdout, stderr=stderr, text=True, **options)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes, given = {}, {"stdout": 1, "stderr": 2}
    for name, stream in (("stdout", stdout), ("stderr", stderr)):
        if stream == PIPE:
            reading, given[name] = os.pipe()
            pipes[name] = open(reading, errors="backslashreplace")  # noqa: SIM115
        elif stream == STDOUT:
            given[name] = given["stdout"]
        elif stream is not None:
            given[name] = stream if isinstance(stream, int) else stream.fileno()
    request = _request(words, spares=spares, **options)
    socket.send_fds(_server(), [request], [theirs.fileno(), given["stdout"], given["stderr"]])
    theirs.close()
    for name in pipes:
        os.close(given[name])
    ours.settimeout(120)  # until the libraries are loaded, the first time
    pid = int(ours.recv(16))

    def wait_for(block: bool) -> int | None:
        ours.setblocking(block)
        try:
            return int(ours.recv(16) or 9)
        except BlockingIOError:
            return None

    return Process(words, pid, wait_for, **pipes)


def run(words: list[str], *, timeout: float, merged: bool = False, **options: Any) -> subprocess.CompletedProcess:
    """`subprocess.run([sys.executable, *words], capture_output=True, text=True, ...)`; with `merged` standard error is in standard output."""
    process = start(words, stdout=PIPE, stderr=STDOUT if merged else PIPE, **options)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors or "")


def _request(
    words: list[str], *, cwd: Any = None, env: dict[str, str] | None = None, start_new_session: bool = False, spares: int = 0
) -> bytes:
    env = dict(os.environ if env is None else env)
    place = os.getcwd() if cwd is None else os.fspath(cwd)
    return json.dumps([list(map(str, words)), place, env, start_new_session, spares]).encode()


_servers: dict[int, socket.socket] = {}  # of this process; a fork of it has none


def _server() -> socket.socket:
    if os.getpid() not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        _servers[os.getpid()] = ours
        atexit.register(lambda: (process.terminate(), process.wait()))
    return _servers[os.getpid()]


# -- in the process that others are forked from, and in those ----------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watchers = set()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 3)
        if not request:
            return
        watchers = {pid for pid in watchers if os.waitpid(pid, os.WNOHANG)[0] == 0}  # those that have ended
        if (pid := os.fork()) == 0:
            requests.close()
            break
        watchers.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
    status = socket.socket(fileno=descriptors[0])
    pid = os.fork()
    if pid == 0:
        status.close()
        _become(request, *descriptors[1:])
    for descriptor in set(descriptors[1:]):
        os.close(descriptor)
    status.send(b"%d" % pid)
    status.send(b"%d" % os.waitpid(pid, 0)[1])
    os._exit(0)


def _become(request: bytes, stdout: int, stderr: int) -> None:
    """Be the process that is asked for, to its end."""
    words, place, environment, own_session, number_of_spares = json.loads(request)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(SECONDS)
    if own_session:
        os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, stdout, stderr)):
        os.dup2(source, target)
    for descriptor in {nothing, stdout, stderr}:
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (open(number, "w" if number else "r", closefd=False) for number in range(3))
    sys.stderr.reconfigure(errors="backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    _read_environment()
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(number_of_spares):
        spares.append(_spare(spares))
    subprocess_script.subprocess = SimpleNamespace(Popen=partial(_start_spare, spares))  # Lightning's launchers, and ours
    subprocess_handler.Popen = partial(_start_spare, spares)  # torchrun
    os._exit(_status_of(_run, words))


def _read_environment() -> None:
    """What the libraries read when they are imported."""
    machine.LAUNCHED_BY = launcher.LAUNCHED_BY = int(os.environ.pop(machine.LAUNCHED_BY_VARIABLE, "0"))
    rank_zero_only.rank = _get_rank() or 0


def _spare(others: list[tuple[int, socket.socket]]) -> tuple[int, socket.socket]:
    """A process that waits until it is asked to be something."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for _, end in [*others, (0, ours)]:
        end.close()
    request, descriptors, _, _ = socket.recv_fds(theirs, _LARGEST, 2)
    if not request:
        os._exit(0)
    theirs.close()
    _become(request, *descriptors)


def _start_spare(
    spares: list[tuple[int, socket.socket]], args: list[str], *, stdout: Any = None, stderr: Any = None, **options: Any
) -> Any:
    if not spares or args[0] != sys.executable:
        return subprocess.Popen(args, stdout=stdout, stderr=stderr, **options)
    pid, end = spares.pop(0)
    streams = [number if stream is None else stream.fileno() for number, stream in ((1, stdout), (2, stderr))]
    socket.send_fds(end, [_request(args[1:], **options)], streams)
    end.close()

    def wait_for(block: bool) -> int | None:
        found, status = os.waitpid(pid, 0 if block else os.WNOHANG)
        return status if found else None

    return Process(args, pid, wait_for)


def _run(words: list[str]) -> None:
    words = [word for word in words if word != "-u"] if words[0] == "-u" else words
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(words[1], main.__dict__)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def _status_of(function: Callable[..., None], *arguments: Any) -> int:
    """Call it and do what Python does at its end: the status, or an end by SIGINT."""
    status, interrupted = 0, False
    try:
        function(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF


if __name__ == "__main__":
    import gc
    import importlib
    import runpy
    from functools import partial

    gc.disable()
    import torch
    from lightning_fabric.utilities.rank_zero import _get_rank, rank_zero_only
    from pytorch_lightning.strategies.launchers import subprocess_script
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from lightning_ipu import machine
    from lightning_ipu.loop import launcher

    for name in (
        "torch.distributed.run",
        "lightning_ipu.command.run",
        "resnet_ipu.imagenet.module",
        "resnet_ipu.module",
        "cifar_ipu.data",
        "cifar_ipu.module",
    ):
        importlib.import_module(name)
    del sys.modules["torch.distributed.run"]  # all that it needs is loaded
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    _serve(socket.socket(fileno=int(sys.argv[1])))
