"""What each rank of tests/test_mpi_backend.py runs: `mpi_backend_program.py STORE CASE...`.

Every rank writes STORE-rank<N>.jsonl, a line per case: the case, and null or the traceback of what
went wrong. Not to stdout: mpirun mixes the ranks' lines.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
import traceback
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.comm_core import mpi_backend
from dear.comm.communicator import Communicator
from tests.mpi_backend_data import (
    CASES,
    DTYPES,
    LENGTHS,
    RANK,
    SIZE,
    backend_of,
    case,
    data,
    ops_of,
    raises,
    reduced,
    same,
)


@case
def all_reduce() -> None:
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for length in LENGTHS:
                tensor = data(RANK, length, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, reduced(op, length, dtype))


@case
def reduce() -> None:
    for root in range(SIZE):
        for dtype in DTYPES:
            tensor = data(RANK, 7, dtype)
            dist.reduce(tensor, root)
            if root == RANK:
                same(tensor, reduced(dist.ReduceOp.SUM, 7, dtype))
    tensor = data(RANK, 5, torch.float32)
    dist.reduce(tensor, SIZE - 1, dist.ReduceOp.AVG)
    if RANK == SIZE - 1:
        same(tensor, reduced(dist.ReduceOp.AVG, 5, torch.float32))


@case
def reduce_scatter_tensor() -> None:
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for shard in LENGTHS:
                output = torch.empty(shard, dtype=dtype)
                dist.reduce_scatter_tensor(output, data(RANK, shard * SIZE, dtype), op)
                whole = reduced(op, shard * SIZE, dtype)
                same(output, whole[RANK * shard : (RANK + 1) * shard])


@case
def reduce_scatter_in_place() -> None:
    whole = data(RANK, 9 * SIZE, torch.float32)
    dist.reduce_scatter_tensor(whole[RANK * 9 : RANK * 9 + 9], whole)
    same(
        whole[RANK * 9 : RANK * 9 + 9],
        reduced(dist.ReduceOp.SUM, 9 * SIZE, torch.float32)[RANK * 9 : RANK * 9 + 9],
    )


@case
def reduce_scatter_list_of_uneven_tensors() -> None:
    sizes = [2 * rank + 1 for rank in range(SIZE)]
    whole = reduced(dist.ReduceOp.SUM, sum(sizes), torch.float64)
    starts = np.cumsum([0, *sizes])
    output = torch.empty(sizes[RANK], dtype=torch.float64)
    inputs = data(RANK, sum(sizes), torch.float64).split(sizes)
    for parts in (list(inputs), [part.clone() for part in inputs]):
        dist.reduce_scatter(output, parts)
        same(output, whole[starts[RANK] : starts[RANK + 1]])


@case
def all_gather() -> None:
    for dtype in DTYPES:
        for length in LENGTHS:
            wanted = [data(rank, length, dtype) for rank in range(SIZE)]
            output = torch.empty(length * SIZE, dtype=dtype)
            dist.all_gather_into_tensor(output, wanted[RANK])
            same(output, torch.cat(wanted))
            outputs = [torch.empty(length, dtype=dtype) for _ in range(SIZE)]
            dist.all_gather(outputs, wanted[RANK])
            same(torch.cat(outputs), torch.cat(wanted))


@case
def all_gather_in_place_and_uneven() -> None:
    whole = torch.zeros(6 * SIZE)
    whole[RANK * 6 : RANK * 6 + 6] = RANK + 1
    dist.all_gather_into_tensor(whole, whole[RANK * 6 : RANK * 6 + 6])
    same(whole, np.repeat(np.arange(1.0, SIZE + 1), 6))
    outputs = [torch.empty(rank, dtype=torch.int16) for rank in range(SIZE)]
    dist.all_gather(outputs, torch.full((RANK,), RANK, dtype=torch.int16))
    for rank, output in enumerate(outputs):
        same(output, np.full(rank, rank))


@case
def broadcast() -> None:
    for root in range(SIZE):
        for dtype in DTYPES:
            for length in LENGTHS:
                tensor = data(RANK, length, dtype)
                dist.broadcast(tensor, root)
                same(tensor, data(root, length, dtype))


@case
def gather_and_scatter() -> None:
    for root in range(SIZE):
        for dtype in DTYPES:
            mine = data(RANK, 11, dtype)
            every = [data(rank, 11, dtype) for rank in range(SIZE)]
            outputs = [torch.empty(11, dtype=dtype) for _ in range(SIZE)]
            dist.gather(mine, outputs if root == RANK else None, root)
            if root == RANK:
                same(torch.cat(outputs), torch.cat(every))
            output = torch.empty(11, dtype=dtype)
            dist.scatter(output, every if root == RANK else None, root)
            same(output, mine)


@case
def all_to_all() -> None:
    def block(source: int, target: int) -> torch.Tensor:
        return torch.full((source + 2 * target,), 10.0 * source + target)

    outputs = [torch.empty(rank + 2 * RANK) for rank in range(SIZE)]
    dist.all_to_all(outputs, [block(RANK, rank) for rank in range(SIZE)])
    for rank, output in enumerate(outputs):
        same(output, block(rank, RANK))

    # Rows of three; rank r sends r + t rows to rank t.
    splits = [RANK + rank for rank in range(SIZE)]
    rows = torch.arange(sum(splits) * 3.0).reshape(-1, 3) + 1000 * RANK
    output = torch.empty(sum(splits), 3)
    dist.all_to_all_single(output, rows, splits, splits)
    for rank, part in enumerate(output.split(splits)):
        first = sum(rank + earlier for earlier in range(RANK))
        wanted = torch.arange(3.0 * first, 3.0 * (first + RANK + rank)) + 1000 * rank
        same(part.flatten(), wanted)

    output = torch.empty(2 * SIZE, dtype=torch.int64)
    dist.all_to_all_single(output, torch.arange(2 * SIZE) + 100 * RANK)
    same(
        output, np.concatenate([[100 * r + 2 * RANK, 100 * r + 2 * RANK + 1] for r in range(SIZE)])
    )


@case
def messages() -> None:
    to, source = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    works = []
    received = {}
    for tag, dtype in enumerate(DTYPES):
        for length in LENGTHS:
            received[tag, length] = torch.empty(length, dtype=dtype)
            if SIZE > 1:
                works.append(dist.irecv(received[tag, length], source, tag=tag))
                works.append(dist.isend(data(RANK, length, dtype), to, tag=tag))
    for work in works:
        work.wait()
    for (tag, length), tensor in received.items():
        if SIZE > 1:
            same(tensor, data(source, length, DTYPES[tag]))


@case
def messages_from_any_rank() -> None:
    if RANK != 0:
        dist.send(torch.tensor([RANK]), 0, tag=3)
        return
    seen = set()
    for _ in range(SIZE - 1):
        tensor = torch.empty(1, dtype=torch.int64)
        seen.add(dist.recv(tensor, tag=3))
        assert tensor.item() in seen
    assert seen == set(range(1, SIZE))


@case
def strided_tensors() -> None:
    base = data(RANK, 5 * 6, torch.float32).reshape(5, 6)
    tensor = base.t()[1:, ::2]
    rows = reduced(dist.ReduceOp.SUM, 30, torch.float32).reshape(5, 6)
    dist.all_reduce(tensor)
    same(tensor, rows.T[1:, ::2])
    same(base[:, 0], data(RANK, 30, torch.float32).reshape(5, 6)[:, 0])

    leaf = torch.nn.Parameter(data(RANK, 12, torch.float32).reshape(3, 4).t())
    dist.broadcast(leaf, SIZE - 1)
    same(leaf.detach(), data(SIZE - 1, 12, torch.float32).reshape(3, 4).T)

    conjugate = data(RANK, 4, torch.complex64).conj()
    output = torch.empty(4 * SIZE, dtype=torch.complex64)
    backend_of()._allgather_base(output, conjugate).wait()
    same(output, torch.cat([data(r, 4, torch.complex64).conj_physical() for r in range(SIZE)]))

    outputs = list(torch.empty(4, SIZE).unbind(1))
    dist.all_gather(outputs, torch.full((4,), float(RANK)))
    same(torch.stack(outputs), np.repeat(np.arange(float(SIZE)), 4).reshape(SIZE, 4))


@case
def many_in_flight() -> None:
    tensors = [data(RANK, 1 + 37 * i, torch.float32) for i in range(100)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor in reversed(list(zip(works, tensors, strict=True))):
        work.wait()
        assert work.is_completed()
        same(tensor, reduced(dist.ReduceOp.SUM, len(tensor), torch.float32))


@case
def futures() -> None:
    seen = []
    work = dist.all_reduce(torch.full((3,), 1.0), async_op=True)
    future = work.get_future().then(lambda f: seen.append(f.value()[0].tolist()) or 5)
    assert future.wait() == 5
    assert seen == [[SIZE] * 3]
    dist.barrier()
    assert work.get_future().value()[0].tolist() == [SIZE] * 3
    outputs = [torch.empty(2) for _ in range(SIZE)]
    late = dist.all_gather(outputs, torch.ones(2), async_op=True)
    late.wait()
    assert len(late.get_future().wait()) == SIZE


@case
def progress_needs_no_python_lock() -> None:
    if SIZE == 1:
        return
    tensors = [torch.ones(1000) for _ in range(50)]
    dist.barrier()
    if RANK == 0:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.get_future().add_done_callback(lambda _: None)
        ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL: with Python's lock held
        for work in works:
            work.wait()
    else:
        began = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        assert time.perf_counter() - began < 1.0
    dist.barrier()


@case
def idle_costs_no_processor() -> None:
    work = None
    tensor = torch.empty(1)
    if SIZE > 1 and RANK == 0:
        work = dist.irecv(tensor, 1, tag=9)
    dist.barrier()
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    assert used < 0.1, f"{used} s of processor time in 0.5 s"
    dist.barrier()
    if SIZE > 1 and RANK == 1:
        dist.send(tensor, 0, tag=9)
    if work is not None:
        work.wait()


@case
def objects() -> None:
    got = [None] * SIZE
    dist.all_gather_object(got, {"rank": RANK, "text": "x" * RANK})
    assert [item["rank"] for item in got] == list(range(SIZE))
    box = [["from", RANK]]
    dist.broadcast_object_list(box, SIZE - 1)
    assert box == [["from", SIZE - 1]]


@case
def subgroups() -> None:
    evens, odds = list(range(0, SIZE, 2)), list(range(1, SIZE, 2))
    groups = [(ranks, dist.new_group(ranks)) for ranks in (evens, odds, list(range(SIZE))) if ranks]
    for ranks, group in groups:
        if RANK not in ranks:
            continue
        tensor = torch.tensor([1.0, 10.0**RANK])
        dist.all_reduce(tensor, group=group)
        same(tensor, np.array([len(ranks), sum(10.0**rank for rank in ranks)]))
        dist.broadcast(tensor.fill_(RANK), ranks[-1], group=group)
        same(tensor, np.full(2, ranks[-1]))
        if len(ranks) > 1:
            me = ranks.index(RANK)
            work = dist.irecv(tensor, ranks[me - 1], group=group)
            dist.send(torch.full((2,), float(RANK)), ranks[(me + 1) % len(ranks)], group=group)
            work.wait()
            same(tensor, np.full(2, ranks[me - 1]))
    dist.barrier()
    for ranks, group in groups:
        if RANK in ranks:
            backend = backend_of(group)
            dist.destroy_process_group(group)
            backend.shutdown()
            raises(
                dist.DistBackendError,
                "was destroyed",
                lambda backend=backend: backend.allreduce([torch.ones(1)]),
            )
    dist.barrier()


@case
def communicator_of_dear() -> None:
    communicator = Communicator(dist.group.WORLD, channels=2, record_times=True)
    whole = data(RANK, 8 * SIZE, torch.float32)
    shard = torch.empty(8)
    works = [communicator.reduce_scatter(shard, whole, op="sum", channel=1)]
    other = torch.ones(3)
    works.append(communicator.all_reduce(other, op="mean", channel=0))
    for work in works:
        work.wait()
    same(shard, reduced(dist.ReduceOp.SUM, 8 * SIZE, torch.float32)[RANK * 8 : RANK * 8 + 8])
    same(other, np.ones(3))
    communicator.close()


@case
def distributed_data_parallel() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2)
        ).double()

    serial, parallel = model(), DistributedDataParallel(model(), bucket_cap_mb=0.01)
    inputs = torch.randn(4 * SIZE, 5, dtype=torch.float64, generator=torch.manual_seed(7))
    for network, rows in ((serial, inputs), (parallel, inputs[RANK * 4 : RANK * 4 + 4])):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            network(rows).square().mean().backward()
            optimizer.step()
    for one, other in zip(serial.parameters(), parallel.module.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@case
def wrong_arguments_are_named() -> None:
    backend = backend_of()
    raises(
        TypeError, "Float8_e4m3fn", lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
    )
    raises(TypeError, "by BAND", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND))
    raises(
        TypeError,
        "cannot reduce ComplexFloat by MAX",
        lambda: backend.allreduce([torch.ones(1, dtype=torch.cfloat)], dist.ReduceOp.MAX),
    )
    raises(TypeError, "Int by AVG", lambda: dist.all_reduce(torch.ones(2).int(), dist.ReduceOp.AVG))
    raises(ValueError, "is on meta", lambda: backend.allreduce([torch.ones(2, device="meta")]))
    raises(TypeError, "Sparse", lambda: backend.allreduce([torch.ones(2).to_sparse()]))
    raises(ValueError, f"no rank {SIZE}", lambda: backend.broadcast(torch.ones(2), SIZE))
    raises(ValueError, "no rank -1", lambda: backend.send([torch.ones(2)], -1, 0))
    raises(ValueError, "tag -1", lambda: backend.send([torch.ones(2)], 0, -1))
    huge = torch.zeros(1, dtype=torch.uint8).expand(2**31)
    raises(ValueError, "limit of 2147483647", lambda: dist.all_reduce(huge))
    raises(
        ValueError,
        "elements each",
        lambda: dist.all_gather_into_tensor(torch.empty(SIZE * 2 + 1), torch.ones(2)),
    )
    raises(
        TypeError,
        "output of",
        lambda: backend._allgather_base(torch.empty(SIZE * 2), torch.ones(2).double()),
    )
    raises(
        ValueError,
        "list of",
        lambda: backend.allgather([[torch.empty(2)] * (SIZE + 1)], [torch.ones(2)]),
    )
    raises(
        ValueError,
        "splits",
        lambda: backend.alltoall_base(torch.empty(SIZE), torch.empty(SIZE), [1] * SIZE, [9] * SIZE),
    )
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == SIZE


@case
def messages_of_a_wrong_size_are_named() -> None:
    if SIZE == 1:
        return
    for length, words in ((3, "sent 3 elements, but the tensor has 5"), (9, "truncate")):
        if RANK == 1:
            dist.send(torch.ones(length), 0)
        elif RANK == 0:
            raises(dist.DistBackendError, words, lambda: dist.recv(torch.ones(5), 1))
    dist.barrier()


@case
def a_wait_may_end_before_the_operation() -> None:
    if SIZE == 1:
        return
    tensor = torch.ones(4)
    if RANK == 0:
        work = dist.irecv(tensor, 1, tag=5)
        raises(
            dist.DistBackendError,
            f"of 16 bytes on rank 0 of {SIZE} of group '0' has not ended in 0.05 s",
            lambda: work.wait(timedelta(milliseconds=50)),
        )
        dist.barrier()
        work.wait()
        assert tensor.sum().item() == 8
    else:
        dist.barrier()
        if RANK == 1:
            dist.send(tensor * 2, 0, tag=5)


@case
def leaving_and_joining_again() -> None:
    options = {"store": dist.FileStore(sys.argv[1] + "-again", SIZE), "rank": RANK}
    dist.destroy_process_group()
    dist.init_process_group(mpi_backend.NAME, world_size=SIZE, **options)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE, SIZE]


ORDINARY = list(CASES)


@case
def a_rank_that_does_not_call() -> None:
    dist.barrier()
    if RANK != 0:
        return  # and waits for rank 0 in MPI_Finalize
    work = dist.all_reduce(torch.ones(6), async_op=True)
    raises(dist.DistBackendError, "all_reduce #2 of 24 bytes", work.wait)
    raises(dist.DistBackendError, "is unusable since MPI all_reduce #2", dist.barrier)
    raises(RuntimeError, "has not ended in 2 s", work.get_future().wait)


@case
def a_rank_that_fails() -> None:
    dist.barrier()
    if RANK == 1:
        raise RuntimeError("for the test")
    dist.all_reduce(torch.ones(2))


def main(path: str, names: list[str]) -> None:
    alone = names in (["a_rank_that_does_not_call"], ["a_rank_that_fails"])
    timeout_s = 2 if names == ["a_rank_that_does_not_call"] else 30
    dist.init_process_group(
        mpi_backend.register(),
        store=dist.FileStore(path, SIZE),
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(seconds=timeout_s),
    )
    for name in names or ORDINARY:
        error = None
        try:
            CASES[name]()
        except Exception:
            if name == "a_rank_that_fails":
                raise
            error = traceback.format_exc()
        with open(f"{path}-rank{RANK}.jsonl", "a") as file:
            file.write(json.dumps({"case": name, "rank": RANK, "error": error}) + "\n")
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
