"""The seeds' `Communicator(nstreams)`: results, streams and handles, how it comes and goes."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from comm_core.streams import collectives
from tests.comm.operations import DTYPES, Call, cases, check, same, total, values
from tests.comm.seed import Communicator, error, module, over_gloo, streams
from tests.comm.worlds import on_ranks

ALL_REDUCES = ("allReduce", "allReduceRSAG", "allReduceRB")
# Gloo sums no int16, which is an error of its own below.
SUMMED = [dtype for dtype in DTYPES if dtype != torch.int16]


@on_ranks(streams, of=[1, 2, 4])
def test_operations_many_of_them_in_flight(comm: Communicator) -> None:
    calls: dict[str, Callable[[Call], int]] = {
        "all_reduce": lambda c: comm.allReduce(c.out),
        "all_reduce RSAG": lambda c: comm.allReduceRSAG(c.out),
        "all_reduce RB": lambda c: comm.allReduceRB(c.out),
        "reduce": lambda c: comm.reduce(c.out, c.root),
        "broadcast": lambda c: comm.bcast(c.out, c.root),
        "reduce_scatter tensor": lambda c: comm.reduceScatter(c.mine, c.out),
        "all_gather tensor": lambda c: comm.allGather(c.mine, c.out),
        "exchange": lambda c: comm.sendrecv(c.mine, c.out, c.peer),
    }
    handles = set()

    def started(start: Callable[[Call], int]) -> Callable[[Call], Callable[[], None]]:
        def call(c: Call) -> Callable[[], None]:
            handles.add(handle := start(c))
            return lambda: comm.syncStream(handle)

        return call

    interface = {name: started(start) for name, start in calls.items()}
    chosen = cases(comm.size, list(interface), SUMMED, ops=lambda dtype: [ReduceOp.SUM])
    check(interface, chosen, at_once=30)
    comm.synchronize()
    assert len(handles) == len(chosen) and comm.getNumOfFreeStreams() == comm.nstreams


@on_ranks(streams, 3, of=[1, 2])
def test_a_pair_concerns_two_ranks_and_does_not_shift_the_turns_of_the_others(
    comm: Communicator,
) -> None:
    if comm.rank < 2:
        recv = torch.zeros(3 if comm.rank == 0 else 5)
        comm.sendrecv(values(comm.rank, 8 - recv.numel()), recv, 1 - comm.rank)
        comm.synchronize()
        same(recv, values(1 - comm.rank, recv.numel()))
    tensors = [torch.full((4,), float(i)) for i in range(5)]
    for tensor in tensors:
        comm.allReduce(tensor)
    comm.synchronize()
    assert [t[0].item() for t in tensors] == [3.0 * i for i in range(5)]


@on_ranks(streams)
def test_multi_bcast_shares_large_tensors_and_repeats_small_ones(comm: Communicator) -> None:
    large, ran = module.MULTI_BCAST_NUMEL, []
    sizes = [large, 5, large + 1, large - 1, large, large]
    tensors = [torch.full((n,), float(i + 1)) for i, n in enumerate(sizes)]
    outs = [torch.zeros(n) for n in sizes]

    def op(tensor: torch.Tensor, out: torch.Tensor) -> None:
        ran.append(int(tensor[0]) - 1)
        out.copy_(tensor * 10 + comm.rank)  # tells who computed it

    comm.syncStream(comm.multiBcast(tensors, outs, op))
    turns = iter(i % comm.size for i in range(4))
    owners = [next(turns) if n >= large else comm.rank for n in sizes]
    for i, (n, by, out) in enumerate(zip(sizes, owners, outs, strict=True)):
        same(out, torch.full((n,), 10.0 * (i + 1) + by))
    assert ran == [i for i, by in enumerate(owners) if by == comm.rank]
    comm.syncStream(comm.multiBcast([], [], op))
    assert "2 outs" in error(ValueError, comm.multiBcast, tensors[:1], outs[:2], op)


# Layouts and dtypes ---------------------------------------------------------------------------


def _layouts(base: torch.Tensor, rank: int) -> list[torch.Tensor]:
    turned = base.view(4, 6).t().contiguous().t()  # ranks differ in strides
    image = base.view(1, 2, 3, 4).clone().to(memory_format=torch.channels_last)
    return [turned if rank % 2 else base.clone().view(4, 6), image, base[3], base[:5].clone()]


@on_ranks(streams)
def test_any_strided_layout_works_in_logical_order(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    for name in ALL_REDUCES:
        wanted = _layouts(total(size, 24), 0)
        *tensors, leaf = _layouts(values(rank, 24), rank)
        for got, expected in zip([*tensors, torch.nn.Parameter(leaf)], wanted, strict=True):
            comm.syncStream(getattr(comm, name)(got))
            same(got.detach(), expected)
        gaps = torch.zeros(24, 2)
        gaps[:, 0] = values(rank, 24)
        comm.syncStream(getattr(comm, name)(gaps[:, 0]))
        assert torch.equal(gaps[:, 0], total(size, 24)) and not gaps[:, 1].any()
    wide = torch.full((2, 3), float(rank)).expand(4, 2, 3)[:, :, 1:]  # a source may be expanded
    gathered = torch.zeros(16, size)
    comm.syncStream(comm.allGather(wide, gathered.t()))
    same(gathered, torch.arange(float(size)).repeat(16, 1))


@on_ranks(streams, of=[1])
def test_conjugates_are_their_values_and_sums_of_bools_are_or(comm: Communicator) -> None:
    for dtype in (torch.complex64, torch.complex128):
        tensor = values(comm.rank, 7, dtype).conj()  # the memory holds the other sign
        comm.syncStream(comm.allReduceRSAG(tensor))
        wanted = sum(values(r, 7, dtype) for r in range(comm.size)).conj()
        same(tensor.resolve_conj(), wanted.resolve_conj())
    for name in ALL_REDUCES:
        flags = torch.arange(9) % (comm.rank + 2) == 0
        wanted = torch.stack([torch.arange(9) % (r + 2) == 0 for r in range(comm.size)]).any(0)
        comm.syncStream(getattr(comm, name)(flags))
        assert flags.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()


@on_ranks(streams, 2, of=[1])
def test_fact_r12_every_dtype_is_right_or_an_error(comm: Communicator) -> None:
    # R12, D10: what a backend lacks is an error, never a tensor left as it was.
    everything = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
    tried = 0
    for dtype in sorted(set(everything), key=str):
        try:
            mine, first = (values(rank, 5, torch.float64).to(dtype) for rank in (comm.rank, 0))
            summed = total(comm.size, 5).to(dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # torch itself has no values of it
        tried += 1
        for name in (*ALL_REDUCES, "bcast"):
            tensor = mine.clone()
            args, wanted = ((0,), first) if name == "bcast" else ((), summed)
            try:
                comm.syncStream(getattr(comm, name)(tensor, *args))
            except (RuntimeError, TypeError, ValueError):
                continue
            assert torch.equal(tensor.to(torch.complex128), wanted.to(torch.complex128)), (
                f"{name} of {dtype}: {tensor}"
            )
    assert tried >= 12


@pytest.mark.parametrize(("numel", "wanted"), [(15, 16), (16, 16), (17, 20), (0, 0), (4, 4)])
def test_fact_r3_padding_to_a_multiple_of_four_ranks(numel: int, wanted: int):
    from comm_core.streams.collectives import padded_numel

    assert padded_numel(numel, 4) == wanted


# Errors ---------------------------------------------------------------------------------------


@on_ranks(streams)
def test_mistakes_are_one_clear_sentence(comm: Communicator) -> None:
    x, size = torch.ones(4), comm.size
    for root in (-1, size):
        assert f"{root} is no rank" in error(ValueError, comm.reduce, x, root)
        assert f"{root} is no rank" in error(ValueError, comm.bcast, x, root)
        assert f"{root} is no rank" in error(ValueError, comm.sendrecv, x, x.clone(), root)
    assert "int" in error(TypeError, comm.bcast, x, 0.0)
    for call in (comm.allReduce, comm.allReduceRSAG, comm.allReduceRB):
        assert "list" in error(TypeError, call, [1.0])
        assert "layout" in error(ValueError, call, x.to_sparse())
        assert "meta" in error(ValueError, call, x.to("meta"))
        assert "expanded" in error(ValueError, call, torch.ones(1).expand(4))
    wrong = torch.ones(4 * size + 1)
    assert "4 of recv" in error(ValueError, comm.reduceScatter, wrong, x)
    assert "4 of send" in error(ValueError, comm.allGather, x, wrong)
    for call in (comm.reduceScatter, comm.allGather):
        assert "one dtype" in error(TypeError, call, x, x.double())
    assert "one dtype" in error(TypeError, comm.sendrecv, x, x.int(), 0)
    assert "oneself" in error(ValueError, comm.sendrecv, x, torch.ones(5), comm.rank)
    for bad in (0, -2):
        assert "at least 1" in error(ValueError, Communicator, bad)
    for bad in (1.0, "2", None, True):
        assert "int" in error(TypeError, Communicator, bad)
    comm.syncStream(comm.allReduce(x))  # all of that has harmed nobody
    same(x, torch.full((4,), float(size)))


@on_ranks(streams, 2, of=[1, 2])
def test_a_failure_in_the_background_is_raised_by_whoever_waits(comm: Communicator) -> None:
    # A dtype that Gloo lacks, in an operation that the stream's thread runs.
    lacking = torch.ones(2 * comm.size + 1, dtype=torch.int16)
    good = torch.ones(5)
    bad = comm.allReduceRSAG(lacking)
    fine = comm.allReduce(good)
    for _ in range(2):
        assert "allReduceRSAG failed" in error(RuntimeError, comm.syncStream, bad)
    comm.syncStream(fine)
    same(good, torch.full((5,), float(comm.size)))
    comm.synchronize()  # reported already
    bad = comm.allReduceRSAG(lacking)
    assert "allReduceRSAG failed" in error(RuntimeError, comm.synchronize)
    comm.synchronize()
    assert "allReduceRSAG failed" in error(RuntimeError, comm.syncStream, bad)
    assert lacking.tolist() == [1] * (2 * comm.size + 1)


@on_ranks(functools.partial(Communicator, 2, timeout_s=0.5), 2)
def test_a_peer_that_does_not_call_is_an_error_after_the_timeout(comm: Communicator) -> None:
    for call in (comm.allReduce, comm.allReduceRSAG) if comm.rank == 0 else ():
        with pytest.raises(RuntimeError, match=r"allReduce(RSAG)? failed"):
            comm.syncStream(call(torch.ones(7)))


# Streams, handles, order ----------------------------------------------------------------------


@on_ranks(streams, of=[1])
def test_one_stream_keeps_the_order_of_the_calls(comm: Communicator) -> None:
    # Nothing waits in between: each uses what the one before it wrote.
    tensor = torch.full((2 * comm.size + 1,), float(comm.rank + 1))
    parts = torch.zeros(2 * comm.size + 1)
    for _ in range(3):
        comm.allReduce(tensor)
        comm.allReduceRSAG(tensor)
        comm.reduce(tensor, 0)
        comm.bcast(tensor, 0)
        comm.sendrecv(tensor, parts, comm.rank)
        comm.allReduceRB(parts)
        comm.sendrecv(parts, tensor, comm.rank)
    comm.synchronize()
    expected = float(comm.size * (comm.size + 1) // 2) * comm.size ** (3 + 4 + 4)
    same(tensor, torch.full_like(tensor, expected))


@on_ranks(streams, 2, of=[3])
def test_calls_return_at_once_and_busy_streams_are_counted(comm: Communicator) -> None:
    store = dist.distributed_c10d._get_default_store()
    tensor, padded = torch.ones(10), torch.ones(2 * comm.size + 1)
    assert comm.getNumOfFreeStreams() == 3
    if comm.rank == 1:
        store.wait(["busy"])
    handles = [comm.allReduce(tensor), comm.allReduceRSAG(padded)]
    if comm.rank == 0:  # whose peer has not even called
        assert comm.getNumOfFreeStreams() == 1 and not comm.done(handles[0])
        store.set("busy", "go")
    for handle in [*handles, *handles]:
        comm.syncStream(handle)
        assert comm.done(handle)
    same(tensor, torch.full((10,), float(comm.size)))
    same(padded, torch.full((2 * comm.size + 1,), float(comm.size)))
    assert comm.getNumOfFreeStreams() == 3


@on_ranks(streams, 2, of=[1, 2])
def test_fact_d12_sync_stream_never_returns_early(comm: Communicator) -> None:
    # D12: the wait is for the operation named, the first on its stream as well as the tenth.
    store = dist.distributed_c10d._get_default_store()
    for i in range(10):
        key, tensor = f"early {comm.nstreams} {i}", torch.ones(1000)
        if comm.rank == 1:
            store.wait([key])
        handle = comm.bcast(tensor, 1) if i % 2 else comm.allReduce(tensor)
        if comm.rank == 0:
            thread = threading.Thread(target=comm.syncStream, args=(handle,))
            thread.start()
            thread.join(0.02)
            assert thread.is_alive()
            store.set(key, "go")
            thread.join()
        comm.syncStream(handle)
        same(tensor, torch.full((1000,), 1.0 if i % 2 else 2.0))


@on_ranks(streams, 2)
def test_handles_may_be_waited_twice_and_unknown_ones_are_errors(comm: Communicator) -> None:
    handle = comm.allReduce(torch.ones(3))
    assert isinstance(handle, int)
    for _ in range(3):
        comm.syncStream(handle)
    with Communicator(1, over_gloo()) as other:
        assert "unknown handle" in error(ValueError, other.syncStream, handle)
        other.synchronize()
    for call in (comm.syncStream, comm.done):
        for bad in (handle + 1, -1):
            assert "unknown handle" in error(ValueError, call, bad)
        for bad in (None, "0", True, 1.0):
            assert "int" in error(TypeError, call, bad)


@on_ranks(streams, 2)
def test_no_rank_has_its_groups_before_all_have_them(comm: Communicator) -> None:
    # A rank that has them may destroy them at once: Gloo then fails where it still connects.
    c10d, key = dist.distributed_c10d, f"{comm.size} have it"
    store, create = c10d._get_default_store(), c10d._new_process_group_helper

    def late(*arguments, **more):
        group = create(*arguments, **more)
        time.sleep(0.3)
        store.set(key, "yes")
        return group

    patched = late if comm.rank == 1 else create
    name = "_new_process_group_helper"
    with mock.patch.object(c10d, name, patched), Communicator(1, over_gloo()):
        assert store.check([key])
    store.delete_key(key)


class OnGpu(torch.Tensor):
    """CPU tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("body", [collectives.all_reduce_rsag, collectives.all_reduce_rb])
def test_the_second_collective_of_a_gpus_sum_starts_when_the_first_has_ended(body, monkeypatch):
    # The comm core copies a GPU's tensors to the host in the call: the second would copy old ones.
    started = []
    for place, name in (
        *((collectives, name) for name in ("_reduce_scatter", "_all_gather")),
        *((dist, name) for name in ("reduce", "broadcast")),
    ):
        monkeypatch.setattr(place, name, lambda *_, name=name, **__: started.append(name))
    channel = collectives.Channel(group=None, size=2, ordered=True)
    next(body(channel, torch.ones(4).as_subclass(OnGpu)))
    assert len(started) == 1
    next(body(channel, torch.ones(4)))
    assert len(started) == 3, "on CPUs, the comm core keeps the order"


@on_ranks(streams, 2, 3)
def test_temporaries_live_as_long_as_their_operation_and_no_longer(comm: Communicator) -> None:
    results, numel = [], 4 * comm.size + 1
    for i in range(30):
        tensor = values(comm.rank, numel, salt=i)
        comm.allReduceRSAG(tensor.view(-1))  # the view dies at once
        send = values(comm.rank, 50, salt=i)
        received = torch.zeros(50 * comm.size)
        comm.allGather(send * 1, received)  # so does the product
        results.append((tensor, received))
        torch.full((numel,), -1e9)  # would take over freed memory
    gc.collect()
    comm.synchronize()
    for i, (tensor, received) in enumerate(results):
        same(tensor, total(comm.size, numel, i))
        same(received, torch.cat([values(r, 50, salt=i) for r in range(comm.size)]))
    kept = torch.ones(2 * comm.size + 1)
    gone = weakref.ref(kept)
    comm.syncStream(comm.allReduceRSAG(kept))
    del kept
    comm.synchronize()
    deadline = time.perf_counter() + 20
    while gone() is not None and time.perf_counter() < deadline:
        time.sleep(0.001)  # Gloo's own thread lets go a moment after the wait
    assert gone() is None, "a finished operation keeps its tensor"


# Life -----------------------------------------------------------------------------------------


@on_ranks(streams)
def test_two_communicators_interleave_and_go_in_any_order(first: Communicator) -> None:
    size, rank = first.size, first.rank
    second = Communicator(3, over_gloo())
    tensors = [values(rank, 2 * size + 1, salt=i) for i in range(40)]
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


@on_ranks(streams)
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


@on_ranks(streams, 3, of=[1])
def test_the_ranks_of_a_group_are_enough_and_may_be_in_several(comm: Communicator) -> None:
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
    # Rank 0 is in more groups than the others, so it has made more process groups than they.
    pairs = [dist.new_group([0, other], backend="gloo") for other in (1, 2)]
    for sub in [Communicator(2, pair) for pair in pairs if dist.get_rank(pair) >= 0]:
        tensor = torch.ones(3)
        sub.syncStream(sub.allReduceRSAG(tensor))
        assert tensor.tolist() == [2.0] * 3
        sub.destroy()


_FORGETFUL = """
import atexit, os, time

def workers():
    folder = "/proc/self/task"
    names = [open(f"{folder}/{task}/comm").read().strip() for task in os.listdir(folder)]
    return names.count("pt_gloo_runloop")

atexit.register(lambda: print(workers() - of_the_job))  # the first, so it runs last
import torch, torch.distributed as dist
from comm_core.streams.communicator import Communicator, init
init("gloo")
late = Communicator(2)
dist.destroy_process_group()
late.destroy()  # after its process groups have gone
init("gloo")
of_the_job = dist.group.WORLD._get_backend(torch.device("cpu")).options._threads
while workers() < of_the_job:  # they take their name a moment after they have begun
    time.sleep(0.01)
forgotten = Communicator(2)
for _ in range(50):
    forgotten.allReduceRSAG(torch.ones(50_001))
"""


def test_a_script_may_end_without_destroy():
    folder = Path(__file__).parents[2] / "common"  # comm_core is not installed
    command = [sys.executable, "-c", _FORGETFUL]
    done = subprocess.run(
        command, cwd=folder, check=True, timeout=240, stdout=subprocess.PIPE, text=True
    )
    # A worker of Gloo's that gives back a tensor when Python has ended aborts the process.
    assert done.stdout == "0\n"


@on_ranks(streams)
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


@on_ranks(Communicator)
def test_module_functions(comm: Communicator) -> None:
    module.init()  # exists already: nothing happens
    module.barrier()
    module.barriar()
    assert (comm.rank, comm.size, comm.nstreams) == (module.rank(), module.size(), 1)
    assert (module.rank(), module.size()) == (dist.get_rank(), dist.get_world_size())


def test_without_a_job_the_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    assert not dist.is_initialized()
    for call in (Communicator, module.rank, module.size, module.barrier):
        assert "init()" in error(RuntimeError, call)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "MASTER_ADDR" in error(RuntimeError, module.init)


# CUDA -------------------------------------------------------------------------------------------


def _cuda() -> None:
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    comm = Communicator(2, group)
    assert "cpu" in error(ValueError, comm.allReduce, torch.ones(3))
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(4):
        torch.cuda._sleep(200_000_000)  # D11: the producer is late
        tensor.fill_(i + 1)
        calls = (comm.allReduce, comm.allReduceRSAG, comm.allReduceRB)
        handle = calls[i](tensor) if i < 3 else comm.sendrecv(tensor.clone(), tensor, 0)
        assert comm.getNumOfFreeStreams() < 2
        comm.syncStream(handle)
        tensor.mul_(2)  # the consumer waits for the communication
    assert time.perf_counter() - began < 0.2  # D15: the host has waited for nothing
    torch.cuda.synchronize()
    same(tensor.cpu(), torch.full((1 << 20,), 8.0))
    assert comm.getNumOfFreeStreams() == 2
    comm.syncStream(comm.neighbor_all_reduce(tensor, [], []))
    part = torch.empty_like(tensor)
    comm.syncStream(comm.allGather(tensor.view(1024, 1024).t(), part))
    comm.syncStream(comm.reduceScatter(part, tensor))
    comm.barrier()
    same(tensor.cpu(), torch.full((1 << 20,), 8.0))
    comm.reload()
    comm.destroy()
    comm.destroy()


@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs CUDA and NCCL"
)
def test_cuda_orders_streams_both_ways_and_never_blocks_the_host(world):
    world(1).run(_cuda)
