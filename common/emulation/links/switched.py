"""Links through a switch of our own: the program link_switch, between the ends of the cables."""

from __future__ import annotations

import dataclasses
import json
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.emulation import network
from common.emulation.config import Connection, NetworkProfile
from common.emulation.links.base import Links
from common.emulation.links.tc import bucket_command
from common.emulation.namespaces import die_with_parent
from dear.errors import UserError

PROGRAM = Path(__file__).parent / "link_switch/link_switch"
# The other end of the cable by which the sandbox itself is on the network.
_OWN_PORT = "switch0"
# The kernel lets a host send a little faster than its link does: what waits then waits in the host,
# where TCP sees it, and the link still never idles. The switch alone says what the rate is.
_HEADROOM = 1.05
_ANSWER_S = 10.0
# The switch is late itself, by about as much; and where packets wait for long, there is no room.
_SPARE_NS, _MOST_PATIENCE_NS = 50e3, 1e6
_UNLIMITED = 2**63


class SwitchedLinks(Links):
    """See fabric.h beside the program for what it does with a packet.

    Raises:
        UserError: the program is not built.
    """

    kind = "switch"
    devices = (network.BRIDGE,)  # takes _OWN_PORT with it

    def __init__(self) -> None:
        super().__init__()
        if not PROGRAM.exists():
            raise UserError(
                "cluster.links: the switch is not built; run make core, or use links: tc, which "
                "has no sites, and without netem in the kernel bandwidth alone"
            )
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None
        self.priority, self._pid = "", None

    def commands(self, holders: Sequence[int]) -> list[str]:
        return [
            f"link add name {network.BRIDGE} address {network.SWITCH_MAC} "
            f"type veth peer name {_OWN_PORT}",
            f"link set dev {_OWN_PORT} {network.no_ipv6()} up",
            *network.cable_commands(holders),
            *network.switch_commands(len(holders)),
        ]

    def shape(self) -> None:
        if self._process is None or self.broken():
            self._start()
        self._on_all("tc", [], [self._host_queue(self.profile)])
        self._tell([self._patience(self.profile.nearest_us), *self._lines(), *self._paths()])

    def set_rate(self, host: int, gbps: float) -> None:
        profile = dataclasses.replace(self.profile, gbps=gbps)
        network.batch("tc", [self._host_queue(profile)], self.pids[host])
        self._tell(self._line(host, profile))

    def set_delay(self, host: int, latency_us: float) -> None:
        others = [other for other in range(len(self.pids)) if other != host]
        # The time that nothing can be due within is shorter, too.
        found = [self._patience(min(latency_us, self.profile.nearest_us))]
        for pair in [(host, other) for other in others] + [(other, host) for other in others]:
            connection = dataclasses.replace(
                self.profile.connection(*pair, len(self.pids)), latency_us=latency_us, jitter_us=0
            )
            found.append(self._path(*pair, connection))
        self._tell(found)

    def left_out(self) -> str | None:
        return None

    @staticmethod
    def refusal(profile: NetworkProfile, latency_us: float) -> str | None:
        return None

    @property
    def pid(self) -> int | None:
        return self._pid

    def counters(self) -> dict[str, Any] | None:
        """Since the program began, but `late_us` since the last call: how much later than due
        packets were handed on, in microseconds of this machine."""
        if self._process is None or self.broken():
            return None
        return {**json.loads(self._ask("stats")), "priority": self.priority}

    def broken(self) -> str | None:
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._errors.seek(0)
        words = self._errors.read().decode().strip().splitlines()[-1:]
        return f"the switch of the virtual hosts was {how}" + "".join(f": {w}" for w in words)

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = self._pid = None

    def _start(self) -> None:
        self._end()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the program)
        ports = [
            f"{network.port_of(host)}={network.number_of(network.address_of(host))}"
            for host in range(len(self.pids))
        ]
        own = f"{_OWN_PORT}={network.number_of(network.BRIDGE_ADDRESS)}"
        self._process = subprocess.Popen(
            [str(PROGRAM), *ports, own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            preexec_fn=die_with_parent,
        )
        words = self._answer().split()
        if len(words) != 3 or words[0] != "ready":
            raise RuntimeError(f"the switch says {' '.join(words)!r} instead of being ready")
        self.priority, self._pid = words[1], int(words[2])

    def _patience(self, nearest_us: float) -> str:
        # Before that no packet can be due: it has at least the shortest way before it.
        ns = 1e3 * nearest_us * self.time_scale - _SPARE_NS
        return f"patience {round(min(max(0.0, ns), _MOST_PATIENCE_NS))}"

    def _lines(self) -> list[str]:
        profile, hosts = self.profile, len(self.pids)
        lines = [line for host in range(hosts) for line in self._line(host, profile)]
        trunks = profile.trunks()
        for number, (gbps, queue_bytes) in enumerate(trunks):
            lines.append(f"line trunk {number} {self._bits_per_s(gbps or 0)} {queue_bytes}")
        return lines

    def _line(self, host: int, profile: NetworkProfile) -> list[str]:
        speed = self._bits_per_s(profile.gbps)
        # What waits before a host's own line waits in its memory, and is not lost.
        return [
            f"line up {host} {speed} {_UNLIMITED}",
            f"line down {host} {speed} {profile.queue_bytes}",
        ]

    def _paths(self) -> list[str]:
        hosts = range(len(self.pids))
        pairs = [(a, b) for a in hosts for b in hosts if a != b]
        return [self._path(a, b, self.profile.connection(a, b, len(self.pids))) for a, b in pairs]

    def _path(self, a: int, b: int, connection: Connection) -> str:
        times_us = (connection.latency_us, connection.jitter_us)
        delay, jitter = (round(1e3 * us * self.time_scale) for us in times_us)
        trunk = -1 if connection.trunk is None else connection.trunk
        return f"path {a} {b} {delay} {jitter} {connection.loss_percent / 100:.12f} {trunk}"

    def _bits_per_s(self, gbps: float) -> int:
        return round(gbps * 1e9 / self.time_scale)

    def _host_queue(self, profile: NetworkProfile) -> str:
        faster = dataclasses.replace(profile, gbps=_HEADROOM * profile.gbps)
        return bucket_command(network.IFNAME, faster, self.time_scale, False)

    def _tell(self, lines: Sequence[str]) -> None:
        answer = self._ask("\n".join([*lines, "sync"]))
        if answer != "ok":
            raise RuntimeError(f"the switch says {answer!r} instead of ok")

    def _ask(self, text: str) -> str:
        try:
            self._process.stdin.write(f"{text}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.wait()
            raise RuntimeError(self.broken()) from None
        return self._answer()

    def _answer(self) -> str:
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise RuntimeError(f"the switch of the virtual hosts says nothing for {_ANSWER_S:g} s")
        line = self._process.stdout.readline().strip()
        if not line:
            self._process.wait()
            raise RuntimeError(self.broken())
        return line
