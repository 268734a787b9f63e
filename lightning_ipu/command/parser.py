"""Read a command line of short options against a table, and turn them into the arguments of LightningCLI."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from lightning_ipu.command.options import SUBCOMMANDS, Option, UsageError
from lightning_ipu.command.readers import boolean


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
