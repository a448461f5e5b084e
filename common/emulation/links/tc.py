"""Links shaped by the kernel: a bridge, tbf on both ends of each link, and netem."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from common.emulation.hosts import network
from common.emulation.links.base import Links
from common.emulation.links.profile import FRAME_BYTES, NetworkProfile

# Size of a token bucket: one large TCP packet (64 KiB in 46 segments with headers, as tbf counts
# it; larger ones are segmented, slowly), plus tokens for the time by which a timer may be late.
# With these, four hosts that all send at once keep 10 Gb/s at time scales from 6 to 16.
_LARGEST_BYTES, _LATE_S = 64 * 1024 + 46 * 66, 200e-6
# Handles of the queues. Different kinds need different ones, or the kernel refuses to replace them.
_TBF_ALONE, _NETEM, _TBF_BELOW = "1:", "2:", "3:"


class KernelLinks(Links):
    """Links of the kernel. See network.py for rates, and the manual of netem for delays."""

    kind = "tc"

    def __init__(self) -> None:
        super().__init__()
        self._netem = self._single_packets = False

    def commands(self, holders: Sequence[int]) -> list[str]:
        bridge = network.BRIDGE
        lines = [f"link add name {bridge} address {network.SWITCH_MAC} type bridge"]
        lines += network.cable_commands(holders)
        lines += [f"link set dev {network.port_of(h)} master {bridge}" for h in range(len(holders))]
        return lines + network.switch_commands(len(holders))

    def shape(self) -> None:
        profile, time_scale = self.profile, self.time_scale
        self._netem = delays(profile) and has_netem()
        down = [
            line
            for host in range(len(self.pids))
            for line in queue_commands(network.port_of(host), profile, time_scale, self._netem)
        ]
        # Only one end delays, so that the latency counts once per path between hosts.
        up = queue_commands(network.IFNAME, profile, time_scale, False)
        self._on_all("tc", down, up)
        lossy = self._netem and profile.loss_percent > 0
        if lossy != self._single_packets:
            # A lost large packet would lose up to 45 segments at once.
            limit = f"gso_max_segs {1 if lossy else 65535}"
            lines = [
                f"link set dev {device} {limit}" for device in (network.BRIDGE, network.IFNAME)
            ]
            self._on_all("ip", lines[:1], lines[1:])
            self._single_packets = lossy

    def set_rate(self, host: int, gbps: float) -> None:
        profile = dataclasses.replace(self.profile, gbps=gbps)
        down = bucket_command(network.port_of(host), profile, self.time_scale, self._netem)
        up = bucket_command(network.IFNAME, profile, self.time_scale, False)
        network.batch("tc", [down])
        network.batch("tc", [up], self.pids[host])

    def set_delay(self, host: int, latency_us: float) -> None:
        if reason := self.refusal(self.profile, latency_us):
            raise RuntimeError(reason)
        profile = dataclasses.replace(self.profile, latency_us=latency_us, jitter_us=0)
        down = queue_commands(network.port_of(host), profile, self.time_scale, True)
        network.batch("tc", down)
        # Packets from this host get the network's latency at the other hosts' ports, and the
        # difference here, at the host's own end.
        extra_us = latency_us - self.profile.latency_us
        profile = dataclasses.replace(profile, latency_us=extra_us, loss_percent=0)
        up = queue_commands(network.IFNAME, profile, self.time_scale, extra_us > 0)
        network.batch("tc", up, self.pids[host])

    @staticmethod
    def refusal(profile: NetworkProfile, latency_us: float) -> str | None:
        if not has_netem():
            return "this kernel has no netem to delay a link with; use links: switch"
        if latency_us < profile.latency_us:
            return (
                "links: tc cannot make the latency of one host less than the "
                f"{profile.latency_us:g} us of its network; use links: switch"
            )
        return None

    def left_out(self) -> str | None:
        profile = self.profile
        if not delays(profile) or has_netem():
            return None
        parts = [f"latency of {profile.latency_us:g} us"] if profile.latency_us else []
        parts += [f"jitter of {profile.jitter_us:g} us"] if profile.jitter_us else []
        parts += [f"loss of {profile.loss_percent:g} %"] if profile.loss_percent else []
        return f"only bandwidth is shaped: this kernel has no netem for the {', '.join(parts)}"

    def burst_bytes(self) -> int:
        return burst_bytes(self.profile.gbps, self.time_scale)


def delays(profile: NetworkProfile) -> bool:
    """Returns True if the profile asks for more than a bandwidth."""
    return profile.latency_us > 0 or profile.loss_percent > 0


@functools.cache
def has_netem() -> bool:
    """Returns True if the kernel can delay and drop packets. Tries it, so needs a sandbox."""
    try:
        network.batch("tc", ["qdisc add dev lo root netem delay 1us", "qdisc del dev lo root"])
    except RuntimeError:
        return False
    return True


def queue_commands(
    device: str, profile: NetworkProfile, time_scale: float, netem: bool
) -> list[str]:
    """Returns the commands that create the queues of `device`, or change existing ones.
    `time_scale` is the factor by which the link is slower, and its delay longer, than the
    profile's. With `netem`, they delay and drop packets as well."""
    delay = [_delay(device, profile, time_scale)] if netem else []
    return [*delay, bucket_command(device, profile, time_scale, netem)]


def bucket_command(device: str, profile: NetworkProfile, time_scale: float, netem: bool) -> str:
    """Returns the command that sets only the rate; queued packets remain queued."""
    position = f"parent {_NETEM}1 handle {_TBF_BELOW}" if netem else f"root handle {_TBF_ALONE}"
    burst = burst_bytes(profile.gbps, time_scale)
    bits_per_s = round(profile.gbps * 1e9 / time_scale)
    return (
        f"qdisc replace dev {device} {position} tbf rate {bits_per_s}bit "
        f"burst {burst}b limit {burst + profile.queue_bytes}b"
    )


def burst_bytes(gbps: float, time_scale: float) -> int:
    """Size of a token bucket in bytes."""
    return _LARGEST_BYTES + math.ceil(gbps * 1e9 / time_scale / 8 * _LATE_S)


def _delay(device: str, profile: NetworkProfile, time_scale: float) -> str:
    delay_us, jitter_us = profile.latency_us * time_scale, profile.jitter_us * time_scale
    under_way = profile.gbps * 1e9 / time_scale / 8 / FRAME_BYTES * (delay_us + jitter_us) * 1e-6
    parameters = f"limit {1000 + math.ceil(2 * under_way)} delay {delay_us:g}us"
    if jitter_us:
        parameters += f" {jitter_us:g}us"
    if profile.loss_percent:
        parameters += f" loss {profile.loss_percent:g}%"
    return f"qdisc replace dev {device} root handle {_NETEM} netem {parameters}"
