"""What the ranks do in tests/comm/test_core.py: an operation against torch's result."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm import values as v
from tests.comm.values import LARGE, me, same, strided, values


def _everyone(n: int, numel: int, dtype: torch.dtype, salt: int = 0) -> list[torch.Tensor]:
    return [values(r, numel, dtype, salt) for r in range(n)]


def all_reduce(dtypes: list[torch.dtype]) -> None:
    rank, n = me()
    for dtype in dtypes:
        for op in v.reductions(dtype):
            for numel in v.sizes(n):
                tensor = values(rank, numel, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, v.reduced(_everyone(n, numel, dtype), op), (dtype, op, numel))


def all_reduce_large() -> None:
    rank, n = me()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64):
        op = ReduceOp.SUM if dtype == torch.int8 else ReduceOp.AVG
        tensor = values(rank, LARGE, dtype)
        dist.all_reduce(tensor, op)
        same(tensor, v.reduced(_everyone(n, LARGE, dtype), op), (dtype, op))


def reduce_and_scatter() -> None:
    rank, n = me()
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex128):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            for numel in v.sizes(n):
                blocks = [values(rank, numel, dtype, salt=r) for r in range(n)]
                wanted = v.reduced(_everyone(n, numel, dtype, salt=rank), op)
                output = torch.empty_like(wanted)
                dist.reduce_scatter(output, blocks, op)
                same(output, wanted, ("list", dtype, op, numel))
                output.zero_()
                dist.reduce_scatter_tensor(output, torch.cat(blocks), op)
                same(output, wanted, ("tensor", dtype, op, numel))
    blocks = [values(rank, LARGE, salt=r) for r in range(n)]
    output = torch.empty(LARGE)
    wanted = v.reduced(_everyone(n, LARGE, torch.float32, salt=rank), ReduceOp.AVG)
    dist.reduce_scatter_tensor(output, torch.cat(blocks), ReduceOp.AVG)
    same(output, wanted, "large")
    # The output may be this rank's part of the input.
    flat = torch.cat(blocks)
    dist.reduce_scatter_tensor(flat.view(n, LARGE)[rank], flat, ReduceOp.AVG)
    same(flat.view(n, LARGE)[rank], wanted, "large, in place")


def gather_everywhere(dtypes: list[torch.dtype]) -> None:
    rank, n = me()
    for dtype in dtypes:
        for numel in v.sizes(n):
            wanted = _everyone(n, numel, dtype)
            outputs = [torch.empty_like(wanted[0]) for _ in range(n)]
            dist.all_gather(outputs, wanted[rank])
            for got, expected in zip(outputs, wanted, strict=True):
                same(got, expected, ("list", dtype, numel))
            flat = torch.empty(n * numel, dtype=dtype)
            dist.all_gather_into_tensor(flat, wanted[rank])
            same(flat, torch.cat(wanted), ("tensor", dtype, numel))
    flat = torch.empty(n, LARGE)
    flat[rank] = values(rank, LARGE)
    dist.all_gather_into_tensor(flat, flat[rank])  # in place
    same(flat, torch.stack(_everyone(n, LARGE, torch.float32)), "large")


def uneven_lists() -> None:
    """Blocks of different sizes, which the lists allow."""
    rank, n = me()
    lengths = [3 * r for r in range(n)]
    outputs = [torch.empty(length) for length in lengths]
    dist.all_gather(outputs, values(rank, lengths[rank]))
    for r in range(n):
        same(outputs[r], values(r, lengths[r]), ("all_gather", r))
    for scale in (1, 50001):
        output = torch.empty(lengths[rank] * scale)
        dist.reduce_scatter(output, [values(rank, k * scale, salt=k) for k in lengths])
        numel, salt = output.numel(), lengths[rank]
        wanted = v.reduced(_everyone(n, numel, torch.float32, salt), ReduceOp.SUM)
        same(output, wanted, ("reduce_scatter", scale))


def coalesced() -> None:
    rank, n = me()
    group = dist.group.WORLD
    ins = [values(rank, n * k, salt=k) for k in (0, 1, 5, 40000)]
    outs = [torch.empty(i.numel() // n) for i in ins]
    with dist._coalescing_manager(group=group, async_ops=True) as pending:
        for output, input in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(output, input, group=group)
    pending.wait()
    for output, k in zip(outs, (0, 1, 5, 40000), strict=True):
        whole = v.reduced(_everyone(n, n * k, torch.float32, salt=k), ReduceOp.SUM)
        same(output, whole.view(n, k)[rank], ("reduce_scatter_tensor", k))
    parts = [values(rank, k) for k in (0, 1, 5, 40000)]
    wholes = [torch.empty(n * p.numel()) for p in parts]
    with dist._coalescing_manager(group=group, async_ops=True) as pending:
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part, group=group)
    pending.wait()
    for whole, k in zip(wholes, (0, 1, 5, 40000), strict=True):
        same(whole, torch.cat(_everyone(n, k, torch.float32)), ("all_gather_into_tensor", k))
    tensors = [values(rank, k) for k in (0, 1, 5, 40000)]
    with dist._coalescing_manager(group=group):  # waits itself
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    for tensor in tensors:
        wanted = v.reduced(_everyone(n, tensor.numel(), torch.float32), ReduceOp.SUM)
        same(tensor, wanted, ("all_reduce", tensor.numel()))


def rooted() -> None:
    rank, n = me()
    for root in range(n):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64):
            for numel in [*v.sizes(n), *([LARGE] if dtype == torch.float32 else [])]:
                _rooted(rank, n, root, dtype, numel)


def _rooted(rank: int, n: int, root: int, dtype: torch.dtype, numel: int) -> None:
    case = (root, dtype, numel)
    everyone = _everyone(n, numel, dtype)
    tensor = everyone[rank].clone()
    dist.broadcast(tensor, root)
    same(tensor, everyone[root], ("broadcast", case))

    tensor = everyone[rank].clone()
    dist.reduce(tensor, root)
    if rank == root:
        same(tensor, v.reduced(everyone, ReduceOp.SUM), ("reduce", case))

    outputs = [torch.empty_like(tensor) for _ in range(n)] if rank == root else None
    dist.gather(everyone[rank], outputs, root)
    for got, wanted in zip(outputs or [], everyone if outputs else [], strict=True):
        same(got, wanted, ("gather", case))

    output = torch.empty_like(tensor)
    dist.scatter(output, everyone if rank == root else None, root)
    same(output, everyone[rank], ("scatter", case))


def all_to_all() -> None:
    rank, n = me()
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex128):
        for numel in [*v.sizes(n), *([LARGE // n] if dtype == torch.float32 else [])]:
            inputs = [values(rank, numel, dtype, salt=r) for r in range(n)]
            wanted = [values(r, numel, dtype, salt=rank) for r in range(n)]
            outputs = [torch.empty_like(t) for t in wanted]
            dist.all_to_all(outputs, inputs)
            for got, expected in zip(outputs, wanted, strict=True):
                same(got, expected, ("list", dtype, numel))
            flat = torch.empty(n * numel, dtype=dtype)
            dist.all_to_all_single(flat, torch.cat(inputs))
            same(flat, torch.cat(wanted), ("single", dtype, numel))
    for scale in (1, 30011):
        # From rank s to rank d go (s + 2 d) % 3 rows of two columns.
        rows = [[(s + 2 * d) % 3 * scale for d in range(n)] for s in range(n)]
        mine = [values(rank, 2 * rows[rank][d], salt=d).view(-1, 2) for d in range(n)]
        wanted = [values(s, 2 * rows[s][rank], salt=rank).view(-1, 2) for s in range(n)]
        output = torch.empty(sum(rows[s][rank] for s in range(n)), 2)
        received = [rows[s][rank] for s in range(n)]
        dist.all_to_all_single(output, torch.cat(mine), received, rows[rank])
        same(output, torch.cat(wanted), ("uneven", scale))
        outputs = [torch.empty_like(t) for t in wanted]
        dist.all_to_all(outputs, mine)
        same(torch.cat(outputs), torch.cat(wanted), ("uneven list", scale))


def non_contiguous() -> None:
    """Every operation with gaps in its inputs and outputs."""
    rank, n = me()
    for numel in (7, 60001):
        everyone = _everyone(n, numel, torch.float32)
        total = v.reduced(everyone, ReduceOp.SUM)

        def empty(numel: int = numel) -> torch.Tensor:
            return strided(torch.full((numel,), -1.0))

        tensor = strided(everyone[rank])
        dist.all_reduce(tensor)
        same(tensor, total, "all_reduce")
        tensor = strided(everyone[rank])
        dist.broadcast(tensor, n - 1)
        same(tensor, everyone[n - 1], "broadcast")
        tensor = strided(everyone[rank])
        dist.reduce(tensor, 0)
        same(tensor, total if rank == 0 else everyone[rank], "reduce")
        outputs = [empty() for _ in range(n)]
        dist.all_gather(outputs, strided(everyone[rank]))
        for got, wanted in zip(outputs, everyone, strict=True):
            same(got, wanted, "all_gather")
        outputs = [empty() for _ in range(n)]
        dist.gather(strided(everyone[rank]), outputs if rank == 0 else None, 0)
        for got, wanted in zip(outputs, everyone, strict=True):
            same(got, wanted if rank == 0 else empty(), "gather")
        output = empty()
        dist.scatter(output, [strided(t) for t in everyone] if rank == 0 else None, 0)
        same(output, everyone[rank], "scatter")
        output = empty()
        dist.reduce_scatter(output, [strided(everyone[rank]) for _ in range(n)])
        same(output, total, "reduce_scatter")
        outputs = [empty() for _ in range(n)]
        dist.all_to_all(outputs, [strided(everyone[rank]) for _ in range(n)])
        for got, wanted in zip(outputs, everyone, strict=True):
            same(got, wanted, "all_to_all")
        if n > 1:
            request = dist.isend(strided(everyone[rank]), (rank + 1) % n)
            output = empty()
            dist.recv(output, (rank - 1) % n)
            request.wait()
            same(output, everyone[rank - 1], "send, recv")
    # A transposed matrix, and what autograd watches.
    square = values(rank, 36).view(6, 6).t()
    dist.all_reduce(square)
    same(square, v.reduced(_everyone(n, 36, torch.float32), ReduceOp.SUM).view(6, 6).t(), "t()")
    watched = torch.ones(5, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(watched)
    same(watched.detach(), torch.full((5,), float(n)), "requires_grad")


def messages() -> None:
    """Tags in any order, sizes on both sides of the eager limit, several under way."""
    rank, n = me()
    if n == 1:
        return
    to, source = (rank + 1) % n, (rank - 1) % n
    for numel in (0, 1, 1000, 4096, 4097, LARGE):
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


def messages_from_anybody() -> None:
    rank, n = me()
    for numel in (3, 50001):
        dist.barrier()
        if rank > 0:
            dist.send(values(rank, numel), 0, tag=rank % 2)
            continue
        seen = []
        for k in range(1, n):
            got = torch.empty(numel)
            source = dist.recv(got, None, tag=k % 2)
            same(got, values(source, numel), ("anybody", source))
            seen.append(source)
        assert sorted(seen) == list(range(1, n))


def batches() -> None:
    rank, n = me()
    if n == 1:
        return
    got = [torch.empty(20011) for _ in range(n)]
    batch = []
    for peer in range(n):
        if peer != rank:
            batch.append(dist.P2POp(dist.irecv, got[peer], peer))
            batch.append(dist.P2POp(dist.isend, values(rank, 20011, salt=peer), peer))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for peer in range(n):
        if peer != rank:
            same(got[peer], values(peer, 20011, salt=rank), ("batch", peer))


def barriers() -> None:
    rank, n = me()
    for late in range(n):
        if rank == late:
            time.sleep(0.1)
        came = time.monotonic()
        dist.barrier()
        left = torch.tensor([time.monotonic(), came], dtype=torch.float64)
        everyone = torch.empty(n * 2, dtype=torch.float64)
        dist.all_gather_into_tensor(everyone, left)
        assert everyone.view(n, 2)[:, 0].min() >= everyone.view(n, 2)[:, 1].max()
    # dist.monitored_barrier itself turns away every backend but gloo.
    dist.group.WORLD.monitored_barrier(timedelta(seconds=5))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=5), True)


def many_in_flight() -> None:
    rank, n = me()
    tensors = [values(rank, 1 + 37 * k % 5000, salt=k) for k in range(200)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    broadcasts = [values(rank, 300, salt=k) for k in range(20)]
    works += [dist.broadcast(t, k % n, async_op=True) for k, t in enumerate(broadcasts)]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() and work.is_success()
        assert work.exception() is None
    for k, tensor in enumerate(tensors):
        everyone = _everyone(n, tensor.numel(), torch.float32, salt=k)
        same(tensor, v.reduced(everyone, ReduceOp.SUM), ("all_reduce", k))
    for k, tensor in enumerate(broadcasts):
        same(tensor, values(k % n, 300, salt=k), ("broadcast", k))


def forgotten_tensors() -> None:
    """The backend keeps alive what nobody else does, and drops it afterwards."""
    _rank, n = me()
    kept = None
    for _ in range(50):
        kept = dist.all_reduce(torch.ones(10000), async_op=True)
    kept.wait()
    outputs = torch.empty(n)
    dist.all_gather_into_tensor(outputs, torch.ones(1))
    same(outputs, torch.ones(n))


def futures() -> None:
    rank, n = me()
    wanted = v.reduced(_everyone(n, 1000, torch.float32), ReduceOp.SUM)
    tensor = values(rank, 1000)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    half = future.then(lambda done: done.value()[0] / 2)
    same(half.wait(), wanted / 2, "then")
    # Before and after the end, and from several operations.
    called = threading.Event()
    seen = []
    tensors = [values(rank, 1000, salt=k) for k in range(10)]
    all_of = torch.futures.collect_all(
        [dist.all_reduce(t, async_op=True).get_future() for t in tensors]
    )
    all_of.add_done_callback(lambda done: (seen.extend(done.value()), called.set()))
    all_of.wait()
    assert called.wait(5) and len(seen) == 10
    work = dist.all_reduce(values(rank, 10), async_op=True)
    work.wait()
    assert work.get_future().done()
    work.get_future().wait()
    dist.barrier()


def sub_groups() -> None:
    """Several alive at a time, destroyed in other orders than made, used from several threads."""
    rank, n = me()
    halves = [list(range(0, n, 2)), list(range(1, n, 2))]
    groups = [(ranks, dist.new_group(ranks)) for ranks in (*halves, list(range(n))) if ranks]
    for ranks, group in groups:
        if rank not in ranks:
            continue
        tensor = values(rank, 5000)
        dist.all_reduce(tensor, group=group)
        same(tensor, v.reduced([values(r, 5000) for r in ranks], ReduceOp.SUM), ranks)
        tensor = values(rank, 5)
        dist.broadcast(tensor, ranks[-1], group=group)
        same(tensor, values(ranks[-1], 5), ("broadcast in", ranks))
    whole = groups[-1][1]
    # In flight in both groups at once, submitted in different orders.
    pair = [(values(rank, 70000, salt=s), s) for s in (0, 1)]
    order = pair if rank % 2 else pair[::-1]
    works = [
        dist.all_reduce(t, group=whole if s else dist.group.WORLD, async_op=True) for t, s in order
    ]
    for work in works:
        work.wait()
    for tensor, salt in pair:
        wanted = v.reduced(_everyone(n, 70000, torch.float32, salt), ReduceOp.SUM)
        same(tensor, wanted, "two groups")
    for ranks, group in [groups[-1], *groups[:-1]]:
        if rank in ranks:
            dist.destroy_process_group(group)
    tensor = values(rank, 100)
    dist.all_reduce(tensor)
    same(tensor, v.reduced(_everyone(n, 100, torch.float32), ReduceOp.SUM), "world")


def threads() -> None:
    """Two threads, each with a group of its own."""
    rank, n = me()
    groups = [dist.new_group() for _ in range(2)]
    failed: list[BaseException] = []

    def loop(group: dist.ProcessGroup, salt: int) -> None:
        try:
            for k in range(60):
                tensor = values(rank, 1 + 311 * k, salt=salt)
                dist.all_reduce(tensor, group=group)
                everyone = _everyone(n, tensor.numel(), torch.float32, salt)
                same(tensor, v.reduced(everyone, ReduceOp.SUM), (salt, k))
        except BaseException as error:
            failed.append(error)

    runs = [threading.Thread(target=loop, args=(g, s)) for s, g in enumerate(groups)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    for group in groups:
        dist.destroy_process_group(group)
    if failed:
        raise failed[0]


def objects() -> None:
    rank, n = me()
    mine = {"rank": rank, "text": "x" * (1 + 20000 * rank)}
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, mine)
    assert [o["rank"] for o in everyone] == list(range(n))
    assert [len(o["text"]) for o in everyone] == [1 + 20000 * r for r in range(n)]
    shared = [f"from {rank}", rank] if rank == n - 1 else [None, None]
    dist.broadcast_object_list(shared, src=n - 1)
    assert shared == [f"from {n - 1}", n - 1]
    gathered: list[Any] = [None] * n
    dist.gather_object(mine["rank"], gathered if rank == 0 else None, dst=0)
    assert gathered == (list(range(n)) if rank == 0 else [None] * n)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]


def times_and_events() -> None:
    import comm_core

    rank, _n = me()
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
    found = comm_core.events()[-4:]
    assert [e["operation"] for e in found] == ["all_reduce"] * 3 + ["broadcast"]
    assert [e["nbytes"] for e in found] == [80000] * 3 + [22]
    assert [e["dtype"] for e in found] == ["float32"] * 3 + ["int16"]
    assert [e["priority"] for e in found] == [0, 0, 0, 3]
    assert all(e["ok"] for e in found)
    numbers = [e["sequence"] for e in found]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert [e["finished_s"] for e in found[:3]] == ends


def priorities() -> None:
    """An urgent small operation, submitted last, overtakes a large one of another group."""
    import comm_core

    rank, n = me()
    if n == 1:
        return
    urgent = dist.new_group()
    dist.barrier(urgent)
    overtook = []
    for _ in range(5):
        bulk = [torch.ones(4_000_000) for _ in range(4)]
        small, whole = values(rank, 1000), torch.empty(n * 1000)
        slow = [dist.all_reduce(t, async_op=True) for t in bulk]
        with comm_core.priority(1):
            fast = dist.all_gather_into_tensor(whole, small, group=urgent, async_op=True)
        fast.wait()
        for work in slow:
            work.wait()
        overtook.append(fast.times().finished_s < slow[-1].times().finished_s)
        same(whole, torch.cat(_everyone(n, 1000, torch.float32)), "urgent")
        for tensor in bulk:
            same(tensor, torch.full_like(tensor, float(n)), "bulk")
    # A rank that is not scheduled between its calls may let the large ones end first.
    assert any(overtook)
    dist.destroy_process_group(urgent)


def idle_cpu_ms() -> float:
    dist.barrier()
    time.sleep(0.2)
    begin = time.process_time()
    time.sleep(3)
    return (time.process_time() - begin) * 1e3


def progress_while_python_is_busy() -> None:
    """The operation ends while rank 0's Python never lets go of its lock."""
    import sys

    rank, _n = me()
    dist.barrier()
    tensor = torch.ones(2_000_000)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(30)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            pass
        sys.setswitchinterval(interval)
        work.wait()
        assert work.times().finished_s < until - 0.3
    else:
        begin = time.monotonic()
        work.wait()
        assert time.monotonic() - begin < 1.2
    dist.barrier()


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 64), torch.nn.ReLU(), torch.nn.Linear(64, 33), torch.nn.Linear(33, 7)
    )


def _train(model: torch.nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 30, generator=generator)
        model(inputs).square().mean().backward()
        optimizer.step()


def ddp_and_fsdp() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, _n = me()
    gloo = dist.new_group(backend="gloo")
    results = []
    for group in (gloo, dist.group.WORLD):
        model = _model()
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.005
        )
        _train(wrapped, rank)
        results.append([p.detach().clone() for p in model.parameters()])
    for group in (gloo, dist.group.WORLD):
        model = _model()
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        _train(model, rank)
        results.append([p.detach().full_tensor() for p in model.parameters()])
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    dist.destroy_process_group(gloo)


def again_after_destroy(folder: str) -> None:
    """The world ends and begins again, over several kinds of rendezvous, groups still alive."""
    rank, n = me()
    dist.destroy_process_group()
    for turn in range(3):
        store = dist.FileStore(f"{folder}/{turn}", n)
        backend = "cpu:comm_core" if turn == 1 else "comm_core"
        dist.init_process_group(backend, store=store, rank=rank, world_size=n)
        other = dist.new_group()
        tensor = values(rank, 3000)
        dist.all_reduce(tensor, group=other if turn == 2 else None)
        same(tensor, v.reduced(_everyone(n, 3000, torch.float32), ReduceOp.SUM), turn)
        dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/last", n)
    dist.init_process_group("comm_core", store=store, rank=rank, world_size=n)


def meet(rank: int, _say: Any, size: int, how: str, port: int) -> float:
    """A world over TCPStore, env:// or tcp://, or the one that is there."""
    common = {"rank": rank, "world_size": size}
    if how == "tcpstore":
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
        dist.init_process_group("comm_core", store=store, **common)
    elif how == "tcp":
        dist.init_process_group("comm_core", init_method=f"tcp://127.0.0.1:{port}", **common)
    elif how == "env":
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size)
        )
        dist.init_process_group("cpu:comm_core", init_method="env://")
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.sum().item()
