"""What each rank of tests/comm/test_mpi.py runs: `mpi_program.py STORE CASE...`.

Every rank writes STORE-rank<N>.jsonl, a line per case: the case, and null or the traceback of what
went wrong. Not to stdout: mpirun mixes the ranks' lines.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from comm_core import mpi
from dear.comm.communicator import Communicator
from tests.comm import bodies
from tests.comm.values import DTYPES, same

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))

# The operations are those of every backend.
CASES: dict[str, Callable[[], None]] = {
    "all_reduce": functools.partial(bodies.all_reduce, DTYPES),
    "gather_everywhere": functools.partial(bodies.gather_everywhere, DTYPES),
}
for body in (
    bodies.all_reduce_large,
    bodies.reduce_and_scatter,
    bodies.uneven_lists,
    bodies.rooted,
    bodies.all_to_all,
    bodies.non_contiguous,
    bodies.messages,
    bodies.messages_from_anybody,
    bodies.batches,
    bodies.many_in_flight,
    bodies.forgotten_tensors,
    bodies.futures,
    bodies.sub_groups,
    bodies.threads,
    bodies.objects,
    bodies.ddp_and_fsdp,
):
    CASES[body.__name__] = body


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), f"{words!r} not in {str(error)!r}"
    else:
        raise AssertionError(f"no {kind.__name__} about {words!r}")


def backend_of(group: dist.ProcessGroup | None = None) -> dist.Backend:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


@case
def a_conjugate_is_gathered_as_its_values() -> None:
    numbers = torch.arange(4) - 1j * RANK
    output = torch.empty(4 * SIZE, dtype=torch.complex64)
    backend_of()._allgather_base(
        output, numbers.to(torch.complex64).conj(), c10d.AllgatherOptions()
    ).wait()
    same(output, torch.cat([torch.arange(4) + 1j * r for r in range(SIZE)]).to(torch.complex64))


@case
def idle_costs_no_processor() -> None:
    work = None
    tensor = torch.empty(1)
    if SIZE > 1 and RANK == 0:
        work = dist.irecv(tensor, 1, tag=9)
    dist.barrier()
    # Of several spans the best: in the first ones threads of other cases may still come to rest.
    used = 1.0
    for _ in range(20):
        before = time.process_time()
        time.sleep(0.25)
        used = min(used, time.process_time() - before)
        if used < 0.025:
            break
    assert used < 0.025, f"{used} s of processor time in 0.25 s"
    dist.barrier()
    if SIZE > 1 and RANK == 1:
        dist.send(tensor, 0, tag=9)
    if work is not None:
        work.wait()


@case
def a_destroyed_group_says_so() -> None:
    group = dist.new_group()
    backend = backend_of(group)
    dist.destroy_process_group(group)
    backend.shutdown()
    raises(
        dist.DistBackendError,
        "was destroyed",
        lambda: backend.allreduce([torch.ones(1)], c10d.AllreduceOptions()),
    )


@case
def communicator_of_dear() -> None:
    communicator = Communicator(dist.group.WORLD, channels=2, record_times=True)
    shard, other = torch.empty(8), torch.ones(3)
    works = [
        communicator.reduce_scatter(shard, torch.arange(8.0 * SIZE), op="sum", channel=1),
        communicator.all_reduce(other, op="mean", channel=0),
    ]
    for work in works:
        work.wait()
    same(shard, torch.arange(8.0 * RANK, 8.0 * RANK + 8) * SIZE)
    same(other, torch.ones(3))
    communicator.close()


@case
def wrong_arguments_are_named() -> None:
    backend = backend_of()
    reducing, sending = c10d.AllreduceOptions(), c10d.BroadcastOptions()
    gathering, exchanging = c10d.AllgatherOptions(), c10d.AllToAllOptions()
    largest = c10d.AllreduceOptions()
    largest.reduceOp = dist.ReduceOp.MAX
    sending.rootRank = SIZE
    two, huge = torch.ones(2), torch.zeros(1, dtype=torch.uint8).expand(2**31)
    one, ones, twice = torch.empty(SIZE), [1] * SIZE, torch.empty(SIZE * 2)
    band, mean = dist.ReduceOp.BAND, dist.ReduceOp.AVG
    for kind, words, call in [
        (TypeError, "float8_e4m3fn", lambda: dist.all_reduce(two.to(torch.float8_e4m3fn))),
        (TypeError, "cannot reduce torch.float32 by BAND", lambda: dist.all_reduce(two, band)),
        (TypeError, "complex64 by MAX", lambda: backend.allreduce([two.cfloat()], largest)),
        (TypeError, "int32 by AVG", lambda: dist.all_reduce(two.int(), mean)),
        (ValueError, "is on meta", lambda: backend.allreduce([two.to("meta")], reducing)),
        (TypeError, "is torch.sparse", lambda: backend.allreduce([two.to_sparse()], reducing)),
        (ValueError, f"no rank {SIZE}", lambda: backend.broadcast([two], sending)),
        (ValueError, "no rank -1", lambda: backend.send([two], -1, 0)),
        (ValueError, "tag -1", lambda: backend.send([two], 0, -1)),
        (ValueError, "limit of 2147483647", lambda: dist.all_reduce(huge)),
        (
            ValueError,
            "elements each",
            lambda: dist.all_gather_into_tensor(torch.empty(SIZE * 2 + 1), two),
        ),
        (TypeError, "output of", lambda: backend._allgather_base(twice, two.double(), gathering)),
        (
            ValueError,
            "list of",
            lambda: backend.allgather([[two] * (SIZE + 1)], [two], gathering),
        ),
        (
            ValueError,
            "splits",
            lambda: backend.alltoall_base(one, one, ones, [9] * SIZE, exchanging),
        ),
    ]:
        raises(kind, words, call)
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
    dist.init_process_group(mpi.NAME, world_size=SIZE, **options)
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
        mpi.register(),
        store=dist.FileStore(path, SIZE),
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(seconds=timeout_s),
    )
    for name in names or ORDINARY:
        if not alone:
            dist.barrier()  # a message of the next case is none of this one's
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
