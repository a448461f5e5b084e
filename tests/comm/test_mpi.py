"""The MPI backend: every operation on 1 to 4 ranks under mpirun, and how jobs end that go wrong.

The ranks run this file as a program, `test_mpi.py STORE CASE...`. Each writes STORE-rank<N>.jsonl,
a line per case: the case, and null or the traceback of what went wrong. Not to stdout: mpirun mixes
the ranks' lines.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from comm_core import mpi
from dear.comm.communicator import Communicator
from tests.comm import bodies
from tests.comm.operations import TORCH, cases, over_torch, same

ROOT = Path(__file__).parents[2]
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


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
    bodies.futures,
    bodies.sub_groups,
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
    tensor = torch.empty(1)
    pending = [dist.irecv(tensor, 1, tag=9)] if SIZE > 1 and RANK == 0 else []
    dist.barrier()
    bodies.rests(span_s=0.25, least_s=0.025)
    dist.barrier()
    if RANK == 1:
        dist.send(tensor, 0, tag=9)
    for work in pending:
        work.wait()


@case
def a_destroyed_group_says_so() -> None:
    group = dist.new_group()
    backend = backend_of(group)
    dist.destroy_process_group(group)
    backend.shutdown()
    options = c10d.AllreduceOptions()
    raises(
        dist.DistBackendError, "was destroyed", lambda: backend.allreduce([torch.ones(1)], options)
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
    reducing, largest = c10d.AllreduceOptions(), c10d.AllreduceOptions()
    sending = c10d.BroadcastOptions()
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


# The tests ------------------------------------------------------------------------------------

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here"),
    pytest.mark.skipif(mpi.unavailable() is not None, reason=str(mpi.unavailable())),
]


@dataclass(frozen=True)
class Done:
    code: int
    stderr: str
    lines: list[dict]
    """The ranks' reports, one per case and rank."""


def run(size: int, *names: str, launcher: list[str] | None = None) -> Done:
    mpirun = ["mpirun", "-np", str(size), "--allow-run-as-root", "--oversubscribe"]
    with TemporaryDirectory() as folder:
        command = [
            *([*mpirun, "--bind-to", "none"] if launcher is None else launcher),
            *(sys.executable, "-m", "tests.comm.test_mpi", f"{folder}/store", *names),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        log = Path(folder, "log")
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=file
            )
            try:
                code = process.wait(timeout=240)
            except subprocess.TimeoutExpired:
                process.terminate()  # mpirun then stops its ranks
                code = process.wait(timeout=10)
        reports = "".join(path.read_text() for path in Path(folder).glob("store-rank*.jsonl"))
        return Done(code, log.read_text(), [json.loads(line) for line in reports.splitlines()])


full = pytest.mark.full


# Starting ranks takes longer than the cases do: one job per size runs them all.
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=full) for size in (1, 3, 4))])
def test_operations_and_a_clean_end(size: int):
    done = run(size)
    assert [line for line in done.lines if line["error"]] == []
    ran = sorted((line["case"], line["rank"]) for line in done.lines)
    assert ran == sorted(itertools.product(ORDINARY, range(size))), done.stderr
    assert (done.code, done.stderr) == (0, "")


def test_a_process_without_mpirun_is_a_job_of_one():
    done = run(1, "communicator_of_dear", launcher=[])
    assert done.code == 0, done.stderr
    (line,) = done.lines
    assert line["error"] is None


def test_processes_that_mpirun_did_not_start_are_told():
    done = run(1, "objects", launcher=["env", "OMPI_COMM_WORLD_SIZE=2"])
    assert done.code != 0
    assert "says rank 0 of 2, MPI says rank 0 of 1; started without mpirun?" in done.stderr


@full
def test_a_rank_that_does_not_call_is_reported_after_the_timeout():
    done = run(2, "a_rank_that_does_not_call")
    errors = [line["error"] for line in done.lines if line["rank"] == 0]
    assert errors == [None], done.stderr
    assert done.code != 0  # an operation was still under way
    assert "1 operations had not ended" in done.stderr


def test_a_rank_that_fails_ends_the_job_at_once():
    done = run(2, "a_rank_that_fails")
    assert done.code != 0
    assert "for the test" in done.stderr
    assert "has not ended" not in done.stderr  # rank 0 has had no time-out of its own


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
