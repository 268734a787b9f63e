"""Read the values of short options from text: each reader returns the value, or says in one line what would be right."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from lightning_ipu.precision import names as precision

LARGEST_SEED = 2**32 - 1  # of numpy's


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
