"""Say a thing once for all processes of a command, before a run has a Trainer that knows which of them is the first."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from lightning_ipu import machine


def warn(text: str, *, prog: str) -> None:
    """Say what is worth a line before a run begins; of several processes the first does."""
    say_once(f"{prog}: warning: {text}")


def report(text: str, *, prog: str) -> None:
    """Print the error that ends this process, once for all of them: what they refuse alike, the first says at once.

    torchrun ends all as soon as one has ended, maybe before the first has spoken: so the others wait for that, or for the end of the
    process that started them, and speak only where neither comes, because the error is theirs alone.
    """
    parent, deadline = machine.LAUNCHED_BY or os.getppid(), time.monotonic() + machine.GRACE
    while machine.started_rank() > 0 and time.monotonic() < deadline:
        if os.getppid() != parent:
            return
        time.sleep(0.1)
    print(f"{prog}: error: {text}", file=sys.stderr, flush=True)


def is_answered_by_the_first(arguments: Sequence[str]) -> bool:
    """Whether the words ask for a help or the version, and another process prints it."""
    asks = any(word in ("-h", "--help", "--version", "--print_config") for word in arguments)
    return asks and machine.started_rank() > 0


def say_once(line: str) -> None:
    """Print a line to stderr, in the first process only."""
    if machine.started_rank() == 0:
        print(line, file=sys.stderr)
