"""Network part of a record: requested, measured and counted values, and notes on deviations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.emulation.cluster import EmulatedCluster
from common.emulation.config import NetworkProfile

FLAG_PERCENT = 5.0
"""Deviation of a link above which the record is flagged."""
DELAY_SLACK_US = 200.0
"""Delay that the kernel of a busy machine may add, in microseconds of real time."""
COUNTED = ("packets", "frames", "bytes", "lost", "overflows", "missed", "unsendable")
# Share of frames that TCP loses while it searches for the rate of a link.
_MOST_OVERFLOWS = 0.001


def measured_network(cluster: EmulatedCluster) -> dict[str, Any]:
    """Measures each link alone, all links at once, and the delays; see `network_record`.

    Raises:
        RuntimeError: a link carries no data.
    """
    one_by_one = cluster.measure()
    before = cluster.counters()
    together = cluster.measure_together()
    after = cluster.counters()
    delays = cluster.measure_delays() if cluster.delays_packets else []
    result = network_record(
        cluster.profile, one_by_one, together, delays, DELAY_SLACK_US / cluster.time_scale
    )
    result |= {"links": cluster.kind, "congestion": cluster.congestion}
    result["switch"] = counted_between(before, after)
    result["notes"] += [f"while all links were busy {line}" for line in told_of(result["switch"])]
    result["notes"] = [*cluster.notes, *result["notes"]]
    return result


def counted_between(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Returns what a switch counted between two calls of `EmulatedCluster.counters`, and the
    percentage of frames that it lost on purpose; None for links without counters."""
    if before is None or after is None:
        return None
    counted = {name: after[name] - before[name] for name in COUNTED}
    offered = counted["frames"] + counted["lost"] + counted["overflows"]
    loss = {"loss_percent": 100 * counted["lost"] / offered if offered else 0.0}
    return {**counted, **loss, "late_us": after["late_us"], "priority": after["priority"]}


def told_of(counted: Mapping[str, Any] | None) -> list[str]:
    """Returns sentences on what a real network would not have done; they start in lower case."""
    if counted is None or "frames" not in counted:
        return []
    sentences = []
    offered = counted["frames"] + counted["lost"] + counted["overflows"]
    if counted["overflows"] > _MOST_OVERFLOWS * offered:
        sentences.append(
            f"{counted['overflows']} of {offered} frames found a queue of the switch full: TCP "
            "sends them again"
        )
    if counted["missed"]:
        sentences.append(
            f"the switch came too late for {counted['missed']} packets: this machine is too busy"
        )
    return sentences


def network_record(
    profile: NetworkProfile,
    measured: Sequence[Mapping[str, Any]],
    together: Sequence[Mapping[str, Any]] = (),
    delays: Sequence[Mapping[str, Any]] = (),
    slack_us: float = 0.0,
) -> dict[str, Any]:
    """Returns what was requested and measured of a cluster's links, with notes on deviations.

    Args:
        measured: result of `EmulatedCluster.measure`.
        together: result of `EmulatedCluster.measure_together`.
        delays: result of `EmulatedCluster.measure_delays`.
        slack_us: deviation that is allowed for every delay, in emulated microseconds.

    Returns:
        `requested` (the profile), `measured`, `together`, `delays`, `off_percent` (of the worst
        link; positive: too fast), `flagged`, `notes`.
    """
    rates = [
        (host["host"], direction, host[f"{direction}_gbps"])
        for host in measured
        for direction in ("up", "down")
    ]
    busy_direction = "down with all links busy"
    rates += [
        (host["host"], busy_direction, host["gbps"])
        for host in together
        if host["requested_gbps"] is not None
    ]
    deviations = [
        (100 * (gbps / profile.gbps - 1), host, direction, gbps) for host, direction, gbps in rates
    ]
    worst = max(deviations, key=lambda deviation: abs(deviation[0]), default=None)
    flagged = worst is not None and abs(worst[0]) > FLAG_PERCENT
    notes = []
    if worst is not None and flagged:
        percent, host, direction, gbps = worst
        notes.append(
            f"links are not as asked: {host} {direction} {gbps:.3g} Gb/s instead of "
            f"{profile.gbps:.3g} ({percent:+.1f} %)"
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
        "requested": json.loads(json.dumps(dataclasses.asdict(profile))),  # tuples become lists
        "measured": [dict(host) for host in measured],
        "together": [dict(host) for host in together],
        "delays": [dict(pair) for pair in delays],
        "off_percent": None if worst is None else round(worst[0], 2),
        "flagged": flagged,
        "notes": notes,
    }
