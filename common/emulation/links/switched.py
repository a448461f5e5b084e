"""Links through the user-space program link_switch, which connects the ends of all links."""

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
# The switch's end of the link to the sandbox itself.
_OWN_PORT = "switch0"
# The kernel lets a host send slightly faster than its link. Packets then wait in the host, where
# TCP sees them, and the link never idles. Only the switch enforces the rate.
_HEADROOM = 1.05
_ANSWER_S = 10.0
# The switch itself is late by about _SPARE_NS. With more patience its packet rings would overflow.
_SPARE_NS, _MOST_PATIENCE_NS = 50e3, 1e6
_UNLIMITED = 2**63


class SwitchedLinks(Links):
    """Links of the program link_switch; its fabric.h describes the path of a packet.

    Raises:
        UserError: the program is not built.
    """

    kind = "switch"
    devices = (network.BRIDGE,)  # removing it removes _OWN_PORT as well

    def __init__(self) -> None:
        super().__init__()
        if not PROGRAM.exists():
            raise UserError(
                "cluster.links: the switch is not built; run make core, or use links: tc, which "
                "does not support sites, and only bandwidth if the kernel has no netem"
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
        # A smaller latency also shortens the time in which no packet can become due.
        lines = [self._patience(min(latency_us, self.profile.nearest_us))]
        for pair in [(host, other) for other in others] + [(other, host) for other in others]:
            connection = dataclasses.replace(
                self.profile.connection(*pair, len(self.pids)), latency_us=latency_us, jitter_us=0
            )
            lines.append(self._path(*pair, connection))
        self._tell(lines)

    def left_out(self) -> str | None:
        return None

    @staticmethod
    def refusal(profile: NetworkProfile, latency_us: float) -> str | None:
        return None

    @property
    def pid(self) -> int | None:
        return self._pid

    def counters(self) -> dict[str, Any] | None:
        """Returns the counts since the program started; `late_us` is since the last call: the
        delay between due time and delivery, in microseconds of this machine."""
        if self._process is None or self.broken():
            return None
        return {**json.loads(self._ask("stats")), "priority": self.priority}

    def broken(self) -> str | None:
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        cause = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._errors.seek(0)
        last_line = self._errors.read().decode().strip().splitlines()[-1:]
        return f"the switch of the virtual hosts {cause}" + "".join(f": {w}" for w in last_line)

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
        own_port = f"{_OWN_PORT}={network.number_of(network.BRIDGE_ADDRESS)}"
        self._process = subprocess.Popen(
            [str(PROGRAM), *ports, own_port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            preexec_fn=die_with_parent,
        )
        words = self._answer().split()
        if len(words) != 3 or words[0] != "ready":
            raise RuntimeError(f"the switch answered {' '.join(words)!r}; expected 'ready ...'")
        self.priority, self._pid = words[1], int(words[2])

    def _patience(self, nearest_us: float) -> str:
        # No packet becomes due earlier than the shortest latency after its arrival.
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
        # Packets that wait for a host's own line are in that host's memory and are not dropped.
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
            raise RuntimeError(f"the switch answered {answer!r}; expected 'ok'")

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
            raise RuntimeError(f"the switch of the virtual hosts did not answer in {_ANSWER_S:g} s")
        line = self._process.stdout.readline().strip()
        if not line:
            self._process.wait()
            raise RuntimeError(self.broken())
        return line
