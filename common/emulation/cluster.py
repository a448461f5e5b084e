"""Virtual hosts joined by shaped links, inside a sandbox."""

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
        name: resolves on every host and in the sandbox.
        address: of `ifname`, where the other hosts and the sandbox reach it.
        pid: of a process on the host, as /proc shows it.
    """

    name: str
    address: str
    ifname: str
    pid: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as it must be started in the sandbox to run on this host."""
        return [*ENTER, str(self.pid), "--", *argv]

    def enter(self) -> None:
        """Moves this process, which must have one thread only, to this host."""
        enter(self.pid)


class EmulatedCluster:
    """`with EmulatedCluster(...) as cluster: cluster.hosts` - built on entry, removed on exit.

    Args:
        profile: of every link, in both directions.
        time_scale: one emulated second takes this many real ones.
        congestion, links: as `ClusterConfig` has them.
        networks: all that `set_profile` will be called with; with `profile` they decide what
            `links: auto` is.

    Attributes:
        hosts: h0, h1 and so on; empty outside of `with`.
        congestion: the TCP congestion control in use.
        kind: of the links in use, `tc` or `switch`; "" outside of `with`.
        notes: sentences on what is not as the profile asks for.

    Raises:
        RuntimeError: on entry, outside of a sandbox or when the kernel refuses.
        UserError: `congestion` is not known to this machine; on entry, `links` cannot be had.
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
        self._gbps: list[float] = []  # what each link was last asked for
        self.congestion = network.check_congestion(congestion)
        for each in self._networks:
            each.check_hosts(hosts)

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
        """Gives all links another profile; what is under way is lost."""
        self.profile, self.time_scale = profile, time_scale
        self._links.set_profile(profile, time_scale)
        self._gbps = [profile.gbps] * len(self.hosts)
        self.notes = self._find_notes()
        self._set_routes()
        self._set_buffers()

    def set_rate(self, host: int, gbps: float) -> None:
        """Changes both directions of one host's link, to so many emulated Gb/s."""
        self._links.set_rate(host, gbps)
        self._gbps[host] = gbps

    def refusal(self, profile: NetworkProfile, latency_us: float) -> str | None:
        """A sentence on why `set_delay` cannot do this where the profile is in force, or None."""
        return self._links.refusal(profile, latency_us)

    def set_delay(self, host: int, latency_us: float) -> None:
        """Changes the latency between one host and all others, to so many emulated microseconds.

        Raises:
            RuntimeError: `refusal` says why not.
        """
        self._links.set_delay(host, latency_us)

    def set_link(self, host: int, up: bool) -> None:
        """Plugs one host's cable in, or out; what is queued in the switch for it is lost."""
        state = "up" if up else "down"
        network.batch("ip", [f"link set dev {network.port_of(host)} {state}"])

    def restore(self) -> None:
        """All links are up and have the profile's rate again."""
        ports = [network.port_of(host) for host in range(len(self.hosts))]
        network.batch("ip", [f"link set dev {port} up" for port in ports])
        self._links.shape()
        self._gbps = [self.profile.gbps] * len(self.hosts)

    def broken(self) -> str | None:
        """A sentence on why the links carry nothing any more, or None.

        `set_profile` mends it.
        """
        return None if self._links is None else self._links.broken()

    @property
    def links_pid(self) -> int | None:
        """The program that is the links, as /proc shows it; None where the kernel is."""
        return None if self._links is None else self._links.pid

    def counters(self) -> dict[str, Any] | None:
        """What the switch has counted; None for links that nobody counts.

        `packets`, `frames` and `bytes` carried; frames `lost` as the profile says, and dropped as
        `overflows` of a queue; packets `missed` (the switch came too late), `unsendable` (the
        cable was out) and `astray`; `late_us` (median, p99, max: how much later than due packets
        were handed on, in microseconds of this machine, since the last call); `cpu_s`; `priority`
        (real-time, raised or ordinary).
        """
        return None if self._links is None else self._links.counters()

    def links_s(self) -> float:
        """CPU seconds so far of the program that is the links; 0 where the kernel is."""
        counted = self.counters()
        return 0.0 if counted is None else counted["cpu_s"]

    def measure(self, seconds: float = 0.5) -> list[dict[str, Any]]:
        """Sends over each link by itself, between its host and the switch.

        A link that seems slow is measured again, up to twice, and the best counts: on a busy
        machine it is the sender that is slow.

        Args:
            seconds: of this machine, for each direction.

        Returns:
            For each host `host`, `up_gbps` and `down_gbps`: emulated Gb/s on the wire as
            network.py counts them, from the TCP payload received.

        Raises:
            RuntimeError: a link carries nothing.
        """
        found = []
        for index, host in enumerate(self.hosts):
            up = down = 0.0
            for _ in range(_MEASUREMENTS):
                speeds = self._measure(host, seconds)
                up, down = max(up, speeds[0]), max(down, speeds[1])
                if min(up, down) > _NEAR * self._gbps[index]:
                    break
            found.append({"host": host.name, "up_gbps": up, "down_gbps": down})
        return found

    def measure_together(self, seconds: float = 1.0) -> list[dict[str, Any]]:
        """Sends from every host to the next at once, so that all links are busy both ways.

        Again, up to twice, where one seems slow, as `measure`; by the congestion control that the
        trials use.

        Returns:
            For each host `host` and `gbps`: what it receives, as `measure` counts; and
            `requested_gbps`, which is None where it is TCP that sets the speed: where frames are
            lost, and between sites. Nothing where there are no two hosts.

        Raises:
            RuntimeError: a link carries nothing.
        """
        if len(self.hosts) < 2:
            return []
        skip_s = 0.2 * seconds + self._settling_s()
        asked: list[float | None] = []
        for index in range(len(self.hosts)):
            before = (index - 1) % len(self.hosts)
            way = self.profile.connection(before, index, len(self.hosts))
            limited = way.loss_percent > 0 or way.trunk is not None
            asked.append(None if limited else min(self._gbps[before], self._gbps[index]))
        best = [0.0] * len(self.hosts)
        for _ in range(_MEASUREMENTS):
            found = flow.ring(self.hosts, seconds + skip_s, skip_s)
            best = [max(a, b * self.time_scale) for a, b in zip(best, found, strict=True)]
            if min(best) > _NEAR * min(self._gbps):
                break
        return [
            {"host": host.name, "gbps": gbps, "requested_gbps": gbps_asked}
            for host, gbps, gbps_asked in zip(self.hosts, best, asked, strict=True)
        ]

    @property
    def delays_packets(self) -> bool:
        """Whether the links do what the profile says of delays."""
        return self._links.left_out() is None

    @property
    def burst_bytes(self) -> int:
        """Payload that each link passes at once after a rest."""
        framed = self._links.burst_bytes()
        return framed * PAYLOAD_BYTES // FRAME_BYTES

    @property
    def wire_bytes_per_s(self) -> float | None:
        """Payload that each link carries each way, in seconds of this machine; None where distance
        or loss may keep TCP from it."""
        if self.profile.sites or self.profile.loss_percent:
            return None
        return payload_bytes_per_s(self.profile.gbps) / self.time_scale

    def measure_delays(self, seconds: float = 0.5) -> list[dict[str, Any]]:
        """Sends small packets from every host to the next, and to the nearest host of each other
        site, all at once.

        Returns:
            For each pair `source`, `target`, `requested_us`, `delay_us` and `delay_us_p99` (one
            way, emulated; the median and the 99th percentile), `sent`, `lost`.

        Raises:
            RuntimeError: nothing comes through.
        """
        hosts = len(self.hosts)
        pairs = {(host, (host + 1) % hosts) for host in range(hosts)} if hosts > 1 else set()
        seen = {self.profile.connection(*pair, hosts) for pair in pairs}
        for pair in itertools.permutations(range(hosts), 2):
            way = self.profile.connection(*pair, hosts)
            if way not in seen:
                seen.add(way)
                pairs.add(pair)
        named = sorted(pairs)
        far_us = self.profile.farthest_us * self.time_scale
        found = probe.all_pairs(
            [(self.hosts[a], self.hosts[b]) for a, b in named], seconds, 2e-6 * far_us
        )
        rows = []
        for (a, b), result in zip(named, found, strict=True):
            asked = self.profile.connection(a, b, hosts).latency_us
            rows.append(
                {
                    "source": self.hosts[a].name,
                    "target": self.hosts[b].name,
                    "requested_us": asked,
                    "delay_us": round(result.median_us / self.time_scale, 3),
                    "delay_us_p99": round(result.p99_us / self.time_scale, 3),
                    "sent": result.sent,
                    "lost": result.lost,
                }
            )
        return rows

    def _settling_s(self) -> float:
        # The first round trips only find the speed.
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
            # Before the namespaces go, which takes the links away at some later moment.
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
        """Lets TCP keep the longest line full: what is under way, twice."""
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
