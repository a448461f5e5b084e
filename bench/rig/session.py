"""Sessions of the scripts that compare engines: options, hosts, ranks, and an orderly end."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from bench.rig import engines, program
from bench.rig.output import Output, note
from bench.rig.team import Layout, Teams, built
from common.emulation import sandbox
from common.emulation.hosts import network
from common.emulation.links.profile import network_profile
from dear.errors import UserError, unknown
from dear.options import at_least

_SETUP = ("engines", "world", "hosts", "rate", "transport", "congestion", "timeout_s", "network")
_SETUP += ("time_scale",)


def parser(doc: str | None, names: Sequence[str], world: int) -> argparse.ArgumentParser:
    """Returns a parser with the options of a session and `--json`. `names` is the default of the
    engines; without names, no engine starts with the session, and there is no such option. `world`
    is the default of the number of ranks."""
    parser = program.parser(doc)
    add = parser.add_argument
    if names:
        add(
            "--engines", nargs="+", default=list(names), metavar="NAME", help="engines, interleaved"
        )
    else:
        parser.set_defaults(engines=[])
    add("-n", "--ranks", dest="world", metavar="RANKS", type=int, default=world, help="ranks")
    add("--hosts", choices=("local", "netns"), default="local", help="this machine, or virtual")
    add("--rate", default="1gbit", help="link speed of virtual hosts: none, 1gbit, 10gbit, ...")
    add("--network", help="network profile of virtual hosts, instead of --rate")
    add("--time-scale", type=float, default=1.0, help="real seconds per second of --network")
    add("--transport", choices=("auto", "tcp"), default="auto", help="tcp: no shared memory")
    add("--congestion", help="TCP congestion control of every engine")
    add("--timeout", dest="timeout_s", metavar="SECONDS", type=float, default=180.0,
        help="longest time of a measurement")  # fmt: skip
    add("--repeats", type=int, default=5, help="rounds")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Returns the checked options; `num_hosts` is the number of virtual hosts, or 0. Raises
    `UserError` if an option is wrong or impossible on this machine. Raises `NeedsSandbox` if the
    options need a sandbox, and the program is in none."""
    args = parser.parse_args(argv)
    for name in args.engines:
        if name not in engines.NAMES:
            raise unknown("engine", name, engines.NAMES)
    check_unique("--engines", args.engines)
    at_least("--repeats", args.repeats, 1)
    if not 2 <= args.world <= 64:
        raise UserError(f"-n {args.world}: collectives need 2 to 64 ranks")
    args.num_hosts = 0 if args.hosts == "local" else args.world
    if not re.fullmatch(r"none|\d+(\.\d+)?[kmg]bit", args.rate):
        raise UserError(f"--rate {args.rate!r} is not none or a speed such as 1gbit, 500mbit")
    profile = args.profile = None if args.network is None else network_profile(args.network)
    if profile is None and args.time_scale != 1:
        raise UserError(f"--time-scale {args.time_scale:g} needs --network")
    if profile is not None and not args.num_hosts:
        raise UserError(f"--network {args.network} needs --hosts netns")
    if not args.time_scale >= 1:
        raise UserError(f"--time-scale {args.time_scale:g}: must be at least 1")
    if args.congestion is not None:
        network.check_congestion(args.congestion)
    if (args.num_hosts or args.congestion) and not sandbox.inside():
        if reason := sandbox.unable():
            raise UserError(
                f"--hosts netns and --congestion build network namespaces: {reason}; "
                "or use --hosts local without --congestion"
            )
        raise program.NeedsSandbox
    return args


def check_unique(option: str, names: Sequence[str]) -> None:
    """Raises `UserError` if an option has a name twice."""
    if len(set(names)) != len(names):
        raise UserError(f"{option} has a duplicate name: {' '.join(names)}")


class Session:
    """Hosts and ranks of the engines of a script; see `started`.

    Attributes:
        args: options, as `parse` returned them.
        layout: hosts of the ranks, and their connections.
        failures: reasons, for each engine that is missing or has failed.
        round: see `Teams.round`.
    """

    def __init__(
        self, tool: str, args: argparse.Namespace, output: Output, layout: Layout, teams: Teams
    ) -> None:
        self.layout, self.failures, self.round = layout, teams.failures, teams.round
        self.args, self._tool, self._output = args, tool, output
        self._congestion = args.congestion or network.default_congestion()
        self._versions = {name: team.versions for name, team in teams.started.items()}
        self.ranks = [
            {"engine": name, "rank": rank, "pid": pid, "host": host.name}
            | {"address": host.address, "ifname": host.ifname}
            for name, team in teams.started.items()
            for rank, pid in enumerate(team.pids)
            for host in [layout.host_of(rank)]
        ]

    def save(self, **results: Any) -> None:
        """Writes the results so far and how they were measured to the result file."""
        about = {"setup": {name: getattr(self.args, name) for name in _SETUP}}
        about |= {"tcp_congestion": self._congestion, "versions": self._versions}
        about |= {"ranks": self.ranks, "failures": self.failures}
        self._output.save(self._tool, about | results)

    def heading(self) -> list[str]:
        """Returns lines that describe the machine, the hosts and the engines."""
        args, where = self.args, "this machine"
        if args.num_hosts:
            links = f"links {args.rate}"
            if args.network is not None:
                links = f"network {args.network} slowed down {args.time_scale:g} times"
            where = f"{args.num_hosts} virtual hosts, {links}"
        lines = self._output.heading()
        lines.append(
            f"# {args.world} ranks on {where}, transport {args.transport}, tcp {self._congestion}"
        )
        for name, versions in self._versions.items():
            listed = ", ".join(f"{key} {value}" for key, value in versions.items())
            lines.append(f"# {name}: {listed}")
        return lines + [f"# {name}: {reason}" for name, reason in self.failures.items()]


@contextlib.contextmanager
def started(tool: str, args: argparse.Namespace) -> Iterator[Session]:
    """Creates the result file, starts the ranks of every engine and prints the heading. No process
    and no host is left afterwards. `tool` is the name of the script in the result file."""
    with Output(args.json) as output, built(args) as hosts:
        layout = Layout(
            hosts=hosts,
            per_host=args.world // len(hosts),
            transport=args.transport,
            congestion=args.congestion,
            timeout_s=args.timeout_s,
        )
        with Teams(args.engines, layout) as teams:
            session = Session(tool, args, output, layout, teams)
            print("\n".join(session.heading()), flush=True)
            for rank in session.ranks:  # for a debugger; the result file has them, too
                note("{engine} rank {rank} pid {pid} host {host} {address} {ifname}".format(**rank))
            yield session
