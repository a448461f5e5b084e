"""What the scripts that compare engines share: options, hosts, ranks, and an orderly end."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.rig import engines
from bench.rig.output import Output
from bench.rig.team import Layout, Teams, built
from common.emulation import sandbox
from common.emulation.hosts import network
from common.emulation.links.profile import NetworkProfile, network_profile
from dear.errors import UserError, unknown

_VARIABLES = ("COMM_CORE_", "GLOO_", "HOROVOD_", "OMPI_MCA_", "OMP_NUM_THREADS")
_SETUP = ("engines", "world", "hosts", "ranks_per_host", "rate", "transport", "congestion")
_SETUP += ("ifname", "timeout_s", "network", "time_scale")


def parser_of(doc: str, names: Sequence[str], world: int) -> argparse.ArgumentParser:
    """A parser with the options that say who is measured, and where, and with `--json`.

    Its defaults: the engines `names`, and `world` ranks. The script's `doc` begins with what it is.
    """
    shape = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=doc.split("\n")[0], formatter_class=shape)
    add = parser.add_argument
    add("--engines", nargs="+", default=list(names), metavar="NAME", help="engines, interleaved")
    add("-n", "--ranks", dest="world", metavar="RANKS", type=int, default=world,
        help="number of ranks")  # fmt: skip
    add("--hosts", choices=("local", "netns"), default="local", help="this machine or virtual")
    add("--ranks-per-host", type=int, default=1, help="ranks of a virtual host")
    add("--rate", default="1gbit", help="link speed of virtual hosts: none, 1gbit, 10gbit, ...")
    add("--network", default=None, help="profile of virtual hosts' links, in place of --rate")
    add("--time-scale", type=float, default=1.0, help="real seconds of a second of --network")
    add("--transport", choices=("auto", "tcp"), default="auto", help="tcp: no shared memory")
    add("--congestion", default=None, help="TCP congestion control of every engine")
    add("--ifname", default="lo", help="interface on this machine")
    add("--timeout", dest="timeout_s", metavar="TIMEOUT", type=float, default=180.0,
        help="seconds that a measurement may take")  # fmt: skip
    add("--json", type=Path, default=None, help="keep raw numbers in this new file")
    return parser


def environment() -> dict[str, str]:
    """Variables that change what engines do; never all of them, which hold secrets."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The checked options, and `num_hosts`: how many virtual hosts there are to be, or 0.

    Raises:
        UserError: something makes no sense, or cannot be done here.
        NeedsSandbox: it can be done only in a sandbox, and this is none.
    """
    args = parser.parse_args(argv)
    for name in args.engines:
        if name not in engines.NAMES:
            raise unknown("engine", name, engines.NAMES)
    if len(set(args.engines)) != len(args.engines):
        raise UserError(f"--engines names one twice: {' '.join(args.engines)}")
    if not 2 <= args.world <= 64:
        raise UserError(f"-n {args.world}: collectives need 2 to 64 ranks")
    args.num_hosts, left = divmod(args.world, args.ranks_per_host)
    if args.hosts == "local":
        args.num_hosts = 0
    elif left:
        raise UserError(
            f"-n {args.world} is not a multiple of --ranks-per-host {args.ranks_per_host}"
        )
    if not re.fullmatch(r"none|\d+(\.\d+)?[kmg]bit", args.rate):
        raise UserError(f"--rate {args.rate!r} is not none or a speed such as 1gbit, 500mbit")
    profile = profile_of(args)
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
        raise NeedsSandbox
    return args


def profile_of(args: argparse.Namespace) -> NetworkProfile | None:
    """The profile that `--network` names; None without it.

    Raises:
        UserError: there is no such profile.
    """
    return None if args.network is None else network_profile(args.network)


class NeedsSandbox(Exception):  # noqa: N818  (no mistake)
    """What was asked for can be done only in a sandbox; `program` starts this program again."""


class Session:
    """Hosts and the ranks of engines, for one script; see `started`.

    Attributes:
        args: as `parse` gave them.
        hosts: what the ranks run on.
        folder: for temporary files.
        failures: for each engine that is missing or has failed, why.
        round: as of `Teams`.
    """

    def __init__(
        self, tool: str, args: argparse.Namespace, output: Output, layout: Layout, teams: Teams
    ) -> None:
        self.hosts, self.folder = layout.hosts, teams.folder
        self.failures, self.round = teams.failures, teams.round
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

    def save(self, **values: Any) -> None:
        """Keeps everything measured so far, `values`, with where it was."""
        about = self._output.about(self._tool)
        about["setup"] = {name: getattr(self.args, name) for name in _SETUP}
        about |= {"tcp_congestion": self._congestion, "versions": self._versions}
        about |= {"environment": environment(), "ranks": self.ranks, "failures": self.failures}
        self._output.save(about | values)

    def heading(self) -> list[str]:
        """Lines that say where the numbers come from."""
        args, where = self.args, "this machine"
        if args.num_hosts:
            where = f"{args.num_hosts} virtual hosts, links {args.rate}"
            if args.network is not None:
                where = f"{args.num_hosts} virtual hosts, network {args.network}"
                where += f" slowed down {args.time_scale:g} times"
        lines = self._output.heading()
        lines.append(
            f"# {args.world} ranks on {where}, transport {args.transport}, tcp {self._congestion}"
        )
        for name, versions in self._versions.items():
            listed = ", ".join(f"{key} {value}" for key, value in versions.items())
            lines.append(f"# {name}: {listed}")
        form = "#   {engine} rank {rank} pid {pid} host {host} {address} {ifname}"
        lines += [form.format(**rank) for rank in self.ranks]
        return lines + [f"# {name}: {reason}" for name, reason in self.failures.items()]


@contextlib.contextmanager
def started(tool: str, args: argparse.Namespace) -> Iterator[Session]:
    """Claims the file of results, starts the ranks of every engine and prints where the numbers
    come from; afterwards no process or host is left. The file calls the script `tool`.
    """
    with (
        Output(args.json) as output,
        built(
            *(args.num_hosts, args.rate, args.congestion, args.ifname),
            profile=profile_of(args),
            time_scale=args.time_scale,
        ) as there,
    ):
        layout = Layout(
            hosts=there,
            per_host=args.world // len(there),
            transport=args.transport,
            congestion=args.congestion,
            timeout_s=args.timeout_s,
        )
        with Teams(args.engines, layout) as teams:
            session = Session(tool, args, output, layout, teams)
            print("\n".join(session.heading()), flush=True)
            yield session


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
