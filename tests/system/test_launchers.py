"""mpirun, the shell launcher with the references' variables, and workers in a wrong world."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from common.harness.running.fabric import WORKER
from common.launch import job as launch_job
from common.launch.job import Job, make_launcher
from common.launch.local import LocalLauncher
from common.results.records import Record
from common.results.validity import flag_text
from dear.training.algorithm import algorithm_class
from tests.system.launch_stub import place, stub_job
from tests.system.processes import ROOT, alive, finished, python, wait_for
from tests.system.sweeps import Driver, write_trial

SCRIPT = ROOT / "dear" / "horovod_mpi_cj.sh"

# Ranks that mpirun and torchrun start import torch, which takes a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)
PATIENT = ("--set", "timeout_s=300")

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here")


@pytest.fixture
def driver(tmp_path):
    return Driver(tmp_path)


def shell(logs: Path, path: str | None = None, **variables: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **variables}
    if path is not None:
        env["PATH"] = path
    short = ["--set", "measure.warmup_steps=1", "--set", "measure.steps_per_iter=2"]
    return finished(
        [str(SCRIPT), "--logs", str(logs), *short], cwd=SCRIPT.parent, env=env, timeout=380
    )


@pytest.mark.full
@needs_mpirun
def test_mpirun_runs_a_trial_on_the_hosts_of_a_hostfile(driver, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# this machine\nlocalhost slots=2\n")
    (record,) = driver.measured(
        *("--set", "launcher=mpirun", "--set", f"hostfile={hostfile}"),
        *("-k", "n=2", "-k", "dear", "--set", "measure.repeats=1", *PATIENT),
        timeout=380,
    )
    assert record["results"][0]["started_by"] == "Open MPI"
    assert record["check"]["matches_reference"] and record["check"]["replicas_agree"]


@pytest.mark.full
@needs_mpirun
def test_horovod_over_mpi_trains_right(driver):
    reason = algorithm_class("horovod").unavailable()
    if reason:
        pytest.skip(reason)
    done = driver.run(
        *("--set", "launcher=mpirun", "--set", "measure.repeats=1", "-k", "n=2"),
        *("--set", "algorithms=[{name: horovod, options: {controller: mpi}}]", *PATIENT),
        timeout=380,
    )
    (record,) = driver.records()
    if record["status"] != "ok" and "built with MPI: False" in record["error"]["message"]:
        pytest.skip("Horovod was built without MPI")
    assert done.returncode == 0, done.stdout + done.stderr
    assert record["check"]["matches_reference"] and record["check"]["replicas_agree"]


@pytest.mark.full
@pytest.mark.parametrize("mpirun", [True, False])
def test_the_shell_launcher_runs_one_trial_and_says_how(tmp_path, mpirun):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "env", "git"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").symlink_to(sys.executable)
    given = {"dnn": "mnist_cnn", "bs": "2", "nworkers": "2", "threshold": "262144"}
    done = shell(tmp_path / "logs", path=None if mpirun else str(tools), **given)
    assert done.returncode == 0, done.stderr
    launcher = "mpirun" if mpirun and shutil.which("mpirun") else "local"
    assert f"launcher: {launcher}" in done.stderr
    for line in ("Iter #4: ", "Img/sec per CPU: ", "Total img/sec on 2 CPU(s): "):
        assert line in done.stdout
    sweep = tmp_path / "logs" / "reference"
    record = json.loads((sweep / "records.jsonl").read_text())
    reports = json.loads((sweep / "reports.json").read_text())["0"]
    ((name, (speed,)),) = reports["mnist_cnn_2"].items()
    assert name == "dear(threshold_mb=1.0)"
    assert (speed == "nan") == (flag_text(Record.from_json(record)) is not None)
    assert record["trial"]["launcher"] == launcher
    assert record["trial"]["options"]["threshold_mb"] == 1.0


@pytest.mark.full
def test_the_shell_launcher_runs_a_trial_on_virtual_hosts(tmp_path):
    given = {"dnn": "mnist_cnn", "bs": "32", "nworkers": "2", "cluster": "emulated"}
    done = shell(tmp_path / "logs", **given, method="asc2")
    assert done.returncode == 0, done.stderr
    assert "launcher: 2 virtual hosts on 10gbe" in done.stderr
    record = json.loads((tmp_path / "logs/reference/records.jsonl").read_text())
    assert record["trial"]["model"] == "mnist_cnn@rtx2080ti-modelled" and record["status"] == "ok"
    assert record["trial"]["label"] == "asc2"
    assert (
        record["trial"]["options"]["channels"] == 2
        and record["results"][0]["plan"]["found"]["predicted"]
    )
    assert "rdma:10gbe,asc2," in done.stdout or flag_text(Record.from_json(record))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"nstreams": "2"}, "nstreams=2"),
        ({"bs": "four"}, "bs=four"),
        ({"threshold": "5", "method": "ddp"}, "threshold=5: method ddp has no such variable"),
        ({"nworkers": "3"}, "cluster3"),
        ({"method": "deer"}, "did you mean 'dear'?"),
        ({"dnn": "resnt50"}, "did you mean 'resnet50'?"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_the_shell_launcher_refuses_what_it_cannot_honour(tmp_path, variables, words):
    done = shell(tmp_path / "logs", **{"nworkers": "2", "dnn": "mnist_cnn", **variables})
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if not line.startswith("launcher:")]
    assert len(errors) == 1 and words in errors[0]
    assert not (tmp_path / "logs").exists()


def test_a_worker_that_is_alone_but_should_not_be_refuses(tmp_path):
    write_trial(tmp_path, "dear", world_size=2)
    assert python("-m", "common.harness.worker", tmp_path, "0").returncode == 1
    error = json.loads((tmp_path / "error-0-rank0.json").read_text())
    assert "needs 2 workers" in error["message"] and "sees 1" in error["message"]


def test_a_failed_rank_ends_a_job_whose_mpirun_does_not_end(tmp_path, monkeypatch):
    """The link to a host may be cut, on which mpirun has a daemon."""
    mpirun = tmp_path / "mpirun"
    version = 'test "$1" = --version && echo "mpirun (Open MPI) 4.1.4" && exit'
    failed = tmp_path / "error-0-rank0.json"
    fault = {"kind": "failed", "message": "lost rank 1", "rank": 0, "where": "measuring"}
    error = f"echo '{json.dumps(fault)}' > {failed}"
    mpirun.write_text(f"#!/bin/sh\n{version}\n{error}\nexec sleep 1000\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("common.launch.mpirun.STOP_S", 0.2)
    job = Job(folder=tmp_path, repeat=0, world_size=2, timeout_s=300, worker_module="stub")
    outcome = make_launcher("mpirun", hosts=None, world_size=2).run(job)
    assert (outcome.status, outcome.error["message"]) == ("failed", "lost rank 1")


@needs_mpirun
def test_ranks_end_when_their_mpirun_is_killed(tmp_path):
    job = stub_job(tmp_path, "hang", world_size=2)
    launcher = make_launcher("mpirun", hosts=None, world_size=2)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(launcher.run, job)
        wait_for(lambda: all((tmp_path / f"place-{rank}.json").exists() for rank in (0, 1)))
        ranks = [place(tmp_path, rank)["pid"] for rank in (0, 1)]
        psutil.Process(psutil.Process(ranks[0]).ppid()).kill()
        assert outcome.result().status == "failed"
    wait_for(lambda: not any(map(alive, ranks)))


def test_ranks_that_mpirun_leaves_behind_are_ended(tmp_path, monkeypatch):
    mpirun, pid = tmp_path / "mpirun", tmp_path / "pid"
    version = 'test "$1" = --version && echo "mpirun (Open MPI) 4.1.4" && exit'
    # A rank that is stopped, in a session of its own.
    stopped = f"setsid sh -c 'echo $$ > {pid}; kill -STOP $$' & sleep 1000"
    mpirun.write_text(f"#!/bin/sh\n{version}\ntrap '' USR1\n{stopped}\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = Job(folder=tmp_path, repeat=0, world_size=2, timeout_s=2, worker_module="stub")
    assert make_launcher("mpirun", hosts=None, world_size=2).run(job).status == "timeout"
    wait_for(lambda: not alive(int(pid.read_text())))


def test_what_ranks_of_a_killed_driver_have_told_each_other_is_forgotten(tmp_path):
    stub_job(tmp_path, "ok", world_size=2)
    (tmp_path / "store-0").write_text("of ranks that have gone")
    stub = "tests.system.launch_stub"
    job = Job(folder=tmp_path, repeat=0, world_size=2, timeout_s=60, worker_module=stub)
    outcome = LocalLauncher().run(job)
    assert outcome.status == "ok", outcome.error
    assert not any(place(tmp_path, rank)["store"] for rank in range(2))


def test_a_job_that_may_lose_ranks_ends_without_one_that_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_job, "LEFT_S", 0.1)
    stub_job(tmp_path, "stop", world_size=2)
    stub = "tests.system.launch_stub"
    job = Job(folder=tmp_path, repeat=0, world_size=2, timeout_s=60, worker_module=stub)
    outcome = LocalLauncher().run(dataclasses.replace(job, may_lose_ranks=True))
    assert (outcome.status, outcome.error) == ("ok", None)
    assert outcome.result["lost_ranks"] == [1]


@pytest.mark.full
def test_the_printed_torchrun_command_runs_the_trial(tmp_path):
    write_trial(tmp_path, "ddp", world_size=2)
    job = Job(folder=tmp_path, repeat=0, world_size=2, timeout_s=60, worker_module=WORKER)
    command = LocalLauncher().command(job).split()
    assert command[0] == "torchrun"
    done = python("-m", "torch.distributed.run", *command[1:])
    assert done.returncode == 0, done.stderr
    result = json.loads(job.result_path.read_text())
    assert result["started_by"] == "torchrun"
    assert result["check"]["matches_reference"]


@pytest.mark.parametrize(
    ("command", "variables", "words"),
    [
        ("dear/horovod_mpi_cj.sh", {"nworker": "2"}, "unknown variable 'nworker'; did you mean"),
        ("dear/horovod_mpi_cj.sh", {"nworkers": "2 3"}, "nworkers=2 3: must be a whole number"),
        ("dear/horovod_mpi_cj.sh", {"bs": "abc"}, "bs=abc: must be a whole number"),
        ("dear/horovod_mpi_cj.sh", {"cluster": "nosuch"}, "unknown cluster 'nosuch'"),
        ("scripts/run_with.sh", {}, "usage: run_with.sh LAUNCHER"),
        ("scripts/run_mpi.sh quick", {"dnn": "vgg16"}, "variable dnn: this script reads"),
        ("scripts/run_mpi.sh quick", {"hostfile": "/no such"}, "hostfile /no such: No such file"),
        ("mnist.sh", {"nworkers": "abc"}, "nworkers=abc: must be a whole number"),
        ("mnist.sh", {"nworkers": "0"}, "nworkers=0: must be a whole number"),
        ("mnist.sh", {"dnn": "resnet50"}, "variable dnn: this script reads"),
        pytest.param("mnist.sh", {"method": "deer"}, "mean 'dear'", marks=pytest.mark.full),
        ("scripts/build.sh /nosuch", {}, "/nosuch: no virtual environment"),
        ("scripts/horovod.sh /nosuch", {}, "/nosuch: no virtual environment"),
        ("scripts/sanitize.sh /nosuch", {}, "/nosuch: no virtual environment"),
        ("scripts/test.sh /nosuch", {}, "/nosuch: no virtual environment"),
        ("scripts/gpu_check.sh", {"PYTHON": "/nosuch"}, "PYTHON=/nosuch: no such program"),
        ("scripts/setup.sh /nosuch", {"PYTHON": "/nosuch"}, "PYTHON=/nosuch: no such program"),
    ],
)
def test_a_mistake_in_what_a_script_is_given_is_one_line(command, variables, words):
    done = finished(
        [ROOT / command.split()[0], *command.split()[1:]], env={**os.environ, **variables}
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and words in line


def test_a_python_without_packages_is_named_before_anything_starts(tmp_path):
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    for name in ("mnist.sh", "dear/horovod_mpi_cj.sh", "scripts/shared.sh", "benchmarks.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("mnist.sh", "dear/horovod_mpi_cj.sh"):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = finished(tmp_path / name, env=env)
        assert done.returncode == 2
        assert re.fullmatch(r"error: \S+ has no torch and .*make bench.*\n", done.stderr)
