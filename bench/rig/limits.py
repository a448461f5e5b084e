"""What wire and memory allow, measured in the same run as the engines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.rig import table
from bench.rig.output import note
from bench.rig.session import Session
from bench.rig.table import Ratio
from bench.rig.team import Host
from common.launch.ranks import Ranks

# Below this a wire's token bucket and a memory's caches hold the whole operation.
LIMIT_FROM = 1_000_000
_SOURCE = Path(__file__).with_name("memory_bound.cc")
_PORT = 5201


class LimitError(Exception):
    """The limit could not be measured; the message is one line."""


class Limits:
    """The least time that each operation of a run could take.

    Attributes:
        kind: "wire" or "memory".
        bound_s: the least time by operation, bytes and round.
        failure: why there are no more of them, or None.
        iperf: the wire's bytes per second, by round.
        wire_bytes_per_s: what the network's profile lets through of TCP's payload, in real seconds;
            None: iperf3 measures it.
    """

    def __init__(
        self, kind: str, cases: Iterable[tuple[str, int]], wire_bytes_per_s: float | None = None
    ) -> None:
        self.kind, self.wire_bytes_per_s = kind, wire_bytes_per_s
        self.bound_s: dict[tuple[str, int], dict[int, float]] = {case: {} for case in cases}
        self.failure: str | None = None
        self.iperf: list[float] = []

    def measure(self, running: Session, index: int) -> None:
        """Fills in one round, unless that has failed before."""
        world, hosts = running.args.world, running.hosts
        # A profile's links hold no operation at any size.
        least = 0 if self.wire_bytes_per_s is not None else LIMIT_FROM
        sizes = {nbytes for _, nbytes in self.bound_s if nbytes >= least}
        if self.failure is not None:
            return
        bounds: dict[int, dict[str, float]] = {}
        try:
            if self.kind == "wire" and len(hosts) > 1:
                rate = self.wire_bytes_per_s
                if rate is None:
                    rate = iperf_bytes_per_s(hosts[0], hosts[1])
                    self.iperf.append(rate)
                for nbytes in sizes:
                    least_s = nbytes / rate
                    bounds[nbytes] = {op: least_s * table.bus_factor(op, world) for op in table.OPS}
            elif self.kind == "memory" and running.args.transport != "tcp":
                bounds = {nbytes: memory_bound_s(running.folder, world, nbytes) for nbytes in sizes}
        except LimitError as error:
            self.failure = str(error)
            note(f"no {self.kind} limit: {error}")
        for (op, nbytes), by_round in self.bound_s.items():
            if nbytes in bounds:
                by_round[index] = bounds[nbytes][op]

    def nearness(self, case: tuple[str, int], times: Mapping[int, float]) -> Ratio | None:
        """How near rounds came to the limit: wire, of 1; memory, times the bound."""
        bounds = self.bound_s[case]
        return Ratio.of(bounds, times) if self.kind == "wire" else Ratio.of(times, bounds)

    def lines(self) -> list[str]:
        """What was measured, for people."""
        if self.failure is not None:
            return [f"# no {self.kind} limit: {self.failure}"]
        if self.wire_bytes_per_s is not None:
            rate = self.wire_bytes_per_s * 8 / 1e9
            return [f"# wire, by the profile, headers left out: {rate:.3f} Gb/s in real time"]
        if self.iperf:
            rates = ", ".join(f"{rate * 8 / 1e9:.3f}" for rate in self.iperf)
            return [f"# iperf3, one connection between two hosts: {rates} Gb/s by round"]
        lines = []
        for (op, nbytes), by_round in self.bound_s.items():
            if by_round:
                values = ", ".join(table.digits(t * 1e3) for t in by_round.values())
                size = table.human_bytes(nbytes)
                lines.append(f"# memory bound {op} {size}: {values} ms by round")
        return lines

    def record(self) -> dict[str, Any]:
        """The same for the file."""
        rounds = [(case, *one) for case, found in self.bound_s.items() for one in found.items()]
        return {
            "iperf3_bytes_per_s": self.iperf,
            "wire_bytes_per_s": self.wire_bytes_per_s,
            "limit": self.kind,
            "limit_failure": self.failure,
            "bounds_s": [[*case, index, value] for case, index, value in rounds],
        }


def memory_bound_s(folder: Path, world: int, nbytes: int, repeats: int = 9) -> dict[str, float]:
    """Seconds that memory alone needs for a collective among ranks of this machine, by operation.

    An all-reduce (or the pair of the two others) needs the sum of both. The small program that
    measures is compiled in `folder` on first use.
    """
    program = folder / "memory_bound"
    if not program.exists():
        if shutil.which("g++") is None:
            raise LimitError("no g++ on the PATH")
        options = ["-O3", "-march=native", "-std=c++20", "-pthread"]
        _output(["g++", *options, str(_SOURCE), "-o", str(program)], 120)
    threads = len(os.sched_getaffinity(0))
    arguments = [str(value) for value in (world, nbytes, repeats, threads)]
    bound: dict[str, float] = json.loads(_output([str(program), *arguments], 120))
    both = bound["reduce_scatter"] + bound["all_gather"]
    return bound | {"all_reduce": both, "rs_ag": both}


def iperf_bytes_per_s(source: Host, target: Host, seconds: int = 2) -> float:
    """TCP payload rate of one connection, the first second left out."""
    if shutil.which("iperf3") is None:
        raise LimitError("no iperf3 on the PATH (apt-get install iperf3)")
    serve = ["iperf3", "-s", "-1", "-B", target.address, "-p", str(_PORT)]
    client = ["iperf3", "-c", target.address, "-p", str(_PORT), "-J"]
    client += ["-t", str(seconds), "-O", "1"]
    with Ranks() as server:
        server.command(target.command(serve), log=Path(os.devnull))
        deadline = time.monotonic() + 5
        while True:
            answer = json.loads(_output(source.command(client), seconds + 15, check=False))
            if "error" not in answer:
                return float(answer["end"]["sum_received"]["bits_per_second"]) / 8
            if time.monotonic() > deadline:
                raise LimitError(f"iperf3: {answer['error']}")
            time.sleep(0.1)  # the server does not listen yet


def _output(command: list[str], timeout_s: float, check: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise LimitError(f"{Path(command[0]).name}: no end in {timeout_s:.0f} s") from error
    if done.returncode and check:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LimitError(f"{Path(command[0]).name}: {said[-1] if said else done.returncode}")
    return done.stdout
