#!/usr/bin/env python3
"""Are the links of virtual hosts what a network file asks for? Each check prints what it measured.

  python bench/links.py delays      one way, beside two hosts that send all they can
  python bench/links.py rates       each link alone, and all at once, with 2, 4 and 8 hosts
  python bench/links.py messages    64 KiB after a rest: is any of it free?
  python bench/links.py losses      frames lost, and the spread of delays with jitter
  python bench/links.py cost        CPU seconds per GB, of the kernel's links and of the switch
  python bench/links.py start-up    a ring all-reduce of 4 KiB, and the fit over sizes with 10gbe

Exit status 3: something is further off than its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.collectives import measure
from bench.rig import session
from bench.rig.cases import Case, Check
from bench.rig.output import Output, note
from bench.rig.table import digits, slowest
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

SWITCH = {"links": "switch"}


@dataclass(frozen=True, kw_only=True)
class Delay(Case):
    """Of the worst pair, in real time; of its rounds the median, as this machine has neighbours."""

    bar_percent = 100.0
    header = ("wanted us", "median", "p99", "packets", "of the bars: 50 us, 500 us")

    wanted_us: float
    rounds: list[list[list[float]]] = field(default_factory=list)
    """Median and 99th percentile of each pair, in microseconds."""
    packets: list[int] = field(default_factory=list)

    @property
    def off_percent(self) -> float:
        """Of the bar that it is nearer to."""
        return max(self._median_us / 50, self._p99_us / 500, key=abs) * 100

    @property
    def _median_us(self) -> float:
        return max((us - self.wanted_us for us in self._of_pairs(0)), key=abs)

    @property
    def _p99_us(self) -> float:
        return max(us - self.wanted_us for us in self._of_pairs(1))

    def _of_pairs(self, which: int) -> list[float]:
        return [
            statistics.median(row[which] for row in pair) for pair in zip(*self.rounds, strict=True)
        ]

    def cells(self) -> list[str]:
        return [
            f"{self.wanted_us:g}",
            f"{self.wanted_us + self._median_us:.1f}",
            f"{self.wanted_us + self._p99_us:.1f}",
            str(sum(self.packets)),
            f"{self.off_percent:.0f} %",
        ]


def delays(args: argparse.Namespace, check: Check) -> int:
    """Four hosts send small packets in a ring; two more send all they can to each other."""
    cases = [Delay(wanted_us=us) for us in (50, 100, 1000, 5000, 20000)]
    profiles = [NetworkProfile(name="bench", gbps=1, latency_us=case.wanted_us) for case in cases]
    with EmulatedCluster(hosts=6, profile=profiles[0], **SWITCH) as cluster:
        ring = [(cluster.hosts[i], cluster.hosts[(i + 1) % 4]) for i in range(4)]
        for index in range(args.repeats):
            for case, profile in zip(cases, profiles, strict=True):
                cluster.set_profile(profile, 1.0)
                load = threading.Thread(target=flow.ring, args=(cluster.hosts[4:], 3.5, 0.0))
                load.start()
                found = probe.all_pairs(ring, 2.0, 1e-6 * case.wanted_us)
                load.join()
                case.rounds.append([[one.median_us, one.p99_us] for one in found])
                case.packets.extend(one.sent - one.lost for one in found)
                note(f"round {index + 1}: {case.wanted_us:g} us")
            check.save(cases)
    return check.end(cases)


@dataclass(frozen=True, kw_only=True)
class Rate(Case):
    """Emulated Gb/s of every link."""

    bar_percent = 2.0
    header = (
        "hosts",
        "rate",
        "time scale",
        "slowest alone",
        "fastest alone",
        "slowest of all at once",
        "off",
    )

    hosts: int
    gbps: float
    time_scale: float
    alone: list[list[float]] = field(default_factory=list)
    together: list[list[float]] = field(default_factory=list)

    @property
    def _medians(self) -> tuple[list[float], list[float]]:
        """Of each link, over the rounds."""
        alone, together = (
            [statistics.median(link) for link in zip(*rounds, strict=True)]
            for rounds in (self.alone, self.together)
        )
        return alone, together

    @property
    def off_percent(self) -> float:
        """The deviation of the worst link."""
        alone, together = self._medians
        return max((100 * (rate / self.gbps - 1) for rate in alone + together), key=abs)

    def cells(self) -> list[str]:
        alone, together = self._medians
        return [
            *(str(self.hosts), f"{self.gbps:g} Gb/s", f"{self.time_scale:g}"),
            *(digits(value, 4) for value in (min(alone), max(alone), min(together))),
            f"{self.off_percent:+.2f} %",
        ]


def rates(args: argparse.Namespace, check: Check) -> int:
    """At time scales at which two cores keep up."""
    shapes = [(2, 1, 1), (2, 10, 10), (4, 1, 2), (4, 10, 16), (8, 1, 4), (8, 10, 40)]
    cases = [Rate(hosts=hosts, gbps=gbps, time_scale=k) for hosts, gbps, k in shapes]
    for index in range(args.repeats):
        for case in cases:
            profile = NetworkProfile(name="bench", gbps=case.gbps, latency_us=30)
            with EmulatedCluster(
                hosts=case.hosts, profile=profile, time_scale=case.time_scale, **SWITCH
            ) as cluster:
                found = link_rates(cluster, 0.5)
                case.alone.append([host[f"{way}_gbps"] for host in found for way in ("up", "down")])
                case.together.append([host["gbps"] for host in rates_together(cluster, 1.5)])
            note(f"round {index + 1}: {case.hosts} hosts, {case.gbps:g} Gb/s")
        check.save(cases)
    return check.end(cases)


@dataclass(frozen=True, kw_only=True)
class Message(Case):
    """From before the call that sends it to when all of it is there."""

    bar_percent = 2.0
    header = ("links", "wanted ms", "median ms", "p99 ms", "messages", "off")

    links: str
    wanted_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def judged(self) -> bool:
        return self.links == "switch"

    @property
    def off_percent(self) -> float:
        return 100 * (statistics.median(self.times_s) / self.wanted_s - 1)

    def cells(self) -> list[str]:
        p99 = statistics.quantiles(self.times_s, n=100)[98]
        times = (self.wanted_s, statistics.median(self.times_s), p99)
        return [
            self.links,
            *(digits(1e3 * seconds, 4) for seconds in times),
            str(len(self.times_s)),
            f"{self.off_percent:+.2f} %",
        ]


_MESSAGE_BYTES = 64 * 1024
# Two ends of a connection, on two hosts with one clock: each message begins with when it was sent.
_TAKE = """
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
_GIVE = """
import socket, struct, sys, time
line = socket.create_connection((sys.argv[1], int(sys.argv[2])))
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
rest = bytes(int(sys.argv[3]) - 8)
for _ in range(int(sys.argv[4])):
    line.sendall(struct.pack("d", time.monotonic()) + rest)
    time.sleep(0.1)
"""


def messages(args: argparse.Namespace, check: Check) -> int:
    """1 Gb/s, 40 times slower: what a call takes is next to nothing of it."""
    gbps, time_scale, latency_us = 1.0, 40.0, 30.0
    frames = -(-_MESSAGE_BYTES // PAYLOAD_BYTES)
    wire_bytes = _MESSAGE_BYTES + frames * (FRAME_BYTES - PAYLOAD_BYTES) + FRAME_BYTES
    wanted_s = (wire_bytes * 8 / (gbps * 1e9) + latency_us * 1e-6) * time_scale
    cases = [Message(links=kind, wanted_s=wanted_s) for kind in ("switch", "tc")]
    profile = NetworkProfile(name="bench", gbps=gbps, latency_us=latency_us)
    for _ in range(args.repeats):
        for case in cases:
            with EmulatedCluster(
                hosts=2, profile=profile, time_scale=time_scale, links=case.links
            ) as cluster:
                case.times_s.extend(_messages(*cluster.hosts, 40)[10:])
        check.save(cases)
    return check.end(cases)


def _messages(giver: VirtualHost, taker: VirtualHost, count: int) -> list[float]:
    python = [sys.executable, "-I", "-S", "-c"]
    how = {"stdout": subprocess.PIPE, "text": True}
    command = taker.command([*python, _TAKE, taker.address, str(_MESSAGE_BYTES)])
    with subprocess.Popen(command, **how) as taking:
        port = taking.stdout.readline().strip()
        words = [taker.address, port, str(_MESSAGE_BYTES), str(count)]
        subprocess.run(giver.command([*python, _GIVE, *words]), check=True, timeout=60)
        return json.loads(taking.communicate(timeout=60)[0])


@dataclass(frozen=True, kw_only=True)
class Loss(Case):
    """Counted by the switch, under TCP."""

    bar_percent = 10.0
    header = ("wanted", "lost", "frames", "off")

    percent: float
    lost: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)

    @property
    def off_percent(self) -> float:
        return 100 * (100 * sum(self.lost) / sum(self.frames) / self.percent - 1)

    def cells(self) -> list[str]:
        share = 100 * sum(self.lost) / sum(self.frames)
        return [
            f"{self.percent:g} %",
            f"{share:.4f} %",
            str(sum(self.frames)),
            f"{self.off_percent:+.1f} %",
        ]


def losses(args: argparse.Namespace, check: Check) -> int:
    """With reno or cubic TCP slows down where frames are lost: it takes many rounds."""
    cases = [Loss(percent=0.1), Loss(percent=1.0)]
    jittered = NetworkProfile(name="bench", gbps=1, latency_us=1000, jitter_us=500)
    spread: list[list[float]] = []
    with EmulatedCluster(hosts=4, profile=jittered, **SWITCH) as cluster:
        for index in range(args.repeats):
            for case in cases:
                profile = NetworkProfile(
                    name="bench", gbps=1, latency_us=100, loss_percent=case.percent
                )
                cluster.set_profile(profile, 1.0)
                before = cluster.links.counters()
                rates_together(cluster, 3.0)
                after = cluster.links.counters()
                lost = after["lost"] - before["lost"]
                case.lost.append(lost)
                case.frames.append(after["frames"] - before["frames"] + lost)
            cluster.set_profile(jittered, 1.0)
            pairs = [(cluster.hosts[0], cluster.hosts[1])]
            spread.append(probe.all_pairs(pairs, 2.0, 0.01)[0].quantiles_us)
            note(f"round {index + 1}")
            check.save(cases, jitter_quantiles_us=spread)
    medians = [statistics.median(column) for column in zip(*spread, strict=True)]
    shown = " ".join(f"{quantile:.0f}" for quantile in medians)
    remark = (
        f"# 1000 +- 500 us, quantiles 5, 25, 50, 75, 95 %: {shown}; even: 550 750 1000 1250 1450"
    )
    return check.end(cases, remark)


@dataclass(frozen=True, kw_only=True)
class Cost(Case):
    """Of both ends, of the kernel between them, and of the switch."""

    bar_percent = 100.0
    header = ("rate", "links", "CPU s per GB", "lowest", "highest", "of the bar: 0.5")

    gbps: float
    links: str
    s_per_gb: list[float] = field(default_factory=list)

    @property
    def off_percent(self) -> float:
        """Of the bar."""
        return 100 * statistics.median(self.s_per_gb) / _MOST_S_PER_GB

    def cells(self) -> list[str]:
        numbers = (statistics.median(self.s_per_gb), min(self.s_per_gb), max(self.s_per_gb))
        shown = [digits(value, 3) for value in numbers]
        return [f"{self.gbps:g} Gb/s", self.links, *shown, f"{self.off_percent:.0f} %"]


_MOST_S_PER_GB = 0.5


def cost(args: argparse.Namespace, check: Check) -> int:
    """In turns."""
    cases = [Cost(gbps=gbps, links=kind) for gbps in (0.5, 2.0) for kind in ("tc", "switch")]
    # What the delay of 10gbe is at 0.5 Gb/s.
    latency_us = 20 * network_profile("10gbe").latency_us
    for index in range(args.repeats):
        for case in cases:
            profile = NetworkProfile(name="bench", gbps=case.gbps, latency_us=latency_us)
            with EmulatedCluster(hosts=2, profile=profile, links=case.links) as cluster:
                found = flow.transfer_cost(*cluster.hosts, cluster.links.cpu_s)
                case.s_per_gb.append(1e9 * found)
        note(f"round {index + 1}")
        check.save(cases)
    return check.end(cases)


@dataclass(frozen=True, kw_only=True)
class StartUp(Case):
    """Emulated microseconds."""

    bar_percent = 10.0
    header = ("what", "hosts", "time scale", "wanted us", "median us", "rounds", "off")

    what: str
    hosts: int
    time_scale: float
    wanted_us: float
    found_us: list[float] = field(default_factory=list)
    raw_s: list[list[float]] = field(default_factory=list)
    """Of each round, the median of each size, emulated."""

    @property
    def off_percent(self) -> float:
        return 100 * (statistics.median(self.found_us) / self.wanted_us - 1)

    def cells(self) -> list[str]:
        return [
            *(self.what, str(self.hosts), f"{self.time_scale:g}", f"{self.wanted_us:g}"),
            f"{statistics.median(self.found_us):.1f}",
            *(str(len(self.found_us)), f"{self.off_percent:+.1f} %"),
        ]


_SIZES = (4096, 65536, 262144, 1 << 20, 4 << 20)


def start_up(args: argparse.Namespace, check: Check) -> int:
    """Rings, whatever the size: what a published fit of NCCL or MPI on Ethernet is of."""
    os.environ |= {"COMM_CORE_TCP_SMALL": "0", "COMM_CORE_TCP_DIRECT": "0"}
    far = NetworkProfile(name="bench", gbps=10, latency_us=1000)
    near = network_profile("10gbe")
    # 2 (n-1) messages, one after the other, each of a frame that two lines send.
    frame_us = 2 * (4096 / 4 + FRAME_BYTES - PAYLOAD_BYTES) * 8 / 10e3
    step_us = far.latency_us + frame_us
    cases = [
        StartUp(what="4 KiB, 1 ms", hosts=4, time_scale=4, wanted_us=6 * step_us),
        StartUp(what="fit, 10gbe", hosts=8, time_scale=20, wanted_us=523),
        StartUp(what="fit, 10gbe", hosts=8, time_scale=40, wanted_us=523),
    ]
    for case in cases:
        alone = case.hosts == 4
        sizes = _SIZES[:1] if alone else _SIZES
        with EmulatedCluster(
            hosts=case.hosts,
            profile=far if alone else near,
            time_scale=case.time_scale,
            **SWITCH,
        ) as cluster:
            layout = Layout(hosts=cluster.hosts, per_host=1, transport="tcp", timeout_s=120.0)
            wanted = {
                nbytes: {
                    "op": "all_reduce",
                    "nbytes": nbytes,
                    "budget_s": 1.5,
                    "iterations": (5, 50),
                }
                for nbytes in sizes
            }
            with Teams(["comm_core"], layout) as teams:
                for index in range(args.repeats):
                    medians = {}
                    for nbytes, _, results in teams.round(measure, wanted):
                        times = slowest([result["times_s"] for result in results])
                        medians[nbytes] = statistics.median(times) / case.time_scale
                    case.raw_s.append([medians[nbytes] for nbytes in sizes])
                    case.found_us.append(1e6 * _start_up_s(sizes, case.raw_s[-1]))
                    note(f"round {index + 1}: {case.what} {case.found_us[-1]:.1f} us")
            for name, reason in teams.failures.items():
                print(f"{name}: {reason}")
                return 1
        check.save(cases, sizes=_SIZES)
    return check.end(cases)


def _start_up_s(sizes: Sequence[int], times_s: Sequence[float]) -> float:
    """Of time = start-up + bytes / rate, by least squares of the relative errors."""
    if len(sizes) == 1:
        return times_s[0]
    weights = [1 / seconds**2 for seconds in times_s]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, times_s, strict=True)) / total
    slope = sum(
        w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, sizes, times_s, strict=True)
    ) / sum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes, strict=True))
    return mean_y - slope * mean_x


CHECKS = {
    "delays": (delays, Delay, 5),
    "rates": (rates, Rate, 3),
    "messages": (messages, Message, 3),
    "losses": (losses, Loss, 5),
    "cost": (cost, Cost, 5),
    "start-up": (start_up, StartUp, 5),
}
"""What runs, its cases, and rounds by default."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=CHECKS)
    parser.add_argument("--repeats", type=int, default=None, help="rounds")
    parser.add_argument("--json", type=Path, default=None, help="keep raw numbers in this new file")
    args = parser.parse_args(argv)
    check, kind, repeats = CHECKS[args.what]
    args.repeats = args.repeats or repeats
    if not sandbox.inside():
        raise session.NeedsSandbox
    with Output(args.json) as output:
        return check(args, Check(f"links {args.what}", kind, output))


if __name__ == "__main__":
    session.program(main)
