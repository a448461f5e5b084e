"""Leaving at different times: who is done waits for the others, and looks around meanwhile."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from dear.comm import peers, runtime
from dear.comm.peers import Departures


def _leave(late_s: float) -> tuple[float, int]:
    communicator = runtime.communicator()
    leaving, looks = Departures(communicator), []
    dist.barrier()
    began = time.monotonic()
    if communicator.rank == 1:
        time.sleep(late_s)
    leaving.done()
    leaving.wait(20.0, lambda: looks.append(1))
    return time.monotonic() - began, len(looks)


def test_a_rank_that_is_much_later_is_waited_for(world):
    late_s = 2.5 * peers.LOOK_S
    (waited_s, looks), (_, none) = world(2).run(_leave, late_s)
    assert waited_s >= 0.9 * late_s and looks >= 1
    assert none == 0


def _never() -> str:
    communicator = runtime.communicator()
    leaving = Departures(communicator)
    if communicator.rank == 1:
        return ""
    leaving.done()
    with pytest.raises(RuntimeError) as caught:
        leaving.wait(1.2, lambda: None)
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(world):
    assert world(2).run(_never)[0] == "rank 0 is done, but after 1.2 s rank 1 is not"
