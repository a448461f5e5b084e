"""Do virtual links have the rate that was asked for; see bench/fidelity.py."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import session
from bench.fidelity_report import Report, verdict
from bench.output import Output
from bench.table import digits, layout
from common.emulation.cluster import EmulatedCluster
from common.emulation.config import NetworkProfile

BAR_PERCENT = 2.0
HOSTS = 2
_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rate at a time scale; `judged` if every machine should reach it."""

    gbps: float
    time_scale: float
    judged: bool = True
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)

    def links(self) -> dict[str, float]:
        """Median over the rounds of every link's rate, in emulated Gb/s."""
        return {
            f"{self.rounds[0][host]['host']} {way}": statistics.median(
                measured[host][f"{way}_gbps"] for measured in self.rounds
            )
            for host in range(len(self.rounds[0]))
            for way in ("up", "down")
        }

    def off_percent(self) -> float:
        """The deviation of the worst link."""
        offs = [100 * (rate / self.gbps - 1) for rate in self.links().values()]
        return max(offs, key=abs)


def cases() -> list[Case]:
    """10 Gb/s at full speed is what a small machine cannot carry: there dilation is needed."""
    return [
        Case(gbps=0.1, time_scale=1),
        Case(gbps=1, time_scale=1),
        Case(gbps=10, time_scale=10),
        Case(gbps=10, time_scale=1, judged=False),
    ]


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table; 0 if all judged links are within the bar."""
    output, report, todo = Output(args.json), Report(args), cases()
    try:
        with EmulatedCluster(hosts=HOSTS, profile=_profile(todo[0])) as cluster:
            for index in range(args.repeats):
                for case in todo:
                    cluster.set_profile(_profile(case), case.time_scale)
                    case.rounds.append(cluster.measure(_SECONDS))
                    session.note(f"round {index + 1}: {case.gbps:g} Gb/s at {case.time_scale:g}")
                output.save(report.record(cases=[vars(case) for case in todo]))
    finally:
        output.close()
    print("\n".join([*report.header(), table(todo)]))
    return int(any(c.judged and verdict(c.off_percent(), BAR_PERCENT) != "ok" for c in todo))


def table(todo: Sequence[Case]) -> str:
    """A row per case."""
    rows = []
    for case in todo:
        rates = case.links().values()
        off = case.off_percent()
        rows.append(
            [
                f"{case.gbps:g} Gb/s",
                f"{case.time_scale:g}",
                digits(min(rates), 4),
                digits(max(rates), 4),
                f"{off:+.2f} %",
                verdict(off, BAR_PERCENT) if case.judged else "not judged",
            ]
        )
    header = ["asked", "time scale", "lowest", "highest", "worst", f"bar {BAR_PERCENT:g} %"]
    return layout(header, rows)


def _profile(case: Case) -> NetworkProfile:
    return NetworkProfile(name=f"{case.gbps:g} Gb/s", gbps=case.gbps)
