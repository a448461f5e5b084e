"""The flight recorder: what ranks did last is read after their end, and the first divergence."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dear
from common.launch.ranks import rank_env
from dear.comm.communicator import Communicator
from dear.comm.flight.__main__ import main
from dear.comm.flight.divergence import first_divergence
from dear.comm.flight.reading import clear, merge, read
from dear.comm.flight.recorder import SLOTS, VARIABLE
from tests.comm.operations import me
from tests.comm.worlds import run_without
from tests.ranks import RankPool


@contextmanager
def recorded(folder: Path, backend: str = "comm_core", size: int = 4) -> Iterator[RankPool]:
    ranks = RankPool(size, 30.0, backend, [{VARIABLE: str(folder)}] * size)
    try:
        yield ranks
    finally:
        ranks.close()


def _trains(steps: int = 3) -> None:
    model = torch.nn.Sequential()
    for name in ("layer1", "layer3"):
        model.add_module(name, torch.nn.Linear(8, 8))
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        algorithm="dear",
        threshold_mb=1e-4,
        first_mb=1e-4,
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    optimizer.synchronize()


def _then(what: str) -> str:
    """Rank 2 goes another way than the others after a collective; returns the error."""
    rank, n = me()
    communicator = Communicator(dist.new_group(timeout=timedelta(seconds=2)))
    whole, part = torch.zeros(64), torch.zeros(64 // n)
    communicator.all_reduce(whole, op="sum").wait()
    dist.barrier()  # a rank that is late there would get the error of the next call
    try:
        if rank == 2 and what == "calls another":
            communicator.all_gather(whole, part).wait()
        if rank == 2 and what == "gives more":
            communicator.all_reduce(torch.zeros(65), op="sum").wait()
        if rank == 2 and what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        if what == "gives more":
            communicator.all_reduce(whole, op="sum").wait()
        else:
            communicator.reduce_scatter(part, whole, op="sum").wait()
    except RuntimeError as error:
        return str(error)
    return ""


SIGNALS = {"is killed": signal.SIGKILL, "stops": signal.SIGSTOP}
BEHIND = "rank 2 has not come to #2 after all_reduce #1 (64 x float32), ranks 0, 1, 3 are at "
BEHIND += "reduce_scatter #2 (64 x float32)"
EXPECTED = {
    "calls another": "rank 2 is at all_gather #2 (16 x float32), ranks 0, 1, 3 at reduce_scatter "
    "#2 (64 x float32)",
    "gives more": "rank 2 is at all_reduce #2 (65 x float32), ranks 0, 1, 3 at all_reduce #2 "
    "(64 x float32)",
    "is killed": BEHIND,
    "stops": BEHIND,
}
CASES = [("comm_core", what) for what in EXPECTED] + [("gloo", "stops"), ("gloo", "calls another")]


@pytest.mark.parametrize(("backend", "what"), CASES)
def test_the_rank_that_differs_is_named_with_its_operation(backend, what, tmp_path, caplog):
    with recorded(tmp_path, backend) as ranks:
        pids = ranks.run(os.getpid)
        texts = run_without(ranks, 2, _then, what)
        sentence = merge(tmp_path)
        if what == "stops":
            os.kill(pids[2], signal.SIGKILL)
    assert all(texts)
    assert sentence is not None and sentence.startswith(EXPECTED[what]), sentence
    merged = json.loads((tmp_path / "hang.json").read_bytes())
    assert merged["divergence"] == sentence and set(merged["ranks"]) == set("0123")
    analysed = _analysed(tmp_path, caplog)
    if what in ("calls another", "gives more"):
        assert "does not match" in analysed, analysed
    else:
        assert "2" in analysed and "reduce_scatter" in analysed, analysed


def _analysed(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Returns what torch's analyser says."""
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    out = folder / "for torch"
    assert main([str(folder), "--torch", str(out)]) == 0
    if torch.__version__ < (2, 12):
        pytest.skip("the analyser of torch 2.11 knows NCCL only")
    fr_trace.main([str(out)])
    gc.enable()  # the analyser disables it
    return caplog.text


@pytest.mark.parametrize("backend", ["comm_core", "gloo"])
def test_operations_have_the_names_of_their_buckets_and_the_files_go_with_the_job(
    backend, tmp_path
):
    with recorded(tmp_path, backend, size=2) as ranks:
        ranks.run(_trains)
        for dump in read(tmp_path).values():
            named = [entry for entry in dump["entries"] if entry["bucket"]]
            assert {entry["bucket"] for entry in named} >= {"layer1", "layer3"}
            kinds = {entry["profiling_name"] for entry in named}
            assert kinds == {f"{backend}:all_reduce"}
            assert {entry["state"] for entry in named} == {"completed"}
        assert merge(tmp_path) is None
        ranks.run(dear.shutdown)
        assert not list(tmp_path.glob("flight-*"))


def _many() -> None:
    for _ in range(2 * SLOTS):
        dist.all_reduce(torch.zeros(1))


def test_the_memory_is_bounded_and_old_operations_are_forgotten(tmp_path):
    with recorded(tmp_path, size=2) as ranks:
        ranks.run(_many)
        sizes = [path.stat().st_size for path in tmp_path.glob("flight-*")]
        assert len(sizes) == 6 and max(sizes) == 128 * SLOTS
        for dump in read(tmp_path).values():
            numbers = [entry["collective_seq_id"] for entry in dump["entries"]]
            assert numbers == list(range(numbers[0], numbers[0] + SLOTS))
    clear(tmp_path)
    assert merge(tmp_path) is None


SCRIPT = """
import torch, dear
dear.init("comm_core", timeout_s=2)
communicator = dear.comm.runtime.communicator()
if communicator.rank == 1:
    raise ValueError("wrong in my program")
communicator.all_reduce(torch.zeros(7), op="sum").wait()
"""


def test_a_script_of_a_user_leaves_the_record_where_the_variable_says(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "script.py"],
            env={
                **os.environ,
                **rank_env(rank, 2, store=tmp_path / "store"),
                VARIABLE: str(tmp_path / "record"),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    sentence = "rank 1 has not come to #1, rank 0 is at all_reduce #1 (7 x float32)"
    assert f"{sentence} ({tmp_path}/record/hang.json)" in errors[0]
    assert "ValueError: wrong in my program" in errors[1]


def _dump(*operations: tuple[int, str, str], ranks: str = "[0, 1]", size: int = 2) -> dict:
    """A rank's record: number, kind and state of each operation."""
    entries = [
        {
            "process_group": ["0", ""],
            "collective_seq_id": number,
            "profiling_name": f"gloo:{kind}",
            "time_created_ns": number,
            "input_sizes": [[4]],
            "output_sizes": [[4]],
            "input_dtypes": ["float32"],
            "state": state,
            "bucket": "layer3",
        }
        for number, kind, state in operations
    ]
    return {"size": size, "pg_config": {"0": {"ranks": ranks}}, "entries": entries}


def test_an_operation_that_has_not_ended_everywhere_is_named():
    done, running = (4, "all_reduce", "completed"), (5, "all_gather", "started")
    sentence = first_divergence({0: _dump(done, running), 1: _dump(done, running)})
    assert sentence == "ranks 0, 1 are at all_gather #5 of bucket layer3; it ended on none"
    ended = (5, "all_gather", "completed")
    assert "it ended on rank 0 only" in first_divergence({0: _dump(ended), 1: _dump(running)})


def test_ranks_without_a_record_are_named():
    dump = _dump((5, "all_gather", "started"), ranks="[0, 1, 2]", size=3)
    assert first_divergence({1: dump}).endswith("; ranks 0, 2 left no record")


def test_what_only_a_ring_has_forgotten_is_no_divergence():
    done = (4, "all_reduce", "completed")
    assert first_divergence({0: _dump(done), 1: _dump()}) is None
    assert first_divergence({0: _dump((3, *done[1:]), done), 1: _dump(done)}) is None
