"""The slurm launcher on a real Slurm of one node, which the tests start and end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.launch_stub import place, stub_job
from tests.system.processes import ROOT, alive, finished, wait_for

_DAEMONS = ("munged", "slurmctld", "slurmd")
START_S = 60.0

_CONFIG = """
ClusterName=dear
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port0}
SlurmdPort={port1}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=3
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def unable() -> str | None:
    """Returns why no Slurm can be started here, or None."""
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    missing = [name for name in (*_DAEMONS, "srun", "sbatch") if _tool(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def slurm_cluster(folder: Path, cpus: int = 4) -> Iterator[dict[str, str]]:
    """The environment in which `srun` and the like reach the Slurm; it ends with the block.

    The folder's path must be short, since sockets are made in it.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    port0, port1 = _free_ports()
    config.write_text(_CONFIG.format(host=host, folder=folder, port0=port0, port1=port1, cpus=cpus))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = {**os.environ, "SLURM_CONF": str(config)}
    munge = [f"--{name}={folder / f'munge.{ending}'}" for name, ending in _MUNGE_FILES.items()]
    commands = (
        ["munged", "--foreground", "--force", "--num-threads=2", *munge],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", host],
    )
    with contextlib.ExitStack() as stack:
        for command in commands:
            stack.enter_context(_daemon(command, folder, env))
            if command[0] == "munged":
                wait_for((folder / "munge.sock").exists, START_S)
        wait_for(lambda: _idle(env), START_S)
        yield env


_MUNGE_FILES = {
    "socket": "sock",
    "key-file": "key",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


@contextlib.contextmanager
def _daemon(command: list[str], folder: Path, env: dict[str, str]) -> Iterator[None]:
    path = _tool(command[0])
    assert path is not None
    with (folder / f"{command[0]}.out").open("wb") as out:
        process = subprocess.Popen(
            [path, *command[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _idle(env: dict[str, str]) -> bool:
    done = finished(["sinfo", "--noheader", "--format=%t"], env=env)
    return done.stdout.strip() == "idle"


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


pytestmark = pytest.mark.timeout(400)

PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
from common.launch.job import make_launcher
from tests.system.launch_stub import StubJob
folder, size, timeout_s, options = json.loads(sys.argv[1])
launcher = make_launcher("slurm", hosts=None, world_size=size, options=options)
job = StubJob(folder=Path(folder), repeat=0, world_size=size, timeout_s=timeout_s)
print(json.dumps(dataclasses.asdict(launcher.run(job))))
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which a Slurm is reached."""
    reason = unable()
    if reason:
        pytest.skip(f"no Slurm: {reason}; scripts/system_packages.sh --slurm installs it")
    # Not below tmp_path: the path of munge's socket must be short.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm_cluster(Path(folder)) as env,
    ):
        yield {**env, "PYTHONPATH": str(ROOT)}


def start(
    slurm, folder: Path, *prefix: str, world_size: int = 3, timeout_s: float = 200.0, **options
):
    """A program that runs a job of stubs with the launcher and prints the outcome."""
    options = {"tasks_per_node": world_size, **options}
    given = json.dumps([str(folder), world_size, timeout_s, options])
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM, given],
        cwd=ROOT,
        env=slurm,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def outcome_of(process: subprocess.Popen) -> dict:
    output, _ = process.communicate(timeout=380)
    assert process.returncode == 0
    return json.loads(output)


def queue(slurm) -> str:
    done = finished(["squeue", "--noheader"], env=slurm)
    return done.stdout


INSIDE = ("salloc", "--quiet", "--ntasks=3")


@pytest.mark.parametrize("prefix", [(), INSIDE], ids=["sbatch", "srun"])
def test_ranks_know_their_place(slurm, tmp_path, prefix):
    job = stub_job(tmp_path / "job", "ok", world_size=3)
    outcome = outcome_of(start(slurm, job.folder, *prefix))
    assert outcome["status"] == "ok", outcome["error"]
    assert outcome["result"] == {"started_by": "Slurm"}
    assert [place(job.folder, r)["ranks"] for r in range(3)] == [[r, 3, r, 3] for r in range(3)]
    assert queue(slurm) == ""


@pytest.mark.parametrize("prefix", [(), INSIDE], ids=["sbatch", "srun"])
@pytest.mark.parametrize(
    ("mode", "words"),
    [("kill", "rank 1 was killed by signal 9"), ("exit", "rank 1 exited with status 7")],
)
def test_a_failing_rank_is_named(slurm, tmp_path, prefix, mode, words):
    job = stub_job(tmp_path / "job", mode, world_size=3)
    outcome = outcome_of(start(slurm, job.folder, *prefix))
    assert outcome["error"]["message"] == words
    assert not any(alive(place(job.folder, rank)["pid"]) for rank in range(3))


@pytest.mark.parametrize("prefix", [(), INSIDE], ids=["batch job", "allocation"])
def test_hanging_ranks_print_their_stacks_and_are_stopped(slurm, tmp_path, prefix):
    job = stub_job(tmp_path / "job", "hang", world_size=3)
    outcome = outcome_of(start(slurm, job.folder, *prefix, timeout_s=8.0))
    assert outcome["status"] == "timeout"
    assert queue(slurm) == ""
    assert "most recent call first" in job.log_path(0).read_text()


def test_waiting_in_the_queue_is_not_running_out_of_time(slurm, tmp_path):
    block = stub_job(tmp_path / "block", "hang", world_size=4)
    holder = start(slurm, block.folder, world_size=4)
    wait_for(lambda: (block.folder / "place-3.json").exists(), 200)
    job = stub_job(tmp_path / "job", "ok", world_size=3)
    waiting = start(slurm, job.folder, timeout_s=100.0, queue_s=1.0)
    outcome = outcome_of(waiting)
    assert outcome["status"] == "timeout"
    assert outcome["error"]["message"] == "still in Slurm's queue after 1 s"
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=100)
    # A driver that is killed takes its batch job along.
    wait_for(lambda: queue(slurm) == "", 100)
    assert not any(alive(place(block.folder, rank)["pid"]) for rank in range(4))


def test_a_refused_submission_is_quoted(slurm, tmp_path):
    job = stub_job(tmp_path / "job", "ok", world_size=3)
    outcome = outcome_of(start(slurm, job.folder, partition="nosuch"))
    assert outcome["status"] == "failed"
    assert "invalid partition" in outcome["error"]["message"].lower()


def test_a_sweep_runs_in_slurm(slurm, tmp_path):
    experiment = tmp_path / "sweep.yaml"
    experiment.write_text(
        "algorithms: [dear]\nmodels: [{name: mnist_cnn, batch_size: 2}]\nworld_sizes: [2]\n"
        "launcher: slurm\nlauncher_options: {tasks_per_node: 2}\nbaseline: false\n"
        "threads_per_rank: 1\ntimeout_s: 300\n"
        "measure: {repeats: 1, warmup_steps: 1, steps_per_iter: 2, check_steps: 2}\n"
    )
    done = finished(
        [
            *(sys.executable, "benchmarks.py", "run", str(experiment)),
            *("--logs", str(tmp_path / "logs"), "--no-plot"),
        ],
        env=slurm,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (tmp_path / "logs/sweep/records.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["status"] == "ok" and record["results"][0]["started_by"] == "Slurm"
    assert record["check"]["matches_reference"] and record["check"]["replicas_agree"]
