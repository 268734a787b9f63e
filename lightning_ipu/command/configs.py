"""Named configurations: short options in a YAML file. They override the defaults, and the command line overrides them.

A file holds one option a line, by its name without dashes, and perhaps `base`, the configuration that it changes, and `ipu_hardware`: settings
that steer an IPU's compiler and change no number. Those are checked, listed at the start of a run, and have no effect. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ipu.errors import UserError

if TYPE_CHECKING:
    from lightning_ipu.command.options import Option

HARDWARE, BASE = "ipu_hardware", "base"
COMMAND = "command"  # in a run's config.yaml: the command that it belongs to
_OF_A_START = ("--config", "--resume")  # options that no file may hold
_LIGHTNING_SECTIONS = ("trainer", "model", "data")


class ConfigError(UserError):
    """A configuration that cannot be used; the message names the file and what would be right."""


def read(name: str, *, folder: Path, options: Sequence[Option], prog: str, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The options of a configuration, by their names with underscores, and its `ipu_hardware` where it has that section.

    Args:
        name: a file, or the name of one in `folder`.
        folder: the package's own configurations.
        options: what the command knows.
        prog: the command's name.
        seen: files that are being read, of which this one is the base.

    Raises:
        ConfigError: no such configuration, unreadable, or with a key or a value that is not right.
    """
    path = find(name, folder=folder, prog=prog)
    if path in seen:
        raise ConfigError(f"{path}: {BASE}: {name} leads back to itself")
    keys = _load(path, prog)
    values: dict[str, Any] = {}
    if (base := keys.pop(BASE, None)) is not None:
        sibling = path.parent / f"{base}.yaml"
        values = read(str(sibling if sibling.is_file() else base), folder=folder, options=options, prog=prog, seen=(*seen, path))
    own: dict[str, Any] = {}
    hardware = keys.pop(HARDWARE, None)
    known = {spelling.lstrip("-"): option for option in options for spelling in option.names}
    for key, value in keys.items():
        option = known.get(str(key).replace("_", "-"), known.get(str(key)))
        if option is None or option.name in _OF_A_START:
            open_to_it = [spelling for spelling, known_option in known.items() if not known_option.refused]
            raise ConfigError(f"{path}: {_unknown(key, [*open_to_it, BASE, HARDWARE])}")
        if option.refused:
            raise ConfigError(f"{path}: {key}: {option.refused}")
        if option.dest in own:
            raise ConfigError(f"{path}: {key}: {option.name} is given twice")
        own[option.dest] = value if value is None else _value(option, key, value, path)
    values = {name: value for name, value in overlay(values, own, options).items() if value is not None}
    if hardware is not None:
        values[HARDWARE] = {**values.get(HARDWARE, {}), **_checked_hardware(hardware, path)}
    if not seen and HARDWARE in values:
        _check_together(values[HARDWARE], stages=len(values.get("pipeline_splits", [])) + 1, path=path)
    return values


def overlay(below: Mapping[str, Any], above: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """The options of `below`, overridden by those of `above`, which also remove the options that they exclude."""
    kept = dict(below)
    for option in options:
        for other in option.excluded:
            if option.dest in above and above[option.dest] is not False:
                kept.pop(other, None)
            if other in above and above[other] is not False:
                kept.pop(option.dest, None)
    return {**kept, **above}


def find(name: str, *, folder: Path, prog: str) -> Path:
    """The file of a configuration: by its path, or one of the package's by its name or by its path in the project.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name).expanduser()
    if path.exists() and not path.is_dir():
        return path
    if path.parent in (Path(), Path(folder.name), Path(folder.parent.name, folder.name)):
        for place in (folder / path.name, folder / f"{path.name}.yaml"):
            if place.is_file():
                return place
    known: dict[bool, list[str]] = {False: [], True: []}
    for place in sorted(folder.glob("*.yaml"), key=lambda place: place.stem):
        known[_is_lightnings(place.read_text())].append(place.stem)
    near = difflib.get_close_matches(path.name.removesuffix(".yaml"), known[False] + known[True], n=1)
    listed = [", ".join(names) for names in known.values() if names]
    hint = f"; did you mean {near[0]}?" if near else ""
    between = f"; for python -m {prog} fit "
    raise ConfigError(f"--config {name}: there is no such file, and the package has {between.join(listed)}{hint}")


def _is_lightnings(text: str) -> bool:
    return text.startswith("trainer:") or "\ntrainer:" in text


def content_of(path: Path, prog: str) -> dict[Any, Any]:
    """The settings in a YAML file, by name.

    Raises:
        ConfigError: it is not a YAML file, has no settings, or belongs to another command.
    """
    import yaml

    hint = "; a checkpoint is given with --ckpt_path" if path.suffix == ".ckpt" else ""
    try:
        with path.open() as file:
            content = yaml.load(file, yaml.CSafeLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:  # bytes that are no text are a ValueError
        raise ConfigError(f"{path} is not a YAML file: {' '.join(str(error).split())}{hint}") from None
    if content is None:
        raise ConfigError(f"{path} is empty: a configuration has at least one setting")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one option a line, such as `epochs: 30`, not a {type(content).__name__}{hint}")
    if (command := content.get(COMMAND) or prog) != prog:
        raise ConfigError(f"{path} is a configuration of {command}, not of {prog}: python -m {command} fit --config {path}")
    return content


@cache
def quote_strings() -> None:
    """Make jsonargparse quote strings such as 1e3 in the YAML that it writes: PyYAML reads them as strings, but jsonargparse as numbers."""
    import jsonargparse
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes strings that look like numbers as well."""

    number = re.compile(r"[-+.]?[0-9][-+0-9._:eE]*|0[xob][0-9a-fA-F_]+")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    options = {"default_flow_style": False, "allow_unicode": True, "sort_keys": False}
    jsonargparse.set_dumper("yaml", lambda content: yaml.dump(content, Dumper=Dumper, **options))


def _load(path: Path, prog: str) -> dict[Any, Any]:
    keys = content_of(path, prog)
    if any(isinstance(keys.get(section), dict) for section in _LIGHTNING_SECTIONS):
        raise ConfigError(f"{path} is laid out for LightningCLI: python -m {prog} fit --config {path}")
    return keys


def _value(option: Option, key: str, value: Any, path: Path) -> Any:
    """A value as the option reads it on the command line."""
    if option.type is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key}: {value!r} must be true or false")
        return value
    if isinstance(value, dict):
        import json

        text = json.dumps(value)
    else:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        return option.type(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        message = str(error) if isinstance(error, argparse.ArgumentTypeError) else f"{value!r} is not a {option.type.__name__}"
        raise ConfigError(f"{path}: {key}: {message}") from None


def _unknown(key: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(key), list(known), n=1)
    return f"unknown key {key!r}" + (f"; did you mean {near[0]}?" if near else "")


# -- settings of an IPU's compiler ----------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _percentages(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(one, (int, float)) and not isinstance(one, bool) and 0 < one <= 100 for one in values)


_SWITCH = (lambda value: isinstance(value, bool), "true or false")
_COUNT = (_is_count, "a whole number of at least 0")
_EXCHANGE = (lambda value: value in ("cycles", "memory", "balanced"), "cycles, memory or balanced")
_HARDWARE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "accelerator-side-preprocess": _SWITCH,
    "available-memory-proportion": (_percentages, "a percentage above 0, or a list of them: one, or two for each stage"),
    "conv-dithering": _SWITCH,
    "device-mapping": (lambda value: isinstance(value, list) and all(map(_is_count, value)), "a list of IPUs, one for each stage"),
    "disable-stable-batchnorm": _SWITCH,
    "enable-optimizer-rts": _SWITCH,
    "fused-preprocessing": _SWITCH,
    "gather-conv-output": _SWITCH,
    "half-partials": _SWITCH,
    "internal-exchange-optimization-target": _EXCHANGE,
    "max-cross-replica-buffer-size": _COUNT,
    "max-reduce-many-buffer-size": _COUNT,
    "min-remote-tensor-size": _COUNT,
    "on-demand": _SWITCH,
    "optimizer-state-offloading": _SWITCH,
    "prefetch-depth": _COUNT,
    "stable-norm": _SWITCH,
}


def _checked_hardware(section: Any, path: Path) -> dict[str, Any]:
    """The section by the settings' names, each of the kind that it must be."""
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {HARDWARE}: must be a section of settings such as `half-partials: true`, not {section!r}")
    checked = {}
    for key, value in section.items():
        name = str(key).replace("_", "-")
        if name not in _HARDWARE:
            raise ConfigError(f"{path}: {HARDWARE}: {_unknown(key, _HARDWARE)}")
        is_right, what = _HARDWARE[name]
        if not is_right(value):
            raise ConfigError(f"{path}: {HARDWARE}: {key}: {value!r} must be {what}")
        checked[name] = value
    return checked


def _check_together(hardware: Mapping[str, Any], *, stages: int, path: Path) -> None:
    """What must hold of the settings together, and with the stages: the checks of the original program."""
    memory, mapping = hardware.get("available-memory-proportion"), hardware.get("device-mapping")
    if isinstance(memory, list) and len(memory) not in (1, 2 * stages if stages > 1 else 1):
        wanted = f"1 or {2 * stages} values (two for each of the {stages} stages)" if stages > 1 else "1 value, as there is one stage"
        raise ConfigError(f"{path}: {HARDWARE}: available-memory-proportion has {len(memory)} values and must have {wanted}")
    if mapping is not None and len(mapping) != stages:
        raise ConfigError(
            f"{path}: {HARDWARE}: device-mapping places {len(mapping)} stages, but pipeline-splits makes {stages}: give one IPU for each"
        )
    if mapping is not None and set(mapping) != set(range(len(set(mapping)))):
        raise ConfigError(f"{path}: {HARDWARE}: device-mapping {mapping} must use IPUs 0 to {len(set(mapping)) - 1}, leaving none out")
    if hardware.get("fused-preprocessing") and not hardware.get("accelerator-side-preprocess"):
        raise ConfigError(f"{path}: {HARDWARE}: fused-preprocessing needs accelerator-side-preprocess: true")


def listed(hardware: Mapping[str, Any]) -> str:
    """The settings in one line."""
    return ", ".join(name if value is True else f"{name} {str(value).lower()}" for name, value in hardware.items())
