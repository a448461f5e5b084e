"""Calls in several processes, as many at a time as there are cores."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from common.machine.cgroups import usable_cores

T = TypeVar("T")


def spread(
    call: Callable[..., T],
    *arguments: Sequence[object],
    begin: Callable[[], object] | None = None,
) -> list[T]:
    """Returns the results of `call` in order, as `map` does; all of it must be picklable.

    A single call runs here, because a process needs seconds to import torch.

    Args:
        begin: called first in each process.
    """
    if len(arguments[0]) == 1:
        return [call(*(values[0] for values in arguments))]
    with started(len(arguments[0]), begin) as pool:
        return list(pool.map(call, *arguments))


@contextlib.contextmanager
def started(
    most: int | None = None, begin: Callable[[], object] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Starts a process for each core, at most `most`; each calls `begin` first."""
    # A forked process cannot use torch if this process has done so, as in a test.
    context = multiprocessing.get_context("spawn")
    count = usable_cores() if most is None else max(1, min(usable_cores(), most))
    with ProcessPoolExecutor(count, context, initializer=begin) as pool:
        yield pool
