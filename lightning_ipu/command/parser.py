"""Read a command line of short options against a table, and turn them into the arguments of LightningCLI."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from lightning_ipu.command.options import SUBCOMMANDS, Option, UsageError
from lightning_ipu.command.readers import boolean


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument (--[\w-]+)[^:]*", r"\1", message))


class _Print(argparse.Action):
    """Prints what `const` gives, and ends."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        print(self.const())
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """A flag stands alone, although it takes true and false."""
        return "" if action.metavar == "" else super()._format_args(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Without the option's names in the original programs."""
        names = action.option_strings
        action.option_strings = [name for name in names if name not in getattr(action, "aliases", ())]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = names


def _formatter(prog: str) -> argparse.HelpFormatter:
    return _Formatter(prog, max_help_position=38, width=min(120, shutil.get_terminal_size().columns))


def build_parser(
    *, prog: str, description: str, epilog: str, options: Sequence[Option], version: Callable[[], str]
) -> argparse.ArgumentParser:
    """The parser of a command's short form; its help lists the options that most runs need, in their groups.

    Where there are rare options, ``--help-all`` lists these too, and ``--help-originals`` the words of the original programs.
    """
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
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
        if option.type is bool:
            reading: dict[str, Any] = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL" if option.default else ""}
        else:
            choices = getattr(option.type, "choices", None)
            reading = {"type": option.type, "metavar": option.metavar or ("{" + ",".join(choices) + "}" if choices else "N")}
        help = argparse.SUPPRESS if option.rare or option.original else _explanation(option)
        action = groups[option.group].add_argument(*option.names, dest=option.dest, default=argparse.SUPPRESS, help=help, **reading)
        action.aliases = option.aliases

    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this help")
    printing: dict[str, Any] = {"action": _Print, "nargs": 0, "default": argparse.SUPPRESS}
    if any(option.rare for option in options):
        all_of_ours = [replace(option, rare=False) for option in options]
        whole = partial(build_parser, prog=prog, description=description, epilog=epilog, options=all_of_ours, version=version)
        other.add_argument("--help-all", const=lambda: whole().format_help(), help="list the rarer options as well", **printing)
    if any(option.refused or option.original or option.aliases for option in options):
        const = partial(_originals, prog, options)
        other.add_argument("--help-originals", const=const, help="list the original programs' words: taken, or refused and why", **printing)
    other.add_argument("--version", const=lambda: f"{parser.prog} {version()}", help="show the version", **printing)
    return parser


def _explanation(option: Option) -> str:
    shown = option.shown if option.shown is not None or option.default is None else option.default
    return (option.help if shown is None else f"{option.help} [{shown}]").replace("%", "%%")


def _originals(prog: str, options: Sequence[Option]) -> str:
    """The original programs' words: their options, their names for options of ours, and those that are refused."""
    taken = {option.name: _explanation(option).replace("%%", "%") for option in options if option.original}
    named = {alias: f"the same as {option.name}" for option in options for alias in option.aliases}
    refused = {option.name: option.refused for option in options if option.refused}
    sections = {"options of the original programs": taken, "their names for options here": named, "known from them, and refused": refused}
    lines = [f"usage: {prog} [options]"]
    for title, words in sections.items():
        if words:
            lines += [
                "",
                f"{title}:",
                *(textwrap.fill(f"  {word:<34}  {text}", 120, subsequent_indent=38 * " ") for word, text in words.items()),
            ]
    return "\n".join(lines)


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
        known = [name for option in options for name in option.names]
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
