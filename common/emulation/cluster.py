"""Virtual hosts joined by shaped links, inside a sandbox, and what a record tells of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.emulation import flow, network, sandbox
from common.emulation.config import FRAME_BYTES, PAYLOAD_BYTES, NetworkProfile
from common.emulation.namespaces import ENTER, Holders, enter

FLAG_PERCENT = 5.0
"""A link further off than this makes the record's numbers doubtful."""
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
        congestion: TCP congestion control of all connections. None: the machine's default, or
            cubic where that is bbr, whose probing misses the rate of such network.

    Attributes:
        hosts: h0, h1 and so on; empty outside of `with`.
        congestion: the TCP congestion control in use.
        notes: sentences on what is not as the profile asks for.

    Raises:
        RuntimeError: on entry, outside of a sandbox or when the kernel refuses.
        UserError: `congestion` is not known to this machine.
    """

    def __init__(
        self,
        *,
        hosts: int,
        profile: NetworkProfile,
        time_scale: float = 1.0,
        congestion: str | None = None,
    ) -> None:
        self.hosts: tuple[VirtualHost, ...] = ()
        self.notes: list[str] = []
        self.profile, self.time_scale = profile, time_scale
        self._count = hosts
        self._holders: Holders | None = None
        self._netem = self._single_packets = False
        self._gbps: list[float] = []  # what each link was last asked for
        self.congestion = network.choose_congestion(congestion)

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
        self._netem = network.delays(profile) and network.has_netem()
        self._take_notes()
        down = [
            line
            for host in range(len(self.hosts))
            for line in network.shape(network.port_of(host), profile, time_scale, self._netem)
        ]
        # The delay is on one end only, so that it counts once from host to host.
        up = network.shape(network.IFNAME, profile, time_scale, False)
        self._on_all("tc", down, up)
        self._gbps = [profile.gbps] * len(self.hosts)
        self._set_routes()
        lossy = self._netem and profile.loss_percent > 0
        if lossy != self._single_packets:
            # Losing one large packet would lose up to 45 segments at once.
            limit = f"gso_max_segs {1 if lossy else 65535}"
            lines = [
                f"link set dev {device} {limit}" for device in (network.BRIDGE, network.IFNAME)
            ]
            self._on_all("ip", lines[:1], lines[1:])
            self._single_packets = lossy

    def set_rate(self, host: int, gbps: float) -> None:
        """Changes both directions of one host's link, to so many emulated Gb/s."""
        down = network.reshape(network.port_of(host), gbps, self.time_scale, self._netem)
        up = network.reshape(network.IFNAME, gbps, self.time_scale, False)
        network.batch("tc", down)
        network.batch("tc", up, self.hosts[host].pid)
        self._gbps[host] = gbps

    def set_link(self, host: int, up: bool) -> None:
        """Plugs one host's cable in, or out; what is queued in the switch for it is lost."""
        state = "up" if up else "down"
        network.batch("ip", [f"link set dev {network.port_of(host)} {state}"])

    def restore(self) -> None:
        """All links are up and have the profile's rate again."""
        ports = [network.port_of(host) for host in range(len(self.hosts))]
        network.batch("ip", [f"link set dev {port} up" for port in ports])
        for host in range(len(self.hosts)):
            self.set_rate(host, self.profile.gbps)

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

        Again, up to twice, where one seems slow, as `measure`.

        Returns:
            For each host `host` and `gbps`: what it receives, as `measure` counts; none where there
            are no two hosts.

        Raises:
            RuntimeError: a link carries nothing.
        """
        if len(self.hosts) < 2:
            return []
        skip_s = 0.2 * seconds + self._settling_s()
        best = [0.0] * len(self.hosts)
        for _ in range(_MEASUREMENTS):
            found = flow.ring(self.hosts, seconds + skip_s, skip_s)
            best = [max(a, b * self.time_scale) for a, b in zip(best, found, strict=True)]
            if min(best) > _NEAR * min(self._gbps):
                break
        return [
            {"host": host.name, "gbps": gbps} for host, gbps in zip(self.hosts, best, strict=True)
        ]

    @property
    def burst_bytes(self) -> int:
        """Payload that each link passes at once after a rest."""
        framed = network.burst_bytes(self.profile.gbps, self.time_scale)
        return framed * PAYLOAD_BYTES // FRAME_BYTES

    def _settling_s(self) -> float:
        # The first round trips only find the speed.
        return 24e-6 * self.profile.latency_us * self.time_scale if self._netem else 0.0

    def _measure(self, host: VirtualHost, seconds: float) -> tuple[float, float]:
        skip_s = 0.2 * seconds + self._settling_s()
        up, down = flow.measure_link(host, network.BRIDGE_ADDRESS, seconds + skip_s, skip_s)
        return up * self.time_scale, down * self.time_scale

    def _build(self) -> None:
        holders = self._holders = Holders(self._count)
        network.batch("ip", network.switch_commands(holders.pids))
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
        self.set_profile(self.profile, self.time_scale)
        network.publish({host.name: (host.address, host.pid) for host in self.hosts})

    def _remove(self) -> None:
        if self._holders is None:
            return
        self._holders.clear()
        # Before the namespaces go, which takes the links away at some later moment.
        network.remove(self._count)
        self._holders.close()
        self._holders, self.hosts = None, ()
        network.withdraw()

    def _on_all(self, tool: str, switch: list[str], every_host: list[str]) -> None:
        jobs = [network.start(tool, switch)]
        jobs += [network.start(tool, every_host, host.pid) for host in self.hosts]
        for job in jobs:
            network.finish(job)

    def _set_routes(self) -> None:
        def route(device: str, address: str) -> str:
            return network.route_command(device, address, self.congestion, self.time_scale)

        jobs = [network.start("ip", [route(network.BRIDGE, network.BRIDGE_ADDRESS)])]
        for host in self.hosts:
            jobs.append(network.start("ip", [route(host.ifname, host.address)], host.pid))
        for job in jobs:
            network.finish(job)

    def _take_notes(self) -> None:
        profile = self.profile
        self.notes = []
        if network.delays(profile) and not self._netem:
            left_out = [f"latency of {profile.latency_us:g} us"] if profile.latency_us else []
            left_out += [f"jitter of {profile.jitter_us:g} us"] if profile.jitter_us else []
            left_out += [f"loss of {profile.loss_percent:g} %"] if profile.loss_percent else []
            self.notes.append(
                f"only bandwidth is shaped: this kernel has no netem for the {', '.join(left_out)}"
            )
        if profile.rdma:
            self.notes.append("RDMA is emulated by TCP")
        if not network.resolvable():
            self.notes.append("names of hosts do not resolve: there is no /etc/hosts to replace")


def network_record(
    profile: NetworkProfile,
    measured: Sequence[Mapping[str, Any]],
    together: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """What was requested and `EmulatedCluster` has measured, and notes on what is doubtful.

    Args:
        measured: by `measure`.
        together: by `measure_together`.

    Returns:
        `requested` (the profile), `measured`, `together`, `off_percent` (of the worst link;
        positive: too fast), `flagged`, `notes`.
    """
    rates = [
        (host["host"], way, host[f"{way}_gbps"]) for host in measured for way in ("up", "down")
    ]
    rates += [(host["host"], "down with all links busy", host["gbps"]) for host in together]
    deviations = [(100 * (gbps / profile.gbps - 1), host, way, gbps) for host, way, gbps in rates]
    worst = max(deviations, key=lambda deviation: abs(deviation[0]), default=None)
    flagged = worst is not None and abs(worst[0]) > FLAG_PERCENT
    notes = []
    if worst is not None and flagged:
        percent, host, way, gbps = worst
        notes.append(
            f"links are not as asked: {host} {way} {gbps:.3g} Gb/s instead of {profile.gbps:.3g} "
            f"({percent:+.1f} %)"
        )
    return {
        "requested": dataclasses.asdict(profile),
        "measured": [dict(host) for host in measured],
        "together": [dict(host) for host in together],
        "off_percent": None if worst is None else round(worst[0], 2),
        "flagged": flagged,
        "notes": notes,
    }
