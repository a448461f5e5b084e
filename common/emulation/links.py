"""The queues that give a link its bandwidth and its delay, as lines for `tc -batch`.

What a rate means. The token bucket (tbf) counts Ethernet frames without preamble, checksum and
gap: a full segment of TCP carries 1448 bytes of payload in 1514 counted bytes (14 Ethernet, 20 IP,
32 TCP with timestamps), also when many segments travel as one large packet, because the kernel
counts the headers of each. So TCP payload flows at 1448/1514 = 95.6 % of the rate. On a real
Ethernet of that rate, where preamble, checksum and gap cost 24 bytes more, it is 94.1 %.
"""

from __future__ import annotations

import functools
import math

from common.emulation.config import NetworkProfile
from common.emulation.network import batch

_FRAME_BYTES = 1514
# One large packet of TCP is 64 KiB and its headers; what exceeds the bucket is cut up, slowly.
_MIN_BURST_BYTES = 128 * 1024
# Tokens for the time that a timer may be late.
_BURST_S = 200e-6
# A switch with deep buffers: in seconds of this machine, and never less than a few bursts.
_QUEUE_S, _MIN_QUEUE_BYTES = 0.05, 1024 * 1024
# Handles of the queues: of different kinds they must differ, or the kernel refuses to replace one.
_TBF_ALONE, _NETEM, _TBF_BELOW = "1:", "2:", "3:"


def delays(profile: NetworkProfile) -> bool:
    """Whether the profile asks for more than a bandwidth."""
    return profile.latency_us > 0 or profile.loss_percent > 0


@functools.cache
def has_netem() -> bool:
    """Whether the kernel can delay and lose packets; asked of it, in a sandbox."""
    try:
        batch("tc", ["qdisc add dev lo root netem delay 1us", "qdisc del dev lo root"])
    except RuntimeError:
        return False
    return True


def shape(device: str, profile: NetworkProfile, time_scale: float, netem: bool) -> list[str]:
    """Gives `device` its queues, or changes those it has from an earlier call.

    Args:
        time_scale: the link is this many times slower, and its delay longer, than the profile's.
        netem: also delay and lose packets.
    """
    bits = profile.gbps * 1e9 / time_scale
    if not netem:
        return [_tbf(device, f"root handle {_TBF_ALONE}", bits)]
    return [
        _delay(device, profile, bits, time_scale),
        _tbf(device, f"parent {_NETEM}1 handle {_TBF_BELOW}", bits),
    ]


def reshape(device: str, gbps: float, time_scale: float, netem: bool) -> list[str]:
    """Changes the rate alone; what is queued stays queued."""
    where = f"parent {_NETEM}1 handle {_TBF_BELOW}" if netem else f"root handle {_TBF_ALONE}"
    return [_tbf(device, where, gbps * 1e9 / time_scale)]


def _tbf(device: str, where: str, bits_per_s: float) -> str:
    burst = max(_MIN_BURST_BYTES, math.ceil(bits_per_s / 8 * _BURST_S))
    limit = burst + max(_MIN_QUEUE_BYTES, math.ceil(bits_per_s / 8 * _QUEUE_S))
    return (
        f"qdisc replace dev {device} {where} "
        f"tbf rate {round(bits_per_s)}bit burst {burst}b limit {limit}b"
    )


def _delay(device: str, profile: NetworkProfile, bits_per_s: float, time_scale: float) -> str:
    delay_us, jitter_us = profile.latency_us * time_scale, profile.jitter_us * time_scale
    under_way = bits_per_s / 8 / _FRAME_BYTES * (delay_us + jitter_us) * 1e-6
    words = f"limit {1000 + math.ceil(2 * under_way)} delay {delay_us:g}us"
    if jitter_us:
        words += f" {jitter_us:g}us"
    if profile.loss_percent:
        words += f" loss {profile.loss_percent:g}%"
    return f"qdisc replace dev {device} root handle {_NETEM} netem {words}"
