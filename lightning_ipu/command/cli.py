"""Short options in front of LightningCLI: one table per command, parsed in milliseconds because nothing here imports torch.

A command lists its options as :class:`Option` rows. :func:`parse` reads a command line against them, :func:`lightning_arguments`
turns the settled values into the arguments of LightningCLI's ``fit``; everything after that is the same for both forms.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from lightning_ipu import machine
from lightning_ipu.command import configs
from lightning_ipu.command.streams import lasting_streams
from lightning_ipu.command.words import arranged
from lightning_ipu.precision import names as precision

__all__ = [
    "AVERAGE_OPTIONS",
    "CHECKPOINT_OPTIONS",
    "MACHINE_OPTIONS",
    "RUN",
    "SUBCOMMANDS",
    "Option",
    "UsageError",
    "average",
    "boolean",
    "build_parser",
    "choice",
    "fraction_or_count",
    "frequency",
    "is_answered_by_the_first",
    "lightning_arguments",
    "main",
    "names",
    "numbers",
    "output_directory",
    "parse",
    "path",
    "positive",
    "precision_choice",
    "report",
    "seed",
    "settings_of",
    "warn",
]

LARGEST_SEED = 2**32 - 1  # of numpy's
SUBCOMMANDS = ("fit", "validate", "test", "predict")


class UsageError(ValueError):
    """A command line that cannot be carried out; the message is the one line that a person reads."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of a command's table.

    Args:
        name: as typed, ``--batch-size``.
        key: LightningCLI's key that a given value goes to; None where the command's own rules turn the value into settings.
        sets: what a flag puts there: false for one that switches something off. A flag that is given as false puts the opposite.
        type: what reads the text; ``bool`` makes the option a flag, which takes true or false as well.
        default: shown in the help, and the value where the option is not given. None means that a rule decides: then ``shown``
            says which.
        shown: the default in words.
        help: one sentence.
        group: heading in the help.
        metavar: placeholder for the value in the help.
        excludes: an option, or several, that cannot be given together with this one.
        refused: why the option, known from older programs, is not to be had here. It is listed in the help, and refused by name.
        aliases: the option's names in the original programs.
    """

    name: str
    group: str
    help: str = ""
    key: str | None = None
    sets: bool = True
    type: Callable[[str], Any] = str
    default: Any = None
    shown: str | None = None
    metavar: str | None = None
    excludes: str | tuple[str, ...] | None = None
    refused: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        return _dest(self.name)

    @property
    def excluded(self) -> list[str]:
        """The names, with underscores, of the options that this one excludes."""
        names = (self.excludes,) if isinstance(self.excludes, str) else self.excludes or ()
        return [_dest(name) for name in names]


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


# -- readers of values --------------------------------------------------------------------------------------------------------


def choice(*values: str) -> Callable[[str], str]:
    """Reader of one of ``values``, in upper or lower case, giving it as it is spelled here."""

    def read(text: str) -> str:
        for value in values:
            if text.lower() == value.lower():
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not known; known are {', '.join(values)}")

    read.choices = values
    return read


def positive(kind: type = int, *, zero: bool = False) -> Callable[[str], Any]:
    """Reader of a number of type ``kind`` above 0, or from 0 on."""
    wanted = f"a {'whole number' if kind is int else 'number'} {'of at least 0' if zero else 'above 0'}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (0 <= value < float("inf")) or (value == 0 and not zero):
            raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}")
        return value

    return read


def fraction_or_count(what: str, *, least: int = 0) -> Callable[[str], int | float]:
    """Reader of a whole number of ``what``, at least ``least``, or with a decimal point a share of them between 0.0 and 1.0."""

    def read(text: str) -> int | float:
        try:
            value: int | float = float(text) if "." in text else int(text)
        except ValueError:
            value = -1
        if not least <= value and not 0 < value < 1 or value < 0 or (isinstance(value, float) and value > 1):
            shares = "a share between 0.0 and 1.0" if least == 0 else "a share above 0.0 and up to 1.0"
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a whole number of {what}{f' from {least} on' if least else ''}, or {shares}"
            )
        return value

    return read


def seed(text: str) -> int:
    """Reader of a seed that torch, numpy and Python all accept."""
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= value <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to {LARGEST_SEED}")
    return value


def path(text: str) -> str:
    """Reader of the path of a file or folder; ~ is a home directory, as in a shell.

    A name that YAML would read as another type, such as null or 1e3, gets its folder in front: ./null.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no path: give a file or folder")
    place = os.path.expanduser(text)
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", place) and place.lower() not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return place if plain or "/" in place else f"./{place}"


def boolean(text: str) -> bool:
    """Reader of true and false, and of the other words for them that the original programs take."""
    if text.lower() in ("true", "t", "1", "yes", "y", "on"):
        return True
    if text.lower() in ("false", "f", "0", "no", "n", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")


def frequency(text: str) -> str:
    """Reader of how often something is to happen in an epoch: a number or a fraction such as 1/2, 0 for never; gives the fraction's text."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0 or a fraction such as 1/2")
    return str(value)


def numbers(text: str) -> list[float]:
    """Reader of numbers with commas between them."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them, such as 1,0.1,0.01") from None


def names(text: str) -> list[str]:
    """Reader of names with commas between them."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} must be names with commas between them")
    return found


def precision_choice(text: str) -> str:
    """Reader of a precision that can be had."""
    value = choice(*precision.CHOICES)(text)
    if problem := precision.refusal(value):
        raise argparse.ArgumentTypeError(problem)
    return value


precision_choice.choices = precision.CHOICES


# -- options that every command has --------------------------------------------------------------------------------------------

RUN = "run (moves speed and output only, precision excepted)"

MACHINE_OPTIONS = (
    Option(name="--device", group=RUN, key="trainer.accelerator", type=choice("auto", "cpu", "gpu"), default="auto", help="where to run"),
    Option(
        name="--threads",
        group=RUN,
        key="machine.threads",
        type=positive(),
        shown="OMP_NUM_THREADS, else the cores it may use",
        help="threads of one operation",
    ),
    Option(
        name="--no-allocator-setting",
        group=RUN,
        key="machine.keep_freed_memory",
        sets=False,
        type=bool,
        help="leave glibc's allocator alone; else it keeps freed memory, which is faster",
    ),
    Option(
        name="--no-core-binding",
        group=RUN,
        key="trainer.strategy.bind_cores",
        sets=False,
        type=bool,
        help="let several processes wander over the cores; else each keeps to its share of them",
    ),
)

CHECKPOINT_OPTIONS = (
    Option(
        name="--resume",
        group="checkpoints",
        key="resume",
        type=bool,
        help="go on with the run in the output directory, with the options it was started with; where there is none yet, begin it",
    ),
    Option(
        name="--checkpoint-every",
        group="checkpoints",
        key="checkpoint_every",
        type=positive(),
        shown="one per epoch",
        help="save after every N weight updates as well",
    ),
    Option(
        name="--keep-last",
        group="checkpoints",
        key="keep_last",
        type=positive(),
        default=1,
        help="keep the latest N of them, beside the best",
    ),
)

AVERAGE_OPTIONS = (
    Option(
        name="--checkpoint-input-path",
        group="average",
        metavar="DIR",
        type=path,
        shown="results/checkpoints",
        help="the checkpoints of a run; its output directory will do",
    ),
    Option(
        name="--checkpoint-output-path",
        group="average",
        metavar="FILE",
        type=path,
        shown="averaged.ckpt beside them",
        help="gets the average",
    ),
    Option(
        name="--weight-avg-strategy",
        group="average",
        type=choice("mean", "exponential"),
        shown="mean",
        help="weigh all alike, or newer ones more",
    ),
    Option(
        name="--weight-avg-exp-decay",
        group="average",
        type=positive(float),
        metavar="X",
        shown="0.99",
        help="exponential: from the oldest on, average = X x average + (1 - X) x weights",
    ),
    Option(name="--weight-avg-N", group="average", type=int, metavar="N", shown="-1", help="how many of the newest; -1 for all"),
)
_OF_ONE_START = ("resume", "output_dir", "log_dir", "log_dir_string")  # not of the run: it may be moved


# -- parsing ------------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument (--[\w-]+)[^:]*", r"\1", message))


class _Version(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        print(f"{parser.prog} {self.const()}")
        parser.exit()


def _refusals(options: Iterable[Option]) -> str:
    """The options that are refused, for the end of the help."""
    refused = [option for option in options if option.refused]
    lines = [f"  {option.name:<24}{option.refused}" for option in refused]
    return "\n".join(["known from the original program and refused:", *lines, "\n"]) if refused else ""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """A flag stands alone, although it takes true and false."""
        return "" if action.metavar == "" else super()._format_args(action, default_metavar)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return _Formatter(prog, max_help_position=38, width=min(120, shutil.get_terminal_size().columns))


def build_parser(
    *, prog: str, description: str, epilog: str, options: Sequence[Option], version: Callable[[], str]
) -> argparse.ArgumentParser:
    """The parser of a command's short form; its help lists the options in their groups, the refused ones last."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=_refusals(options) + epilog,
        add_help=False,
        usage=f"{prog} [options]\n       {prog} {{{','.join(SUBCOMMANDS)}}} [--config FILE] [LightningCLI options]",
        formatter_class=_formatter,
    )
    groups: dict[str, Any] = {}
    for option in options:
        if option.refused:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        shown = option.shown if option.shown is not None or option.default is None else option.default
        explanation = (option.help if shown is None else f"{option.help} [{shown}]").replace("%", "%%")
        if option.type is bool:
            reading: dict[str, Any] = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL" if option.default else ""}
        else:
            choices = getattr(option.type, "choices", None)
            reading = {"type": option.type, "metavar": option.metavar or ("{" + ",".join(choices) + "}" if choices else "N")}
        names = (option.name, *option.aliases)
        groups[option.group].add_argument(*names, dest=option.dest, default=argparse.SUPPRESS, help=explanation, **reading)

    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this help")
    other.add_argument("--version", action=_Version, nargs=0, const=version, default=argparse.SUPPRESS, help="show the version")

    return parser


def parse(arguments: Sequence[str], *, parser: argparse.ArgumentParser, options: Sequence[Option]) -> dict[str, Any]:
    """The options that were given, by their names with underscores.

    Raises UsageError for what is unknown, refused, unreadable or given together with an option that it excludes.
    """
    refused = {option.name: option.refused for option in options if option.refused}
    for word in arguments:
        if (name := word.partition("=")[0]) in refused:
            raise UsageError(f"{name}: {refused[name]}")
    namespace, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        for command in (*SUBCOMMANDS, "average"):
            if command in unknown:
                rest = list(arguments)
                rest.remove(command)
                raise UsageError(f"{command} must come first: python -m {parser.prog} {shlex.join([command, *rest])}")
        word = unknown[0]
        known = [name for option in options for name in (option.name, *option.aliases)]
        near = difflib.get_close_matches(word.split("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near and near[0] not in refused else f"; {parser.prog} --help lists the options"
        if "." in word.split("=")[0] and word.startswith("--"):
            hint = f": keys of LightningCLI need a subcommand, python -m {parser.prog} fit {word} ..."
        raise UsageError(f"unknown option {word}{hint}" if word.startswith("-") else f"unexpected argument {word!r}{hint}")
    if sum(word.partition("=")[0] == "--config" for word in arguments) > 1:
        raise UsageError(f"--config is given twice, but short options take one; python -m {parser.prog} fit takes several")
    given = vars(namespace)
    on = {name for name, value in given.items() if value is not False}
    for option in options:
        for other in option.excluded:
            if option.dest in on and other in on:
                raise UsageError(f"{option.name} and --{other.replace('_', '-')} exclude each other: give one of them")
    return given


def settings_of(given: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """LightningCLI's settings for the options that have a key: the value that was given, or the default where there is one."""
    settings = {}
    for option in options:
        value = given.get(option.dest, option.default)
        if option.key is not None and value is not None:
            settings[option.key] = value == option.sets if option.type is bool else value
    return settings


def lightning_arguments(settings: Mapping[str, Any]) -> list[str]:
    """LightningCLI arguments, ``--key=value``, for a mapping of its keys; values are written as JSON, which is YAML too."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def warn(text: str, *, prog: str) -> None:
    """Say what is worth a line before a run begins; of several processes the first does."""
    _say_once(f"{prog}: warning: {text}")


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


def _say_once(line: str) -> None:
    if machine.started_rank() == 0:
        print(line, file=sys.stderr)


def output_directory(given: Mapping[str, Any]) -> str:
    """Where the short options put what the run writes."""
    directory = given.get("output_dir") or given.get("log_dir") or "results"
    return os.path.normpath(os.path.join(directory, given["log_dir_string"])) if "log_dir_string" in given else directory


def _resumed(given: dict[str, Any], options: Sequence[Option], prog: str) -> dict[str, Any]:
    """The short options that the run in the output directory was started with, under those that are given now."""
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
            _say_once(f"{prog}: resuming with {option.name} {given[option.dest]} in place of {before[option.dest]}")
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
    except (ValueError, OSError) as error:  # UsageError is one
        report(" ".join(str(error).split()), prog=f"{prog} average")
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
                flags = {option.dest for option in options if option.type is bool and not option.default}
                given = {name: value for name, value in given.items() if value or name not in flags}
                settled = [*settle(given), *lightning_arguments({"short_options": kept})]
                lightning = ["fit" if given.get("training", True) else "validate", *settled]
        except (UsageError, configs.ConfigError) as error:
            report(str(error), prog=parser.prog)
            return 2
        streams.begin_run()
        try:
            machine.bound_spinning()
            machine.load("lightning_ipu.command.run")
            return start(lightning, given=given) or streams.status
        except KeyboardInterrupt:  # while torch was being loaded; later on a handler of signals takes over
            return 130
