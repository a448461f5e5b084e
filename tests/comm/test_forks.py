"""A forked child has its parent's memory, and nothing of its connections and threads."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.comm import worlds
from tests.ranks import RankPool

SAID_SO, SOMETHING_ELSE = 7, 8


@pytest.fixture(params=["shm2", "tcp2"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with worlds.pool(request.param) as pool:
        yield pool


def _in_a_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does `work` and ends as a script does."""
    child = os.fork()
    if child == 0:
        status = SOMETHING_ELSE
        try:
            signal.alarm(20)
            work()
            atexit._run_exitfuncs()
            gc.collect()
            status = 0
        except RuntimeError as error:
            status = SAID_SO if "forked child" in str(error) else SOMETHING_ELSE
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _sum_is_right() -> None:
    values = torch.ones(1000)
    dist.all_reduce(values)
    assert (values == dist.get_world_size()).all()


def _a_child_ends(how: str) -> int:
    import comm_core

    held = {"buffer": comm_core.empty(1 << 16).fill_(1.0)}
    dist.all_reduce(held["buffer"])
    held["buffer"].fill_(1.0)

    def work() -> None:
        held.clear()  # the parent's is not freed by that
        if how == "destroys":
            dist.destroy_process_group()
        if how == "leaves Python":
            ctypes.pythonapi.Py_Exit(0)  # as `sys.exit`: all that Python has is taken apart

    status = _in_a_child(work)
    shared = held["buffer"]
    assert (shared == 1.0).all()
    for _ in range(3):
        _sum_is_right()
        dist.all_reduce(shared)
    assert (shared == dist.get_world_size() ** 3).all()
    return status


@pytest.mark.parametrize("how", ["ends", "destroys", "leaves Python"])
def test_a_child_that_ends_harms_nobody(ranks, how):
    assert ranks.run(_a_child_ends, how) == [0, 0]


def _a_child_communicates() -> list[int]:
    _sum_is_right()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    late = dist.irecv(torch.empty(3), 1 - dist.get_rank())
    statuses = [
        _in_a_child(_sum_is_right),
        _in_a_child(lambda: dist.send(torch.ones(3), 1 - dist.get_rank())),
        _in_a_child(late.wait),
        _in_a_child(work.wait),  # it has ended
    ]
    dist.send(torch.ones(3), 1 - dist.get_rank())
    late.wait()
    _sum_is_right()
    return statuses


def test_a_child_that_communicates_is_told_that_it_cannot(ranks):
    assert ranks.run(_a_child_communicates) == [[SAID_SO, SAID_SO, SAID_SO, 0]] * 2


def _dies_beside_a_child() -> float | None:
    _sum_is_right()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1000))
    except RuntimeError:
        return time.monotonic() - began
    return None


def test_the_end_of_a_rank_is_heard_though_its_child_lives(ranks):
    (took_s,) = worlds.run_without(ranks, 1, _dies_beside_a_child)
    assert took_s is not None and took_s < 5
