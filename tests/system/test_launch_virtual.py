"""Launchers across virtual hosts: each rank on its host, and failures named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.emulation import sandbox
from tests.system.launch_stub import place, stub_job

ROOT = Path(__file__).parents[2]
# A busy machine needs several seconds for a few processes of Python.
pytestmark = pytest.mark.timeout(400)

PER_HOST = ["ssh", "mpirun"]


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    reason = sandbox.unable()
    if reason:
        pytest.skip(reason)


def launch(folder: Path, launcher: str, mode: str | None = None, **given) -> dict:
    """The outcome of a job of this launcher on virtual hosts."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    given = {"hosts": 2, "slots": 1, "world_size": 2, "options": {}, "timeout_s": 200, **given}
    given |= {"launcher": launcher, "mode": mode}
    command = [sys.executable, str(ROOT / "tests/system/launch_program.py"), str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "common.emulation.sandbox", "--", *command, json.dumps(given)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("launcher", PER_HOST)
def test_ranks_fill_the_hosts_and_know_their_place(tmp_path, launcher):
    outcome = launch(tmp_path, launcher, "ok", slots=2, world_size=3)
    assert outcome["status"] == "ok", outcome
    job = stub_job(tmp_path, "ok", world_size=3)
    places = [place(job, rank) for rank in range(3)]
    assert [p["host"] for p in places] == ["h0", "h0", "h1"]
    assert [p["ranks"] for p in places] == [[0, 3, 0, 2], [1, 3, 1, 2], [2, 3, 0, 1]]
    for p in places:
        assert p["env"]["COMM_CORE_IFNAME"] == p["env"]["GLOO_SOCKET_IFNAME"] == "eth0"
        assert p["env"]["MASTER_ADDR"] == "h0"
        assert p["env"]["EXTRA"] == "yes"


@pytest.mark.parametrize("launcher", PER_HOST)
def test_a_killed_rank_on_another_host_is_named_and_ends_the_job(tmp_path, launcher):
    outcome = launch(tmp_path, launcher, "kill")
    assert outcome["status"] == "failed"
    assert outcome["error"]["rank"] == 1
    assert "killed by signal 9" in outcome["error"]["message"]


@pytest.mark.parametrize("launcher", PER_HOST)
def test_an_exit_status_is_named_with_its_rank(tmp_path, launcher):
    outcome = launch(tmp_path, launcher, "exit")
    assert outcome["status"] == "failed"
    assert outcome["error"]["message"] == "rank 1 exited with status 7"


@pytest.mark.parametrize("launcher", PER_HOST)
def test_hanging_ranks_are_stopped_and_say_where_they_hung(tmp_path, launcher):
    outcome = launch(tmp_path, launcher, "hang", timeout_s=8)
    assert outcome["status"] == "timeout"
    assert "not finished after 8 s" in outcome["error"]["message"]
    if "rank 1: measuring" in outcome["error"]["message"]:  # else it never came so far
        logs = "".join(path.read_text() for path in tmp_path.glob("log-0-*"))
        assert "launch_stub.py" in logs and "most recent call first" in logs


def test_one_world_of_one_runs_on_the_first_host(tmp_path):
    outcome = launch(tmp_path, "ssh", "ok", world_size=1)
    assert outcome["status"] == "ok"
    job = stub_job(tmp_path, "ok", world_size=1)
    assert place(job, 0)["host"] == "h0"
