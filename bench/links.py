#!/usr/bin/env python3
"""Checks of emulated links: do they have the delay, rate and losses of their network file?

  python bench/links.py delays      one-way delays, while two other hosts send at full speed
  python bench/links.py rates       rate of each link alone, and of all at once, with 2 to 8 hosts
  python bench/links.py messages    time of a message of 64 KiB after a pause
  python bench/links.py losses      lost frames, and the spread of delays with jitter
  python bench/links.py cost        CPU seconds per GB, of the kernel's links and of the switch
  python bench/links.py start-up    time of a small all-reduce, and its start-up time with 10gbe

The switch is this project's program that delays frames between virtual hosts. Exit status 3: a
result is outside its limits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.collectives import measure
from bench.rig import program
from bench.rig.output import Output, note
from bench.rig.table import layout, slowest
from bench.rig.team import Layout, Teams
from common.emulation import flow, probe, sandbox
from common.emulation.cluster import EmulatedCluster, VirtualHost
from common.emulation.links.profile import (
    FRAME_BYTES,
    PAYLOAD_BYTES,
    NetworkProfile,
    network_profile,
)
from common.emulation.measured import link_rates, rates_together
from common.results.committed.catalogue import MISSED
from dear.errors import UserError
from dear.lazy import np
from dear.options import at_least


@dataclass(frozen=True, kw_only=True)
class Case:
    """Row of a check: a wanted value, its limits, and what was measured.

    Attributes:
        name: cells on the left.
        limits: lowest and highest allowed value; None: any value is allowed.
        samples: measured values by round; a round may have a value per link or pair of hosts.
    """

    name: tuple[str, ...]
    wanted: float
    limits: tuple[float, float] | None
    samples: list[list[float]] = field(default_factory=list)

    @classmethod
    def within(cls, percent: float, *name: object, wanted: float) -> Case:
        """Returns a case whose value may differ from `wanted` by `percent` in either direction."""
        room = wanted * percent / 100
        return cls(name=tuple(map(str, name)), wanted=wanted, limits=(wanted - room, wanted + room))

    @property
    def value(self) -> float:
        """Median over the rounds, for the link or pair that differs most from `wanted`."""
        medians = [statistics.median(column) for column in zip(*self.samples, strict=True)]
        return max(medians, key=lambda value: abs(value - self.wanted))

    @property
    def verdict(self) -> str:
        """Returns `ok`, `MISSED` or `not judged`."""
        if self.limits is None:
            return "not judged"
        return "ok" if self.limits[0] <= self.value <= self.limits[1] else "MISSED"

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        values = [value for round_ in self.samples for value in round_]
        shown = map(_text, (self.wanted, self.value, min(values), max(values)))
        limits = "" if self.limits is None else "..".join(map(_text, self.limits))
        return [*self.name, *shown, limits, self.verdict]


def _text(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Check:
    """Check that runs; its cases are saved after each round, and judged after the last one."""

    what: str
    repeats: int
    output: Output

    def save(self, cases: Sequence[Case], **values: Any) -> None:
        """Writes the cases and other values to the result file."""
        kept = [dataclasses.asdict(case) for case in cases]
        self.output.save(f"bench/links {self.what}", {"cases": kept, **values})

    def end(self, cases: Sequence[Case], *remarks: str) -> int:
        """Prints a row per case; returns the exit status."""
        _, names, unit, _ = CHECKS[self.what]
        header = [*names, f"wanted {unit}", "worst median", "lowest", "highest"]
        header += ["limits", "verdict"]
        rows = layout(header, [case.cells() for case in cases])
        print("\n".join([*self.output.heading(), *remarks, rows]))
        return MISSED if any(case.verdict == "MISSED" for case in cases) else 0


def delays(check: Check) -> int:
    """Measures delays of small packets between four hosts, while two others send at full speed."""
    cases = []
    for us in (50, 100, 1000, 5000, 20000):
        cases.append(Case(name=("median",), wanted=us, limits=(us - 50, us + 50)))
        cases.append(Case(name=("p99",), wanted=us, limits=(us - 50, us + 500)))
    profiles = [NetworkProfile(name="bench", gbps=1, latency_us=case.wanted) for case in cases[::2]]
    with EmulatedCluster(hosts=6, profile=profiles[0], links="switch") as cluster:
        ring = [(cluster.hosts[i], cluster.hosts[(i + 1) % 4]) for i in range(4)]
        for index in range(check.repeats):
            for number, profile in enumerate(profiles):
                cluster.set_profile(profile, 1.0)
                load = threading.Thread(target=flow.ring, args=(cluster.hosts[4:], 3.5, 0.0))
                load.start()
                pairs = probe.all_pairs(ring, 2.0, 1e-6 * profile.latency_us)
                load.join()
                cases[2 * number].samples.append([pair.median_us for pair in pairs])
                cases[2 * number + 1].samples.append([pair.p99_us for pair in pairs])
                note(f"round {index + 1}: {profile.latency_us:g} us")
            check.save(cases)
    return check.end(cases)


def rates(check: Check) -> int:
    """Measures the rates of links, slowed down enough for two cores to keep up."""
    cases = []
    shapes = ((2, 1, 1), (2, 10, 10), (4, 1, 2), (4, 10, 16), (8, 1, 4), (8, 10, 40))
    for hosts, gbps, scale in shapes:
        cases.append(Case.within(2, hosts, scale, "alone", wanted=gbps))
        cases.append(Case.within(2, hosts, scale, "all at once", wanted=gbps))
    for index in range(check.repeats):
        for number, (hosts, gbps, scale) in enumerate(shapes):
            profile = NetworkProfile(name="bench", gbps=gbps, latency_us=30)
            with EmulatedCluster(
                hosts=hosts, profile=profile, time_scale=scale, links="switch"
            ) as cluster:
                alone, together = link_rates(cluster, 0.5), rates_together(cluster, 1.5)
            both_ways = [host[key] for host in alone for key in ("up_gbps", "down_gbps")]
            cases[2 * number].samples.append(both_ways)
            cases[2 * number + 1].samples.append([host["gbps"] for host in together])
            note(f"round {index + 1}: {hosts} hosts, {gbps:g} Gb/s")
        check.save(cases)
    return check.end(cases)


_MESSAGE_BYTES = 64 * 1024
# The two ends of a connection, on two hosts with one clock. A message begins with its start time.
_RECEIVE = """
import json, socket, struct, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
line, _ = server.accept()
space = memoryview(bytearray(int(sys.argv[2])))
times = []
while True:
    have = 0
    while have < len(space) and (count := line.recv_into(space[have:])):
        have += count
    if have < len(space):
        break
    times.append(time.monotonic() - struct.unpack_from("d", space)[0])
print(json.dumps(times))
"""
_SEND = """
import socket, struct, sys, time
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
rest = bytes(int(sys.argv[3]) - 8)
for _ in range(int(sys.argv[4])):
    line.sendall(struct.pack("d", time.monotonic()) + rest)
    time.sleep(0.1)
"""


def messages(check: Check) -> int:
    """Times messages from the call of send to the last byte, at 1 Gb/s. The links run 40 times
    slower than real time, so that the time of the calls does not matter."""
    gbps, time_scale, latency_us = 1.0, 40.0, 30.0
    frames = -(-_MESSAGE_BYTES // PAYLOAD_BYTES)
    wire_bytes = _MESSAGE_BYTES + frames * (FRAME_BYTES - PAYLOAD_BYTES) + FRAME_BYTES
    wanted_ms = 1e3 * (wire_bytes * 8 / (gbps * 1e9) + latency_us * 1e-6) * time_scale
    cases = [Case.within(2, "switch", wanted=wanted_ms)]
    cases.append(Case(name=("tc",), wanted=wanted_ms, limits=None))
    profile = NetworkProfile(name="bench", gbps=gbps, latency_us=latency_us)
    for _ in range(check.repeats):
        for case in cases:
            with EmulatedCluster(
                hosts=2, profile=profile, time_scale=time_scale, links=case.name[0]
            ) as cluster:
                times_s = _message_times(*cluster.hosts, 40)[10:]
            case.samples.extend([1e3 * seconds] for seconds in times_s)
        check.save(cases)
    return check.end(cases)


def _message_times(sender: VirtualHost, receiver: VirtualHost, count: int) -> list[float]:
    python = [sys.executable, "-I", "-S", "-c"]
    command = receiver.command([*python, _RECEIVE, receiver.address, str(_MESSAGE_BYTES)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiving:
        port = receiving.stdout.readline().strip()
        words = [receiver.address, port, str(_MESSAGE_BYTES), str(count)]
        subprocess.run(sender.command([*python, _SEND, *words]), check=True, timeout=60)
        return json.loads(receiving.communicate(timeout=60)[0])


def losses(check: Check) -> int:
    """Counts the frames of TCP that the switch drops, and measures delays with jitter. TCP (Reno,
    CUBIC) slows down after a loss, so a precise share needs many rounds."""
    cases = [Case.within(10, wanted=percent) for percent in (0.1, 1.0)]
    jittered = NetworkProfile(name="bench", gbps=1, latency_us=1000, jitter_us=500)
    spread: list[list[float]] = []
    with EmulatedCluster(hosts=4, profile=jittered, links="switch") as cluster:
        for index in range(check.repeats):
            for case in cases:
                profile = NetworkProfile(
                    name="bench", gbps=1, latency_us=100, loss_percent=case.wanted
                )
                cluster.set_profile(profile, 1.0)
                before = cluster.links.counters()
                rates_together(cluster, 3.0)
                after = cluster.links.counters()
                lost = after["lost"] - before["lost"]
                sent = after["frames"] - before["frames"] + lost
                case.samples.append([100 * lost / sent])
            cluster.set_profile(jittered, 1.0)
            pairs = [(cluster.hosts[0], cluster.hosts[1])]
            spread.append(probe.all_pairs(pairs, 2.0, 0.01)[0].quantiles_us)
            note(f"round {index + 1}")
            check.save(cases, jitter_quantiles_us=spread)
    medians = [statistics.median(column) for column in zip(*spread, strict=True)]
    shown = " ".join(f"{quantile:.0f}" for quantile in medians)
    remark = f"# 1000 +- 500 us, quantiles 5, 25, 50, 75, 95 %: {shown}; "
    return check.end(cases, remark + "even: 550 750 1000 1250 1450")


def cost(check: Check) -> int:
    """Measures the CPU seconds of both ends, of the kernel between them, and of the switch."""
    shapes = [(gbps, kind) for gbps in (0.5, 2.0) for kind in ("tc", "switch")]
    cases = [
        Case(name=(f"{gbps:g} Gb/s", kind), wanted=0.5, limits=(0, 0.5)) for gbps, kind in shapes
    ]
    latency_us = 20 * network_profile("10gbe").latency_us  # as many bytes in flight at 0.5 Gb/s
    for index in range(check.repeats):
        for case, (gbps, kind) in zip(cases, shapes, strict=True):
            profile = NetworkProfile(name="bench", gbps=gbps, latency_us=latency_us)
            with EmulatedCluster(hosts=2, profile=profile, links=kind) as cluster:
                s_per_byte = flow.transfer_cost(*cluster.hosts, cluster.links.cpu_s)
            case.samples.append([1e9 * s_per_byte])
        note(f"round {index + 1}")
        check.save(cases)
    return check.end(cases)


_SIZES = (4096, 65536, 262144, 1 << 20, 4 << 20)


def start_up(check: Check) -> int:
    """Measures the start-up time of ring all-reduces as published measurements of Ethernet do."""
    os.environ |= {"COMM_CORE_TCP_SMALL": "0", "COMM_CORE_TCP_DIRECT": "0"}
    far = NetworkProfile(name="bench", gbps=10, latency_us=1000)
    # A ring of 4 hosts sends 6 messages one after the other; each is a frame that crosses 2 links.
    frame_us = 2 * (4096 / 4 + FRAME_BYTES - PAYLOAD_BYTES) * 8 / 10e3
    cases = [Case.within(10, "4 KiB, 1 ms", 4, 4, wanted=6 * (far.latency_us + frame_us))]
    cases += [Case.within(10, "fit, 10gbe", 8, scale, wanted=523) for scale in (20, 40)]
    medians: list[list[float]] = []
    for case in cases:
        hosts, scale = int(case.name[1]), int(case.name[2])
        sizes = _SIZES if hosts == 8 else _SIZES[:1]
        common = {"op": "all_reduce", "budget_s": 1.5, "iterations": (5, 50)}
        calls = {nbytes: {"nbytes": nbytes, **common} for nbytes in sizes}
        profile = network_profile("10gbe") if hosts == 8 else far
        with EmulatedCluster(
            hosts=hosts, profile=profile, time_scale=scale, links="switch"
        ) as cluster:
            layout = Layout(hosts=cluster.hosts, per_host=1, transport="tcp", timeout_s=120.0)
            with Teams(["comm_core"], layout) as teams:
                for index in range(check.repeats):
                    times = [
                        slowest([rank["times_s"] for rank in ranks])
                        for _, _, ranks in teams.round(measure, calls)
                    ]
                    for name, reason in teams.failures.items():
                        raise UserError(f"{name}: {reason}")
                    medians.append([statistics.median(steps) / scale for steps in times])
                    case.samples.append([1e6 * _start_up_s(sizes, medians[-1])])
                    note(f"round {index + 1}: {case.name[0]} {case.samples[-1][0]:.1f} us")
        check.save(cases, sizes=_SIZES, medians_s=medians)
    return check.end(cases)


def _start_up_s(sizes: Sequence[int], times_s: Sequence[float]) -> float:
    """Fits time = start-up + bytes / rate by least squares of the relative errors."""
    if len(sizes) == 1:
        return times_s[0]
    return float(np.polynomial.Polynomial.fit(sizes, times_s, 1, w=1 / np.array(times_s))(0))


CHECKS: dict[str, tuple[Callable[[Check], int], tuple[str, ...], str, int]] = {
    "delays": (delays, ("of a pair",), "us", 5),
    "rates": (rates, ("hosts", "time scale", "links"), "Gb/s", 3),
    "messages": (messages, ("links",), "ms", 3),
    "losses": (losses, (), "% lost", 5),
    "cost": (cost, ("rate", "links"), "CPU s per GB", 5),
    "start-up": (start_up, ("what", "hosts", "time scale"), "us", 5),
}
"""Function of each check, names of its columns, unit, and rounds by default."""


def main(argv: list[str]) -> int:
    parser = program.parser(__doc__)
    parser.add_argument("what", choices=CHECKS)
    parser.add_argument("--repeats", type=int, help="rounds; the default depends on the check")
    args = parser.parse_args(argv)
    function, _, _, repeats = CHECKS[args.what]
    at_least("--repeats", args.repeats, 1)
    if not sandbox.inside():
        raise program.NeedsSandbox
    with Output(args.json) as output:
        return function(Check(args.what, args.repeats or repeats, output))


if __name__ == "__main__":
    program.run(main)
