"""The ranks of one engine, kept by the parent: started once, asked often, stopped in between."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.engines import MPIRUN
from bench.hosts import Host
from common.launch.ranks import RankLost, Ranks, gather

_ROOT = Path(__file__).parents[1]
_STOP_S = 5.0


class TeamError(Exception):
    """The engine is missing or has failed; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a team's ranks run and over what they talk.

    Attributes:
        hosts: in rank order, `per_host` ranks on each.
        transport: "auto", or "tcp" to keep ranks of one host from sharing memory.
        congestion: TCP congestion control, None for the default.
        start_s: the longest that starting may take.
    """

    hosts: list[Host]
    per_host: int
    transport: str = "auto"
    congestion: str | None = None
    start_s: float = 120.0

    @property
    def size(self) -> int:
        return len(self.hosts) * self.per_host

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank // self.per_host]


class Team:
    """Ranks of one engine, stopped (SIGSTOP) except during `call`.

    Gloo and an idle MPI are quiet by themselves; Horovod's threads talk every millisecond. All are
    stopped alike, so that nothing depends on that.
    """

    def __init__(self, name: str, layout: Layout, folder: Path) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self.pids: list[int] = []
        self._layout, self._folder = layout, folder
        self._lines: list[Connection] = []
        self._processes = Ranks()
        self._logs: list[Path] = []
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def call(self, module: str, function: str, timeout_s: float, **arguments: Any) -> list[Any]:
        """Runs `function(place, **arguments)` on every rank; the results in rank order."""
        self._signal(signal.SIGCONT)
        try:
            for line in self._lines:
                line.send((module, function, arguments))
            results = self._gather(timeout_s)
        except OSError as error:
            self.kill()
            raise TeamError(f"a rank died: {error}") from error
        except BaseException:
            self.kill()
            raise
        self._signal(signal.SIGSTOP)
        return results

    def close(self) -> None:
        """Ends the ranks in an orderly way, or else by force."""
        self._signal(signal.SIGCONT)
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send(None)
        self._processes.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """Ends the ranks by force; also after `close`, then without effect."""
        self._processes.signal(signal.SIGCONT)
        # mpirun passes it on, also to other hosts; ranks that it leaves die with it.
        self._processes.stop(_STOP_S, ask=signal.SIGTERM)
        for line in self._lines:
            line.close()
        self._lines, self.pids = [], []

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._folder / f"{self.name}.sock"))
        listener.listen(self._layout.size)
        listener.settimeout(0.2)
        with listener:
            for place, command in enumerate(self._commands()):
                self._logs.append(self._folder / f"{self.name}-{place}.log")
                env = self._environment(command)
                self._processes.command(command, cwd=_ROOT, env=env, log=self._logs[-1])
            self._accept(listener)
        answers = self._gather(self._layout.start_s)
        self.versions = answers[0]
        self._signal(signal.SIGSTOP)

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + self._layout.start_s
        known: dict[int, tuple[int, Connection]] = {}
        while len(known) < self._layout.size:
            try:
                line = Connection(listener.accept()[0].detach())
                rank, pid = line.recv()
                known[rank] = (pid, line)
            except TimeoutError:
                self._processes.wait(0.0)
                if self._processes.codes:
                    raise TeamError(f"did not start: {self._last_words()}") from None
                if time.monotonic() > deadline:
                    raise TeamError(f"did not start in {self._layout.start_s:.0f} s") from None
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
            said = f": {self._last_words()}" if lost.died else ""
            raise TeamError(f"failed: {lost}{said}") from None
        return [results[rank] for rank in sorted(results)]

    def _last_words(self) -> str:
        texts = [log.read_text(errors="replace") for log in self._logs]
        lines = [line.strip() for text in texts for line in text.split("\n") if line.strip(" -*")]
        lines = [line for line in lines if "***" not in line and "help_aggregate" not in line]
        telling = [line for line in lines if re.search("error|signal:|fail", line, re.IGNORECASE)]
        return (telling or lines or ["without a word"])[-1]

    def _environment(self, command: list[str]) -> dict[str, str]:
        layout = self._layout
        environment = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": layout.hosts[0].ifname,
            "COMM_CORE_TRANSPORT": layout.transport,
            "COMM_CORE_IFNAME": layout.hosts[0].ifname,
            "TMPDIR": str(self._folder),  # so that nothing of Open MPI's stays behind
        }
        if self.name not in MPIRUN:
            rank = int(command[command.index("--rank") + 1])
            environment["COMM_CORE_HOST_ID"] = layout.host_of(rank).name
        if layout.congestion is not None:
            environment["COMM_CORE_TCP_CONGESTION"] = layout.congestion
        return environment

    def _commands(self) -> list[list[str]]:
        layout = self._layout
        base = [sys.executable, "-m", "bench.rank", "--engine", self.name]
        base += ["--folder", str(self._folder), "--size", str(layout.size)]
        if self.name in MPIRUN:
            return [self._mpirun() + base]
        ranks = range(layout.size)
        return [layout.host_of(rank).command([*base, "--rank", str(rank)]) for rank in ranks]

    def _mpirun(self) -> list[str]:
        layout = self._layout
        if shutil.which("mpirun") is None:
            raise TeamError("unavailable: no mpirun on the PATH")
        first = layout.hosts[0]
        command = ["mpirun", "-np", str(layout.size), "-wdir", str(_ROOT), "--oversubscribe"]
        # Open MPI else binds the rank of each virtual host to the same core.
        command += ["--bind-to", "none", "--map-by", "slot"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        # Yielding takes the loss of a spinning rank from its neighbours on the same core.
        settings = {"mpi_yield_when_idle": "0" if self.name == "mpi_spin" else "1"}
        tcp_only = layout.transport == "tcp" or layout.per_host == 1
        if len(layout.hosts) > 1 or tcp_only:
            settings |= {"pml": "ob1", "btl": "tcp,self" if tcp_only else "vader,tcp,self"}
            settings |= {"btl_tcp_if_include": first.ifname}
        if len(layout.hosts) > 1:
            slots = [f"{host.address}:{layout.per_host}" for host in layout.hosts]
            command += ["-H", ",".join(slots)]
            settings |= {"oob_tcp_if_include": first.ifname, "plm_rsh_agent": str(self._agent())}
        for name, value in settings.items():
            command += ["--mca", name, value]
        return first.command(command)

    def _agent(self) -> Path:
        """A stand-in for ssh that enters the host whose address it is given."""
        path = self._folder / f"{self.name}.agent"
        cases = "\n".join(
            f'  {host.address}) exec {shlex.join(host.command(["sh", "-c"]))} "$*" ;;'
            for host in self._layout.hosts
        )
        script = f'#!/bin/sh\naddress=$1\nshift\ncase "$address" in\n{cases}\nesac\nexit 1\n'
        path.write_text(script)
        path.chmod(0o700)
        return path
