"""Errors that a user can put right; everything else that is raised is a fault of the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A setting, file or command line that cannot be used; the message is one line that names it and says what would be right.

    The commands print that line in place of a traceback.
    """


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Make ValueErrors of code that knows nothing of this class, such as the networks' refusals of a size, errors that a user can put right."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
