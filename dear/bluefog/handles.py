"""Handles of nonblocking calls: numbers that stand for operations under way, or held back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from dear.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_running: dict[int, tuple[Callable[[], bool], Callable[[], Any]]] = {}
_numbers = itertools.count()
_queue: dict[int, Callable[[], int]] | None = None
"""While suspended: handle -> what starts its operation, in the order of the calls."""


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
        UserError: there is no such handle (any more), or `suspend` holds its operation back.
        RuntimeError: the operation failed.
    """
    _, result = _found(handle)
    if _queue is not None and handle in _queue:
        raise _suspended(f"the operation of handle {handle}")
    del _running[handle]
    return result()


wait = synchronize


def suspend() -> None:
    """Holds this rank's calls back until `resume`, as BlueFog does in a notebook between cells.

    Nonblocking collectives and neighbour calls queue up: they have a handle, which is not done, and
    tensors must stay as they are. Whatever else needs the other ranks is refused: blocking calls,
    windows, `set_topology`. What is under way goes on, and so do the steps of optimizers.

    It saves nothing here: BlueFog's thread polls and would keep a core busy, the comm core sleeps
    while there is nothing to do. A second call does nothing.

    Raises:
        UserError: `bf.init` has not been called.
    """
    from dear.bluefog.job import job  # which imports this module

    global _queue
    job()
    if _queue is None:
        _queue = {}


def resume() -> None:
    """Starts what has queued up since `suspend`, in the order of the calls; all ranks call it.

    If an operation cannot start, `synchronize` of its handle says why. Without `suspend` it does
    nothing.
    """
    global _queue
    queue, _queue = _queue or {}, None
    for number, start in queue.items():
        try:
            _running[number] = _running.pop(start())
        except Exception as error:
            _running[number] = (lambda: True), functools.partial(_fail, error)


def queueable(call: Callable[P, int]) -> Callable[P, int]:
    """Makes a nonblocking call one that queues up while suspended."""

    @functools.wraps(call)
    def start(*args: P.args, **kwargs: P.kwargs) -> int:
        if _queue is None:
            return call(*args, **kwargs)
        number = new(lambda: False, lambda: None)
        _queue[number] = functools.partial(call, *args, **kwargs)
        return number

    return start


def not_suspended(call: Callable[P, R]) -> Callable[P, R]:
    """Makes a call that cannot be put off one that is refused while suspended."""

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if _queue is not None:
            raise _suspended(f"bf.{call.__name__}")
        return call(*args, **kwargs)

    return checked


def forget_all() -> None:
    """Drops handles that nobody has waited for, and what is held back."""
    global _queue
    _running.clear()
    _queue = None


def _suspended(what: str) -> UserError:
    return UserError(f"{what} is held back by bf.suspend(): call bf.resume() first")


def _fail(error: Exception) -> None:
    raise error


def _found(handle: int) -> tuple[Callable[[], bool], Callable[[], Any]]:
    if handle not in _running:
        raise UserError(f"no operation has the handle {handle!r}; it may have been waited for")
    return _running[handle]
