"""Keep a run alive when standard output or error is lost: their reader has ended, or the disk is full.

In `python -m resnet_ipu | head -1` the reader ends after one line. The run goes on, says so once on standard error, and drops what it
would print; its results are in the output directory.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Lasting(io.FileIO):
    """A file that discards everything once it can no longer be written."""

    def __init__(self, descriptor: int, on_loss: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._on_loss, self._is_lost = on_loss, False

    def write(self, data: Any) -> int | None:
        if not self._is_lost:
            try:
                return super().write(data)
            except OSError as error:
                self._is_lost = True
                self._on_loss(error)
        return memoryview(data).nbytes


class Streams:
    """Whether standard output can still be written.

    Args:
        prog: the command's name, with which the message begins.
        speaks: whether this process prints the message.
    """

    def __init__(self, prog: str, *, speaks: bool) -> None:
        self._prog, self._speaks = prog, speaks
        self._error: OSError | None = None
        self._is_running = False

    @property
    def status(self) -> int:
        """1 if output could not be written; 0 if the reader has ended, which is its choice."""
        return 0 if self._error is None or isinstance(self._error, BrokenPipeError) else 1

    def begin_run(self) -> None:
        """Report a loss of standard output from now on."""
        self._is_running = True
        if self._error is not None:
            self._say()

    def _lose(self, error: OSError) -> None:
        self._error = error
        if self._is_running:
            self._say()

    def _say(self) -> None:
        gone = isinstance(self._error, BrokenPipeError)
        what = "nobody reads standard output any more" if gone else f"standard output cannot be written ({self._error.strerror})"
        if self._speaks:
            print(f"{self._prog}: {what}: the run goes on, and what it prints is lost", file=sys.stderr, flush=True)


@contextmanager
def lasting_streams(prog: str, *, speaks: bool) -> Iterator[Streams]:
    """Let a run survive the loss of standard output and error; streams that have been replaced by others are left alone."""
    streams, before = Streams(prog, speaks=speaks), {}
    for name, on_loss in (("stderr", lambda error: None), ("stdout", streams._lose)):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            before[name] = stream
            file = io.BufferedWriter(_Lasting(stream.fileno(), on_loss))
            options = {option: getattr(stream, option) for option in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(file, **options))
    try:
        yield streams
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)
