"""Short options in front of LightningCLI: one table per command, parsed in milliseconds because nothing here imports torch.

A command lists its options as `Option` rows. `parse` reads a command line against them, `lightning_arguments` turns the settled
values into the arguments of LightningCLI's ``fit``; everything after that is the same for both forms.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ipu import machine
from lightning_ipu.command import configs, once
from lightning_ipu.command.options import AVERAGE_OPTIONS, SUBCOMMANDS, Option, UsageError
from lightning_ipu.command.parser import build_parser, lightning_arguments, parse
from lightning_ipu.command.streams import lasting_streams
from lightning_ipu.command.words import arranged
from lightning_ipu.errors import UserError

_OF_ONE_START = ("resume", "output_dir", "log_dir", "log_dir_string")  # not part of the run: it may be moved


def output_directory(given: Mapping[str, Any]) -> str:
    """Where the short options put what the run writes."""
    directory = given.get("output_dir") or given.get("log_dir") or "results"
    return os.path.normpath(os.path.join(directory, given["log_dir_string"])) if "log_dir_string" in given else directory


def _resumed(given: dict[str, Any], options: Sequence[Option], prog: str) -> dict[str, Any]:
    """The short options that the run in the output directory was started with, overridden by those that are given now."""
    directory = output_directory(given)
    if not Path(directory, "config.yaml").exists():
        return given  # the run begins
    config = configs.content_of(Path(directory, "config.yaml"), prog)
    before = config.get("short_options")
    if before is None:
        raise UsageError(
            f"--resume: the run in {directory} was started by fit; resume it with"
            f" python -m {prog} fit --config {directory}/config.yaml --resume true"
        )
    for option in options:
        if option.dest in before and option.dest in given and before[option.dest] != given[option.dest]:
            once.say_once(f"{prog}: resuming with {option.name} {given[option.dest]} in place of {before[option.dest]}")
    return configs.overlay(before, given, options)


def average(words: Sequence[str], *, prog: str, version: Callable[[], str]) -> int:
    """The command ``average``, which averages the weights of a run's checkpoints; returns the exit status."""
    what = "Average the weights of a run's checkpoints into one that validate, test and predict take, BatchNorm's statistics included."
    parser = build_parser(prog=f"{prog} average", description=what, epilog="", options=AVERAGE_OPTIONS, version=version)
    parser.usage = f"{prog} average [options]"
    try:
        given = parse(words, parser=parser, options=AVERAGE_OPTIONS)
        if (decay := given.get("weight_avg_exp_decay", 0.99)) >= 1:
            raise UsageError(f"--weight-avg-exp-decay {decay:g} must be below 1")
        if "weight_avg_exp_decay" in given and given.get("weight_avg_strategy") != "exponential":
            raise UsageError(f"--weight-avg-exp-decay {decay:g} needs --weight-avg-strategy exponential")
        if (count := given.get("weight_avg_N", -1)) < 1 and count != -1:
            raise UsageError(f"--weight-avg-N {count} must be at least 1, or -1 for all")
        from lightning_ipu.recipe.averaging import write_average

        print(write_average(given))
    except (UserError, OSError) as error:
        once.report(" ".join(str(error).split()), prog=f"{prog} average")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def main(
    arguments: Sequence[str],
    *,
    parser: argparse.ArgumentParser,
    options: Sequence[Option],
    settle: Callable[[dict[str, Any]], list[str]],
    start: Callable[..., int],
    folder: Path,
    reads_config: bool = True,
) -> int:
    """Run a command line, short form or LightningCLI's; returns the exit status.

    Args:
        arguments: the words after the command's name.
        settle: turns the given options into the arguments of LightningCLI's ``fit``; raises UsageError.
        start: runs LightningCLI with such arguments; ``given`` are the options that were given in the short form. All that imports torch happens in there.
        folder: where the command's named configurations lie.
        reads_config: whether an option --config names short options in a file; else it is left to ``settle``.
    """
    with lasting_streams(parser.prog, speaks=machine.started_rank() == 0) as streams:
        try:
            if arguments and arguments[0] in SUBCOMMANDS:
                lightning = [arguments[0], *arranged(arguments[1:], folder=folder, prog=parser.prog)]
                given: dict[str, Any] = {}
            else:
                given = parse(arguments, parser=parser, options=options)
                if reads_config and "config" in given:
                    configured = configs.read(given.pop("config"), folder=folder, options=options, prog=parser.prog)
                    given = configs.overlay(configured, given, options)
                if given.get("resume"):
                    given = _resumed(given, options, parser.prog)
                kept = {name: value for name, value in given.items() if name not in _OF_ONE_START}
                if "config" not in given:  # else it may say true where a flag says false
                    off = {option.dest for option in options if option.type is bool and not option.default and option.shown is None}
                    given = {name: value for name, value in given.items() if value or name not in off}
                settled = [*settle(given), *lightning_arguments({"short_options": kept})]
                lightning = ["fit" if given.get("training", True) else "validate", *settled]
        except UserError as error:
            once.report(str(error), prog=parser.prog)
            return 2
        streams.begin_run()
        try:
            machine.bound_spinning()
            machine.load("lightning_ipu.command.run")
            return start(lightning, given=given) or streams.status
        except KeyboardInterrupt:  # while torch was being loaded; later on a handler of signals takes over
            return 130
