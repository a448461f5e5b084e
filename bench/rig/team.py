"""Ranks of the engines, on this machine or on virtual hosts with links of limited speed.

The parent process starts the ranks once and calls functions on them. Between calls the ranks are
stopped (SIGSTOP), so that they do not disturb the ranks of other engines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.rig.engines import MPIRUN
from bench.rig.output import note
from common.emulation import sandbox
from common.emulation.cluster import EmulatedCluster, VirtualHost
from common.emulation.hosts import network
from common.emulation.links.profile import network_profile
from common.launch.mpirun import find_mpirun, settings
from common.launch.ranks import RankLost, Ranks, gather
from dear.errors import UserError

_ROOT = Path(__file__).parents[2]
_STOP_S = 5.0
_START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """Host that is this machine; has the interface of `VirtualHost`."""

    name: str = "local"
    ifname: str = "lo"
    address: str = "127.0.0.1"

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)


Host = ThisMachine | VirtualHost


@contextlib.contextmanager
def built(args: argparse.Namespace) -> Iterator[list[Host]]:
    """Builds the hosts of a session. At the end removes virtual hosts and the processes on them.

    `args` are options of the session. `congestion` is a setting of the kernel, for every engine; it
    needs a sandbox, as virtual hosts do. Raises `RuntimeError` if the program is not in a sandbox,
    but needs one."""
    if args.num_hosts == 0:
        if args.congestion is not None:
            if not sandbox.inside():
                raise RuntimeError("the option congestion needs a sandbox")
            network.batch("ip", network.loopback_commands(args.congestion))
        yield [ThisMachine()]
        return
    profile, unlimited = args.profile, args.rate == "none"
    with EmulatedCluster(
        hosts=args.num_hosts,
        profile=profile or network_profile("1gbit" if unlimited else args.rate),
        time_scale=args.time_scale,
        # Without the option, every engine gets the machine's default.
        congestion=args.congestion or network.default_congestion(),
        # With --rate, the links are the kernel's, so that the switch program adds no cost.
        links="tc" if profile is None else "auto",
    ) as cluster:
        if profile is None and unlimited:
            for index, host in enumerate(cluster.hosts):
                network.batch("tc", [f"qdisc del dev {network.port_of(index)} root"])
                network.batch("tc", [f"qdisc del dev {host.ifname} root"], host.pid)
        yield list(cluster.hosts)


class TeamError(Exception):
    """Error of an engine that is missing or has failed; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Hosts and connections of ranks.

    Attributes:
        hosts: hosts in rank order, with `per_host` ranks on each.
        transport: "auto", or "tcp" for no shared memory.
        congestion: TCP congestion control; None: the default.
        timeout_s: longest time of a call.
    """

    hosts: Sequence[Host]
    per_host: int
    transport: str = "auto"
    congestion: str | None = None
    timeout_s: float = 180.0

    @property
    def size(self) -> int:
        return len(self.hosts) * self.per_host

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank // self.per_host]


class Teams:
    """Ranks of all engines, from `with Teams(names, layout) as teams:` to its end. `failures` has
    the reason for each engine that is missing or has failed. `started` has the other engines, by
    name."""

    def __init__(self, names: Sequence[str], layout: Layout) -> None:
        self.failures: dict[str, str] = {}
        self.started: dict[str, Team] = {}
        self._names, self._layout = names, layout

    def __enter__(self) -> Teams:
        with contextlib.ExitStack() as stack:
            # Paths of sockets must be short.
            temporary = tempfile.TemporaryDirectory(prefix="drb", dir="/tmp")
            folder = Path(stack.enter_context(temporary))
            for name in self._names:
                note(f"starting {name}")
                try:
                    self.started[name] = Team(name, self._layout, folder)
                    stack.callback(self.started[name].close)
                except TeamError as error:
                    self.fail(name, str(error))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fail(self, name: str, reason: str) -> None:
        """Notes the failure of an engine, which gets no further calls."""
        self.failures[name] = reason
        note(f"{name}: {reason}")

    def round(
        self,
        function: Callable[..., Any],
        cases: Mapping[Any, dict[str, Any]],
        *,
        backwards: bool = False,
    ) -> Iterator[tuple[Any, str, list[Any]]]:
        """Calls a function for each case, on the ranks of one engine after the other. Yields the
        key of the case, the engine, and the results in rank order. The function is at the top level
        of a module; it gets the rank's `Place` and the arguments of the case."""
        for key, arguments in cases.items():
            for name in reversed(self._names) if backwards else self._names:
                if name in self.failures:
                    continue
                try:
                    results = self.started[name].call(function, **arguments)
                except TeamError as error:
                    self.fail(name, str(error))
                else:
                    yield key, name, results


class Team:
    """Ranks of one engine, stopped by SIGSTOP except during `call`. Without SIGSTOP, Horovod's
    threads would wake up every millisecond."""

    def __init__(self, name: str, layout: Layout, folder: Path) -> None:
        self.name, self._folder = name, folder
        self.versions: dict[str, str] = {}
        self.pids: list[int] = []
        self._layout = layout
        self._lines: list[Connection] = []
        self._processes = Ranks()
        self._logs: list[Path] = []
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def call(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Runs `function(place, **arguments)` on every rank; returns the results in rank order."""
        self._signal(signal.SIGCONT)
        try:
            for line in self._lines:
                line.send((_module(function), function.__name__, arguments))
            results = self._gather(self._layout.timeout_s)
        except OSError as error:
            self.kill()
            raise TeamError(f"a rank died: {error}") from error
        except BaseException:
            self.kill()
            raise
        self._signal(signal.SIGSTOP)
        return results

    def close(self) -> None:
        """Ends the ranks, by force if they do not end by themselves."""
        self._signal(signal.SIGCONT)
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send(None)
        self._processes.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """Ends the ranks by force; has no effect after `close`."""
        self._processes.signal(signal.SIGCONT)
        # mpirun passes the signal on, also to other hosts; its ranks die with it.
        self._processes.stop(_STOP_S, ask=signal.SIGTERM)
        for line in self._lines:
            line.close()
        self._lines, self.pids = [], []

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self) -> None:
        layout = self._layout
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._folder / f"{self.name}.sock"))
        listener.listen(layout.size)
        listener.settimeout(0.2)
        with listener:
            for index, (command, env) in enumerate(self._commands()):
                self._logs.append(self._folder / f"{self.name}-{index}.log")
                self._processes.command(command, cwd=_ROOT, env=env, log=self._logs[-1])
            self._accept(listener)
        self.versions = self._gather(_START_S)[0]
        self._signal(signal.SIGSTOP)

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_S
        known: dict[int, tuple[int, Connection]] = {}
        while len(known) < self._layout.size:
            try:
                line = Connection(listener.accept()[0].detach())
                rank, pid = line.recv()
                known[rank] = (pid, line)
            except TimeoutError:
                self._processes.wait(0.0)
                if self._processes.codes:
                    raise TeamError(f"did not start: {self._last_line()}") from None
                if time.monotonic() > deadline:
                    raise TeamError(f"did not start in {_START_S:.0f} s") from None
            finally:
                self.pids = [known[r][0] for r in sorted(known)]
                self._lines = [known[r][1] for r in sorted(known)]

    def _gather(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        try:
            for rank, (status, value) in gather(dict(enumerate(self._lines)), timeout_s):
                if status == "unavailable":
                    raise TeamError(f"unavailable: {value}")
                if status != "ok":
                    raise TeamError(f"failed: rank {rank}: {value.strip().splitlines()[-1]}")
                results[rank] = value
        except RankLost as lost:
            log = f": {self._last_line()}" if lost.died else ""
            raise TeamError(f"failed: {lost}{log}") from None
        return [results[rank] for rank in sorted(results)]

    def _last_line(self) -> str:
        """Returns the last line of the logs that names an error, or else the last line."""
        texts = [log.read_text(errors="replace", encoding="utf-8") for log in self._logs]
        lines = [line.strip() for text in texts for line in text.split("\n") if line.strip(" -*")]
        lines = [line for line in lines if "***" not in line and "help_aggregate" not in line]
        errors = [line for line in lines if re.search("error|signal:|fail", line, re.IGNORECASE)]
        return (errors or lines or ["without output"])[-1]

    def _commands(self) -> Iterator[tuple[list[str], dict[str, str]]]:
        layout = self._layout
        env = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": layout.hosts[0].ifname,
            "COMM_CORE_TRANSPORT": layout.transport,
            "COMM_CORE_IFNAME": layout.hosts[0].ifname,
            "TMPDIR": str(self._folder),  # Open MPI leaves files behind
        }
        if layout.congestion is not None:
            env["COMM_CORE_TCP_CONGESTION"] = layout.congestion
        base = [sys.executable, "-m", "bench.rig.rank", "--engine", self.name]
        base += ["--folder", str(self._folder), "--size", str(layout.size)]
        if self.name in MPIRUN:
            yield layout.hosts[0].command(self._mpirun() + base), env
            return
        for rank in range(layout.size):
            host = layout.host_of(rank)
            command = host.command([*base, "--rank", str(rank)])
            yield command, {**env, "COMM_CORE_HOST_ID": host.name}

    def _mpirun(self) -> list[str]:
        layout = self._layout
        if shutil.which("mpirun") is None:
            raise TeamError("unavailable: no mpirun on the PATH")
        try:
            mpirun = find_mpirun()
        except UserError as error:
            raise TeamError(f"unavailable: {error}") from None
        # A rank that waits in a busy loop would take the core from others.
        chosen = {"mpi_yield_when_idle": "1"}
        tcp_only = layout.transport == "tcp" or layout.per_host == 1
        if len(layout.hosts) > 1 or tcp_only:
            chosen |= settings(mpirun, 0, layout.hosts[0].ifname)
        if tcp_only:
            chosen["btl"] = "tcp,self"
        command, agent = ["-wdir", str(_ROOT)], None
        if len(layout.hosts) > 1:
            command += ["-H", ",".join(f"{h.address}:{layout.per_host}" for h in layout.hosts)]
            agent = [sys.executable, "-m", "common.emulation.hosts.rsh"]
        return [*mpirun.words(layout.size, chosen, agent), *command]


def _module(function: Callable[..., Any]) -> str:
    """Returns the module's name for ranks to import; only here is a script `__main__`."""
    if function.__module__ == "__main__":
        return f"bench.{Path(sys.argv[0]).stem}"
    return function.__module__
