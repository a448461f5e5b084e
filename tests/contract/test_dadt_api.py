"""dear.dadt: DADT's own calls."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import dear
from comm_core import mpi
from dear import dadt
from dear.buckets.grouping import by_buffer
from dear.comm import runtime
from dear.errors import UserError
from tests.contract.loops import message
from tests.system.processes import finished


@pytest.fixture(params=["comm_core", "gloo"])
def pool(request, world):
    return world(2, request.param)


def _session(body, options=None):
    dadt.init(**(options or {}))
    try:
        return body()
    finally:
        dadt.shutdown()


def test_a6_tasks_are_split_by_the_size_of_the_buffer():
    sizes = [30, 30, 10, 64, 10, 50]
    groups = by_buffer(sizes, 64)
    assert [[sizes[i] for i in group] for group in groups] == [[30, 30], [10], [64], [10, 50]]
    assert by_buffer(sizes, 0) == [[i] for i in range(6)]
    assert by_buffer([], 64) == []


def _x():
    x = torch.arange(100.0)
    return x if dear.rank() == 0 else 100 - x


def _dense():
    x, rank = _x(), dear.rank()
    whole = torch.full((100,), 100.0)
    result = dadt.all_reduce(0, x)  # A1
    assert torch.equal(result, whole)
    result.zero_()
    assert torch.equal(dadt.all_reduce(0, x), whole)
    first = dadt.all_reduce_async(0, x)  # A2
    assert torch.equal(first, torch.zeros(100))
    second = dadt.all_reduce_async(0, x)
    assert torch.equal(second, whole)
    second.fill_(-1.0)  # the caller's own
    assert torch.equal(dadt.flush(0), whole)
    assert torch.equal(x, _x())
    half = dadt.all_reduce_async(1, x.view(10, 10).to(torch.float64).t())
    assert (half.dtype, half.shape) == (torch.float64, (10, 10))
    mine = torch.full((2, 2), float(rank + 5))
    assert torch.equal(dadt.broad_cast(0, mine), torch.full((2, 2), 5.0))
    assert mine[0, 0] == rank + 5
    outputs = [dadt.all_reduce_async(7, torch.tensor([t + 10.0 * rank])).item() for t in range(5)]
    last = dadt.flush(7).item()  # A3
    with pytest.raises(UserError, match="id 7"):
        dadt.flush(7)
    assert dadt.all_reduce_async(7, torch.ones(1)).item() == 0.0
    return outputs, last


def test_a1_a2_a3_sums_leave_their_input_and_asynchronous_ones_come_one_call_later(pool):
    assert pool.run(_session, _dense) == [([0.0, 10.0, 12.0, 14.0, 16.0], 18.0)] * 2


def _coo():
    if dear.rank() == 0:
        places, values = [[0, 0, 1], [0, 1, 0]], [[3.0, 4], [5, 6], [10, 10]]
    else:
        places, values = [[1, 1, 1], [0, 1, 2]], [[3.0, 4], [5, 6], [7, 8]]
    return torch.sparse_coo_tensor(places, values, (2, 3, 2))


_COO_SUM = (
    [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]],
    [[3.0, 4.0], [5.0, 6.0], [13.0, 14.0], [5.0, 6.0], [7.0, 8.0]],
)


def _parts(tensor):
    assert tensor.is_coalesced()
    return tensor.indices().tolist(), tensor.values().tolist()


def _sparse():
    first = dadt.coo_all_reduce_async(0, _coo())
    tensor = _coo().coalesce()
    assert torch.equal(first.indices(), tensor.indices())
    assert torch.equal(first.values(), torch.zeros(3, 2))
    second = _parts(dadt.coo_all_reduce_async(0, _coo()))
    assert _parts(dadt.flush(0, coo=True)) == second
    twice = torch.sparse_coo_tensor([[2, 2]], [1.0, 2.0], (4,))  # not coalesced
    assert _parts(dadt.coo_all_reduce(0, twice)) == ([[2]], [6.0])
    assert not twice.is_coalesced()
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0).long(), torch.zeros(0), (4,))
    assert _parts(dadt.coo_all_reduce(1, empty)) == ([[]], [])
    mine = twice if dear.rank() else empty
    assert _parts(dadt.coo_all_reduce(2, mine)) == ([[2]], [3.0])
    assert dadt.coo_all_reduce(3, twice.to(torch.bfloat16)).dtype == torch.bfloat16
    return second, _parts(dadt.coo_all_reduce(4, _coo()))


def test_a4_a5_sparse_tensors_of_any_type_are_added_at_once_or_one_call_later(pool):
    assert pool.run(_session, _sparse) == [(_COO_SUM, _COO_SUM)] * 2


def _facts():
    for _ in range(2):
        dadt.barrier()
        dadt.local_barrier()
    return dadt.initialized(), dadt.rank(), dadt.size(), dadt.local_rank(), dadt.local_size()


def test_what_a_rank_knows_of_itself(pool):
    assert pool.run(_session, _facts) == [(True, r, 2, r, 2) for r in range(2)]


def _threads():
    """Many calls at a time, in another order on each rank, of mixed types and kinds."""
    results = {}
    kinds = [torch.float32, torch.float64, torch.int64, torch.bfloat16]

    def call(number):
        dtype = kinds[number % 4]
        tensor = torch.full((number + 1,), number + dear.rank(), dtype=dtype)
        if number % 5 == 4:
            results[number] = dadt.broad_cast(number, tensor).tolist()
        else:
            results[number] = dadt.all_reduce(number, tensor).tolist()

    numbers = list(range(24))
    for number in numbers if dear.rank() % 2 else reversed(numbers):
        threading.Thread(target=call, args=(number,)).start()
    for thread in threading.enumerate():
        if "(call)" in thread.name:
            thread.join()
    return results


@pytest.mark.parametrize("options", [{}, {"all_reduce_buffer_size": 0, "cycle_duration_ms": 0}])
def test_ranks_may_ask_in_any_order(world, options):
    for results in world(3).run(_session, _threads, options):
        for number, values in results.items():
            wanted = number if number % 5 == 4 else 3 * number + 3
            assert values == [wanted] * (number + 1)
        assert len(results) == 24


def _forms():
    """Blocking and asynchronous calls of one number, and of several kinds, do not collide."""
    x = torch.ones(2)
    assert dadt.all_reduce_async(0, x)[0] == 0
    assert dadt.all_reduce(0, 3 * x)[0] == 6
    assert dadt.broad_cast(0, 4 * x)[0] == 4
    assert dadt.coo_all_reduce(0, (5 * x).to_sparse()).to_dense()[0] == 10
    assert dadt.all_reduce_async(0, x)[0] == 2


def test_forms_of_one_number_do_not_collide(pool):
    pool.run(_session, _forms)


class _Messages:
    """Counts the all-reduces of the thread."""

    def __init__(self):
        self.sizes = []

    def watch(self, communicator):
        plain = communicator.all_reduce

        def all_reduce(tensor, **options):
            self.sizes.append(tensor.nbytes)
            return plain(tensor, **options)

        communicator.all_reduce = all_reduce


def _fused():
    seen = _Messages()
    seen.watch(dadt.current().cycles._execution._communicator)
    for _ in range(2):
        for number, count in enumerate((30, 30, 10, 64, 10, 50)):
            # Ids fall in the order in which the thread takes them.
            dadt.all_reduce_async(9 - number, torch.ones(count, dtype=torch.int8))
        dadt.barrier()
    for number in range(6):
        assert dadt.flush(9 - number).unique().item() == 2
    return seen.sizes


def test_a6_what_is_ready_in_one_cycle_shares_buffers(own_pool):
    options = {"cycle_duration_ms": 300, "all_reduce_buffer_size": 64}
    for sizes in own_pool(2).run(_session, _fused, options):
        assert set(sizes) >= {60, 64}
        assert max(sizes) <= 64
        assert sum(sizes) == 2 * (30 + 30 + 10 + 64 + 10 + 50)


def _mismatch():
    shape = (2,) if dear.rank() == 0 else (3,)
    with pytest.raises(UserError, match=r"rank 0 gave .*\(2,\).*rank 1 gave .*\(3,\)"):
        dadt.all_reduce(0, torch.ones(shape))
    assert dadt.all_reduce(0, torch.ones(1)).item() == 2.0


def test_tensors_that_differ_between_ranks_are_refused_on_all(pool):
    pool.run(_session, _mismatch)


def _missing():
    if dear.rank() == 0:
        with pytest.raises(RuntimeError, match=r"no result within 1 s; ranks \[1\]"):
            dadt.all_reduce(3, torch.ones(1))
    else:
        with pytest.raises(RuntimeError, match=r"no result within 1 s; ranks \[0\]"):
            dadt.all_reduce(4, torch.ones(1))
    dadt.barrier()


def test_a_call_that_a_rank_does_not_make_ends_with_its_name(own_pool):
    own_pool(2).run(_session, _missing, {"timeout_s": 1.0})


def _left():
    if dear.rank() == 0:
        with pytest.raises(UserError, match=r"all_reduce\(id 3\): ranks \[1\] shut down"):
            dadt.all_reduce(3, torch.ones(1))


def test_a_call_that_a_rank_leaves_without_is_told_so(own_pool):
    own_pool(2).run(_session, _left)


def _again():
    values = []
    for number in range(3):
        dadt.init(cycle_duration_ms=1)
        dadt.init(cycle_duration_ms=1)
        with pytest.raises(UserError, match="other arguments"):
            dadt.init(cycle_duration_ms=2)
        values.append(dadt.all_reduce_async(0, torch.ones(1)).item())
        values.append(dadt.all_reduce_async(0, torch.ones(1)).item() + number)
        dadt.shutdown()
        dadt.shutdown()
        assert not dadt.initialized()
        with pytest.raises(UserError, match=r"dadt\.init\(\)"):
            dadt.size()
    return values


def test_a9_it_can_be_initialized_again_after_a_shutdown(pool):
    assert pool.run(_again) == [[0, 2, 0, 3, 0, 4]] * 2


def _whole_job():
    """dadt joins and leaves the job itself."""
    runtime.shutdown()
    for _ in range(2):
        dadt.init(executor_type="gloo")
        assert runtime.communicator().backend == "gloo"
        assert dadt.all_reduce(0, torch.ones(1)).item() == 2
        dadt.shutdown()
        assert not runtime.is_initialized()
    dadt.init(executor_type="gloo")
    runtime.shutdown()
    assert not dadt.initialized()


@pytest.mark.full
def test_it_joins_the_job_and_leaves_it(own_pool):
    own_pool(2).run(_whole_job)


def _two_executors():
    """The call of DADT's README, with what a machine without GPUs has."""
    runtime.shutdown()
    dadt.init(
        cycle_duration_ms=1,
        broad_cast_executor="gloo",
        all_reduce_executor="comm_core",
        all_reduce_buffer_size=1 << 20,
        group_buffer_size=1 << 20,
    )
    session = dadt.current()
    carriers = session.cycles._execution
    moved = [carriers._broadcasts.bytes_sent, carriers._communicator.bytes_sent]
    assert dadt.broad_cast(0, torch.full((3,), dear.rank() + 5.0)).tolist() == [5.0] * 3
    assert dadt.all_reduce(0, torch.ones(5)).tolist() == [2.0] * 5
    gained = [
        carriers._broadcasts.bytes_sent - moved[0],
        carriers._communicator.bytes_sent - moved[1],
    ]
    backends = carriers._broadcasts.backend, carriers._communicator.backend
    dadt.shutdown()
    return backends, gained


def test_broadcasts_and_sums_may_have_executors_of_their_own(own_pool):
    results = own_pool(2).run(_two_executors)
    assert results == [(("gloo", "comm_core"), [12, 20])] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"executor_type": "mpii"}, "did you mean 'mpi'"),
        ({"cycle_duration_ms": -1}, "cycle_duration_ms"),
        ({"all_reduce_buffer_size": -1}, "all_reduce_buffer_size"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"gpu_device_id": 64}, "gpu_device_id=64"),
        ({"gpu_device_id": -2}, "gpu_device_id=-2"),
        ({"broad_cast_executor": "glooo", "all_reduce_executor": "gloo"}, "did you mean 'gloo'"),
        ({"executor_type": "gloo", "all_reduce_executor": "mpi"}, "gloo, mpi"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, words):
    line = message(lambda: dadt.init(**arguments))
    assert words in line and "\n" not in line
    assert not dadt.initialized()


def _bad_calls():
    with pytest.raises(UserError, match=r"already uses"):
        dadt.init(executor_type="mpi")
    for call in (dadt.all_reduce, dadt.all_reduce_async, dadt.broad_cast, dadt.coo_all_reduce):
        with pytest.raises(UserError, match=r"dadt\.init"):
            call(0, torch.ones(1).to_sparse() if "coo" in call.__name__ else torch.ones(1))
    with pytest.raises(UserError, match=r"dadt\.init"):
        dadt.DistributedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1))
    dadt.init()
    assert "id must be" in message(lambda: dadt.all_reduce("a", torch.ones(1)))
    assert "id must be" in message(lambda: dadt.all_reduce(-1, torch.ones(1)))
    assert "needs a tensor" in message(lambda: dadt.all_reduce(0, 1.0))
    assert "needs a dense tensor" in message(lambda: dadt.all_reduce(0, torch.ones(1).to_sparse()))
    assert "needs a sparse COO tensor" in message(lambda: dadt.coo_all_reduce(0, torch.ones(1)))
    dadt.shutdown()


def test_bad_calls_are_refused_in_one_line(pool):
    pool.run(_bad_calls)


def _optimizer(avg, delay):
    """Parameters start as rank 0's; a plain tensor serves as well as a Parameter."""
    slope = torch.tensor([1.0, 3.0]) * (dear.rank() + 1)
    x = torch.full((2,), 5.0 + dear.rank(), requires_grad=True)
    y = nn.Parameter(torch.ones(2))
    first = torch.optim.SGD([x], lr=1.0)
    second = torch.optim.SGD([y], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1)
    assert dadt.DistributedOptimizer(first, avg=avg, delay=delay) is first
    assert isinstance(dadt.DistributedOptimizer(second), torch.optim.SGD)
    values = [x.tolist()]
    for _ in range(4):
        first.zero_grad()
        second.zero_grad()
        ((x + y) * slope).sum().backward()
        first.step()
        second.step()
        scheduler.step()
        values.append(x.tolist())
    first.flush()
    values.append(x.tolist())
    dadt.shutdown()  # applies what the other holds back
    return values, y.tolist()


def _optimizer_of(avg, delay):
    dadt.init()
    return _optimizer(avg, delay)


@pytest.mark.parametrize(("avg", "delay"), [(True, 1), (False, 2)])
def test_a7_its_optimizer_is_a_real_one_and_shutdown_applies_the_last_gradients(pool, avg, delay):
    gradient = torch.tensor([1.0, 3.0]) * (1.5 if avg else 3.0)
    applied = [0] + [max(0, t - delay) for t in range(1, 5)] + [4]
    for values, y in pool.run(_optimizer_of, avg, delay):
        for value, count in zip(values, applied, strict=True):
            torch.testing.assert_close(torch.tensor(value), 5.0 - count * gradient)
        # Updates at learning rates .1, .01, .001 and, in shutdown, .0001.
        moved = 0.1111 * torch.tensor([1.5, 4.5])
        torch.testing.assert_close(torch.tensor(y), 1.0 - moved)


def _after():
    """An optimizer outlives the job that it was made in."""
    runtime.shutdown()
    dadt.init()
    model = nn.Linear(2, 1)
    optimizer = dadt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dadt.shutdown()
    with pytest.raises(UserError, match="has left the job"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_an_optimizer_says_that_the_job_is_over(own_pool):
    own_pool(1).run(_after)


def _timeline(path):
    dadt.init(timeline=path, cycle_duration_ms=1)
    for _ in range(3):
        dadt.all_reduce_async(4, torch.ones(5))
    dadt.broad_cast(1, torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    optimizer = dadt.DistributedOptimizer(torch.optim.SGD([x], lr=0.1))
    for _ in range(2):
        x.sum().backward()
        optimizer.step()
    dadt.shutdown()


def test_a_timeline_has_dadts_phases(pool, tmp_path):
    pool.run(_timeline, str(tmp_path / "trace.json"))
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in trace if event["ph"] == "X"]
        assert set(names) == {
            "StayInQueue",
            "StayInWaitingRequestPool",
            "CopyToMidWay",
            "DoAllReduce",
            "DoBroadCast",
            "WaitForFetch",
            "InTraining",
        }
        assert names.count("DoAllReduce") == 2
        assert names.count("InTraining") == 1
        optimizer = json.loads((tmp_path / f"trace-optimizer0-rank{rank}.json").read_text())
        assert [e["name"] for e in optimizer["traceEvents"]].count("step 2") == 1


@pytest.mark.full  # MPI takes seconds to start
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")
@pytest.mark.skipif(mpi.unavailable() is not None, reason=str(mpi.unavailable()))
def test_a_script_runs_over_mpi(tmp_path):
    report = tmp_path / "report.json"
    mpirun = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    done = finished(
        [*mpirun, sys.executable, "-m", "tests.contract.dadt_program", "mpi", str(report)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DEAR_STORE": str(tmp_path / "store")},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert result["summed"] == [2.0, 2.0]
    assert result["sparse"] == [1.0, 1.0]
    assert result["moved"][0] == pytest.approx([0.3, 0.3])
    assert result["moved"][1] == pytest.approx([0.45, 0.45])
    assert result["spread"] == pytest.approx(0.0, abs=1e-6)
