"""What launchers share that start one command per host."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.launch.envs import NetworkOptions, interface, network_env, read_envs
from common.launch.fleet import Fleet, HostCommand, agent_of, meeting_point, on_host
from common.launch.hosts import Block, Host, are_virtual, blocks
from common.launch.job import Job, Launcher, Outcome, timed_out
from common.launch.probe import probe
from dear.errors import UserError

PRINTED_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(NetworkOptions):
    """How the hosts are reached."""

    agent: str | None = None
    """Remote shell, called as `AGENT HOST COMMAND`; None: ssh, and nothing for this machine (for
    virtual hosts: the stand-in `python -m common.emulation.rsh`)."""
    port: int | None = None
    """Port of the first host at which the ranks meet; None: one that is free on this machine."""

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise UserError(f"port must be in 1..65535, got {self.port}")


class PerHostLauncher(Launcher):
    """Starts one command per host, on this machine directly and elsewhere by a remote shell."""

    Options = RemoteOptions

    def __init__(
        self,
        *,
        hosts: Sequence[Host] | None,
        options: RemoteOptions | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self._options = options or RemoteOptions()
        self._hosts = hosts
        self._envs = read_envs()
        self._interface = interface(self._options, self._envs, hosts)
        self._agent = agent_of(self._options.agent, hosts)
        self._checked = False

    def check(self) -> None:
        self._checked = True
        if self._hosts is not None and not are_virtual(self._hosts):
            remote = [host for host in self._hosts if self._agent_for(host) is not None]
            probe(remote, self._agent)

    def command(self, job: Job) -> str:
        commands = self._commands(job, self._options.port or PRINTED_PORT, tied=False)
        return " & ".join(shlex.join(command.argv) for command in commands)

    def run(self, job: Job) -> Outcome:
        if not self._checked:
            self.check()
        with Fleet(self._commands(job, self._options.port, tied=True)) as fleet:
            in_time = fleet.wait(job.timeout_s)
            if not in_time:
                fleet.ask_for_stacks()
        return self._outcome(job, fleet) if in_time else timed_out(job)

    @abstractmethod
    def _argv(
        self, job: Job, place: int, placed: Sequence[Block], meet: Mapping[str, str], tied: bool
    ) -> list[str]:
        """What to run on the host of `placed[place]`; if `tied`, it must end with its input."""

    @abstractmethod
    def _outcome(self, job: Job, fleet: Fleet) -> Outcome:
        """Judges a job whose commands have ended."""

    def _commands(self, job: Job, port: int | None, tied: bool) -> list[HostCommand]:
        hosts = self._hosts or [Host(name="localhost", slots=job.world_size)]
        placed = blocks(hosts, job.world_size)
        meet = meeting_point(placed, port)
        commands = []
        for place, block in enumerate(placed):
            env: dict[str, str] = {}
            if len(placed) > 1:
                env = network_env(self._options, self._interface)
            if block.host.virtual is not None:
                env["COMM_CORE_HOST_ID"] = block.host.name
            env |= {**self._env(meet), **job.env}
            argv = self._argv(job, place, placed, meet, tied)
            words = on_host(block.host, argv, env, self._agent_for(block.host))
            commands.append(HostCommand(host=block.host, argv=words, log=self._log(job, block)))
        return commands

    def _env(self, meet: Mapping[str, str]) -> Mapping[str, str]:
        """What the command's environment must hold besides the network's settings."""
        return {}

    def _log(self, job: Job, block: Block) -> Path:
        return job.folder / f"log-{job.repeat}-host-{block.host.name}.txt"

    def _agent_for(self, host: Host) -> list[str] | None:
        """The remote shell for this host, None if it needs none."""
        return None if host.here and self._options.agent is None else self._agent
