"""What the ranks do in tests/comm/test_core_faults.py, until a fault ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

Say = Callable[[object], None]

CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "reduce_scatter": lambda t: dist.reduce_scatter_tensor(
        t[: t.numel() // dist.get_world_size()], t
    ),
    "all_gather": lambda t: dist.all_gather_into_tensor(
        t, t[: t.numel() // dist.get_world_size()].clone()
    ),
    "barrier": lambda t: dist.barrier(),
}


def loop(rank: int, say: Say, call: str, numel: int) -> None:
    """Until an error ends it."""
    tensor = torch.zeros(numel)
    CALLS[call](tensor)
    say("started")
    while True:
        CALLS[call](tensor)


def loop_or_leave(rank: int, say: Say, leaver: int, how: str) -> None:
    """All but one go on; he destroys his group, or just returns, or fails."""
    tensor = torch.zeros(100000)
    for _ in range(5):
        dist.all_reduce(tensor)
    if rank == leaver:
        if how == "destroys":
            dist.destroy_process_group()
        if how == "disagrees":
            try:
                dist.all_reduce(tensor.int())
            finally:
                dist.destroy_process_group()
        return
    while True:
        dist.all_reduce(tensor)


def receive_from_leaver(rank: int, say: Say, what: str) -> None:
    """Rank 1 leaves; the others wait for its message, or for it to take theirs."""
    if rank == 1:
        time.sleep(0.3)
        dist.send(torch.full((5,), 7.0), 0)
        dist.destroy_process_group()
        return
    group = torch.zeros(5)
    if rank == 0:
        dist.recv(group, 1)  # what was sent before the end arrives
        assert group.sum() == 35
    if what == "recv":
        dist.recv(torch.zeros(5), 1)
    elif what == "recv late":
        time.sleep(0.6)
        dist.recv(torch.zeros(5), 1)
    elif what == "send":
        dist.send(torch.zeros(100000), 1)
    else:
        time.sleep(0.6)
        dist.send(torch.zeros(100000), 1)


def late_barrier(rank: int, say: Say, wait_all: bool) -> None:
    """The last two ranks do not come."""
    say("there")
    if rank >= dist.get_world_size() - 2:
        time.sleep(3)
        return
    dist.group.WORLD.monitored_barrier(timedelta(seconds=1), wait_all)


def exits_at_once(rank: int, say: Say) -> None:
    """The interpreter ends in the middle of things, as after an uncaught exception."""
    if rank == 1:
        import comm_core

        dist.all_reduce(torch.zeros(100000), async_op=True)
        comm_core._core.shut_down()
        return
    loop(rank, say, "all_reduce", 100000)


def serve_while_strangers_come(rank: int, say: Say, seconds: float) -> tuple[int, float, float]:
    """Dropped connections, the longest operation, and the processor's seconds."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    tensor = torch.ones(50000)
    dist.all_reduce(tensor)
    dropped = backend.dropped_connections()
    say(backend.summary())
    until, longest = time.monotonic() + seconds, 0.0
    running = torch.ones(1)
    while running.item() > 0:
        begin = time.monotonic()
        tensor.fill_(1)
        dist.all_reduce(tensor)
        longest = max(longest, time.monotonic() - begin)
        assert tensor[0] == dist.get_world_size()
        running.fill_(float(begin < until))
        dist.broadcast(running, 0)
        time.sleep(0.002)
    # New groups still find each other.
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    request = dist.isend(torch.ones(3), (rank + 1) % dist.get_world_size())
    dist.recv(torch.ones(3), (rank - 1) % dist.get_world_size())
    request.wait()
    return backend.dropped_connections() - dropped, longest, time.process_time()


def wait_idle(rank: int, say: Say, seconds: float) -> float:
    begin = time.process_time()
    say(dist.group.WORLD._get_backend(torch.device("cpu")).summary())
    time.sleep(seconds)
    return time.process_time() - begin
