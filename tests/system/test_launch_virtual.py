"""Launchers across virtual hosts: each rank on its host, failures named, and real training."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest

from common.emulation import sandbox
from common.emulation.cluster import EmulatedCluster
from common.emulation.links.profile import network_profile
from common.harness.running.fabric import WORKER
from common.launch.hosts import Host
from common.launch.job import Job, make_launcher
from dear.training.algorithm import algorithm_class
from tests.system.launch_stub import place, stub_job
from tests.system.processes import finished
from tests.system.sweeps import write_trial

# A busy machine needs several seconds for a few processes of Python, and a minute for torch.
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(sandbox.unable() is not None, reason=f"sandbox: {sandbox.unable()}"),
]

PER_HOST = ["ssh", "mpirun"]


def launch(folder: Path, launcher: str, mode: str | None = None, **given) -> dict:
    """The outcome of a job of this launcher on two virtual hosts.

    Args:
        mode: of stubs; None: the real worker.
    """
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    call = f"run_job({str(folder)!r}, {launcher!r}, {mode!r}, **{given!r})"
    code = f"from tests.system.test_launch_virtual import run_job; {call}"
    done = finished(
        [sys.executable, "-m", "common.emulation.sandbox", "--", sys.executable, "-c", code],
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_job(
    folder: str,
    launcher: str,
    mode: str | None,
    slots: int = 1,
    world_size: int = 2,
    timeout_s: float = 300.0,
) -> None:
    """Builds hosts inside a sandbox, runs the job and prints its outcome."""
    job = stub_job(Path(folder), mode or "", world_size=world_size, timeout_s=timeout_s)
    if mode is None:
        job = Job(**{**vars(job), "worker_module": WORKER})
    with EmulatedCluster(hosts=2, profile=network_profile("1gbit")) as cluster:
        hosts = [
            Host(name=host.name, slots=slots, address=host.address, virtual=host)
            for host in cluster.hosts
        ]
        ready = make_launcher(launcher, hosts=hosts, world_size=world_size)
        ready.check()
        outcome = ready.run(dataclasses.replace(job, env={"EXTRA": "yes"}))
    print(json.dumps(dataclasses.asdict(outcome)))


@pytest.mark.parametrize("launcher", PER_HOST)
def test_ranks_fill_the_hosts_and_know_their_place(tmp_path, launcher):
    outcome = launch(tmp_path, launcher, "ok", slots=2, world_size=3)
    assert outcome["status"] == "ok", outcome
    places = [place(tmp_path, rank) for rank in range(3)]
    assert [p["host"] for p in places] == ["h0", "h0", "h1"]
    assert [p["ranks"] for p in places] == [[0, 3, 0, 2], [1, 3, 1, 2], [2, 3, 0, 1]]
    for p in places:
        assert p["env"]["COMM_CORE_IFNAME"] == p["env"]["GLOO_SOCKET_IFNAME"] == "eth0"
        assert p["env"]["MASTER_ADDR"] == "h0"
        assert p["env"]["EXTRA"] == "yes"


@pytest.mark.parametrize("launcher", PER_HOST)
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("kill", "rank 1 was killed by signal 9"),
        pytest.param("exit", "rank 1 exited with status 7", marks=pytest.mark.full),
    ],
)
def test_a_failing_rank_on_another_host_is_named_and_ends_the_job(tmp_path, launcher, mode, words):
    outcome = launch(tmp_path, launcher, mode)
    assert (outcome["status"], outcome["error"]["rank"]) == ("failed", 1)
    assert outcome["error"]["message"] == words


@pytest.mark.full
@pytest.mark.parametrize("launcher", PER_HOST)
def test_hanging_ranks_are_stopped_and_say_where_they_hung(tmp_path, launcher):
    outcome = launch(tmp_path, launcher, "hang", timeout_s=8.0)
    assert outcome["status"] == "timeout"
    assert "not finished after 8 s" in outcome["error"]["message"]
    if "rank 1: measuring" in outcome["error"]["message"]:  # else it never came so far
        logs = "".join(path.read_text() for path in tmp_path.glob("log-0-*"))
        assert "launch_stub.py" in logs and "most recent call first" in logs


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "algorithm", "world_size", "slots"),
    [
        ("ssh", "dear", 2, 1),
        ("torchrun", "dear", 2, 1),
        ("mpirun", "dear", 2, 1),
        ("local", "horovod", 3, 2),  # Horovod's own Gloo, on hosts of unlike size
    ],
)
def test_a_real_job_trains_across_virtual_hosts(tmp_path, launcher, algorithm, world_size, slots):
    kind = algorithm_class(algorithm)
    reason = kind.unavailable()
    if reason:
        pytest.skip(reason)
    write_trial(tmp_path, algorithm, world_size)
    outcome = launch(tmp_path, launcher, world_size=world_size, slots=slots)
    assert outcome["status"] == "ok", outcome["error"]
    result = outcome["result"]
    assert result["check"]["matches_reference"] and result["check"]["replicas_agree"]
    assert result["started_by"] == ("Open MPI" if launcher == "mpirun" else "torchrun")
    engine = result["engine_costs"]
    assert (engine and engine["engine"]) == kind.sends_by(kind.Options())
