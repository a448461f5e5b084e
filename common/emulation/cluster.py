"""Virtual hosts connected by shaped links, inside a sandbox."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.emulation import flow, network, probe, sandbox
from common.emulation.config import (
    FRAME_BYTES,
    PAYLOAD_BYTES,
    NetworkProfile,
    payload_bytes_per_s,
)
from common.emulation.links import Links, choose
from common.emulation.namespaces import ENTER, Holders, enter

_MEASUREMENTS, _NEAR = 3, 0.98


@dataclass(frozen=True, kw_only=True)
class VirtualHost:
    """One host of an emulated cluster.

    Attributes:
        name: host name; it resolves on every host and in the sandbox.
        address: IP address of `ifname`; the other hosts and the sandbox use it.
        ifname: network interface of the host's link.
        pid: PID of a process on the host, as /proc shows it.
    """

    name: str
    address: str
    ifname: str
    pid: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """Returns the command line that, started in the sandbox, runs `argv` on this host."""
        return [*ENTER, str(self.pid), "--", *argv]

    def enter(self) -> None:
        """Moves this process to this host. The process must have only one thread."""
        enter(self.pid)


class EmulatedCluster:
    """Context manager that builds virtual hosts on entry and removes them on exit.

    Args:
        profile: network profile of every link, for both directions.
        time_scale: real seconds per emulated second.
        congestion, links: same as in `ClusterConfig`.
        networks: all profiles that `set_profile` will be called with; these and `profile` decide
            which kind of link `links="auto"` selects.

    Attributes:
        hosts: the hosts h0, h1, ...; empty outside of `with`.
        congestion: TCP congestion control in use.
        kind: kind of the links in use, `tc` or `switch`; "" outside of `with`.
        notes: sentences that say where the cluster differs from the profile.

    Raises:
        RuntimeError: on entry, outside of a sandbox or if the kernel refuses a command.
        UserError: this machine does not have `congestion`; on entry, `links` is not available.
    """

    def __init__(
        self,
        *,
        hosts: int,
        profile: NetworkProfile,
        time_scale: float = 1.0,
        congestion: str = "reno",
        links: Literal["auto", "switch", "tc"] = "auto",
        networks: Sequence[NetworkProfile] = (),
    ) -> None:
        self.hosts: tuple[VirtualHost, ...] = ()
        self.notes: list[str] = []
        self.kind = ""
        self.profile, self.time_scale = profile, time_scale
        self._count = hosts
        self._asked, self._networks = links, (profile, *networks)
        self._holders: Holders | None = None
        self._links: Links | None = None
        self._gbps: list[float] = []  # last requested rate of each link
        self.congestion = network.check_congestion(congestion)
        for used_profile in self._networks:
            used_profile.check_hosts(hosts)

    def __enter__(self) -> EmulatedCluster:
        if not sandbox.inside():
            raise RuntimeError("virtual hosts can be built only in a sandbox, see sandbox.run")
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def set_profile(self, profile: NetworkProfile, time_scale: float) -> None:
        """Gives all links another profile. Packets in flight are lost."""
        self.profile, self.time_scale = profile, time_scale
        self._links.set_profile(profile, time_scale)
        self._gbps = [profile.gbps] * len(self.hosts)
        self.notes = self._find_notes()
        self._set_routes()
        self._set_buffers()

    def set_rate(self, host: int, gbps: float) -> None:
        """Sets the rate of one host's link, in both directions, in emulated Gb/s."""
        self._links.set_rate(host, gbps)
        self._gbps[host] = gbps

    def refusal(self, profile: NetworkProfile, latency_us: float) -> str | None:
        """Returns why `set_delay` cannot set this latency under `profile`, or None if it can."""
        return self._links.refusal(profile, latency_us)

    def set_delay(self, host: int, latency_us: float) -> None:
        """Sets the latency between one host and all others, in emulated microseconds.

        Raises:
            RuntimeError: `refusal` gives a reason.
        """
        self._links.set_delay(host, latency_us)

    def set_link(self, host: int, up: bool) -> None:
        """Connects or cuts one host's link. A cut drops the packets queued for it in the switch."""
        state = "up" if up else "down"
        network.batch("ip", [f"link set dev {network.port_of(host)} {state}"])

    def restore(self) -> None:
        """Connects all links and sets them to the profile's rate."""
        ports = [network.port_of(host) for host in range(len(self.hosts))]
        network.batch("ip", [f"link set dev {port} up" for port in ports])
        self._links.shape()
        self._gbps = [self.profile.gbps] * len(self.hosts)

    def broken(self) -> str | None:
        """Returns why the links no longer carry packets, or None if they work.

        `set_profile` repairs broken links.
        """
        return None if self._links is None else self._links.broken()

    @property
    def links_pid(self) -> int | None:
        """PID of the switch program, as /proc shows it; None if the kernel shapes the links."""
        return None if self._links is None else self._links.pid

    def counters(self) -> dict[str, Any] | None:
        """Returns the switch's counters; None for links without counters.

        `packets`, `frames` and `bytes`: delivered. `lost`: frames lost as the profile demands.
        `overflows`: frames dropped because a queue was full. `missed`: packets that the switch did
        not read in time. `unsendable`: packets for a cut link. `astray`: packets with an unknown
        destination. `late_us`: delay between due time and delivery since the last call (median,
        p99, max; microseconds of this machine). `cpu_s`: CPU seconds. `priority`: real-time,
        raised or ordinary.
        """
        return None if self._links is None else self._links.counters()

    def links_s(self) -> float:
        """CPU seconds used so far by the switch program; 0 if the kernel shapes the links."""
        counted = self.counters()
        return 0.0 if counted is None else counted["cpu_s"]

    def measure(self, seconds: float = 0.5) -> list[dict[str, Any]]:
        """Measures the rate of each link alone, between its host and the switch.

        A link that seems slow is measured up to two more times, and the best result counts: on a
        busy machine the sender is slow, not the link.

        Args:
            seconds: duration per direction, in seconds of this machine.

        Returns:
            One row per host: `host`, `up_gbps` and `down_gbps`. The rates are emulated Gb/s on the
            wire (see network.py), computed from the TCP payload received.

        Raises:
            RuntimeError: a link carries no data.
        """
        rows = []
        for index, host in enumerate(self.hosts):
            up = down = 0.0
            for _ in range(_MEASUREMENTS):
                speeds = self._measure(host, seconds)
                up, down = max(up, speeds[0]), max(down, speeds[1])
                if min(up, down) > _NEAR * self._gbps[index]:
                    break
            rows.append({"host": host.name, "up_gbps": up, "down_gbps": down})
        return rows

    def measure_together(self, seconds: float = 1.0) -> list[dict[str, Any]]:
        """Measures all links at once: every host sends to the next one.

        If a link seems slow, all are measured up to two more times, as in `measure`. The
        connections use the same congestion control as the trials.

        Returns:
            One row per host: `host`, `gbps` (the rate received, as in `measure`) and
            `requested_gbps`. The latter is None if TCP limits the rate: with frame loss, and
            between sites. Empty for fewer than two hosts.

        Raises:
            RuntimeError: a link carries no data.
        """
        if len(self.hosts) < 2:
            return []
        skip_s = 0.2 * seconds + self._settling_s()
        requested: list[float | None] = []
        for index in range(len(self.hosts)):
            before = (index - 1) % len(self.hosts)
            connection = self.profile.connection(before, index, len(self.hosts))
            limited = connection.loss_percent > 0 or connection.trunk is not None
            requested.append(None if limited else min(self._gbps[before], self._gbps[index]))
        best = [0.0] * len(self.hosts)
        for _ in range(_MEASUREMENTS):
            rates = flow.ring(self.hosts, seconds + skip_s, skip_s)
            best = [max(a, b * self.time_scale) for a, b in zip(best, rates, strict=True)]
            if min(best) > _NEAR * min(self._gbps):
                break
        return [
            {"host": host.name, "gbps": gbps, "requested_gbps": requested_gbps}
            for host, gbps, requested_gbps in zip(self.hosts, best, requested, strict=True)
        ]

    @property
    def delays_packets(self) -> bool:
        """True if the links apply the latency, jitter and loss of the profile."""
        return self._links.left_out() is None

    @property
    def burst_bytes(self) -> int:
        """Payload bytes that each link passes without delay after an idle period."""
        framed = self._links.burst_bytes()
        return framed * PAYLOAD_BYTES // FRAME_BYTES

    @property
    def wire_bytes_per_s(self) -> float | None:
        """Payload bytes per second of this machine that each link carries in each direction; None
        if distance or loss may keep TCP below the link's rate."""
        if self.profile.sites or self.profile.loss_percent:
            return None
        return payload_bytes_per_s(self.profile.gbps) / self.time_scale

    def measure_delays(self, seconds: float = 0.5) -> list[dict[str, Any]]:
        """Measures one-way delays with small packets, for all pairs of hosts at once.

        Every host sends to the next one. Each other kind of connection, such as that between two
        sites, is measured with one more pair.

        Returns:
            One row per pair: `source`, `target`, `requested_us`, `delay_us` and `delay_us_p99`
            (one way, emulated microseconds; median and 99th percentile), `sent`, `lost`.

        Raises:
            RuntimeError: no packet arrives.
        """
        hosts = len(self.hosts)
        pairs = {(host, (host + 1) % hosts) for host in range(hosts)} if hosts > 1 else set()
        seen = {self.profile.connection(*pair, hosts) for pair in pairs}
        for pair in itertools.permutations(range(hosts), 2):
            connection = self.profile.connection(*pair, hosts)
            if connection not in seen:
                seen.add(connection)
                pairs.add(pair)
        named = sorted(pairs)
        far_us = self.profile.farthest_us * self.time_scale
        results = probe.all_pairs(
            [(self.hosts[a], self.hosts[b]) for a, b in named], seconds, 2e-6 * far_us
        )
        rows = []
        for (a, b), result in zip(named, results, strict=True):
            requested_us = self.profile.connection(a, b, hosts).latency_us
            rows.append(
                {
                    "source": self.hosts[a].name,
                    "target": self.hosts[b].name,
                    "requested_us": requested_us,
                    "delay_us": round(result.median_us / self.time_scale, 3),
                    "delay_us_p99": round(result.p99_us / self.time_scale, 3),
                    "sent": result.sent,
                    "lost": result.lost,
                }
            )
        return rows

    def _settling_s(self) -> float:
        # TCP needs the first round trips to find the rate.
        return 24e-6 * self.profile.farthest_us * self.time_scale

    def _measure(self, host: VirtualHost, seconds: float) -> tuple[float, float]:
        skip_s = 0.2 * seconds + self._settling_s()
        up, down = flow.measure_link(host, network.BRIDGE_ADDRESS, seconds + skip_s, skip_s)
        return up * self.time_scale, down * self.time_scale

    def _build(self) -> None:
        holders = self._holders = Holders(self._count)
        links = self._links = choose(self._asked, self._networks)
        self.kind = links.kind
        network.batch("ip", links.commands(holders.pids))
        jobs = []
        for index, pid in enumerate(holders.proc_pids):
            address = network.address_of(index)
            lines = network.host_commands(index, self._count)
            lines += network.congestion_commands(network.IFNAME, address, self.congestion)
            jobs.append(network.start("ip", lines, pid))
            host = VirtualHost(name=f"h{index}", address=address, ifname=network.IFNAME, pid=pid)
            self.hosts += (host,)
        switch = (network.BRIDGE, network.BRIDGE_ADDRESS)
        jobs.append(network.start("ip", network.congestion_commands(*switch, self.congestion)))
        for job in jobs:
            network.finish(job)
        links.connect(holders.proc_pids)
        self.set_profile(self.profile, self.time_scale)
        network.publish({host.name: (host.address, host.pid) for host in self.hosts})

    def _remove(self) -> None:
        if self._holders is None:
            return
        self._holders.clear()
        if self._links is not None:
            self._links.close()
            # Removed explicitly, because the kernel removes links later than their namespaces.
            ports = map(network.port_of, range(self._count))
            network.remove([*self._links.devices, *ports])
        self._holders.close()
        self._holders, self._links, self.hosts, self.kind = None, None, (), ""
        network.withdraw()

    def _set_routes(self) -> None:
        def route(device: str, address: str) -> str:
            return network.route_command(device, address, self.congestion, self.time_scale)

        jobs = [network.start("ip", [route(network.BRIDGE, network.BRIDGE_ADDRESS)])]
        for host in self.hosts:
            jobs.append(network.start("ip", [route(host.ifname, host.address)], host.pid))
        for job in jobs:
            network.finish(job)

    def _set_buffers(self) -> None:
        """Gives TCP buffers of twice the bytes in flight, so that it can fill the longest line."""
        needed = 2 * self.profile.under_way_bytes
        refused = network.raise_buffers(needed, [host.pid for host in self.hosts])
        if refused:
            self.notes.append(f"TCP may not have {needed} bytes of buffers: {refused}")

    def _find_notes(self) -> list[str]:
        profile, notes = self.profile, []
        if left_out := self._links.left_out():
            notes.append(left_out)
        lossy = profile.loss_percent or any(far.loss_percent for far in profile.between)
        if lossy and self.time_scale != 1 and not left_out:
            notes.append(
                "packets are lost at a time scale other than 1: the least time after which TCP "
                "sends again is scaled, its other timers are not"
            )
        if profile.rdma:
            notes.append("RDMA is emulated by TCP")
        if not network.resolvable():
            notes.append("names of hosts do not resolve: there is no /etc/hosts to replace")
        return notes
