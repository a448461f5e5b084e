"""The MPI backend: every operation on 1 to 4 ranks under mpirun, and how jobs end that go wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
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


full = pytest.mark.full


# Starting ranks takes longer than the cases do: one job per size runs them all.
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=full) for size in (1, 2, 4))])
def test_operations_and_a_clean_end(size: int):
    done = run(size)
    assert [line for line in done.lines if line["error"]] == []
    ran = sorted((line["case"], line["rank"]) for line in done.lines)
    assert ran == sorted(itertools.product(program.ORDINARY, range(size))), done.stderr
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
