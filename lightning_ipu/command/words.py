"""The words of a LightningCLI command line, rearranged so that typed options override configurations, whatever their order.

jsonargparse lets later words override earlier ones, so that a `--config` would silently undo the options to its left. The configurations are
therefore moved to the front. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_ipu.command import configs

_SECTIONS = ("model", "data", "trainer", "checkpoint", "events", "machine")  # --data FILE gives a whole section


def arranged(words: Sequence[str], *, folder: Path, prog: str) -> list[str]:
    """The words after a subcommand: configurations by their paths, then whole sections, then everything else in its order.

    Args:
        folder: the package's own configurations, which are found by their names as well.
        prog: the command's name.

    Raises:
        ConfigError: there is no such configuration, or the file is not one.
    """
    files, sections, others = [], [], []
    following = iter(words)
    for word in following:
        name, is_one_word, value = word.partition("=")
        if word.startswith("-c") and len(word) > 2:
            name, is_one_word, value = "-c", "=", word[2:].removeprefix("=")
        is_config, is_section = _is_config(name), name.removeprefix("--") in _SECTIONS and name.startswith("--")
        if (is_config or is_section) and not is_one_word:
            value = next(following, "")
        if is_config and value:
            files.append(f"--config={_placed(value, folder, prog)}")
        elif is_section:
            if "{" not in value and Path(value).is_file():
                configs.content_of(Path(value), prog)
            sections.append(f"{name}={value}")
        else:
            others.append(word)
    return [*files, *sections, *others]


def value_of(words: Sequence[str], section: str, key: str) -> Any:
    """The value of `section.key` in arranged words, from their configurations or typed; None where it is not given.

    A configuration that cannot be read counts as empty here: LightningCLI reports what is wrong with it.
    """
    found = None
    for name, value in pairs(words):
        if name == "--config":
            said = _section(_loaded(value), section, Path(value).parent).get(key)
        elif name == f"--{section}":
            said = _section({section: _loaded(value)}, section, Path()).get(key)
        else:
            said = value if name == f"--{section}.{key}" else None
        found = found if said is None else said
    return found


def file_with(words: Sequence[str], key: str) -> str | None:
    """The configuration among arranged words that has a key such as `model.size`, the last of several; None where none has."""
    found = None
    for name, value in pairs(words):
        content = _loaded(value) if name == "--config" else None
        for part in key.split("."):
            content = content.get(part, _MISSING) if isinstance(content, dict) else _MISSING
        found = found if content is _MISSING else value
    return found


_MISSING = object()


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option with its value, whether that is in the same word or in the next."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, is_one_word, value = word.partition("=")
        if name.startswith("--"):
            yield name, value if is_one_word else following


def _is_config(name: str) -> bool:
    return name == "-c" or len(name) > 4 and "--config".startswith(name)  # options may be cut short


def _placed(name: str, folder: Path, prog: str) -> str:
    if name == "-" or "{" in name or "\n" in name:  # standard input, or YAML itself
        return name
    path = configs.find(name, folder=folder, prog=prog)
    if path.is_file():  # what comes through a pipe is read once, by LightningCLI
        configs.content_of(path, prog)
    return str(path)


def _loaded(text: str) -> Any:
    """The content of a YAML file, or of a text that is YAML itself."""
    import yaml

    try:
        path = Path(text)
        return yaml.load(path.read_text() if "{" not in text and path.is_file() else text, yaml.CSafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _section(config: Any, name: str, folder: Path) -> dict[str, Any]:
    """A section of a configuration, which may stand in a file of its own."""
    section = config.get(name) if isinstance(config, dict) else None
    if isinstance(section, str):
        section = _loaded(str(folder / section))
    return section if isinstance(section, dict) else {}
