"""Ranks started by Open MPI's mpirun, on this machine or on the hosts of a hostfile."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.launch.envs import ROOT, interface, network_env, read_envs
from common.launch.fleet import STACKS_S, agent_of, meeting_point
from common.launch.hosts import Host, are_virtual, blocks
from common.launch.job import Job, Launcher, Outcome, outcome_of, timed_out
from common.launch.openmpi import find_mpirun, settings
from common.launch.orphans import die_with_parent
from common.launch.per_host import PRINTED_PORT, RemoteOptions
from common.launch.probe import probe

STOP_S = 5.0


class MpirunLauncher(Launcher):
    """Runs `mpirun --hostfile ... python -m common.harness.worker` (Open MPI 4 or 5)."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RemoteOptions):
        """The remote shell, the network, and Open MPI's own settings."""

        mca: dict[str, Any] = field(default_factory=dict)
        """Settings of Open MPI by name, each passed as `--mca NAME VALUE`."""

    def __init__(
        self,
        *,
        hosts: Sequence[Host] | None = None,
        options: Options | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self._options = options or self.Options()
        self._envs = read_envs()
        self._mpirun = find_mpirun(self._envs.MPIPATH)
        self._hosts = hosts
        self._interface = interface(self._options, self._envs, hosts)
        self._agent = agent_of(self._options.agent, hosts)
        self._checked = False

    def check(self) -> None:
        self._checked = True
        if self._hosts is not None and not are_virtual(self._hosts):
            probe([host for host in self._hosts if not host.here], self._agent)

    def command(self, job: Job) -> str:
        return shlex.join(self._command(job, self._options.port or PRINTED_PORT))

    def run(self, job: Job) -> Outcome:
        if not self._checked:
            self.check()
        self._write_hostfile(job)
        # Open MPI's files get a folder that is gone afterwards, even if mpirun has to be killed.
        with tempfile.TemporaryDirectory(prefix="dear-mpi-") as folder:
            code = self._run(job, folder)
        if code is None:
            return timed_out(job)
        # mpirun ends the other ranks itself.
        log = job.log_path(0).read_text(errors="replace")
        otherwise = f"mpirun ended with status {code}: {_said(log)}" if code else None
        return outcome_of(job, _first_failure(log) if code else {}, otherwise=otherwise)

    def _run(self, job: Job, folder: str) -> int | None:
        """mpirun's exit status, or None if it ran out of time; nothing is left running."""
        env = dict(os.environ)
        if self._hosts is None or are_virtual(self._hosts):
            env["TMPDIR"] = folder  # other machines do not have it
        with job.log_path(0).open("wb") as log:
            process = subprocess.Popen(
                self._entered(self._command(job, self._options.port)),
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # it then stops its ranks
            )
        try:
            return process.wait(timeout=job.timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # mpirun passes it on
            _wait(process, STACKS_S)
            return None
        finally:
            _stop(process)

    def _command(self, job: Job, port: int | None) -> list[str]:
        options = self._options
        env = dict(job.env)
        chosen: dict[str, str] = {}
        several = remote = False
        hosts: list[str] = []
        if self._hosts is not None:
            placed = blocks(self._hosts, job.world_size)
            several = len(placed) > 1
            remote = not all(block.host.here for block in placed)
            hosts = ["--hostfile", str(self._hostfile(job))]
        if several:
            env = {**network_env(options, self._interface), **meeting_point(placed, port), **env}
        if several or options.rdma:
            include = self._interface
            if not options.rdma and not options.interface:
                include = self._envs.ETH_MPI_BTC_TCP_IF_INCLUDE or include
            chosen = settings(self._mpirun, options.rdma, include)
        if remote:
            chosen[self._mpirun.agent_setting] = shlex.join(self._agent)
        chosen |= {name: str(value) for name, value in options.mca.items()}
        command = [self._mpirun.path, *self._mpirun.placement, *hosts, "-np", str(job.world_size)]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        for name, value in chosen.items():
            command += [self._mpirun.flag(name), name, value]
        for name, value in env.items():
            command += ["-x", f"{name}={value}"]
        return [*command, self._envs.python, *job.worker]

    def _entered(self, command: list[str]) -> list[str]:
        """On virtual hosts mpirun itself runs on the first one."""
        virtual = self._hosts[0].virtual if self._hosts else None
        return command if virtual is None else virtual.command(command)

    @staticmethod
    def _hostfile(job: Job) -> Path:
        return job.folder.resolve() / "hostfile"

    def _write_hostfile(self, job: Job) -> None:
        if self._hosts is not None:
            lines = [f"{host.reached_at} slots={host.slots}\n" for host in self._hosts]
            self._hostfile(job).write_text("".join(lines))


def _first_failure(log: str) -> dict[int, int]:
    """Exit status by rank, as Open MPI reports it for the first process that failed."""
    sentence = " ".join(log.split())  # Open MPI breaks it into lines
    killed = re.search(r"rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)", sentence)
    if killed:
        return {int(killed[1]): -int(killed[2])}
    # [[JOB,1],RANK], from version 5 on [JOB@1,RANK]
    ended = re.search(r"Process name: \[\S*,(\d+)\] Exit code: (\d+)", sentence)
    return {int(ended[1]): int(ended[2])} if ended else {}


def _said(log: str) -> str:
    """The last line that is no ornament."""
    lines = [line.strip() for line in log.splitlines() if line.strip(" -*")]
    return lines[-1] if lines else "without a word"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """mpirun passes SIGTERM on to the ranks of all hosts; SIGKILL would leave them behind."""
    if process.poll() is not None:
        return
    process.terminate()
    if not _wait(process, STOP_S):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
