"""Print a line once for all processes of a command, before there is a Trainer that knows their ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from lightning_ipu import machine


def warn(text: str, *, prog: str) -> None:
    """Print a warning before a run begins, in the first process only."""
    say_once(f"{prog}: warning: {text}")


def report(text: str, *, prog: str) -> None:
    """Print the error that ends this process, once for all processes: the first prints it immediately.

    torchrun ends all processes as soon as one has ended, perhaps before the first has printed. So the others wait to be ended, or for the end
    of the process that started them, and print only if neither happens: then the error is theirs alone.
    """
    parent, deadline = machine.LAUNCHED_BY or os.getppid(), time.monotonic() + machine.GRACE
    while machine.started_rank() > 0 and time.monotonic() < deadline:
        if os.getppid() != parent:
            return
        time.sleep(0.1)
    print(f"{prog}: error: {text}", file=sys.stderr, flush=True)


def is_answered_by_the_first(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for the help or the version, which another process prints."""
    asks = any(word in ("-h", "--help", "--help-all", "--help-originals", "--version", "--print_config") for word in arguments)
    return asks and machine.started_rank() > 0


def say_once(line: str) -> None:
    """Print a line to stderr, in the first process only."""
    if machine.started_rank() == 0:
        print(line, file=sys.stderr)
