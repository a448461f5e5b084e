"""What a record tells of a cluster's links: asked for, measured, counted, and what is doubtful."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.emulation.cluster import EmulatedCluster
from common.emulation.config import NetworkProfile

FLAG_PERCENT = 5.0
"""A link further off than this makes the record's numbers doubtful."""
DELAY_SLACK_US = 200.0
"""What the kernel of a busy machine may add to a delay, in its own time."""
COUNTED = ("packets", "frames", "bytes", "lost", "overflows", "missed", "unsendable")
# Of frames: what TCP's search for the speed of a link costs.
_MOST_OVERFLOWS = 0.001


def measured_network(cluster: EmulatedCluster) -> dict[str, Any]:
    """Measures every link alone, all of them at once, and the delays; see `network_record`.

    Raises:
        RuntimeError: a link carries nothing.
    """
    one_by_one = cluster.measure()
    before = cluster.counters()
    together = cluster.measure_together()
    after = cluster.counters()
    delays = cluster.measure_delays() if cluster.delays_packets else []
    found = network_record(
        cluster.profile, one_by_one, together, delays, DELAY_SLACK_US / cluster.time_scale
    )
    found |= {"links": cluster.kind, "congestion": cluster.congestion}
    found["switch"] = counted_between(before, after)
    found["notes"] += [f"while all links were busy {line}" for line in told_of(found["switch"])]
    found["notes"] = [*cluster.notes, *found["notes"]]
    return found


def counted_between(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """What a switch did between two calls of `EmulatedCluster.counters`, and the share of frames
    that it lost on purpose, in percent; None where nobody counts."""
    if before is None or after is None:
        return None
    counted = {name: after[name] - before[name] for name in COUNTED}
    offered = counted["frames"] + counted["lost"] + counted["overflows"]
    loss = {"loss_percent": 100 * counted["lost"] / offered if offered else 0.0}
    return {**counted, **loss, "late_us": after["late_us"], "priority": after["priority"]}


def told_of(counted: Mapping[str, Any] | None) -> list[str]:
    """Sentences on what of it is not as on the real network; they begin with a small letter."""
    if counted is None or "frames" not in counted:
        return []
    found = []
    offered = counted["frames"] + counted["lost"] + counted["overflows"]
    if counted["overflows"] > _MOST_OVERFLOWS * offered:
        found.append(
            f"{counted['overflows']} of {offered} frames found a queue of the switch full: TCP "
            "sends them again"
        )
    if counted["missed"]:
        found.append(
            f"the switch came too late for {counted['missed']} packets: this machine is too busy"
        )
    return found


def network_record(
    profile: NetworkProfile,
    measured: Sequence[Mapping[str, Any]],
    together: Sequence[Mapping[str, Any]] = (),
    delays: Sequence[Mapping[str, Any]] = (),
    slack_us: float = 0.0,
) -> dict[str, Any]:
    """What was requested and `EmulatedCluster` has measured, and notes on what is doubtful.

    Args:
        measured: by `measure`.
        together: by `measure_together`.
        delays: by `measure_delays`.
        slack_us: how far a delay may be off whatever was asked for; emulated.

    Returns:
        `requested` (the profile), `measured`, `together`, `delays`, `off_percent` (of the worst
        link; positive: too fast), `flagged`, `notes`.
    """
    rates = [
        (host["host"], way, host[f"{way}_gbps"]) for host in measured for way in ("up", "down")
    ]
    busy = "down with all links busy"
    rates += [
        (host["host"], busy, host["gbps"])
        for host in together
        if host["requested_gbps"] is not None
    ]
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
    for row in delays:
        off_us = row["delay_us"] - row["requested_us"]
        if abs(off_us) > max(slack_us, FLAG_PERCENT / 100 * row["requested_us"]):
            flagged = True
            notes.append(
                f"links are not as asked: from {row['source']} to {row['target']} packets take "
                f"{row['delay_us']:.3g} us instead of {row['requested_us']:g}"
            )
    return {
        "requested": json.loads(json.dumps(dataclasses.asdict(profile))),  # lists for tuples
        "measured": [dict(host) for host in measured],
        "together": [dict(host) for host in together],
        "delays": [dict(pair) for pair in delays],
        "off_percent": None if worst is None else round(worst[0], 2),
        "flagged": flagged,
        "notes": notes,
    }
