#!/usr/bin/env python3
"""How near the emulated cluster comes to what it stands for.

  python bench/fidelity.py compute       replayed steps against their profiles; bar 2 %
  python bench/fidelity.py collective    a 4-rank all-reduce at 1 Gb/s against the wire; bar 6 %
  python bench/fidelity.py faith         steps at several time scales, and ranks' waits for cores;
                                         bar 3 % beside the largest scale, for what is believed

With `--json FILE` the last one keeps each trial when it has ended. Asked again at the same commit,
for the same or other parts (`--models resnet50 --algorithms ddp,dear`), it measures what is
missing. The links themselves: bench/links.py. Steps at time scales k and 2k, and by the event
model: `python benchmarks.py run fidelity`.

Exit status: 0 within the bar, 3 not, 1 something failed, 2 a mistake in the options.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.collectives import measure
from bench.rig import scales, session
from bench.rig.cases import Case, Check
from bench.rig.output import Output, note
from bench.rig.table import bucket_bytes, bus_factor, digits, parse_size, slowest
from bench.rig.team import Layout, Teams
from common.emulation import network, sandbox
from common.emulation.cluster import EmulatedCluster
from common.emulation.config import NetworkProfile
from common.models import registry
from dear.errors import UserError, unknown
from dear.lazy import torch


@dataclass(frozen=True, kw_only=True)
class Replay(Case):
    """A profile at a time scale. Seconds are emulated ones."""

    bar_percent = 2.0
    header = (
        *("profile", "batch", "time scale", "wanted ms", "median ms", "lowest", "highest"),
        *("CPU ms per step", "off"),
    )
    judged_from: ClassVar[float] = 4.0

    model: str
    batch_size: int
    time_scale: float
    profile_s: float
    """Forward and backward."""
    steps_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds per step, not emulated."""

    @property
    def judged(self) -> bool:
        return self.time_scale >= self.judged_from

    @property
    def off_percent(self) -> float:
        """The deviation of the median step."""
        return 100 * (statistics.median(self.steps_s) / self.profile_s - 1)

    def cells(self) -> list[str]:
        steps = (statistics.median(self.steps_s), min(self.steps_s), max(self.steps_s))
        return [
            *(self.model, str(self.batch_size), f"{self.time_scale:.4g}"),
            *(digits(seconds * 1e3, 4) for seconds in (self.profile_s, *steps)),
            *(digits(statistics.median(self.cpu_s) * 1e3), f"{self.off_percent:+.2f} %"),
        ]


# A step that takes less in wall time is mostly Python; real trials of such models scale more.
_SHORTEST_STEP_S = 0.05
# The first steps touch new memory.
_WARMUP_STEPS = 2


def compute(args: argparse.Namespace, check: Check) -> int:
    """Does a replayed step take as long as its profile says? Every profile that there is."""
    from common.models import pace, profile

    cases = []
    for model, sizes in profile.batch_sizes().items():
        for size in sizes:
            step_s = registry.profile_of(model, size).step_s
            k = max(Replay.judged_from, _SHORTEST_STEP_S / step_s)
            for scale in (k, 1.0) if step_s >= _SHORTEST_STEP_S else (k,):
                cases.append(
                    Replay(model=model, batch_size=size, time_scale=scale, profile_s=step_s)
                )
    torch.set_num_threads(1)
    try:
        for case in cases:
            pace.set_pace(pace.Pace(case.time_scale, None))
            _replay(case, args.repeats)
            note(f"{case.model} bs={case.batch_size} at {case.time_scale:g}")
            check.save(cases)
    finally:
        pace.set_pace(pace.Pace(1.0, None))
    return check.end(cases)


def _replay(case: Replay, repeats: int) -> None:
    generator = torch.Generator().manual_seed(1)
    workload = registry.build(case.model, case.batch_size, None, generator)
    for index in range(_WARMUP_STEPS + repeats):
        workload.model.zero_grad()
        began, cpu = time.perf_counter(), time.process_time()
        workload.loss().backward()
        if index >= _WARMUP_STEPS:
            case.steps_s.append((time.perf_counter() - began) / case.time_scale)
            case.cpu_s.append(time.process_time() - cpu)
    # Copies of the parameters and gradients of all models would not fit beside each other.
    del workload
    gc.collect()


@dataclass(frozen=True, kw_only=True)
class AllReduce(Case):
    """An engine at a packet size: the slowest rank's time of every all-reduce, by round."""

    bar_percent = 6.0
    header = (
        *("engine", "mtu", "n", "median ms", "fastest", "payload ms", "with headers ms"),
        *("over payload", "over headers"),
    )

    engine: str
    mtu: int
    payload_s: float
    """When links carry nothing but payload at their rate."""
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def framed_s(self) -> float:
        """When they also carry the headers of Ethernet, IP and TCP, as tbf counts them."""
        ethernet, ip_and_tcp = 14, 52
        return self.payload_s * (self.mtu + ethernet) / (self.mtu - ip_and_tcp)

    @property
    def off_percent(self) -> float:
        """Above the time of the payload alone."""
        return 100 * (self._median_s / self.payload_s - 1)

    @property
    def _median_s(self) -> float:
        return statistics.median(time for times in self.rounds for time in times)

    def cells(self) -> list[str]:
        fastest = min(min(times) for times in self.rounds)
        times = (self._median_s, fastest, self.payload_s, self.framed_s)
        return [
            *(self.engine, str(self.mtu), str(sum(map(len, self.rounds)))),
            *(digits(seconds * 1e3, 4) for seconds in times),
            f"{self.off_percent:+.2f} %",
            f"{100 * (self._median_s / self.framed_s - 1):+.2f} %",
        ]


_ENGINES = ("comm_core", "gloo")


def all_reduce(args: argparse.Namespace, check: Check) -> int:
    """Does an all-reduce between virtual hosts take as long as its bytes?"""
    for name in args.engines:
        if name not in _ENGINES:
            raise unknown("engine", name, _ENGINES)
    if args.hosts < 2 or any(not 576 <= mtu <= 65000 for mtu in args.mtu):
        raise UserError("--hosts must be at least 2 and --mtu from 576 to 65000")
    nbytes = bucket_bytes(parse_size(args.size), args.hosts)
    bound = nbytes * bus_factor("all_reduce", args.hosts) * 8 / (args.gbps * 1e9)
    wanted = {"op": "all_reduce", "nbytes": nbytes, "budget_s": 1.0, "iterations": (3, 20)}
    cases: list[AllReduce] = []
    failures: list[str] = []
    profile = NetworkProfile(name="bench", gbps=args.gbps)
    with EmulatedCluster(hosts=args.hosts, profile=profile) as cluster:
        for mtu in args.mtu:
            # Of both ends of every link; connections made later use it.
            for index, host in enumerate(cluster.hosts):
                network.batch("ip", [f"link set mtu {mtu} dev {network.port_of(index)}"])
                network.batch("ip", [f"link set mtu {mtu} dev {host.ifname}"], host.pid)
            note(f"packets of {mtu}")
            found = {e: AllReduce(engine=e, mtu=mtu, payload_s=bound) for e in args.engines}
            layout = Layout(hosts=cluster.hosts, per_host=1, transport="tcp", timeout_s=120.0)
            with Teams(args.engines, layout) as teams:
                for index in range(args.repeats):
                    for _, engine, results in teams.round(measure, {"": wanted}):
                        if wrong := sum(result["wrong"] for result in results):
                            teams.fail(engine, f"wrong results: {wrong} elements")
                            continue
                        times = slowest([result["times_s"] for result in results])
                        found[engine].rounds.append(times)
                        took = statistics.median(times) * 1e3
                        note(f"round {index + 1}: {engine} {mtu} {took:.2f} ms")
            failures += [f"{name}: {reason}" for name, reason in teams.failures.items()]
            cases += [case for case in found.values() if case.rounds]
            check.save(cases, bytes=nbytes)
    remark = f"# all-reduce of {nbytes} bytes, {args.hosts} ranks, links of {args.gbps:g} Gb/s"
    return check.end(cases, remark, failures=failures)


CHECKS = {
    "compute": (compute, Replay, 5, "replayed steps against their profiles"),
    "collective": (all_reduce, AllReduce, 7, "an all-reduce against the wire"),
}
"""What runs, its cases, rounds by default, and what it compares."""


def main(argv: list[str]) -> int:
    args = _parse(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: must be at least 1")
    if args.what == "collective" and not sandbox.inside():
        raise session.NeedsSandbox
    if args.what == "faith":
        scales.check_options(args)
        with Output(args.json, go_on=True) as output:
            return scales.faith(args, output)
    with Output(args.json) as output:
        check, kind, *_ = CHECKS[args.what]
        return check(args, Check(f"fidelity {args.what}", kind, output))


def _parse(argv: list[str]) -> argparse.Namespace:
    shape = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    whats = parser.add_subparsers(dest="what", required=True)
    made = {}
    for name, (_, _, repeats, text) in CHECKS.items():
        parsers = whats.add_parser(name, help=text, description=text, formatter_class=shape)
        made[name] = add = parsers.add_argument
        add("--repeats", type=int, default=repeats, help="rounds")
        add("--json", type=Path, default=None, help="keep raw numbers in this new file")
    add = made["collective"]
    add("--engines", nargs="+", default=["comm_core"], metavar="NAME", help="comm_core, gloo")
    add("--hosts", type=int, default=4, help="virtual hosts, one rank each")
    add("--gbps", type=float, default=1.0, help="rate of the links in Gb/s")
    add("--size", default="25Mi", help="bytes to reduce")
    add("--mtu", nargs="+", type=int, default=[1500], help="packet sizes of the links, in bytes")
    text = "steps against waiting for cores, at several time scales"
    parsers = whats.add_parser("faith", help=text, description=text, formatter_class=shape)
    add = parsers.add_argument
    add("--repeats", type=int, default=3, help="launches at each time scale")
    add("--json", type=Path, default=None, help="keep records here, and go on with those there")
    scales.add_options(add)
    return parser.parse_args(argv)


if __name__ == "__main__":
    session.program(main)
