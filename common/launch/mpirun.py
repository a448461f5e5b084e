"""Launcher of ranks by Open MPI's mpirun, on this machine or on the hosts of a hostfile."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common.launch.hosts import Host, are_virtual, blocks, elsewhere, network_env
from common.launch.job import Job, Outcome, outcome_of, timed_out
from common.launch.per_host import (
    PRINTED_PORT,
    STACKS_S,
    RemoteLauncher,
    RemoteOptions,
    meeting_point,
)
from common.launch.ranks import Ranks
from common.machine.folders import TemporaryFolder
from common.paths import ROOT
from dear.errors import UserError

STOP_S = 5.0
POLL_S = 0.5


class MpirunLauncher(RemoteLauncher):
    """Launcher that runs `mpirun --hostfile ... python -m WORKER` (Open MPI 4 or 5)."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RemoteOptions):
        """Remote shell, network, and settings of Open MPI."""

        mca: dict[str, Any] = field(default_factory=dict)
        """Settings of Open MPI by name, passed as `--mca NAME VALUE`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._mpirun = find_mpirun(self._envs.MPIPATH)

    def command(self, job: Job) -> str:
        return shlex.join(self._command(job, self._options.port or PRINTED_PORT))

    def run(self, job: Job) -> Outcome:
        command = self._command(job, self._options.port, (*self._envs.python, "-c", _TIE))
        if self._hosts is not None:
            lines = [f"{host.login} slots={host.slots}\n" for host in self._hosts]
            (job.folder / "hostfile").write_text("".join(lines), encoding="utf-8")
            if self._hosts[0].virtual is not None:  # mpirun itself runs on the first host
                command = self._hosts[0].virtual.command(command)
        # A folder for Open MPI's files, which is removed even if mpirun or this process is killed.
        with TemporaryFolder("dear-mpi-") as folder, _Started() as mpirun:
            here = self._hosts is None or are_virtual(self._hosts)  # others do not have the folder
            env = {"TMPDIR": str(folder.path)} if here else {}
            log = job.log_path(0)
            mpirun.command(command, cwd=ROOT, env=env, log=log, pass_fds=(folder.held,))
            in_time = _ends(mpirun, job)
            if not in_time:
                mpirun.signal(signal.SIGUSR1)  # mpirun passes it on
                mpirun.wait(STACKS_S)
        if not in_time:
            return timed_out(job)
        code = mpirun.codes.get(0)  # None if it did not end by itself
        log = job.log_path(0).read_text(errors="replace", encoding="utf-8")
        lines = [line.strip() for line in log.splitlines() if line.strip(" -*")]
        last_line = lines[-1] if lines else "no output"
        otherwise = f"mpirun ended with status {code}: {last_line}" if code else None
        return outcome_of(job, _first_failure(log) if code else {}, otherwise=otherwise)

    def _command(self, job: Job, port: int | None, before: Sequence[str] = ()) -> list[str]:
        options = self._options
        env = {**self._envs.rank_env, **job.env}
        chosen: dict[str, str] = {}
        several = remote = False
        # Otherwise, mpirun would use all hosts of the scheduler's job in which it may run.
        host_words = ["--host", f"localhost:{job.world_size}"]
        if self._hosts is not None:
            used = blocks(self._hosts, job.world_size)
            several = len(used) > 1
            remote = not all(block.host.here for block in used)
            host_words = ["--hostfile", str(job.folder.resolve() / "hostfile")]
        if remote:
            env = {**elsewhere(), **env}
        if several:
            network = network_env(options, self._interface, virtual=are_virtual(self._hosts))
            env |= {**network, **meeting_point(used, port), **self._envs.rank_env, **job.env}
        if several or options.rdma:
            include = self._interface
            if not options.rdma and not options.interface:
                include = self._envs.ETH_MPI_BTC_TCP_IF_INCLUDE or include
            chosen = settings(self._mpirun, options.rdma, include)
        chosen |= {name: str(value) for name, value in options.mca.items()}
        agent = self._agent if remote else None
        command = [*self._mpirun.words(job.world_size, chosen, agent), *host_words]
        for name, value in env.items():
            command += ["-x", f"{name}={value}"]
        return [*command, *before, *self._envs.python, *job.worker]

    def _agent_for(self, host: Host) -> list[str] | None:
        return None if host.here else self._agent


_TIE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Program before a rank's command (PR_SET_PDEATHSIG): the rank is then killed when mpirun, or its
daemon on another host, is killed. The command setpriv of some systems cannot do it."""


class _Started(Ranks):
    """Running mpirun, which passes SIGTERM on to all ranks."""

    def stop(self, patience_s: float = STOP_S, ask: int | None = signal.SIGTERM) -> None:
        super().stop(patience_s, ask)

    def _stop(self, patience_s: float, ask: int | None) -> None:
        ranks: list[psutil.Process] = []
        for number in self._running():
            with contextlib.suppress(psutil.Error):
                ranks += psutil.Process(self.pid(number)).children(recursive=True)
        super()._stop(patience_s, ask)
        for rank in ranks:  # a stopped one (SIGSTOP) does not react to SIGTERM
            with contextlib.suppress(psutil.Error):
                rank.kill()


def _ends(mpirun: Ranks, job: Job) -> bool:
    """Waits for mpirun, but not long after a rank has failed; returns False if time has run out.

    mpirun itself would wait for its daemon on a host that no longer answers.
    """
    deadline = time.monotonic() + job.timeout_s
    while (left := deadline - time.monotonic()) > 0:
        if mpirun.wait(min(left, POLL_S)):
            return True
        if any(job.folder.glob(f"error-{job.repeat}-rank*.json")):
            mpirun.wait(STOP_S)
            return True
    return False


def _first_failure(log: str) -> dict[int, int]:
    sentence = " ".join(log.split())  # the report spans several lines
    killed = re.search(r"rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)", sentence)
    if killed:
        return {int(killed[1]): -int(killed[2])}
    # [[JOB,1],RANK] in version 4, [JOB@1,RANK] in version 5
    ended = re.search(r"Process name: \[\S*,(\d+)\] Exit code: (\d+)", sentence)
    return {int(ended[1]): int(ended[2])} if ended else {}


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """Installed mpirun."""

    path: str
    major: int

    def words(
        self, size: int, chosen: Mapping[str, str], agent: Sequence[str] | None = None
    ) -> list[str]:
        """Returns the start of the command line: ranks are assigned to the hosts in order, may
        outnumber the cores, and are not pinned.

        Args:
            size: number of ranks.
            chosen: settings of Open MPI; version 5 has a separate option for those of its starter.
            agent: remote shell; `chosen` takes precedence.
        """
        new = self.major >= 5
        if agent is not None:
            name = "plm_ssh_agent" if new else "plm_rsh_agent"
            chosen = {name: shlex.join(agent), **chosen}
        oversubscribed = ["--map-by", "slot:OVERSUBSCRIBE"]
        mapping = oversubscribed if new else ["--oversubscribe", "--map-by", "slot"]
        words = [self.path, *mapping, "--bind-to", "none", "-np", str(size)]
        words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        starter = ("plm_", "prte_", "oob_", "ras_", "rmaps_")
        for name, value in chosen.items():
            words += ["--prtemca" if new and name.startswith(starter) else "--mca", name, value]
        return words


def find_mpirun(prefix: str = "") -> Mpirun:
    """Finds Open MPI's mpirun in `prefix`/bin, or on the PATH if `prefix` is empty.

    Raises:
        UserError: mpirun does not exist, is too old, or belongs to another MPI.
    """
    path = shutil.which(str(Path(prefix, "bin", "mpirun")) if prefix else "mpirun")
    if path is None:
        where = f"in {prefix}/bin (MPIPATH of envs.conf)" if prefix else "on the PATH"
        raise UserError(
            f"launcher mpirun: no mpirun {where}; install Open MPI or use launcher=local"
        )
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    first = (done.stdout or done.stderr).strip().partition("\n")[0]
    version = re.search(r"Open MPI\D*(\d+)\.", first)
    if version is None or int(version[1]) < 4:
        raise UserError(
            f"launcher mpirun: {path} must be Open MPI 4 or 5, got {first!r}; set MPIPATH in "
            "configs/envs.conf, or use launcher=ssh"
        )
    return Mpirun(path=path, major=int(version[1]))


def settings(mpirun: Mpirun, rdma: int, include: str) -> dict[str, str]:
    """Returns Open MPI's settings for messages between hosts.

    Args:
        rdma: 0 or 2 for TCP, 1 for InfiniBand (an Open MPI without UCX then refuses to run).
        include: interfaces or subnets for TCP; empty: all.
    """
    shared_memory = "sm" if mpirun.major >= 5 else "vader"
    if rdma == 1:
        chosen = {"pml": "ucx"}
    else:
        chosen = {"pml": "ob1", "btl": f"tcp,{shared_memory},self"}
        if include:
            chosen["btl_tcp_if_include"] = include
    if include:
        chosen["prte_if_include" if mpirun.major >= 5 else "oob_tcp_if_include"] = include
    return chosen
