"""Limits that a long job meets: many groups, freed memory, mistakes, an exhausted machine."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import comm_core
from dear.comm.communicator import Communicator
from tests.comm import worlds
from tests.comm.operations import me
from tests.ranks import RankPool

MIB = 1 << 20


def _pool(name: str) -> Iterator[RankPool]:
    with worlds.pool(name) as pool:
        yield pool


PAIRS = ["shm2", pytest.param("tcp2", marks=pytest.mark.full)]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with worlds.lent(request.param) as pool:
        yield pool


@pytest.fixture(params=PAIRS)
def own_pair(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """A world for one test, after which an engine may go on in another way."""
    yield from _pool(request.param)


@pytest.fixture(params=["shm4", "tcp4", "hosts0011"])
def four(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from _pool(request.param)


def _all_in_flight(count: int) -> None:
    rank, n = me()
    groups = [dist.new_group() for _ in range(count)]
    tensors = [torch.full((100,), 1.0 + index) for index in range(count)]
    step = [1, count - 1, 5, count // 2 + 1][rank]  # each goes through all of them, its own way
    works = {}
    for turn in range(count):
        index = (rank + turn * step) % count
        works[index] = dist.all_reduce(tensors[index], group=groups[index], async_op=True)
    for work in works.values():
        work.wait()
    assert len(works) == count
    for index, tensor in enumerate(tensors):
        assert (tensor == n * (1.0 + index)).all()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("count", [71, pytest.param(257, marks=pytest.mark.full)])
def test_groups_may_all_be_in_flight_in_another_order_on_each_rank(four, count):
    four.run(_all_in_flight, count)


def _shared_kib(field: str = "RssShmem") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _buffers_come_and_go() -> int:
    for _ in range(3):
        dist.all_reduce(comm_core.empty(4 * MIB))
    dist.barrier()
    before = _shared_kib()
    for _ in range(12):
        tensor = comm_core.empty(4 * MIB)
        dist.all_reduce(tensor.fill_(1.0))
        assert tensor[-1] == 2
    del tensor
    dist.barrier()
    return _shared_kib() - before


def test_freed_buffers_take_no_memory_of_the_peers_that_read_them():
    with worlds.pool("shm2") as ranks:
        assert max(ranks.run(_buffers_come_and_go)) < 2 * 16 * 1024  # of 12 of 16 MiB


def _after_a_mistake_among_parts(how: str) -> tuple[float, float]:
    rank, n = me()
    wrong = torch.empty(3, dtype=torch.float4_e2m1fn_x2)
    with pytest.raises(TypeError):
        if how == "batch":
            dist.batch_isend_irecv([dist.P2POp(dist.isend, wrong, (rank + 1) % n)])
        else:
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            backend._start_coalescing()
            dist.send(wrong, (rank + 1) % n)
    for _ in range(3):
        dist.all_reduce(torch.ones(MIB))
    dist.barrier()
    before = _shared_kib("RssAnon")
    for _ in range(40):
        dist.all_reduce(tensor := torch.ones(MIB))
    return tensor[0].item(), (_shared_kib("RssAnon") - before) / 1024


@pytest.mark.parametrize("how", ["batch", "block"])
def test_a_mistake_among_parts_of_one_operation_keeps_nothing_of_those_to_come(pair, how):
    for value, grown_mib in pair.run(_after_a_mistake_among_parts, how):
        assert value == 2  # it was done at all
        assert grown_mib < 60  # of 160


def _nobody_waits() -> list[str]:
    rank, _n = me()
    texts = []
    for _ in range(4):
        group = dist.new_group(timeout=timedelta(seconds=0.4))
        dist.all_reduce(torch.ones(100_000), group=group)
        if rank == 1:
            time.sleep(0.05)  # the other one waits in the kernel then
            dist.all_reduce(torch.ones(100_000), group=group)
        else:
            work = dist.irecv(torch.zeros(4), 1, group=group)
            dist.all_reduce(torch.ones(100_000), group=group)
            until = time.monotonic() + 20
            while not work.is_completed() and time.monotonic() < until:
                time.sleep(0.01)
            assert work.is_completed()
            with pytest.raises(dist.DistBackendError) as caught:
                work.wait()
            texts.append(str(caught.value))
        dist.barrier()
        dist.destroy_process_group(group)
    return texts


def test_the_time_of_a_message_ends_though_nobody_waits_for_it(pair):
    texts, _none = pair.run(_nobody_waits)
    assert len(texts) == 4
    for text in texts:
        assert "timed out waiting for rank 1" in text
        assert text.count("recv #0") == 1


def _held_alone() -> None:
    c = Communicator(dist.group.WORLD, channels=2)
    bulk, small = torch.ones(1 << 20), torch.ones(100)
    for channel in range(2):
        c.all_reduce(small, op="sum", channel=channel).wait()
    if c.rank == 0:
        works = [c.all_reduce(small, op="sum", channel=1, priority=1)]
        works += [c.all_reduce(bulk, op="sum")]
    else:
        works = [c.all_reduce(bulk, op="sum")]
        time.sleep(0.3)
        assert not works[0].done()
        works += [c.all_reduce(small, op="sum", channel=1, priority=1)]
    for work in works:
        work.wait()
    assert (bulk == 2).all() and (small == 8).all()


def test_on_a_slower_network_less_urgent_operations_wait_for_longer():
    """Rank 0 sends the less urgent operation after 10 s; with time scale 1, after 1 ms."""
    places = [{**place, "COMM_CORE_TIME_SCALE": "10000"} for place in worlds.environments("tcp2")]
    ranks = RankPool(2, 60.0, "comm_core", places)
    try:
        ranks.run(_held_alone)
    finally:
        ranks.close()


def _urgent_beside(how: str) -> bool:
    """Returns whether the large operation is still under way when the urgent one has ended."""
    rank, _n = me()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    small, group = torch.ones(16), dist.new_group()
    for _ in range(3):
        dist.all_reduce(small, group=group)
    large = torch.ones(64 * MIB)
    if how == "own copy":
        work = dist.all_gather_into_tensor(
            torch.empty_like(large), large, group=alone, async_op=True
        )
    else:
        work = dist.all_reduce(large.view(2, -1).t(), group=alone, async_op=True)
    with comm_core.priority(1):
        dist.all_reduce(small, group=group)
    overtaken = not work.is_completed()
    work.wait()
    return overtaken


@pytest.mark.parametrize("how", ["own copy", "copy of a result"])
def test_copies_of_one_rank_let_urgent_operations_pass(own_pair, how):
    assert any(any(own_pair.run(_urgent_beside, how)) for _ in range(5))


def _averages(values: float, dtype: torch.dtype) -> None:
    n = dist.get_world_size()
    for count in (3, 5000, 300_000):
        tensor = torch.full((count * n,), values, dtype=dtype)
        tensor[::2] = -1.5
        expected = tensor.clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert (tensor == expected).all()
        whole = expected.repeat(n)
        part = torch.empty_like(expected)
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG)
        assert (part == expected).all()
        dist.reduce(tensor := expected.clone(), 0, dist.ReduceOp.AVG)
        assert dist.get_rank() > 0 or (tensor == expected).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 40_000.0) for name in ("shm4", "tcp4", "hosts0011")),
        pytest.param("tcp9", 36_864.0, marks=pytest.mark.full),  # ranks pass sums on in pairs
    ],
)
def test_an_average_is_right_though_its_sum_would_overflow(name, value):
    with worlds.pool(name) as ranks:
        ranks.run(_averages, value, torch.float16)


def _waits_once_for_all() -> float:
    rank, _n = me()
    began = time.monotonic()
    if rank == 0:
        tensors = [torch.zeros(4) for _ in range(8)]
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend._start_coalescing()
        for tag, tensor in enumerate(tensors):
            dist.group.WORLD.recv([tensor], 1, tag)
        work = backend._end_coalescing()
        with pytest.raises(dist.DistBackendError, match="still running after a wait of 200 ms"):
            work.wait(timedelta(seconds=0.2))
        took_s = time.monotonic() - began
        work.wait()
        return took_s
    for tag in range(8):
        time.sleep(0.1)
        dist.send(torch.ones(4), 0, tag=tag)
    return 0.0


def test_the_time_to_wait_is_that_of_all_parts_together(pair):
    assert pair.run(_waits_once_for_all)[0] < 0.7  # of 0.8 s


def _waits_beside_another_group() -> bool:
    """Returns whether the time is up though this rank's engine never rests."""
    rank, _n = me()
    group, flood = dist.new_group(), dist.new_group()
    large = torch.ones(32 * MIB)
    dist.barrier()
    works = [dist.all_reduce(large, group=flood, async_op=True) for _ in range(8)]
    ended = True
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        with pytest.raises(dist.DistBackendError, match="still running"):
            work.wait(timedelta(seconds=0.05))
        ended = works[-1].is_completed()
    for each in works:
        each.wait()
    if rank == 1:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    work.wait()
    return not ended


def test_the_time_to_wait_ends_though_others_move(pair):
    assert pair.run(_waits_beside_another_group)[0]


@contextlib.contextmanager
def _limit(what: int, most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@contextlib.contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """Also what is not said in Python."""
    before = os.dup(2)
    with path.open("a") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _without_room_for_shared_memory(poor: int, errors: Path) -> str:
    limit = MIB // 4 if me()[0] == poor else resource.RLIM_INFINITY
    with _stderr_in(errors), _limit(resource.RLIMIT_FSIZE, limit):
        group = dist.new_group()
    dist.all_reduce(tensor := torch.ones(100_000), group=group)
    assert (tensor == me()[1]).all()
    summary = group._get_backend(torch.device("cpu")).summary()
    dist.destroy_process_group(group)
    return summary


@pytest.mark.parametrize("name, hosts", [("shm3", 1), ("hosts0011", 2)])
def test_where_a_host_has_no_room_for_shared_memory_tcp_is_taken_and_it_is_said(
    name, hosts, tmp_path
):
    with worlds.pool(name) as ranks:
        for summary in ranks.run(_without_room_for_shared_memory, 0, tmp_path / "errors"):
            assert f"on {hosts} hosts, TCP between" in summary
    errors = (tmp_path / "errors").read_text()
    assert errors.count("uses TCP inside hosts, too, which is slower") == 1
    assert "no room for" in errors and "rank 0 (host" in errors


def _out_of_descriptors(ready: Path) -> float:
    """Rank 1 connects while rank 0 can accept nothing."""
    rank, _n = me()
    group = dist.new_group()
    if rank == 1:
        while not ready.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        request = dist.isend(torch.full((4,), 7.0), 0, group=group)
        request.wait()
        return 7.0
    held = []
    with _limit(resource.RLIMIT_NOFILE, 300):
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        os.close(held.pop())
        ready.touch()
        held.append(os.open("/dev/null", os.O_RDONLY))
        time.sleep(0.8)
        for descriptor in held:
            os.close(descriptor)
    dist.recv(received := torch.zeros(4), 1, group=group)
    return received[0].item()


def test_who_connects_while_descriptors_are_out_is_let_in_later(own_pair, tmp_path):
    assert own_pair.run(_out_of_descriptors, tmp_path / "ready") == [7.0, 7.0]


def _host_and_port() -> str:
    return dist.group.WORLD._get_backend(torch.device("cpu")).summary().rpartition(" at ")[2]


def _among_silent_strangers(ready: Path) -> None:
    """Runs with the 1024 descriptors that a process usually has; training needs some, too."""
    with _limit(resource.RLIMIT_NOFILE, 1024):
        if me()[0] == 0:
            ready.touch()
            while ready.exists():
                time.sleep(0.01)
            with open(os.devnull):
                pass
        dist.barrier()
        group = dist.new_group()
        dist.all_reduce(tensor := torch.ones(4), group=group)
        assert (tensor == 2).all()
        dist.destroy_process_group(group)


def test_strangers_take_no_descriptors_that_the_process_needs(own_pair, tmp_path):
    host, port = own_pair.run(_host_and_port)[0].split(":")
    ready = tmp_path / "ready"
    for pipe in own_pair.pipes.values():
        pipe.send((_among_silent_strangers, (ready,)))
    while not ready.exists():
        time.sleep(0.01)
    strangers = []
    try:
        for _ in range(1500):
            stranger = socket.socket()
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                stranger.connect((host, int(port)))
            strangers.append(stranger)
        time.sleep(0.2)
        ready.unlink()
        for pipe in own_pair.pipes.values():
            assert pipe.poll(60)
            ok, value = pipe.recv()
            assert ok, value
    finally:
        for stranger in strangers:
            stranger.close()
