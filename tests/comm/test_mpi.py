"""The MPI backend: every operation on 1 to 4 ranks under mpirun, and how jobs end that go wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from comm_core import mpi
from tests.comm import mpi_program as program

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here"),
    pytest.mark.skipif(mpi.unavailable() is not None, reason=str(mpi.unavailable())),
]


SIZES = pytest.mark.parametrize(
    "size", [2, 3, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))]
)


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
            *(sys.executable, "-m", "tests.comm.mpi_program", f"{folder}/store", *names),
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


# Starting ranks takes longer than the cases do: one job per size runs them all.
@lru_cache
def ordinary(size: int) -> Done:
    return run(size)


@SIZES
@pytest.mark.parametrize("name", program.ORDINARY)
def test_operations(name, size):
    done = ordinary(size)
    lines = [line for line in done.lines if line["case"] == name]
    assert [line["error"] for line in lines if line["error"]] == []
    assert sorted(line["rank"] for line in lines) == list(range(size)), done.stderr


@SIZES
def test_jobs_end_cleanly(size):
    done = ordinary(size)
    assert done.code == 0
    assert done.stderr == ""


def test_a_process_without_mpirun_is_a_job_of_one():
    done = run(1, "all_reduce", launcher=[])
    assert done.code == 0, done.stderr
    (line,) = done.lines
    assert line["error"] is None


def test_processes_that_mpirun_did_not_start_are_told():
    done = run(1, "all_reduce", launcher=["env", "OMPI_COMM_WORLD_SIZE=2"])
    assert done.code != 0
    assert "says rank 0 of 2, MPI says rank 0 of 1; started without mpirun?" in done.stderr


def test_a_rank_that_does_not_call_is_reported_after_the_timeout():
    done = run(2, "a_rank_that_does_not_call")
    errors = [line["error"] for line in done.lines if line["rank"] == 0]
    assert errors == [None], done.stderr
    assert done.code != 0  # an operation was still under way
    assert "1 operations had not ended" in done.stderr


def test_a_rank_that_fails_ends_the_job_at_once():
    began = time.perf_counter()
    done = run(2, "a_rank_that_fails")
    assert done.code != 0
    assert "for the test" in done.stderr
    assert time.perf_counter() - began < 25
