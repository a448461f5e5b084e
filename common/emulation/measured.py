"""A record's `network`: what was asked of the links, and what they did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from common.emulation.config import NetworkProfile

FLAG_PERCENT = 5.0
"""A link further off than this makes the record's numbers doubtful."""


def network_record(
    profile: NetworkProfile, measured: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What was requested and measured, the worst deviation, and notes on what is doubtful.

    Args:
        measured: per host `host`, `up_gbps`, `down_gbps`, as `EmulatedCluster.measure` gives them.

    Returns:
        `requested` (the profile), `measured`, `off_percent` (of the worst link; positive: too
        fast), `flagged`, `notes`.
    """
    deviations = [
        (100 * (host[f"{way}_gbps"] / profile.gbps - 1), host["host"], way, host[f"{way}_gbps"])
        for host in measured
        for way in ("up", "down")
    ]
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
        "off_percent": None if worst is None else round(worst[0], 2),
        "flagged": flagged,
        "notes": notes,
    }
