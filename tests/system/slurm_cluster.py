"""A Slurm of one node for tests: munged, slurmctld and slurmd in the foreground, in one folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

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
    """Why no Slurm can be started here, or None."""
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
                _wait_for(lambda: (folder / "munge.sock").exists(), folder)
        _wait_for(lambda: _idle(env), folder)
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
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%t"], env=env, capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip() == "idle"


def _wait_for(condition, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.[lo][ou][gt]")))
            raise RuntimeError(f"Slurm did not start within {START_S:g} s:\n{logs[-4000:]}")
        time.sleep(0.1)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
