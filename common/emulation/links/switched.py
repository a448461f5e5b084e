"""Links through the user-space program link_switch, which connects the ends of all links."""

from __future__ import annotations

import dataclasses
import itertools
import json
import select
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.emulation.hosts import network
from common.emulation.hosts.namespaces import die_with_parent
from common.emulation.links.base import Links
from common.emulation.links.profile import Connection, NetworkProfile
from common.emulation.links.tc import bucket_command
from common.paths import BUILD
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


class SwitchProgram:
    """Process of link_switch; fabric.h describes its commands. `ports` are the devices of all
    links, each with the number of its host's address. `priority` is real-time, raised or ordinary.
    `pid` is as /proc shows it."""

    def __init__(self, ports: Sequence[tuple[str, int]]) -> None:
        self._asking = threading.Lock()
        """Held from a question to its answer: a fault and a trace change links in two threads."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the program)
        self._process = subprocess.Popen(
            [str(PROGRAM), *(f"{device}={number}" for device, number in ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            preexec_fn=die_with_parent,
        )
        try:
            words = self._answer().split()
            if len(words) != 3 or words[0] != "ready":
                raise RuntimeError(f"the switch answered {' '.join(words)!r}; expected 'ready ...'")
        except BaseException:
            self.close()
            raise
        self.priority, self.pid = words[1], int(words[2])

    def apply(self, lines: Sequence[str]) -> None:
        """Sends commands that change the links, and waits until they have taken effect."""
        answer = self.ask("\n".join([*lines, "sync"]))
        if answer != "ok":
            raise RuntimeError(f"the switch answered {answer!r}; expected 'ok'")

    def ask(self, text: str) -> str:
        """Sends commands, and returns the answer to the last one."""
        with self._asking:
            try:
                self._process.stdin.write(f"{text}\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._process.wait()
                raise RuntimeError(self.broken()) from None
            return self._answer()

    def broken(self) -> str | None:
        """Returns how the program ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        cause = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._errors.seek(0)
        last_line = self._errors.read().decode().strip().splitlines()[-1:]
        return f"the switch of the virtual hosts {cause}" + "".join(f": {w}" for w in last_line)

    def close(self) -> None:
        """Ends the program."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> str:
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise RuntimeError(f"the switch of the virtual hosts did not answer in {_ANSWER_S:g} s")
        line = self._process.stdout.readline().strip()
        if not line:
            self._process.wait()
            raise RuntimeError(self.broken())
        return line


class SwitchedLinks(Links):
    """Links of the program link_switch; its fabric.h describes the path of a packet. Raises
    `UserError` if the program is not built."""

    kind = "switch"

    def __init__(self) -> None:
        super().__init__()
        if not PROGRAM.exists():
            raise UserError(
                f"cluster.links: the switch is not built; {BUILD}, or use links: tc "
                "(which supports no sites, and delay and loss only if the kernel has netem)"
            )
        self._program: SwitchProgram | None = None

    def commands(self, holders: Sequence[int]) -> list[str]:
        return [
            f"link add name {network.BRIDGE} address {network.SWITCH_MAC} "
            f"type veth peer name {_OWN_PORT}",
            f"link set dev {_OWN_PORT} {network.no_ipv6()} up",
            *network.cable_commands(holders),
            *network.switch_commands(len(holders)),
        ]

    def shape(self) -> None:
        if self._program is not None and self._program.broken():
            self._end()
        if self._program is None:
            hosts = range(len(self.pids))
            ports = [(network.port_of(host), network.address_of(host)) for host in hosts]
            ports.append((_OWN_PORT, network.BRIDGE_ADDRESS))
            self._program = SwitchProgram([(d, network.number_of(ip)) for d, ip in ports])
        self._on_all("tc", [], [self._host_queue(self.profile)])
        self._program.apply(
            [_patience(self.profile.nearest_us, self.time_scale), *self._all_lines()]
        )

    def set_rate(self, host: int, gbps: float) -> None:
        profile = dataclasses.replace(self.profile, gbps=gbps)
        network.batch("tc", [self._host_queue(profile)], self.pids[host])
        self._program.apply(self._line(host, profile))

    def set_delay(self, host: int, latency_us: float) -> None:
        others = [other for other in range(len(self.pids)) if other != host]
        # A smaller latency also shortens the time in which no packet can become due.
        lines = [_patience(min(latency_us, self.profile.nearest_us), self.time_scale)]
        for pair in [(host, other) for other in others] + [(other, host) for other in others]:
            connection = dataclasses.replace(
                self.profile.connection(*pair, len(self.pids)), latency_us=latency_us, jitter_us=0
            )
            lines.append(self._path(*pair, connection))
        self._program.apply(lines)

    @property
    def pid(self) -> int | None:
        return None if self._program is None else self._program.pid

    def counters(self) -> dict[str, Any] | None:
        if self._program is None or self._program.broken():
            return None
        return {**json.loads(self._program.ask("stats")), "priority": self._program.priority}

    def broken(self) -> str | None:
        return None if self._program is None else self._program.broken()

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None

    def _all_lines(self) -> list[str]:
        profile, count = self.profile, len(self.pids)
        lines = [line for host in range(count) for line in self._line(host, profile)]
        for number, (gbps, queue_bytes) in enumerate(profile.trunks()):
            lines.append(f"line trunk {number} {self._bits_per_s(gbps or 0)} {queue_bytes}")
        for pair in itertools.permutations(range(count), 2):
            lines.append(self._path(*pair, profile.connection(*pair, count)))
        return lines

    def _line(self, host: int, profile: NetworkProfile) -> list[str]:
        speed = self._bits_per_s(profile.gbps)
        # Packets that wait for a host's own line are in that host's memory and are not dropped.
        return [
            f"line up {host} {speed} {_UNLIMITED}",
            f"line down {host} {speed} {profile.queue_bytes}",
        ]

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


def _patience(nearest_us: float, time_scale: float) -> str:
    # No packet becomes due earlier than the shortest latency after its arrival.
    ns = 1e3 * nearest_us * time_scale - _SPARE_NS
    return f"patience {round(min(max(0.0, ns), _MOST_PATIENCE_NS))}"
