"""Base of launchers that start one command per host, directly or through a remote shell.

Such a command must end when its standard input closes, so that it ends with this process and with
the connection to its host.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.launch.hosts import (
    Block,
    Host,
    NetworkOptions,
    are_virtual,
    blocks,
    elsewhere,
    interface,
    network_env,
    read_envs,
)
from common.launch.job import ADMINISTRATIVE, Job, Launcher, Outcome, timed_out
from common.launch.ranks import Ranks
from common.paths import ROOT
from dear.comm.environment import free_port
from dear.errors import UserError

PRINTED_PORT = 29500
# BatchMode: nobody can type a password. ServerAliveInterval: a network failure must end the job.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=15"
PROBE_S = 10.0
STACKS_S = 1.0
STOP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class PortOptions(NetworkOptions):
    """Options of the network and the rendezvous."""

    port: int | None = field(default=None, metadata=ADMINISTRATIVE)
    """Port of the rendezvous on the first host; None: a port that is free on this machine."""

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise UserError(f"port must be in 1..65535, got {self.port}")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(PortOptions):
    """Options of the remote shell and the network."""

    agent: str | None = None
    """Remote shell, called as `AGENT HOST COMMAND`. None: ssh, no shell for this machine itself,
    and `python -m common.emulation.hosts.rsh` for virtual hosts."""


class RemoteLauncher(Launcher):
    """Base of launchers that use a remote shell; `check` tests that the hosts answer."""

    Options = RemoteOptions

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._envs = read_envs()
        self._interface = interface(self._options, self._envs, self._hosts)
        self._given_agent = getattr(self._options, "agent", None)
        self._agent = agent_of(self._given_agent, self._hosts)

    def check(self) -> None:
        if self._hosts is not None and not are_virtual(self._hosts):
            probe([host for host in self._hosts if self._agent_for(host)], self._agent)

    def _agent_for(self, host: Host) -> list[str] | None:
        """Returns the remote shell for this host; None if it is not needed."""
        return None if host.here and self._given_agent is None else self._agent


class PerHostLauncher(RemoteLauncher):
    """Base of launchers of one command per host, started through a remote shell if necessary."""

    def command(self, job: Job) -> str:
        commands = self._commands(job, self._options.port or PRINTED_PORT, tied=False)
        return " & ".join(shlex.join(command.argv) for command in commands)

    def run(self, job: Job) -> Outcome:
        with Fleet(self._commands(job, self._options.port, tied=True)) as fleet:
            in_time = fleet.ends_within(job.timeout_s)
        return self._outcome(job, fleet) if in_time else timed_out(job)

    @abstractmethod
    def _argv(
        self, job: Job, index: int, used: Sequence[Block], meet: Mapping[str, str], tied: bool
    ) -> list[str]:
        """Returns the command for the host of `used[index]`.

        Args:
            meet: MASTER_ADDR and MASTER_PORT.
            tied: if True, the command must end when its standard input closes.
        """

    @abstractmethod
    def _outcome(self, job: Job, fleet: Fleet) -> Outcome:
        """Returns the outcome of a job whose commands have ended."""

    def _commands(self, job: Job, port: int | None, tied: bool) -> list[HostCommand]:
        used = blocks(self._hosts_of(job), job.world_size)
        meet = meeting_point(used, port)
        commands = []
        for index, block in enumerate(used):
            agent = self._agent_for(block.host)
            env = elsewhere() if agent is not None else {}
            if len(used) > 1:
                virtual = block.host.virtual is not None
                env |= network_env(self._options, self._interface, virtual=virtual)
            if block.host.virtual is not None:
                env["COMM_CORE_HOST_ID"] = block.host.name
            env |= {**self._envs.rank_env, **self._env(meet), **job.env}
            argv = self._argv(job, index, used, meet, tied)
            words = on_host(block.host, argv, env, agent)
            commands.append(HostCommand(host=block.host, argv=words, log=self._log(job, block)))
        return commands

    def _hosts_of(self, job: Job) -> Sequence[Host]:
        return self._hosts or [Host(name="localhost", slots=job.world_size)]

    def _env(self, meet: Mapping[str, str]) -> Mapping[str, str]:
        """Returns further variables of the command, without those of the network."""
        return {}

    def _log(self, job: Job, block: Block) -> Path:
        return job.folder / f"log-{job.repeat}-host-{block.host.name}.txt"


@dataclass(frozen=True, kw_only=True)
class HostCommand:
    """Command for one host; it must end when its standard input closes."""

    host: Host
    argv: Sequence[str]
    log: Path


class Fleet(Ranks):
    """Context manager that starts the commands of one job, one per host, on entry."""

    def __init__(self, commands: Sequence[HostCommand]) -> None:
        super().__init__()
        self.commands = commands

    def __enter__(self) -> Fleet:
        try:
            for command in self.commands:
                self.command(command.argv, cwd=ROOT, log=command.log, tied=True)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, patience_s: float = STOP_S, ask: int | None = None) -> None:
        """Closes the standard input of the commands, and gives the hosts time to end."""
        self.send(None)
        super().stop(patience_s, ask)

    def ends_within(self, timeout_s: float) -> bool:
        """Waits for all commands; if some need longer, their workers print their stacks.

        Returns False in this case.
        """
        if self.wait(timeout_s):
            return True
        self.send(b"stacks\n")
        self.wait(STACKS_S)
        return False

    def failure(self) -> str | None:
        """Returns a sentence with the last output of a command that failed; None if none failed."""
        for index, command in enumerate(self.commands):
            code = self.codes.get(index)
            if code:
                lines = (
                    command.log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
                )
                last_line = f": {lines[-1].strip()}" if lines else ""
                return f"host {command.host.name} ended with status {code}{last_line}"
        return None


def agent_of(given: str | None, hosts: Sequence[Host] | None) -> list[str]:
    """Returns the words of the remote shell: `given`, else ssh (its stand-in for virtual hosts)."""
    if given is not None:
        words = shlex.split(given)
        if not words:
            raise UserError("option agent: must be a command such as ssh, got an empty text")
        return words
    if are_virtual(hosts):
        return [sys.executable, "-m", "common.emulation.hosts.rsh"]
    return shlex.split(SSH)


def on_host(
    host: Host, argv: Sequence[str], env: Mapping[str, str], agent: Sequence[str] | None
) -> list[str]:
    """Returns the command that runs `argv` on `host` in the repository's folder.

    Args:
        agent: remote shell; None: start the command on this machine.
    """
    words = ["env", *(f"{key}={value}" for key, value in env.items()), *argv]
    if agent is None:
        return words
    return [*agent, host.login, f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"]


def meeting_point(blocks: Sequence[Block], port: int | None) -> dict[str, str]:
    """Returns MASTER_ADDR and MASTER_PORT for ranks on these hosts; rank 0 opens the port.

    Raises:
        UserError: there are several hosts, and the others cannot reach the first by its name.
    """
    first = blocks[0].host
    if len(blocks) == 1:
        address = "127.0.0.1"
    elif first.loopback:
        raise UserError(
            f"the other hosts cannot reach the first host as {first.name!r}; write the name that "
            "it has in the network"
        )
    else:
        address = first.reached_at
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port or free_port())}


def probe(hosts: Sequence[Host], agent: Sequence[str]) -> None:
    """Runs `true` on every host through the remote shell.

    Raises:
        UserError: the remote shell does not exist, or hosts do not answer in time; the message
            names them.
    """
    if not hosts:
        return
    if shutil.which(agent[0]) is None:
        raise UserError(
            f"no remote shell {agent[0]!r} on the PATH, needed for host {hosts[0].name}; install "
            "it or set the launcher's option agent"
        )
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        reasons = list(pool.map(lambda host: _ask(host, agent), hosts))
    silent = [(host.name, reason) for host, reason in zip(hosts, reasons, strict=True) if reason]
    if silent:
        names = ", ".join(name for name, _ in silent)
        raise UserError(
            f"no answer from {'hosts' if len(silent) > 1 else 'host'} {names}: {silent[0][1]}"
        )


def _ask(host: Host, agent: Sequence[str]) -> str | None:
    try:
        how = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
        done = subprocess.run([*agent, host.login, "true"], timeout=PROBE_S, **how)
    except subprocess.TimeoutExpired:
        return f"time limit of {PROBE_S:g} s"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"{last} (exit status {done.returncode})"
