"""Programs of ranks that test a backend of torch.distributed, besides its operations' results."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dear.comm.communicator import Communicator
from tests.comm.operations import TORCH, Call, Case, check, me, same, total, values


def layouts_and_autograd() -> None:
    """A transposed matrix, and what autograd watches."""
    rank, n = me()
    square = values(rank, 36).view(6, 6).t()
    dist.all_reduce(square)
    same(square, total(n, 36).view(6, 6).t(), "t()")
    watched = torch.ones(5, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(watched)
    same(watched.detach(), torch.full((5,), float(n)), "requires_grad")


def types_that_only_move() -> None:
    """Bytes of every width that no reduction is defined for, in collectives and messages."""
    rank, n = me()
    eights = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    for name in (*eights, "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32"):
        dtype = getattr(torch, name)
        width = torch.empty(0, dtype=dtype).element_size()
        for numel in (3, 50_000):
            mine, gathered = torch.zeros(numel, dtype=dtype), torch.zeros(numel * n, dtype=dtype)
            mine.view(torch.uint8).copy_(torch.arange(numel * width) % 251 + rank)
            dist.all_gather_into_tensor(gathered, mine)
            last = gathered[numel * (n - 1) :].view(torch.uint8)
            same(last, mine.view(torch.uint8) - rank + n - 1, name)
            dist.broadcast(mine, n - 1)
            same(mine.view(torch.uint8), last, name)
            if n > 1:
                got = torch.zeros_like(mine)
                request = dist.isend(mine, (rank + 1) % n)
                dist.recv(got, (rank - 1) % n)
                request.wait()
                same(got.view(torch.uint8), last, name)
    tensor = torch.full((5000,), 300 + rank).to(torch.uint16)
    dist.all_reduce(tensor)
    same(tensor.int(), torch.full((5000,), 300 * n + n * (n - 1) // 2, dtype=torch.int32))


def lopsided_exchange() -> None:
    """One rank gives much, the others little: each rank's total is its own."""
    rank, n = me()
    for much in (20_000, 300_000):
        sizes = [[much if s == 0 else 3 + s + d for d in range(n)] for s in range(n)]
        given = torch.cat([values(rank, size, salt=d) for d, size in enumerate(sizes[rank])])
        wanted = [values(s, sizes[s][rank], salt=rank) for s in range(n)]
        got = torch.zeros(sum(map(len, wanted)))
        dist.all_to_all_single(got, given, [len(part) for part in wanted], sizes[rank])
        same(got, torch.cat(wanted), much)


def messages() -> None:
    """Tags in any order, sizes on both sides of the eager limit, several under way."""
    rank, n = me()
    if n == 1:
        return
    to, source = (rank + 1) % n, (rank - 1) % n
    for numel in (0, 1, 1000, 4096, 4097, 1000003):
        sends = [dist.isend(values(rank, numel, salt=t), to, tag=t) for t in range(4)]
        for tag in (2, 0, 3, 1):
            got = torch.empty(numel)
            assert dist.recv(got, source, tag=tag) == source
            same(got, values(source, numel, salt=tag), (numel, tag))
        for send in sends:
            send.wait()
    # Receives posted first, messages of one tag in their order.
    got = [torch.empty(9) for _ in range(5)]
    receives = [dist.irecv(t, source, tag=7) for t in got]
    dist.barrier()
    for k in range(5):
        dist.send(values(rank, 9, salt=k), to, tag=7)
    for k, receive in enumerate(receives):
        receive.wait()
        same(got[k], values(source, 9, salt=k), ("order", k))
    # From anybody.
    for numel in (3, 50001):
        dist.barrier()
        if rank > 0:
            dist.send(values(rank, numel), 0, tag=rank % 2)
            continue
        seen = []
        for k in range(1, n):
            got = torch.empty(numel)
            seen.append(dist.recv(got, None, tag=k % 2))
            same(got, values(seen[-1], numel), ("anybody", seen))
        assert sorted(seen) == list(range(1, n))


def barriers() -> None:
    rank, n = me()
    for late in range(n):
        if rank == late:
            time.sleep(0.02)
        came = time.monotonic()
        dist.barrier()
        left = torch.tensor([time.monotonic(), came], dtype=torch.float64)
        everyone = torch.empty(n * 2, dtype=torch.float64)
        dist.all_gather_into_tensor(everyone, left)
        assert everyone.view(n, 2)[:, 0].min() >= everyone.view(n, 2)[:, 1].max()
    # dist.monitored_barrier itself turns away every backend but gloo.
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), True)


def futures() -> None:
    """Works and their futures, before and after the end; tensors that nobody else keeps."""
    rank, n = me()
    work = dist.all_reduce(tensor := values(rank, 1000), async_op=True)
    half = work.get_future().then(lambda done: done.value()[0] / 2)
    same(half.wait(), total(n, 1000) / 2, "then")
    same(tensor, total(n, 1000))
    called, seen = threading.Event(), []
    works = [dist.all_reduce(values(rank, 1000, salt=k), async_op=True) for k in range(10)]
    all_of = torch.futures.collect_all([work.get_future() for work in works])
    all_of.add_done_callback(lambda done: (seen.extend(done.value()), called.set()))
    all_of.wait()
    assert called.wait(20) and len(seen) == 10
    for work in [dist.all_reduce(torch.ones(10000), async_op=True) for _ in range(50)][::-1]:
        assert work.wait() and work.is_completed() and work.is_success()
        assert work.get_future().done()
        if torch.__version__ >= (2, 12):  # torch 2.11 cannot convert its own result
            assert work.exception() is None
        work.get_future().wait()
    dist.barrier()


def sub_groups() -> None:
    """Several alive at a time, destroyed in other orders than made, used from several threads."""
    rank, n = me()
    job = list(range(n))
    members = [ranks for ranks in (job[::2], job[1::2], job, job) if ranks]
    groups = [(ranks, dist.new_group(ranks)) for ranks in members]
    for ranks, group in groups:
        some = [Case(name, root=len(ranks) - 1) for name in TORCH]
        if rank in ranks:
            check(TORCH, some, group=group)
    # In flight in both groups at once, submitted in different orders.
    both = [group for _, group in groups[-2:]]
    calls = [Call(Case("all_reduce", numel=70000), rank, n, group) for group in both]
    for wait in [TORCH["all_reduce"](call) for call in (calls if rank % 2 else calls[::-1])]:
        wait()
    for call in calls:
        call.check()
    with ThreadPoolExecutor() as threads:
        for run in [threads.submit(check, TORCH, some * 10, 3, group) for group in both]:
            run.result()
    for ranks, group in [groups[-1], *groups[:-1]]:
        if rank in ranks:
            dist.destroy_process_group(group)
    unharmed("sub_groups")


def times_and_events() -> None:
    import comm_core

    rank, n = me()
    before = time.monotonic()
    works = [dist.all_reduce(values(rank, 20000), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    after = time.monotonic()
    for work in works:
        times = work.times()
        assert before <= times.enqueued_s <= times.started_s <= times.finished_s <= after
    ends = [work.times().finished_s for work in works]
    assert ends == sorted(ends)
    with comm_core.priority(3):
        dist.broadcast(values(rank, 11, torch.int16), 0)
    events = comm_core.events()[-4:]
    assert [e["operation"] for e in events] == ["all_reduce"] * 3 + ["broadcast"]
    assert [e["nbytes"] for e in events] == [80000] * 3 + [22]
    assert [e["dtype"] for e in events] == ["float32"] * 3 + ["int16"]
    assert [e["priority"] for e in events] == [0, 0, 0, 3]
    assert all(e["ok"] for e in events)
    numbers = [e["sequence"] for e in events]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert [e["finished_s"] for e in events[:3]] == ends
    awaited = comm_core.last_awaited_s()
    assert awaited == events[-1]["finished_s"]
    idle_since, idle_until = comm_core.lulls_s(events[-2]["finished_s"])[0]
    assert idle_until == events[-1]["enqueued_s"] and idle_since == events[-2]["finished_s"]
    if n == 1:
        return  # what this rank does alone has ended before the next begins
    # Operations of which each begins before the one before has ended leave no lull.
    large = torch.ones(10_000_000)
    works = [dist.all_reduce(large, async_op=True) for _ in range(3)]
    elsewhere = threading.Thread(target=works[-1].wait)
    elsewhere.start()
    elsewhere.join()
    assert comm_core.last_awaited_s() == awaited
    works[0].wait()  # it has long ended
    assert comm_core.last_awaited_s() == works[0].times().finished_s
    lull = events[-1]["finished_s"], works[0].times().enqueued_s
    assert comm_core.lulls_s(idle_until) == [lull]
    assert comm_core.lulls_s(idle_until - 1e-9) == [(idle_since, idle_until), lull]
    assert comm_core.lulls_s(lull[1]) == []


def an_urgent_operation_overtakes_a_large_one() -> None:
    c = Communicator(dist.group.WORLD, channels=2)
    # A rank that is not scheduled between its two calls may let the large one end first.
    for _ in range(50):
        large = c.all_reduce(bulk := torch.ones(10_000_000), op="sum")
        urgent = c.all_reduce(small := torch.ones(100), op="sum", channel=1, priority=1)
        urgent.wait()
        large.wait()
        assert (small == c.size).all() and (bulk == c.size).all()
        overtook = urgent.times().finished_s < large.times().finished_s or c.size == 1
        everywhere = torch.tensor([float(overtook)])
        c.all_reduce(everywhere, op="min").wait()
        if everywhere.item():
            return
    raise AssertionError("it never has on all ranks")


def rests(span_s: float, least_s: float) -> None:
    """The process uses less than `least_s` of processor time in a span of `span_s`.

    Of several spans the best: in the first ones threads of other tests may still come to rest.
    """
    used = span_s
    for _ in range(20):
        before = time.process_time()
        time.sleep(span_s)
        used = min(used, time.process_time() - before)
        if used < least_s:
            return
    raise AssertionError(f"{used} s of processor time in {span_s} s")


def while_python_is_busy(
    path: str, call: Callable[[], Any], busy: Callable[[], Any] | None = None
) -> None:
    """Rank 1 calls `busy` and does not let go of Python's lock until rank 0's `call` has ended.

    Args:
        path: a file of two zeros, by which they tell each other.
    """
    rank, _n = me()
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 2) as flags:
        if rank == 0:
            while not flags[0]:
                time.sleep(0.001)
            call()
            flags[1] = 1
        if rank == 1:
            interval, until = sys.getswitchinterval(), time.monotonic() + 20
            if busy:
                busy()
            sys.setswitchinterval(60)
            flags[0] = 1
            while not flags[1] and time.monotonic() < until:
                pass
            sys.setswitchinterval(interval)
            assert flags[1], "it ended only after Python let go of its lock"


def progress(path: str) -> None:
    tensor, works = torch.ones(2_000_000), []

    def start() -> None:
        works.append(dist.all_reduce(tensor, async_op=True))

    while_python_is_busy(path, lambda: (start(), works[0].wait()), start)
    works[0].wait()
    same(tensor, torch.full_like(tensor, 2.0))


def _trained(
    shard: Callable[[torch.nn.Module, dist.ProcessGroup], torch.nn.Module], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(30, 64), torch.nn.ReLU(), torch.nn.Linear(64, 33), torch.nn.Linear(33, 7)
    )
    called = shard(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(me()[0])
    for _ in range(4):
        optimizer.zero_grad()
        called(torch.randn(8, 30, generator=generator)).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in whole]


def ddp_and_fsdp() -> None:
    """DDP and FSDP train as over Gloo."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def by_ddp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.005
        )

    def by_fsdp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    gloo, results = dist.new_group(backend="gloo"), []
    for shard in (by_ddp, by_fsdp):
        for group in (gloo, dist.group.WORLD):
            results.append(_trained(shard, group))
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    dist.destroy_process_group(gloo)


def meet_again(folder: str, ports: list[int]) -> None:
    """The world ends and begins again, over several kinds of rendezvous, groups still alive."""
    rank, n = me()
    place, stores = {"rank": rank, "world_size": n}, []
    dist.destroy_process_group()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the pool's; here rank 0 serves
    for turn, how in enumerate(("file", "file", "file", "store", "tcp", "env", "file")):
        store = dist.FileStore(f"{folder}/{turn}", n)
        if how == "store":
            store = dist.TCPStore("127.0.0.1", ports[0], n, is_master=rank == 0)
        stores.append(store)  # others may still need the one of rank 0
        if how == "tcp":
            dist.init_process_group("comm_core", init_method=f"tcp://127.0.0.1:{ports[1]}", **place)
        elif how == "env":
            names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[2])}
            os.environ.update(names, RANK=str(rank), WORLD_SIZE=str(n))
            dist.init_process_group("cpu:comm_core", init_method="env://")
        else:
            backend = "cpu:comm_core" if turn == 1 else "comm_core"
            dist.init_process_group(backend, store=store, **place)
        other = dist.new_group()
        tensor = values(rank, 3000)
        dist.all_reduce(tensor, group=other if turn == 2 else None)
        same(tensor, total(n, 3000), turn)
        if turn < 6:
            dist.destroy_process_group()


def unharmed(what: object = "") -> None:
    """The world still works."""
    rank, n = me()
    tensor = values(rank, 10)
    dist.all_reduce(tensor)
    same(tensor, total(n, 10), what)
