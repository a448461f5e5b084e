"""Virtual hosts connected by shaped links, inside a sandbox."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.emulation import sandbox
from common.emulation.hosts import network
from common.emulation.hosts.namespaces import ENTER, Holders, enter
from common.emulation.links import choose
from common.emulation.links.base import Links
from common.emulation.links.profile import (
    FRAME_BYTES,
    PAYLOAD_BYTES,
    NetworkProfile,
    payload_bytes_per_s,
)


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
        """Returns the command line to start in the sandbox, which runs `argv` on this host."""
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
        links: the links in use, inside of `with`. Rates are set through the cluster.
        gbps: latest requested rate of each link.
        notes: sentences that say where the cluster differs from the profile.

    Raises:
        RuntimeError: on entry, outside of a sandbox or if the kernel refuses a command.
        UserError: this machine does not have `congestion`; on entry, `links` is not available.
    """

    links: Links

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
        self.profile, self.time_scale = profile, time_scale
        self._count = hosts
        self._asked, self._networks = links, (profile, *networks)
        self._holders: Holders | None = None
        self.gbps: list[float] = []
        self._changing = threading.Lock()
        """Held while rates change: a fault and a trace change them in two threads."""
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
        self.links.set_profile(profile, time_scale)
        self.gbps = [profile.gbps] * len(self.hosts)
        self.notes = self._find_notes()
        self._set_routes()
        self._set_buffers()

    def set_rate(self, host: int, gbps: float) -> None:
        """Sets the rate of one host's link, in both directions, in emulated Gb/s."""
        with self._changing:
            self.links.set_rate(host, gbps)
            self.gbps[host] = gbps

    def set_link(self, host: int, up: bool) -> None:
        """Connects or cuts one host's link. A cut drops the packets queued for it in the switch."""
        state = "up" if up else "down"
        network.batch("ip", [f"link set dev {network.port_of(host)} {state}"])

    def restore(self) -> None:
        """Connects all links with the profile's latencies. They keep their rates, which a trace may
        have changed."""
        ports = [network.port_of(host) for host in range(len(self.hosts))]
        network.batch("ip", [f"link set dev {port} up" for port in ports])
        with self._changing:
            self.links.shape()
            for host, gbps in enumerate(self.gbps):
                if gbps != self.profile.gbps:
                    self.links.set_rate(host, gbps)

    @property
    def burst_bytes(self) -> int:
        """Payload bytes that each link passes without delay after an idle period."""
        return self.links.burst_bytes() * PAYLOAD_BYTES // FRAME_BYTES

    @property
    def wire_bytes_per_s(self) -> float | None:
        """Payload bytes per second of this machine that each link carries in each direction; None
        if distance or loss may keep TCP below the link's rate."""
        if self.profile.sites or self.profile.loss_percent:
            return None
        return payload_bytes_per_s(self.profile.gbps) / self.time_scale

    def _build(self) -> None:
        self.links = choose(self._asked, self._networks)
        holders = self._holders = Holders(self._count)
        network.clear(self._devices())
        network.batch("ip", self.links.commands(holders.pids))
        parts = []
        for index, pid in enumerate(holders.proc_pids):
            address = network.address_of(index)
            host = VirtualHost(name=f"h{index}", address=address, ifname=network.IFNAME, pid=pid)
            self.hosts += (host,)
            lines = network.host_commands(index, self._count)
            lines += network.congestion_commands(network.IFNAME, address, self.congestion)
            parts.append((lines, pid))
        switch = (network.BRIDGE, network.BRIDGE_ADDRESS)
        parts.append((network.congestion_commands(*switch, self.congestion), None))
        network.batches("ip", parts)
        self.links.connect(holders.proc_pids)
        self.set_profile(self.profile, self.time_scale)
        network.publish({host.name: (host.address, host.pid) for host in self.hosts})

    def _remove(self) -> None:
        if self._holders is None:
            return
        self._holders.clear()
        self.links.close()
        # Removed explicitly, because the kernel removes links later than their namespaces.
        network.remove(self._devices())
        self._holders.close()
        self._holders, self.hosts = None, ()
        network.withdraw()

    def _devices(self) -> list[str]:
        return [*self.links.devices, *map(network.port_of, range(self._count))]

    def _set_routes(self) -> None:
        ends = [(host.ifname, host.address, host.pid) for host in self.hosts]
        ends.append((network.BRIDGE, network.BRIDGE_ADDRESS, None))
        rules = (self.congestion, self.time_scale)
        network.batches(
            "ip",
            [([network.route_command(device, ip, *rules)], pid) for device, ip, pid in ends],
        )

    def _set_buffers(self) -> None:
        """Gives TCP buffers of twice the bytes in flight, so that TCP can fill the longest line."""
        needed = 2 * self.profile.under_way_bytes
        refused = network.raise_buffers(needed, [host.pid for host in self.hosts])
        if refused:
            self.notes.append(f"TCP may not have {needed} bytes of buffers: {refused}")

    def _find_notes(self) -> list[str]:
        profile, notes = self.profile, []
        if left_out := self.links.left_out():
            notes.append(left_out)
        lossy = profile.loss_percent or any(far.loss_percent for far in profile.between)
        if lossy and self.time_scale != 1 and not left_out:
            notes.append(
                "packets are lost at a time scale other than 1: TCP's minimum retransmission "
                "timeout is scaled, but its other timers are not"
            )
        if profile.rdma:
            notes.append("RDMA is emulated by TCP")
        if not network.resolvable():
            notes.append("names of hosts do not resolve: there is no /etc/hosts to replace")
        return notes
