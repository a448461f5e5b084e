"""What all benchmark scripts share: options, hosts, teams, and an orderly end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import engines
from bench.hosts import Hosts, need_sandbox
from bench.team import Layout, Team, TeamError
from common.emulation import sandbox
from common.machine import machine_card
from dear.errors import UserError, unknown

_CONGESTION = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_VARIABLES = ("COMM_CORE_", "GLOO_", "HOROVOD_", "OMPI_MCA_", "OMP_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Who is measured, and where.

    Attributes:
        engines: names out of `engines.NAMES`, in the order of the table.
        world: number of ranks.
        hosts: "local" (this machine) or "netns" (virtual hosts).
        ranks_per_host: ranks on each virtual host.
        rate: speed of the virtual hosts' links, as tc writes it.
        transport: "auto", or "tcp": no shared memory.
        congestion: TCP congestion control of all connections, None for this machine's default.
        ifname: interface to use on this machine.
        timeout_s: the longest that one measurement may take.
    """

    engines: tuple[str, ...]
    world: int
    hosts: str = "local"
    ranks_per_host: int = 1
    rate: str = "1gbit"
    transport: str = "auto"
    congestion: str | None = None
    ifname: str = "lo"
    timeout_s: float = 180.0

    def __post_init__(self) -> None:
        for name in self.engines:
            if name not in engines.NAMES:
                raise unknown("engine", name, engines.NAMES)
        if len(set(self.engines)) != len(self.engines):
            raise UserError(f"--engines names one twice: {' '.join(self.engines)}")
        if not 2 <= self.world <= 64:
            raise UserError(f"-n {self.world}: collectives need 2 to 64 ranks")
        if self.hosts == "netns" and self.world % self.ranks_per_host:
            raise UserError(
                f"-n {self.world} is not a multiple of --ranks-per-host {self.ranks_per_host}"
            )
        if not re.fullmatch(r"none|\d+(\.\d+)?[kmg]bit", self.rate):
            raise UserError(f"--rate {self.rate!r} is not none or a speed such as 1gbit, 500mbit")
        known = _CONGESTION.read_text().split()
        if self.congestion is not None and self.congestion not in known:
            raise unknown("congestion control", self.congestion, known)

    @property
    def num_hosts(self) -> int:
        """Virtual hosts; 0 on this machine."""
        return self.world // self.ranks_per_host if self.hosts == "netns" else 0


def add_arguments(parser: argparse.ArgumentParser, names: Sequence[str], world: int) -> None:
    """The options that make a `Setup`, and `--json`."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("--engines", nargs="+", default=list(names), metavar="NAME", help="engines, interleaved")
    add("-n", "--ranks", type=int, default=world, help="number of ranks")
    add("--hosts", choices=("local", "netns"), default="local", help="this machine or virtual")
    add("--ranks-per-host", type=int, default=1, help="ranks of a virtual host")
    add("--rate", default="1gbit", help="link speed of virtual hosts: none, 1gbit, 10gbit, ...")
    add("--transport", choices=("auto", "tcp"), default="auto", help="tcp: no shared memory")
    add("--congestion", default=None, help="TCP congestion control of every engine")
    add("--ifname", default="lo", help="interface on this machine")
    add("--timeout", type=float, default=180.0, help="seconds that a measurement may take")
    add("--json", type=Path, default=None, help="keep raw numbers in this new file")


def setup_from(args: argparse.Namespace) -> Setup:
    """Raises `UserError` for what makes no sense, and `NeedsSandbox`."""
    setup = Setup(
        engines=tuple(args.engines),
        world=args.ranks,
        hosts=args.hosts,
        ranks_per_host=args.ranks_per_host,
        rate=args.rate,
        transport=args.transport,
        congestion=args.congestion,
        ifname=args.ifname,
        timeout_s=args.timeout,
    )
    if need_sandbox(setup.num_hosts, setup.congestion):
        raise NeedsSandbox
    return setup


class NeedsSandbox(Exception):  # noqa: N818  (no mistake)
    """What was asked for can be done only in a sandbox; `program` starts this program again."""


class Session:
    """`with Session(setup) as session:` starts every team; on exit no process or host is left.

    Attributes:
        hosts: what the ranks run on.
        folder: for temporary files; removed on exit.
        failures: for each engine that is missing or has failed, why.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.failures: dict[str, str] = {}
        self._teams: dict[str, Team] = {}
        self._ranks: list[dict[str, Any]] = []
        self._stack = contextlib.ExitStack()
        self._started = datetime.datetime.now(datetime.timezone.utc)

    def __enter__(self) -> Session:
        setup = self.setup
        with contextlib.ExitStack() as stack:
            # A short path, because it holds sockets.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="drb", dir="/tmp"))
            self.folder = Path(folder)
            hosts = Hosts(setup.num_hosts, setup.rate, setup.congestion, setup.ifname)
            self.hosts = stack.enter_context(hosts)
            stack.callback(self._close_teams)
            self.layout = Layout(
                hosts=self.hosts.all,
                per_host=setup.world // len(self.hosts.all),
                transport=setup.transport,
                congestion=setup.congestion,
            )
            for name in setup.engines:
                note(f"starting {name}")
                try:
                    self._teams[name] = Team(name, self.layout, self.folder)
                except TeamError as error:
                    self.failures[name] = str(error)
                    note(f"{name}: {error}")
                else:
                    self._list_ranks(self._teams[name])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, engine: str, module: str, function: str, **arguments: Any) -> list[Any] | None:
        """The function's results in rank order, or None if the engine is missing or now fails."""
        if engine in self.failures:
            return None
        team = self._teams[engine]
        try:
            return team.call(module, function, self.setup.timeout_s, **arguments)
        except TeamError as error:
            self.failures[engine] = str(error)
            note(f"{engine}: {error}")
            return None

    def header(self) -> list[str]:
        """Lines that say where the numbers come from."""
        setup, card = self.setup, machine_card()
        where = "this machine"
        if self.hosts.virtual:
            where = f"{setup.num_hosts} virtual hosts, links {setup.rate}"
        congestion = setup.congestion or _default_congestion()
        lines = [
            f"# {card['cpu']}, {card['cores']} cores, {card['memory_bytes'] / 2**30:.0f} GiB, "
            f"{card['os']}, Linux {card['kernel']}, Python {card['python']}",
            f"# commit {card['commit']}, {self._started:%Y-%m-%d %H:%M} UTC",
            f"# {setup.world} ranks on {where}, transport {setup.transport}, tcp {congestion}",
        ]
        for name, team in self._teams.items():
            versions = ", ".join(f"{key} {value}" for key, value in team.versions.items())
            lines.append(f"# {name}: {versions}")
        for rank in self._ranks:
            lines.append(
                f"#   {rank['engine']} rank {rank['rank']} pid {rank['pid']} "
                f"host {rank['host']} {rank['address']} {rank['ifname']}"
            )
        return lines + [f"# {name}: {reason}" for name, reason in self.failures.items()]

    def record(self, tool: str) -> dict[str, Any]:
        """What a file of raw numbers says besides them."""
        chosen = {name: os.environ[name] for name in os.environ if name.startswith(_VARIABLES)}
        return {
            "schema": 1,
            "tool": tool,
            "started": self._started.isoformat(timespec="seconds"),
            "argv": sys.argv[1:],
            "setup": dataclasses.asdict(self.setup),
            "tcp_congestion": self.setup.congestion or _default_congestion(),
            "machine": machine_card(),
            "environment": chosen,
            "versions": {name: team.versions for name, team in self._teams.items()},
            "ranks": self._ranks,
            "failures": self.failures,
        }

    def _list_ranks(self, team: Team) -> None:
        for rank, pid in enumerate(team.pids):
            host = self.layout.host_of(rank)
            where = {"host": host.name, "address": host.address, "ifname": host.ifname}
            self._ranks.append({"engine": team.name, "rank": rank, "pid": pid, **where})

    def _close_teams(self) -> None:
        for team in self._teams.values():
            team.close()


def program(main: Callable[[list[str]], int]) -> None:
    """Runs a script's main and ends the process with the right status."""
    # So that SIGTERM too unwinds the stack that removes hosts and ends ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        try:
            status = main(sys.argv[1:])
        except NeedsSandbox:
            status = sandbox.run([sys.executable, *sys.orig_argv[1:]])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


def note(text: str) -> None:
    """Progress, for who watches; results go to stdout."""
    print(f"  {text}", file=sys.stderr, flush=True)


def _default_congestion() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
