"""Calls in several processes, as many at a time as there are cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
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
    # A forked process cannot use torch if this process has done so, as in a test.
    context = multiprocessing.get_context("spawn")
    count = max(1, min(usable_cores(), len(arguments[0])))
    with ProcessPoolExecutor(count, context, initializer=begin) as pool:
        return list(pool.map(call, *arguments))
