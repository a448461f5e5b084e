"""Ranks started by Open MPI's mpirun, on the hosts of a hostfile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from common.launch.hostfile import Host, read_hostfile
from common.launch.job import Job, Launcher, Outcome, outcome_of, timed_out
from common.launch.orphans import die_with_parent
from dear.errors import UserError

_ROOT = Path(__file__).parents[2]
STOP_S = 5.0


class MpirunLauncher(Launcher):
    """Runs `mpirun -np N ... python -m common.harness.worker`.

    Several hosts must see the same folders (a shared file system), this one among them.

    Args:
        hostfile: lines `HOST slots=N`; None means this machine.
        world_size: the largest world that will be asked for; checked against the slots.
    """

    def __init__(self, hostfile: Path | None, world_size: int) -> None:
        self._mpirun = shutil.which("mpirun")
        if self._mpirun is None:
            raise UserError(
                "launcher mpirun: no mpirun on the PATH; install Open MPI or use launcher=local"
            )
        self._hostfile = hostfile
        self._hosts = [Host(name="localhost", slots=world_size)]
        if hostfile is not None:
            self._hosts = read_hostfile(hostfile, world_size)

    def command(self, job: Job) -> str:
        return shlex.join(self._command(job))

    def run(self, job: Job) -> Outcome:
        with job.log_path(0).open("w") as log:
            process = subprocess.Popen(
                self._command(job),
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # it then stops its ranks
            )
        try:
            process.wait(timeout=job.timeout_s)
        except subprocess.TimeoutExpired:
            _stop(process)
            return timed_out(job)
        except BaseException:
            _stop(process)
            raise
        # mpirun kills the other ranks itself and reports the first failure; which rank that was
        # stands in the ranks' own files, or for a signal in its message.
        killed = _killed_rank(job.log_path(0).read_text()) if process.returncode else None
        if killed is not None:
            return outcome_of(job, {killed[0]: -killed[1]})
        outcome = outcome_of(job, {})
        if process.returncode and outcome.status == "ok":
            return outcome_of(job, {0: process.returncode})
        return outcome

    def _command(self, job: Job) -> list[str]:
        assert self._mpirun is not None
        command = [self._mpirun, "--oversubscribe", "-bind-to", "none", "-map-by", "slot"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if self._hostfile is not None:
            command += ["-hostfile", str(self._hostfile.resolve())]
        command += ["-np", str(job.world_size)]
        if len(self._hosts) > 1:
            # Rank 0 runs on the first host of the file and opens the port.
            command += ["-x", f"MASTER_ADDR={self._hosts[0].name}"]
            command += ["-x", f"MASTER_PORT={_free_port()}"]
        worker = ["-m", "common.harness.worker", str(job.folder.resolve()), str(job.repeat)]
        return [*command, sys.executable, *worker]


def _killed_rank(log: str) -> tuple[int, int] | None:
    """(rank, signal) from Open MPI's note about a killed process, or None if there is none."""
    sentence = " ".join(log.split())  # Open MPI breaks it into lines
    found = re.search(r"rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)", sentence)
    return (int(found[1]), int(found[2])) if found else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _stop(process: subprocess.Popen) -> None:
    """mpirun passes SIGTERM on to the ranks of all hosts; SIGKILL would leave them behind."""
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
