"""Handles of nonblocking calls: numbers that stand for operations under way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from dear.errors import UserError

_running: dict[int, tuple[Callable[[], bool], Callable[[], Any]]] = {}
_numbers = itertools.count()


def new(done: Callable[[], bool], result: Callable[[], Any]) -> int:
    """A handle: `done` never blocks, `result` waits for the operation and gives its result."""
    number = next(_numbers)
    _running[number] = done, result
    return number


def poll(handle: int) -> bool:
    """True once the operation of `handle` has ended; never blocks."""
    return _found(handle)[0]()


def synchronize(handle: int) -> Any:
    """Waits for the operation of `handle` and returns its result; then the handle is used up.

    Raises:
        UserError: there is no such handle (any more).
        RuntimeError: the operation failed.
    """
    _, result = _found(handle)
    del _running[handle]
    return result()


wait = synchronize


def forget_all() -> None:
    """Drops handles that nobody has waited for."""
    _running.clear()


def _found(handle: int) -> tuple[Callable[[], bool], Callable[[], Any]]:
    if handle not in _running:
        raise UserError(f"no operation has the handle {handle!r}; it may have been waited for")
    return _running[handle]
