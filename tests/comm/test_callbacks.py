"""Code that runs when an operation ends: callbacks that wait for others, the end of a script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.launch.ranks import rank_env
from tests.comm import worlds
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["shm2", "tcp2"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with worlds.lent(request.param) as pool:
        yield pool


def _sum_later(number: int) -> torch.futures.Future:
    return dist.all_reduce(torch.full((1000,), float(number)), async_op=True).get_future()


def _waits_in_callbacks(depth: int) -> float:
    """Each callback waits for an operation whose callback waits for another one."""

    def after(level: int) -> Callable[[torch.futures.Future], float]:
        def wait(future: torch.futures.Future) -> float:
            value = future.value()[0][0].item()
            if level == depth:
                return value
            return value + _sum_later(level + 1).then(after(level + 1)).wait()

        return wait

    return _sum_later(0).then(after(0)).wait()


@pytest.mark.parametrize("depth", [1, 5])
def test_a_callback_may_wait_for_another_operation(ranks, depth):
    wanted = float(sum(2 * level for level in range(depth + 1)))
    assert ranks.run(_waits_in_callbacks, depth) == [wanted, wanted]


def _in_order(count: int) -> list[int]:
    seen: list[int] = []
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.barrier(group)  # until rank 0 has registered all of its callbacks

    def called_back(index: int) -> None:
        time.sleep(0.01 if index % 10 == 0 else 0)  # as one does that waits for a core
        seen.append(index)

    futures = [_sum_later(i).then(lambda _, i=i: called_back(i)) for i in range(count)]
    if dist.get_rank() == 0:
        dist.barrier(group)
    torch.futures.wait_all(futures)
    dist.destroy_process_group(group)
    return seen


def test_callbacks_run_in_the_order_in_which_operations_end(ranks):
    assert ranks.run(_in_order, 50)[0] == list(range(50))


def _starting(tensor: torch.Tensor) -> Callable[[torch.futures.Future], torch.Tensor]:
    def start(before: torch.futures.Future) -> torch.Tensor:
        before.wait()  # raises its error
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    return start


def _beside_the_program(buckets: int) -> list[tuple[float, ...]]:
    """Callbacks start collectives that the program knows nothing of, each rank at another time."""
    rank, results = dist.get_rank(), []
    for step in range(4):
        time.sleep(0.05 * rank)
        futures = []
        for bucket in range(buckets):
            first, second, third = (torch.full((10 * k + bucket,), float(k)) for k in (1, 2, 3))
            future = dist.all_reduce(first, async_op=True).get_future()
            futures.append(future.then(_starting(second)).then(_starting(third)))
            time.sleep(0.02 * (rank if step % 2 else 1 - rank))  # where one is late, then the other
        results.append(tuple(future.wait()[0].item() for future in futures))
        dist.barrier()
    return results


def test_callbacks_and_the_program_start_collectives_in_one_order_on_all_ranks(ranks):
    assert ranks.run(_beside_the_program, 3) == [[(6.0, 6.0, 6.0)] * 4] * 2


def _late_callback() -> str:
    """Rank 1 joins when rank 0 has its callback: torch calls that of an ended operation at once."""
    never, first = threading.Event(), dist.get_rank() == 0
    group = dist.new_group(timeout=timedelta(seconds=1 if first else 60))
    if not first:
        dist.barrier()
    future = dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future()
    if first:
        future.then(lambda _: never.wait(20))
        dist.barrier()
    try:
        dist.all_reduce(torch.ones(4), group=group)
        return "no error"
    except dist.DistBackendError as error:
        return str(error)
    finally:
        never.set()
        dist.barrier()
        dist.destroy_process_group(group)


def test_a_callback_that_does_not_return_ends_in_a_time_out(ranks):
    for text in ranks.run(_late_callback):
        assert "timed out: a collective waited for callbacks" in text, text


def _powersgd() -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)  # two buckets
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    assert state.iter > state.start_powerSGD_iter
    return [parameter.double().sum().item() for parameter in model.parameters()]


def test_the_powersgd_hook_of_torch_runs_and_keeps_replicas_equal(ranks):
    first, second = ranks.run(_powersgd)
    assert first == second


SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist
import comm_core
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = "file://" + os.environ["DEAR_STORE"]
dist.init_process_group("comm_core", init_method=store, rank=rank, world_size=size)
dist.barrier()
tensor = torch.ones(10_000)
if dist.get_rank() == 1:
    time.sleep(1)
    sys.exit(0)
"""
ENDINGS = {
    "an operation": "dist.all_reduce(tensor, async_op=True)",
    "a callback": "dist.all_reduce(tensor, async_op=True).get_future().then(print)",
    "a callback that waits": """
        other = dist.all_reduce(tensor, async_op=True).get_future()
        dist.all_reduce(tensor[:5], async_op=True).get_future().then(lambda _f: other.wait())
    """,
    "a callback that never returns": """
        ended = dist.all_reduce(tensor, async_op=True).get_future()
        ended.then(lambda _f: threading.Event().wait())
    """,
    "a thread": """
        # On one core, Python ends before the thread's turn comes. The thread gets low priority when
        # it waits for the operation: before that, it holds Python's lock.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        behind = threading.Thread(target=dist.all_reduce, args=(tensor,), daemon=True)
        behind.start()
        time.sleep(0.5)
        os.sched_setscheduler(behind.native_id, os.SCHED_IDLE, os.sched_param(0))
    """,
    "a message": "dist.irecv(tensor, 1)",
    "an exception": "dist.all_reduce(tensor, async_op=True); raise SystemExit(3)",
    "after a destroy": """
        work = dist.all_reduce(tensor, async_op=True)
        dist.destroy_process_group()
        try:
            work.wait()
        except dist.DistBackendError:
            pass
    """,
}

QUICK = ("a callback that waits", "a callback that never returns", "a thread")


HOST = """
import gc, json, os, sys
import torch._dynamo, torch.distributed.nn, comm_core, dear.optimizer

gc.freeze()

def script_of_rank(line):
    path, places = json.loads(line)
    ranks = []
    for rank, environment in enumerate(places):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(environment)
            output = os.open(f"{path}.{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1), os.dup2(output, 2)
            return path
    print([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks], flush=True)

path = next(filter(None, map(script_of_rank, sys.stdin)))
exec(compile(open(path).read(), path, "exec"))
"""
"""Program that imports what ranks need, once, and forks them. A rank then runs its script as the
main module of an interpreter, which ends as that of any other program does."""


@pytest.fixture(scope="module")
def run_all() -> Iterator[Callable[[str, Path], list[tuple[int, str]]]]:
    """Function of a script and a folder; returns exit status and output of two ranks of it."""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'common'}", "PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def run(script: str, folder: Path) -> list[tuple[int, str]]:
        path = folder / "script.py"
        path.write_text(script)
        places = [
            worlds.environments("shm2")[rank] | rank_env(rank, 2, store=folder / "store")
            for rank in range(2)
        ]
        print(json.dumps([str(path), places]), file=host.stdin, flush=True)
        try:
            statuses = json.loads(host.stdout.readline())
        except BaseException:  # pytest's time limit
            os.killpg(host.pid, signal.SIGKILL)
            raise
        outputs = [Path(f"{path}.{rank}").read_text() for rank in range(2)]
        return list(zip(statuses, outputs, strict=True))

    yield run
    with contextlib.suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGKILL)
    host.communicate()


@pytest.mark.parametrize(
    "what",
    [what if what in QUICK else pytest.param(what, marks=pytest.mark.full) for what in ENDINGS],
)
def test_a_script_may_end_with_something_under_way(what, run_all, tmp_path):
    ended = run_all(SCRIPT + textwrap.dedent(ENDINGS[what]), tmp_path)
    wanted = 3 if what == "an exception" else 0
    assert [status for status, _said in ended] == [wanted, 0], ended
    assert "terminate" not in ended[0][1] and "Fatal" not in ended[0][1]


OUTLIVES = """
import os, time
import torch, torch.distributed as dist, torch.distributed.nn
import dear
dear.init(backend=BACKEND)
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = dear.DistributedOptimizer(sgd, model, algorithm="ddp")
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
tensor, gathered = torch.ones(4), [torch.empty(4), torch.empty(4)]
if dear.rank() == 0:
    # The backend ends this while the group is destroyed, and needs the interpreter for that.
    dist.all_gather(gathered, tensor, async_op=True).get_future().then(lambda _: time.sleep(0.1))
else:
    time.sleep(1)
    if BACKEND == "gloo":
        dist.all_gather(gathered, tensor)
dear.shutdown()
optimizer.close()
"""


# DDP's reducer is C++: as the last owner of a group, it destroys that with the GIL held. Of the
# others rank 1 ends while rank 0 still needs what its last step sends or shows.
ENDS = """
import time
import torch, dear
dear.init(timeout_s=20)
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = dear.DistributedOptimizer(sgd, model, algorithm=ALGORITHM)
for step in range(3):
    if dear.rank() == 0 and step == 2:
        time.sleep(1)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if dear.rank() == 0:
    with torch.no_grad():
        model(torch.ones(2, 4))
    optimizer.synchronize()
"""


@pytest.mark.parametrize(
    ("script", "name"),
    [
        *((OUTLIVES, backend) for backend in ("comm_core", "gloo")),
        *((ENDS, algorithm) for algorithm in ("neighbor", "pull-get")),
        *(pytest.param(ENDS, n, marks=pytest.mark.full) for n in ("win-put", "push-sum", "dear")),
    ],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_a_script_may_end_without_close(script: str, name: str, run_all, tmp_path: Path):
    ended = run_all(re.sub("BACKEND|ALGORITHM", repr(name), script), tmp_path)
    assert [status for status, _said in ended] == [0, 0], ended
