#!/usr/bin/env python3
"""How near the emulated cluster comes to what it stands for.

  python bench/fidelity.py links         rates of the links, asked and measured; bar 2 %
  python bench/fidelity.py compute       replayed steps against their profiles; bar 2 %
  python bench/fidelity.py collective    a 4-rank all-reduce at 1 Gb/s against the wire; bar 6 %
  python bench/fidelity.py scales        the same trials at time scales k and 2k; bar 1.5 %, and 1 %
                                         for the ratio to the first

Exit status: 0 within the bar, 1 not or something failed, 2 a mistake in the options.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from bench.collectives import measure
from bench.rig import session
from bench.rig.output import Output, note
from bench.rig.table import bucket_bytes, bus_factor, digits, layout, parse_size, slowest
from bench.rig.team import Layout, Teams
from common.emulation import network, sandbox
from common.emulation.cluster import EmulatedCluster
from common.emulation.config import NetworkProfile
from common.models import registry
from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import positive


class Case:
    """One thing that is asked for, what was measured of it, and how far that is off.

    Attributes:
        cells: of the row below `header`.
    """

    bar_percent: ClassVar[float]
    header: ClassVar[tuple[str, ...]]
    judged = True
    off_percent: float
    cells: Callable[[], list[str]]

    @property
    def verdict(self) -> str:
        """`ok`, or `MISSED` if further off than the bar in either direction."""
        if not self.judged:
            return "not judged"
        return "ok" if abs(self.off_percent) <= self.bar_percent else "MISSED"


def table(kind: type[Case], cases: Sequence[Case]) -> str:
    """A row per case, and its verdict."""
    header = [*kind.header, f"bar {kind.bar_percent:g} %"]
    return layout(header, [[*case.cells(), case.verdict] for case in cases])


@dataclass(frozen=True)
class Check:
    """The cases of one run: kept after each round, printed and judged at its end."""

    what: str
    kind: type[Case]
    output: Output

    def save(self, cases: Sequence[Case], **values: Any) -> None:
        """Keeps the cases and values, with where they were measured."""
        about = self.output.about(f"bench/fidelity {self.what}")
        self.output.save({**about, "cases": [vars(case) for case in cases], **values})

    def end(self, cases: Sequence[Case], *remarks: str, failures: Sequence[str] = ()) -> int:
        """Prints the table; 0 if all that is judged is within the bar and nothing has failed."""
        print("\n".join([*self.output.heading(), *remarks, table(self.kind, cases), *failures]))
        return int(bool(failures) or any(case.verdict == "MISSED" for case in cases))


@dataclass(frozen=True, kw_only=True)
class Link(Case):
    """A rate at a time scale; `judged` if every machine should reach it."""

    bar_percent = 2.0
    header = ("asked", "time scale", "lowest", "highest", "worst")

    gbps: float
    time_scale: float
    judged: bool = True
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def profile(self) -> NetworkProfile:
        return NetworkProfile(name=f"{self.gbps:g} Gb/s", gbps=self.gbps)

    def links(self) -> dict[str, float]:
        """Median over the rounds of every link's rate, in emulated Gb/s."""
        return {
            f"{host[0]['host']} {way}": statistics.median(one[f"{way}_gbps"] for one in host)
            for host in zip(*self.rounds, strict=True)
            for way in ("up", "down")
        }

    @property
    def off_percent(self) -> float:
        """The deviation of the worst link."""
        offs = [100 * (rate / self.gbps - 1) for rate in self.links().values()]
        return max(offs, key=abs)

    def cells(self) -> list[str]:
        rates = self.links().values()
        return [
            *(f"{self.gbps:g} Gb/s", f"{self.time_scale:g}"),
            *(digits(min(rates), 4), digits(max(rates), 4), f"{self.off_percent:+.2f} %"),
        ]


def links(args: argparse.Namespace, check: Check) -> int:
    """Do virtual links have the rate that was asked for?"""
    cases = [
        Link(gbps=0.1, time_scale=1),
        Link(gbps=1, time_scale=1),
        Link(gbps=10, time_scale=10),
        # What a small machine cannot carry at full speed: there dilation is needed.
        Link(gbps=10, time_scale=1, judged=False),
    ]
    with EmulatedCluster(hosts=2, profile=cases[0].profile) as cluster:
        for index in range(args.repeats):
            for case in cases:
                cluster.set_profile(case.profile, case.time_scale)
                case.rounds.append(cluster.measure(0.5))
                note(f"round {index + 1}: {case.gbps:g} Gb/s at {case.time_scale:g}")
            check.save(cases)
    return check.end(cases)


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


@dataclass(frozen=True, kw_only=True)
class Scales(Case):
    """A trial of a sweep: mean emulated step times of its repeats at time scales k and 2k."""

    bar_percent = 1.5
    ratio_bar_percent: ClassVar[float] = 1.0
    header = (
        *("model", "algorithm", "k", "n", "step at k", "step at 2k", "off"),
        *("ratio to base", "ratio off"),
    )

    model: str
    algorithm: str
    time_scale: float
    at_k_s: list[float]
    at_2k_s: list[float]
    base_at_k_s: float
    """Mean step of the algorithm that the others are compared with."""
    base_at_2k_s: float

    @property
    def off_percent(self) -> float:
        """T(k) - T(2k) as a share of T(k)."""
        return 100 * (1 - statistics.fmean(self.at_2k_s) / statistics.fmean(self.at_k_s))

    @property
    def ratio(self) -> float:
        """Of the mean step at k to that of the base."""
        return statistics.fmean(self.at_k_s) / self.base_at_k_s

    @property
    def ratio_off_percent(self) -> float:
        """By how much that ratio is larger than at 2k."""
        at_2k = statistics.fmean(self.at_2k_s) / self.base_at_2k_s
        return 100 * (self.ratio / at_2k - 1)

    @property
    def verdict(self) -> str:
        near = abs(self.ratio_off_percent) <= self.ratio_bar_percent
        return super().verdict if near else "MISSED"

    def cells(self) -> list[str]:
        return [
            *(self.model.partition("@")[0], self.algorithm, f"{self.time_scale:g}"),
            f"{len(self.at_k_s)} + {len(self.at_2k_s)}",
            f"{digits(statistics.fmean(self.at_k_s) * 1e3, 4)} ms",
            f"{digits(statistics.fmean(self.at_2k_s) * 1e3, 4)} ms",
            f"{self.off_percent:+.2f} %",
            f"{self.ratio:.3f}",
            f"{self.ratio_off_percent:+.2f} % of {self.ratio_bar_percent:g} %",
        ]


_COMPARED = ["ddp", "horovod", "wfbp", "dear", "dadt", "decentralized"]
_MODELS = [f"{name}@rtx2080ti-modelled" for name in ("bert_base", "resnet50", "densenet201")]


class SweepError(Exception):
    """A sweep gave no step times; the message is one line."""


def scales(args: argparse.Namespace, check: Check) -> int:
    """Do two time scales give the same emulated step time?"""
    cases: list[Scales] = []
    sweeps: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
        for index, model in enumerate(args.models):
            try:
                found = _sweep(args, model, f"scales-{index}", Path(folder))
            except SweepError as error:
                failures.append(str(error))
                continue
            sweeps += found
            failures += [_failure(record) for record in found if record["status"] != "ok"]
            cases += _compared(found, args.algorithms[0])
            check.save(cases, sweeps=sweeps)
    remark = f"# {args.hosts} hosts, {args.network}; ratios to {args.algorithms[0]}"
    return check.end(cases, remark, failures=failures)


def experiment(args: argparse.Namespace, model: str, name: str) -> dict[str, Any]:
    """The keys of the experiment file of one sweep."""
    cluster = {"hosts": args.hosts, "network": args.network}
    if args.time_scale is not None:
        cluster["time_scale"] = args.time_scale
    measure = {"repeats": args.repeats, "repeats_at_2k": args.repeats, "check_steps": 1}
    measure |= {"warmup_steps": 2, "steps_per_iter": args.steps}
    return {
        "name": name,
        "algorithms": list(args.algorithms),
        "models": [{"name": model, "batch_size": registry.model_entry(model).batch_size}],
        "world_sizes": [args.hosts],
        "baseline": False,
        "cluster": cluster,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "measure": measure,
        "timeout_s": 1800.0,
    }


def _compared(records: Sequence[dict[str, Any]], base: str) -> list[Scales]:
    """Those that have been measured at both scales, if the base is one of them."""
    times = {}
    for record in records:
        if record["status"] == "ok" and record["systematic"]:
            both = (record["iters"], record["systematic"]["iters"])
            times[record["trial"]["algorithm"]] = tuple(
                [statistics.fmean(itertools.chain(*blocks)) for blocks in repeats]
                for repeats in both
            )
    if base not in times:
        return []
    at_k_s, at_2k_s = map(statistics.fmean, times[base])
    return [
        Scales(
            model=record["trial"]["model"],
            algorithm=record["trial"]["algorithm"],
            time_scale=record["time_scale"],
            at_k_s=times[record["trial"]["algorithm"]][0],
            at_2k_s=times[record["trial"]["algorithm"]][1],
            base_at_k_s=at_k_s,
            base_at_2k_s=at_2k_s,
        )
        for record in records
        if record["trial"]["algorithm"] in times
    ]


def _failure(record: dict[str, Any]) -> str:
    said = (record["error"] or {}).get("message")
    return f"{record['trial']['model']} {record['trial']['algorithm']}: {record['status']}: {said}"


def _sweep(args: argparse.Namespace, model: str, name: str, folder: Path) -> list[dict[str, Any]]:
    """The records of one run of the driver."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(experiment(args, model, name)))
    driver = str(Path(__file__).parents[1] / "benchmarks.py")
    command = [sys.executable, driver, "run", str(path), "--json", "--quiet"]
    command += ["--no-plot", "--logs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 2:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    note(done.stderr.strip())
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise SweepError(f"the sweep of {model} failed: {last}")
    return json.loads(done.stdout)


CHECKS = {
    "links": (links, Link, 5, "rates of the links, asked and measured"),
    "compute": (compute, Replay, 5, "replayed steps against their profiles"),
    "collective": (all_reduce, AllReduce, 7, "an all-reduce against the wire"),
    "scales": (scales, Scales, 3, "the same trials at time scales k and 2k"),
}
"""What runs, its cases, rounds by default, and what it compares."""


def main(argv: list[str]) -> int:
    args = _parse(argv)
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: must be at least 1")
    if args.what in ("links", "collective") and not sandbox.inside():
        raise session.NeedsSandbox
    if args.what == "scales":
        positive("--time-scale", args.time_scale)
        for option, names in (("--algorithms", args.algorithms), ("--models", args.models)):
            if len(set(names)) != len(names):
                raise UserError(f"{option} names one twice: {' '.join(names)}")
        for model in args.models:
            if not registry.is_replay(model):
                raise UserError(f"--models {model}: has no time scale; use MODEL@DEVICE")
    with Output(args.json) as output:
        check, kind, *_ = CHECKS[args.what]
        return check(args, Check(args.what, kind, output))


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
    add = made["scales"]
    add("--time-scale", type=float, default=None, help="k; else what the sweep finds by itself")
    add("--algorithms", nargs="+", default=_COMPARED, metavar="NAME", help="the base first")
    add("--models", nargs="+", default=_MODELS, metavar="NAME", help="replayed models")
    add("--hosts", type=int, default=4, help="virtual hosts, one rank each")
    add("--network", default="10gbe", help="network profile or bandwidth")
    add("--steps", type=int, default=3, help="timed steps in each round")
    return parser.parse_args(argv)


if __name__ == "__main__":
    session.program(main)
