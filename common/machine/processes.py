"""Calls in several processes, as many at a time as there are cores."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from common.machine.cgroups import usable_cores

T = TypeVar("T")


def spread(
    call: Callable[..., T],
    *arguments: Sequence[object],
    begin: Callable[[], object] | None = None,
    preload: Sequence[str] = (),
) -> list[T]:
    """Returns the results of `call` in order, as `map` does; all of it must be picklable.

    A single call runs here, because a process needs seconds to import torch.

    Args:
        begin, preload: as for `started`.
    """
    if len(arguments[0]) == 1:
        return [call(*(values[0] for values in arguments))]
    with started(len(arguments[0]), begin, preload) as pool:
        return list(pool.map(call, *arguments))


@contextlib.contextmanager
def started(
    most: int | None = None,
    begin: Callable[[], object] | None = None,
    preload: Sequence[str] = (),
) -> Iterator[ProcessPoolExecutor]:
    """Starts a process for each core, at most `most`.

    If the block ends with an exception (Ctrl-C, too), nobody needs the calls under way: the
    processes end at once.

    Args:
        begin: called first in each process.
        preload: modules that are imported once for all processes, and for those of later calls.
    """
    # A fork of this process could not use torch if this process has done so, as in a test.
    context = multiprocessing.get_context("forkserver")
    if preload:
        preload_in_fork_server(preload)
    count = usable_cores() if most is None else max(1, min(usable_cores(), most))
    given = (dict(os.environ), begin)  # the fork server has the environment of its start
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, context, initializer=_begin, initargs=given) as pool:
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def preload_in_fork_server(modules: Sequence[str]) -> None:
    """Has this process's fork server import the modules, if it has not started yet.

    The server is the parent of the processes that `multiprocessing` starts by "forkserver".
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*modules, "common.machine.fork_server_end"])


def _begin(environment: Mapping[str, str], begin: Callable[[], object] | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if begin is not None:
        begin()
