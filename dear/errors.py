"""Errors that a user can act on, and the sentences they are made of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class UserError(Exception):
    """The caller asked for something wrong or impossible; the message says what and how to mend it.

    Programs print it as one line and exit with status 2; it never carries a traceback to a user.
    """


class Unavailable(Exception):  # noqa: N818  (a state of the machine, not a mistake)
    """Something optional (a library, a device) is not on this machine; the message says which."""


def unknown(
    kind: str, given: object, allowed: Iterable[str], where: str = "see `list`"
) -> UserError:
    """A `UserError` for a name that is not among `allowed`, with the nearest one suggested.

    Args:
        where: to find them, if there are many.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listing = ", ".join(names) if len(names) <= 24 else f"{len(names)} names, {where}"
    return UserError(f"unknown {kind} {given!r}{hint} (allowed: {listing})")


def one_of(kind: str, given: str, known: Mapping[str, T]) -> T:
    """`known[given]`; raises `unknown` if it is not there."""
    if given not in known:
        raise unknown(kind, given, known)
    return known[given]
