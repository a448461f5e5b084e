"""What each rank of tests/comm/test_mpi.py runs: `mpi_program.py STORE CASE...`.

Every rank writes STORE-rank<N>.jsonl, a line per case: the case, and null or the traceback of what
went wrong. Not to stdout: mpirun mixes the ranks' lines.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from comm_core import mpi
from dear.comm.communicator import Communicator
from tests.comm import bodies
from tests.comm.operations import TORCH, cases, over_torch, same

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))

CASES: dict[str, Callable[[], None]] = {}


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


# The operations are those of every backend.
@case
def operations() -> None:
    chosen = cases(SIZE, list(TORCH), gaps=lambda name: " " not in name)
    over_torch(chosen, 40)


for body in (
    bodies.layouts_and_autograd,
    bodies.messages,
    bodies.batches,
    bodies.futures,
    bodies.sub_groups,
    bodies.threads,
    bodies.objects,
    bodies.ddp_and_fsdp,
):
    case(body)


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
    work, tensor = None, torch.empty(1)
    if SIZE > 1 and RANK == 0:
        work = dist.irecv(tensor, 1, tag=9)
    dist.barrier()
    bodies.rests(span_s=0.25, least_s=0.025)
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
    options = c10d.AllreduceOptions()
    raises(
        dist.DistBackendError,
        "was destroyed",
        lambda: backend.allreduce([torch.ones(1)], options),
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
    reducing, sending, largest = (
        c10d.AllreduceOptions(),
        c10d.BroadcastOptions(),
        c10d.AllreduceOptions(),
    )
    gathering, exchanging = c10d.AllgatherOptions(), c10d.AllToAllOptions()
    largest.reduceOp, sending.rootRank = dist.ReduceOp.MAX, SIZE
    two, huge = torch.ones(2), torch.zeros(1, dtype=torch.uint8).expand(2**31)
    one, ones, twice = torch.empty(SIZE), [1] * SIZE, torch.empty(SIZE * 2)
    band, mean, nines = dist.ReduceOp.BAND, dist.ReduceOp.AVG, [9] * SIZE
    gather, more = dist.all_gather_into_tensor, torch.empty(SIZE * 2 + 1)
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
        (ValueError, "elements each", lambda: gather(more, two)),
        (TypeError, "output of", lambda: backend._allgather_base(twice, two.double(), gathering)),
        (ValueError, "list of", lambda: backend.allgather([[two] * (SIZE + 1)], [two], gathering)),
        (ValueError, "splits", lambda: backend.alltoall_base(one, one, ones, nines, exchanging)),
    ]:
        raises(kind, words, call)
    bodies.unharmed()


@case
def messages_of_a_wrong_size_are_named() -> None:
    for length, words in ((3, "sent 3 elements, but the tensor has 5"), (9, "truncate")):
        if RANK == 1:
            dist.send(torch.ones(length), 0)
        elif RANK == 0 and SIZE > 1:
            raises(dist.DistBackendError, words, lambda: dist.recv(torch.ones(5), 1))
    dist.barrier()


@case
def a_wait_may_end_before_the_operation() -> None:
    tensor = torch.ones(4)
    if RANK == 0 and SIZE > 1:
        work = dist.irecv(tensor, 1, tag=5)
        raises(
            dist.DistBackendError,
            f"of 16 bytes on rank 0 of {SIZE} of group '0' has not ended in 0.05 s",
            lambda: work.wait(timedelta(milliseconds=50)),
        )
    dist.barrier()
    if RANK == 1:
        dist.send(tensor * 2, 0, tag=5)
    if RANK == 0 and SIZE > 1:
        work.wait()
        assert tensor.sum().item() == 8


@case
def leaving_and_joining_again() -> None:
    options = {"store": dist.FileStore(sys.argv[1] + "-again", SIZE), "rank": RANK}
    dist.destroy_process_group()
    dist.init_process_group(mpi.NAME, world_size=SIZE, **options)
    bodies.unharmed()


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
    timeout_s = 2 if names == ["a_rank_that_does_not_call"] else 60
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
