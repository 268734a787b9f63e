"""Words of the original program: options that are refused, and configurations without --config."""

from __future__ import annotations

from lightning_ipu.command.options import Option
from lightning_ipu.command.readers import choice
from lightning_ipu.command.rows import DATA

LEGACY_OPTIONS = (
    Option(name="--use-estimator", group="", refused="TensorFlow's Estimator does not exist here; there is one way to train, with the same numbers"),
    Option(name="--distributed", group="", refused="use --processes, or torchrun (the original ignored this option)"),
    Option(name="-d", group="", refused="use --processes, or torchrun (the original ignored this option)"),
    Option(name="--verbose", group="", refused="the table at the start and metrics.csv tell what there is to tell"),
    Option(name="-v", group="", refused="the table at the start and metrics.csv tell what there is to tell"),
    Option(name="--profiling", group="", refused="an IPU's profile does not exist here"),
    Option(name="--staged-files", group=DATA, type=choice("0", "1"), shown="0", help="1, files of its own for each node, is refused: every process must see them all", original=True),
)  # fmt: skip


def with_named_config(words: list[str]) -> list[str]:
    """The words with `--config=` before a configuration's name, which the original program takes without."""
    named: list[str] = []
    for word in words:
        is_file = word.endswith((".yaml", ".yml")) and not word.startswith("-")
        named.append(f"--config={word}" if is_file and named[-1:] != ["--config"] else word)
    return named
