"""Errors that a user can act on, and functions that build their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class UserError(Exception):
    """Invalid or impossible request; the message says what is wrong and how to fix it.

    Programs print it as one line, without a traceback, and exit with status 2. Line breaks of what
    the message quotes, such as a path, are shown as an escape.
    """

    def __str__(self) -> str:
        return super().__str__().replace("\r", "\\r").replace("\n", "\\n")


class Unavailable(Exception):  # noqa: N818  (a state of the machine, not a mistake)
    """Optional dependency (a library, a device) that this machine lacks; the message names it."""


def unknown(
    kind: str, given: object, allowed: Iterable[str], where: str = "see `list`"
) -> UserError:
    """Returns a `UserError` for a name that is not in `allowed`; suggests the nearest allowed name.

    Args:
        where: pointer to the list of names, shown in place of the list if it is long.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listing = ", ".join(names) if len(names) <= 24 else f"{len(names)} names, {where}"
    return UserError(f"unknown {kind} {given!r}{hint} (allowed: {listing})")


def one_of(kind: str, given: str, choices: Mapping[str, T]) -> T:
    """Returns `choices[given]`; raises the error of `unknown` if the key is missing."""
    if given not in choices:
        raise unknown(kind, given, choices)
    return choices[given]
