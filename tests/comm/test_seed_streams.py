"""The seeds' `Communicator`: streams, handles, temporaries, and how it comes and goes."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.seed import (
    Communicator,
    World,
    error,
    module,
    on_ranks,
    over_gloo,
    same,
    total,
    values,
)

# Streams, handles, order ----------------------------------------------------------------------


@on_ranks(nstreams=[1, 2, 4])
def test_many_operations_in_flight(comm: Communicator) -> None:
    seed = 7 * comm.nstreams
    chooser = random.Random(seed)  # the same on all ranks
    size, rank, checks = comm.size, comm.rank, []
    for i in range(120):
        numel, name = chooser.choice([0, 1, size, 97, 5000]), chooser.randrange(6)
        mine, summed = values(rank, numel, i).float(), total(size, numel, i)
        if name < 3:
            call = (comm.allReduce, comm.allReduceRSAG, comm.allReduceRB)[name]
            checks.append((call(mine), mine, summed))
        elif name == 3:
            root = chooser.randrange(size)
            checks.append((comm.bcast(mine, root), mine, values(root, numel, i)))
        elif name == 4:
            recv = torch.zeros(numel * size)
            wanted = torch.cat([values(r, numel, i) for r in range(size)])
            checks.append((comm.allGather(mine, recv), recv, wanted))
        else:
            send, recv = values(rank, numel * size, i).float(), torch.zeros(numel)
            wanted = total(size, numel * size, i)[rank * numel : (rank + 1) * numel]
            checks.append((comm.reduceScatter(send, recv), recv, wanted))
        del mine
    order = list(range(len(checks)))
    random.Random(seed + rank).shuffle(order)  # waits need no common order
    for i in order[:60]:
        handle, tensor, wanted = checks[i]
        comm.syncStream(handle)
        same(tensor, wanted)
    comm.synchronize()
    for handle, tensor, wanted in checks:
        same(tensor, wanted)
        comm.syncStream(handle)
    assert comm.getNumOfFreeStreams() == comm.nstreams
    assert len({handle for handle, _, _ in checks}) == len(checks)


@on_ranks(nstreams=[1])
def test_one_stream_keeps_the_order_of_the_calls(comm: Communicator) -> None:
    # Nothing waits in between: each uses what the one before it wrote.
    tensor = torch.full((2 * comm.size + 1,), float(comm.rank + 1))
    parts = torch.zeros(2 * comm.size + 1)
    expected = tensor[0].item()
    for _ in range(3):
        comm.allReduce(tensor)
        comm.allReduceRSAG(tensor)
        comm.reduce(tensor, 0)
        comm.bcast(tensor, 0)
        comm.sendrecv(tensor, parts, comm.rank)
        comm.allReduceRB(parts)
        comm.sendrecv(parts, tensor, comm.rank)
    comm.synchronize()
    expected = float(comm.size * (comm.size + 1) // 2) * comm.size ** (2 + 1)
    for _ in range(2):
        expected *= comm.size**4
    same(tensor, torch.full_like(tensor, expected))


@on_ranks(2, nstreams=[3])
def test_calls_return_at_once_and_busy_streams_are_counted(comm: Communicator) -> None:
    store = dist.distributed_c10d._get_default_store()
    assert comm.getNumOfFreeStreams() == 3
    tensor, padded = torch.ones(10), torch.ones(2 * comm.size + 1)
    if comm.rank == 0:
        started = time.perf_counter()
        handles = [comm.allReduce(tensor), comm.allReduceRSAG(padded)]
        assert time.perf_counter() - started < 1  # the peer has not even called
        assert comm.getNumOfFreeStreams() == 1
        store.set("busy", "go")
    else:
        store.wait(["busy"])
        handles = [comm.allReduce(tensor), comm.allReduceRSAG(padded)]
    for handle in [*handles, *handles]:
        comm.syncStream(handle)
    same(tensor, torch.full((10,), float(comm.size)))
    same(padded, torch.full((2 * comm.size + 1,), float(comm.size)))
    assert comm.getNumOfFreeStreams() == 3


@on_ranks(2, nstreams=[1, 2])
def test_fact_d12_sync_stream_never_returns_early(comm: Communicator) -> None:
    key = f"early {comm.nstreams}"
    # D12: the wait is for the operation named, the first on its stream as well as the tenth.
    store = dist.distributed_c10d._get_default_store()
    for i in range(10):
        tensor = torch.ones(1000)
        if comm.rank == 1:
            store.wait([f"{key} {i}"])
        handle = comm.bcast(tensor, 1) if i % 2 else comm.allReduce(tensor)
        if comm.rank == 0:
            done = threading.Event()

            def wait(handle: int = handle, done: threading.Event = done) -> None:
                comm.syncStream(handle)
                done.set()

            thread = threading.Thread(target=wait)
            thread.start()
            assert not done.wait(0.02)
            store.set(f"{key} {i}", "go")
            thread.join()
        comm.syncStream(handle)
        same(tensor, torch.full((1000,), 1.0 if i % 2 else 2.0))


@on_ranks(2)
def test_handles_may_be_waited_twice_and_unknown_ones_are_errors(comm: Communicator) -> None:
    handle = comm.allReduce(torch.ones(3))
    assert isinstance(handle, int)
    for _ in range(3):
        comm.syncStream(handle)
    with Communicator(1, over_gloo()) as other:
        assert "unknown handle" in error(ValueError, other.syncStream, handle)
        other.synchronize()
    for bad in (handle + 1, -1):
        assert "unknown handle" in error(ValueError, comm.syncStream, bad)
    for bad in (None, "0", True, 1.0):
        assert "int" in error(TypeError, comm.syncStream, bad)


@on_ranks(2, 3)
def test_temporaries_live_as_long_as_their_operation_and_no_longer(comm: Communicator) -> None:
    handles, results = [], []
    for i in range(30):
        tensor = values(comm.rank, 4 * comm.size + 1, i).float()
        results.append(tensor)
        handles.append(comm.allReduceRSAG(tensor.view(-1)))  # the view dies at once
        send = values(comm.rank, 50, i).float()
        received = torch.zeros(50 * comm.size)
        results.append(received)
        handles.append(comm.allGather(send * 1, received))  # so does the product
        torch.full((4 * comm.size + 1,), -1e9)  # would take over freed memory
    gc.collect()
    comm.synchronize()
    for i in range(30):
        same(results[2 * i], total(comm.size, 4 * comm.size + 1, i))
        same(results[2 * i + 1], torch.cat([values(r, 50, i) for r in range(comm.size)]))
    kept = torch.ones(2 * comm.size + 1)
    gone = weakref.ref(kept)
    comm.syncStream(comm.allReduceRSAG(kept))
    del kept
    comm.synchronize()
    deadline = time.perf_counter() + 5
    while gone() is not None and time.perf_counter() < deadline:
        time.sleep(0.001)  # Gloo's own thread lets go a moment after the wait
    assert gone() is None, "a finished operation keeps its tensor"


# Life -----------------------------------------------------------------------------------------


@on_ranks()
def test_two_communicators_interleave_and_go_in_any_order(first: Communicator) -> None:
    size, rank = first.size, first.rank
    second = Communicator(3, over_gloo())
    tensors = [values(rank, 2 * size + 1, i).float() for i in range(40)]
    for i, tensor in enumerate(tensors):
        comm = (first, second)[i % 2]
        (comm.allReduce if i % 3 else comm.allReduceRSAG)(tensor)
    second.synchronize()
    first.synchronize()
    for i, tensor in enumerate(tensors):
        same(tensor, total(size, 2 * size + 1, i))
    first.destroy()  # made first, gone first
    tensor = torch.ones(5)
    second.syncStream(second.allReduce(tensor))
    same(tensor, torch.full((5,), float(size)))
    first.reload()
    second.destroy()
    first.syncStream(first.allReduceRSAG(tensor))
    same(tensor, torch.full((5,), float(size * size)))


@on_ranks()
def test_destroy_waits_and_can_be_repeated_and_reloaded(comm: Communicator) -> None:
    tensor, big = torch.ones(2 * comm.size + 1), torch.ones(100_000)
    old = comm.allReduceRSAG(tensor)
    comm.allReduce(big)
    comm.destroy()  # waits
    same(tensor, torch.full((2 * comm.size + 1,), float(comm.size)))
    same(big, torch.full((100_000,), float(comm.size)))
    comm.destroy()
    calls: list[Callable[[], Any]] = [
        lambda: comm.allReduce(tensor),
        lambda: comm.sendrecv(tensor, tensor.clone(), 0),
        lambda: comm.multiBcast([], [], print),
        lambda: comm.neighbor_all_reduce(tensor, [], []),
        lambda: comm.check_neighbors([], []),
        lambda: comm.syncStream(old),
        comm.synchronize,
        comm.barrier,
        comm.getNumOfFreeStreams,
    ]
    for call in calls:
        assert "reload" in error(RuntimeError, call)
    for _ in range(2):
        comm.reload()
        assert comm.nstreams == comm.getNumOfFreeStreams() == 2
        comm.syncStream(old)
        again = torch.ones(3)
        comm.syncStream(comm.allReduce(again))
        same(again, torch.full((3,), float(comm.size)))


@on_ranks(3, nstreams=[1])
def test_the_ranks_of_a_group_are_enough(comm: Communicator) -> None:
    part = dist.new_group([0, 2], backend="gloo")
    if comm.rank == 1:
        assert "not in" in error(ValueError, Communicator, 1, part)
    else:
        for _ in range(2):  # also with groups that had the same members before
            sub = Communicator(2, part)
            assert (sub.rank, sub.size) == (comm.rank // 2, 2)
            tensor = torch.tensor([float(comm.rank)])
            sub.syncStream(sub.allReduce(tensor))
            assert tensor.item() == 2
            sub.syncStream(sub.bcast(tensor.fill_(comm.rank), 1))  # 1 is rank 2 of the job
            assert tensor.item() == 2
            recv = torch.zeros(1)
            sub.syncStream(sub.sendrecv(tensor.fill_(comm.rank), recv, 1 - sub.rank))
            assert recv.item() == 2 - comm.rank
            sub.reload()
            sub.syncStream(sub.allReduceRB(tensor))
            assert tensor.item() == 2
            sub.barrier()
            sub.destroy()
    comm.barrier()


@on_ranks(3, nstreams=[1])
def test_ranks_may_be_in_different_numbers_of_groups(comm: Communicator) -> None:
    # Rank 0 is in more groups than the others, so it has made more process groups than they.
    pairs = [dist.new_group([0, other], backend="gloo") for other in (1, 2)]
    mine = [Communicator(2, pair) for pair in pairs if dist.get_rank(pair) >= 0]
    for sub in mine:
        tensor = torch.ones(3)
        sub.syncStream(sub.allReduceRSAG(tensor))
        assert tensor.tolist() == [2.0] * 3
        sub.destroy()


_FORGETFUL = """
import sys, torch, torch.distributed as dist
sys.path.append(sys.argv[1])
from comm_core.communicator import Communicator, init
init("gloo")
late = Communicator(2)
dist.destroy_process_group()
late.destroy()  # after its process groups have gone
init("gloo")
forgotten = Communicator(2)
for _ in range(50):
    forgotten.allReduceRSAG(torch.ones(50_001))
"""


def test_a_script_may_end_without_destroy():
    folder = str(Path(__file__).parents[2] / "common")
    done = subprocess.run(
        [sys.executable, "-c", _FORGETFUL, folder], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@on_ranks()
def test_barrier_comes_after_everybody(comm: Communicator) -> None:
    key = f"barrier {comm.size}"
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(5)
    comm.allReduceRSAG(tensor)
    comm.barrier()
    same(tensor, torch.full((5,), float(comm.size)))  # barrier has waited for it, too
    store.add(key, 1)
    comm.barrier()
    assert store.add(key, 0) == comm.size


def _job() -> tuple[int, int]:
    module.init()  # exists already: nothing happens
    module.barrier()
    module.barriar()
    with Communicator() as comm:
        assert (comm.rank, comm.size, comm.nstreams) == (module.rank(), module.size(), 1)
    return module.rank(), module.size()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_module_functions(world: World, world_size: int):
    assert world(world_size).run(_job) == [(r, world_size) for r in range(world_size)]


def test_without_a_job_the_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    assert not dist.is_initialized()
    for call in (Communicator, module.rank, module.size, module.barrier):
        assert "init()" in error(RuntimeError, call)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "MASTER_ADDR" in error(RuntimeError, module.init)
