"""Does an all-reduce between virtual hosts take as long as its bytes; see bench/fidelity.py."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench import session
from bench.fidelity_report import Report, verdict
from bench.output import Output
from bench.table import bucket_bytes, bus_factor, digits, layout, parse_size, slowest
from bench.team import Layout, Team, TeamError
from common.emulation import network
from common.emulation.cluster import EmulatedCluster
from common.emulation.config import NetworkProfile
from dear.errors import UserError, unknown

BAR_PERCENT = 6.0
ENGINES = ("comm_core", "gloo")
_ETHERNET, _IP_AND_TCP = 14, 52
_TIMEOUT_S = 120.0
_BUDGET_S, _ITERATIONS = 1.0, (3, 20)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine at a packet size: the slowest rank's time of every all-reduce, by round."""

    engine: str
    mtu: int
    payload_s: float
    """When links carry nothing but payload at their rate."""
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def framed_s(self) -> float:
        """When they also carry the headers of Ethernet, IP and TCP, as tbf counts them."""
        return self.payload_s * (self.mtu + _ETHERNET) / (self.mtu - _IP_AND_TCP)

    @property
    def median_s(self) -> float:
        return statistics.median(time for times in self.rounds for time in times)

    @property
    def over_percent(self) -> float:
        """Above the time of the payload alone."""
        return 100 * (self.median_s / self.payload_s - 1)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table; 0 if every engine is within the bar at every packet size."""
    for name in args.engines:
        if name not in ENGINES:
            raise unknown("engine", name, ENGINES)
    if args.hosts < 2 or any(not 576 <= mtu <= 65000 for mtu in args.mtu):
        raise UserError("--hosts must be at least 2 and --mtu from 576 to 65000")
    nbytes = bucket_bytes(parse_size(args.size), args.hosts)
    bound = nbytes * bus_factor("all_reduce", args.hosts) * 8 / (args.gbps * 1e9)
    cases, failures = [], []
    output, report = Output(args.json), Report(args)
    try:
        with EmulatedCluster(
            hosts=args.hosts, profile=NetworkProfile(name="bench", gbps=args.gbps)
        ) as cluster:
            for mtu in args.mtu:
                set_mtu(cluster, mtu)
                group = [Case(engine=name, mtu=mtu, payload_s=bound) for name in args.engines]
                failures += _measure(cluster, group, nbytes, args.repeats)
                cases += [case for case in group if case.rounds]
                output.save(report.record(bytes=nbytes, cases=[vars(case) for case in cases]))
    finally:
        output.close()
    print("\n".join(report.header()))
    print(f"# all-reduce of {nbytes} bytes, {args.hosts} ranks, links of {args.gbps:g} Gb/s")
    print(table(cases))
    print("\n".join(failures), end="\n" if failures else "")
    missed = [case for case in cases if verdict(case.over_percent, BAR_PERCENT) != "ok"]
    return int(bool(missed or failures))


def set_mtu(cluster: EmulatedCluster, mtu: int) -> None:
    """Gives both ends of every link this packet size; connections made later use it."""
    for index, host in enumerate(cluster.hosts):
        change = ["ip", "link", "set", "mtu", str(mtu), "dev"]
        subprocess.run([*change, network.port_of(index)], check=True)
        subprocess.run(host.command([*change, host.ifname]), check=True)


def table(cases: list[Case]) -> str:
    """A row per engine and packet size."""
    header = ["engine", "mtu", "n", "median ms", "fastest", "payload ms", "with headers ms"]
    header += ["over payload", "over headers", f"bar {BAR_PERCENT:g} %"]
    rows = [
        [
            case.engine,
            str(case.mtu),
            str(sum(map(len, case.rounds))),
            digits(case.median_s * 1e3, 4),
            digits(min(min(times) for times in case.rounds) * 1e3, 4),
            digits(case.payload_s * 1e3, 4),
            digits(case.framed_s * 1e3, 4),
            f"{case.over_percent:+.2f} %",
            f"{100 * (case.median_s / case.framed_s - 1):+.2f} %",
            verdict(case.over_percent, BAR_PERCENT),
        ]
        for case in cases
    ]
    return layout(header, rows)


def _measure(cluster: EmulatedCluster, cases: list[Case], nbytes: int, rounds: int) -> list[str]:
    """Fills in the cases, engines taking turns; returns what failed."""
    teams: dict[str, Team] = {}
    failures: dict[str, str] = {}
    # A short path, because it holds sockets.
    with tempfile.TemporaryDirectory(prefix="fid", dir="/tmp") as folder:
        try:
            for case in cases:
                session.note(f"starting {case.engine} with packets of {case.mtu}")
                try:
                    place = Layout(hosts=list(cluster.hosts), per_host=1, transport="tcp")
                    teams[case.engine] = Team(case.engine, place, Path(folder))
                except TeamError as error:
                    failures[case.engine] = str(error)
            for index in range(rounds):
                for case in cases:
                    if case.engine in failures:
                        continue
                    try:
                        case.rounds.append(_round(teams[case.engine], nbytes))
                    except TeamError as error:
                        failures[case.engine] = str(error)
                        continue
                    took = statistics.median(case.rounds[-1]) * 1e3
                    session.note(f"round {index + 1}: {case.engine} {case.mtu} {took:.2f} ms")
        finally:
            for team in teams.values():
                team.close()
    return [f"{name}: {reason}" for name, reason in failures.items()]


def _round(team: Team, nbytes: int) -> list[float]:
    results = team.call(
        "bench.measure", "collective", _TIMEOUT_S,
        op="all_reduce", nbytes=nbytes, budget_s=_BUDGET_S, iterations=_ITERATIONS,
    )  # fmt: skip
    wrong = sum(result["wrong"] for result in results)
    if wrong:
        raise TeamError(f"wrong results: {wrong} elements")
    return slowest([result["times_s"] for result in results])
