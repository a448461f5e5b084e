"""The backend `comm_core` of torch.distributed: every operation, on every way for the bytes."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.comm import bodies, worlds
from tests.comm.operations import TORCH, cases, coalesced, over_torch
from tests.ranks import RankPool

full = pytest.mark.full
EVERY = ["shm1", "shm3", "shm4", "tcp3", "hosts001", "hosts0011"]
MORE = ["shm2", "tcp2", "tcp4", "hosts0101"]
EIGHT = ["shm8", "tcp8", "hosts00110011"]


@pytest.fixture(scope="module")
def open_pools() -> Iterator[dict[str, RankPool]]:
    pools: dict[str, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, open_pools: dict[str, RankPool]) -> RankPool:
    """A pool for each world, for all tests here; a new one after a failure."""
    name = request.param
    if name not in open_pools or open_pools[name].broken:
        for pool in open_pools.values():
            pool.close()
        places = worlds.environments(name)
        open_pools[name] = RankPool(len(places), 60.0, "comm_core", places)
    return open_pools[name]


def in_worlds(*names: str) -> pytest.MarkDecorator:
    """All tests of one world, one after the other."""
    params = [name if name in EVERY else pytest.param(name, marks=full) for name in names]
    return pytest.mark.parametrize("ranks", params, indirect=True, scope="module")


@functools.cache
def _cases(size: int) -> list:
    # Those into one tensor want it in one piece.
    return cases(size, list(TORCH), gaps=lambda name: " " not in name)


@in_worlds(*EVERY, *MORE, *EIGHT)
def test_operations(ranks: RankPool):
    chosen = _cases(len(ranks.pipes))
    ranks.run(over_torch, chosen)
    ranks.run(over_torch, chosen, 40)
    ranks.run(coalesced)


BODIES = [
    bodies.layouts_and_autograd,
    bodies.types_that_only_move,
    bodies.lopsided_exchange,
    bodies.messages,
    bodies.barriers,
    bodies.futures,
    bodies.sub_groups,
    bodies.times_and_events,
    bodies.an_urgent_operation_overtakes_a_large_one,
]


@in_worlds(*EVERY, *MORE)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_else_a_backend_does(ranks: RankPool, body: Callable[[], None]):
    ranks.run(body)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for server in sockets:
        server.bind(("127.0.0.1", 0))
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


@in_worlds(*EVERY, *MORE)
def test_the_world_ends_and_begins_again(ranks: RankPool, tmp_path):
    ranks.run(bodies.meet_again, str(tmp_path), _free_ports(3))


@in_worlds("shm4", "tcp3")
def test_ddp_and_fsdp_train_as_over_gloo(ranks: RankPool):
    ranks.run(bodies.ddp_and_fsdp)


@in_worlds("shm2", "tcp2")
def test_an_operation_goes_on_while_python_is_busy(ranks: RankPool, tmp_path):
    (tmp_path / "flags").write_bytes(bytes(2))
    ranks.run(bodies.progress, str(tmp_path / "flags"))


def _summary() -> str:
    return dist.group.WORLD._get_backend(torch.device("cpu")).summary()


def strangers(address: tuple[str, int]) -> list[socket.socket]:
    """Garbage of several kinds, and 100 that say nothing. Returns those that stay."""
    for garbage in (b"x", b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(4096), b"\xff" * 4096):
        with socket.create_connection(address) as stranger:
            stranger.sendall(garbage)
    return [socket.create_connection(address) for _ in range(100)]


def _address(ranks: RankPool) -> tuple[str, int]:
    """Returns the address at which rank 0's engine listens."""
    host, port = ranks.run(_summary)[0].rpartition(" at ")[2].split(":")
    return host, int(port)


@pytest.mark.parametrize("name", ["shm2", "tcp2"])
def test_an_idle_group_uses_no_processor_also_when_strangers_come(name: str):
    with worlds.pool(name) as ranks:  # whose processes have nothing else to do
        ranks.run(bodies.rests, 0.5, 2e-3)
        waiting = strangers(_address(ranks))
        ranks.run(bodies.rests, 0.5, 2e-3)
        for stranger in waiting:
            stranger.close()


def _serve() -> None:
    """Operations go on until all strangers have been dropped, on rank 0; new groups meet."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    rank, n = dist.get_rank(), dist.get_world_size()
    until, dropped = time.monotonic() + 20, 0
    running = torch.ones(1)
    while running.item() > 0:
        bodies.unharmed("strangers")
        dropped = backend.dropped_connections()
        running.fill_(float(dropped < 104 and time.monotonic() < until))
        dist.broadcast(running, 0)
        time.sleep(0.002)
    assert dropped == (104 if rank == 0 else 0)
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    request = dist.isend(torch.ones(3), (rank + 1) % n)
    dist.recv(torch.ones(3), (rank - 1) % n)
    request.wait()


@full  # silent ones are dropped after 5 s
def test_strangers_harm_nothing_and_are_counted():
    with worlds.pool("hosts001") as ranks:
        waiting = strangers(_address(ranks))
        ranks.run(_serve)
        for stranger in waiting:
            stranger.close()
