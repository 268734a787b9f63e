"""A package's command line: training by short options or LightningCLI, `average`, the package's own commands; and rules that all packages share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ipu.command import cli, once
from lightning_ipu.command.options import Option, UsageError
from lightning_ipu.command.parser import build_parser, parse
from lightning_ipu.errors import UserError
from lightning_ipu.placement import Placement
from lightning_ipu.plan import Plan, PlanError


def main(
    words: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    epilog: str,
    options: Sequence[Option],
    settle: Callable[[dict[str, Any]], list[str]],
    start: Callable[..., int],
    others: Mapping[str, Callable[[list[str]], int]],
    folder: Path,
    reads_config: bool = True,
) -> int:
    """Run a command line; returns the exit status. `others` are the commands beside training and `average`; for the rest see `cli.main`."""
    words = sys.argv[1:] if words is None else list(words)
    if once.is_answered_by_the_first(words):
        return 0
    if words[:1] == ["average"]:
        return cli.average(words[1:], prog=prog, version=version)
    if words and words[0] in others:
        return others[words[0]](words[1:])
    parser = build_parser(prog=prog, description=description, epilog=epilog, options=options, version=version)
    return cli.main(words, parser=parser, options=options, settle=settle, start=start, folder=folder, reads_config=reads_config)


def other(
    words: Sequence[str], *, prog: str, what: str, options: Sequence[Option], run: Callable[[dict[str, Any]], None], places: str = ""
) -> int:
    """Run a command beside training, which goes on where it was interrupted; returns the exit status.

    Args:
        words: those after the command's name and its positional arguments.
        what: what it does, for its help.
        run: does it, with the options that were given.
        places: its positional arguments, as its help shows them.
    """
    parser: argparse.ArgumentParser = build_parser(prog=prog, description=what, epilog="", options=options, version=version)
    parser.usage = f"{prog} {places}[options]"
    try:
        run(parse(words, parser=parser, options=options))
    except (UserError, OSError) as error:
        once.report(" ".join(str(error).split()), prog=prog)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def version() -> str:
    """The version, one for all packages."""
    from lightning_ipu import __version__

    return __version__


def check_processes(given: Mapping[str, Any], *, replicas: int, stages: int) -> None:
    """Refuse a number of processes that cannot share out a plan's replicas and stages."""
    if "processes" in given:
        try:
            Placement(plan=Plan(replication_factor=replicas, num_stages=stages), processes=given["processes"])
        except PlanError as error:
            raise UsageError(f"--processes: {error}") from None


def multiples(number: int, *, first: int = 1) -> str:
    """Three multiples of a number, for a message that names what would be right."""
    return ", ".join(str(number * factor) for factor in range(first, first + 3))


def divisors(number: int) -> str:
    """All divisors of a number, for a message that names what would be right."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
