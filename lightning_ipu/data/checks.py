"""Checks of data modules' options that several of them need."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ipu.errors import UserError


def at_least(least: int, **options: float | None) -> None:
    """Refuse an option below `least`; None is not given."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError(f"{name}={value} must be at least {least}")


def known(legal: Sequence[str], **options: str) -> None:
    """Refuse an option that is none of the legal words."""
    for name, value in options.items():
        if value not in legal:
            raise UserError(f"{name}={value!r} is unknown: choose from {', '.join(legal)}")
