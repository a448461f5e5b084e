"""Measured properties of a cluster's network: rates, delays and counters, for the record."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from common.emulation import flow, probe
from common.emulation.cluster import EmulatedCluster
from common.emulation.hosts.network import BRIDGE_ADDRESS
from common.emulation.links.profile import NetworkProfile

Row = dict[str, Any]

FLAG_PERCENT = 5.0
"""Deviation of a link above which the record is flagged."""
DELAY_SLACK_US = 200.0
"""Delay that the kernel of a busy machine may add, in microseconds of real time."""
COUNTED = ("packets", "frames", "bytes", "lost", "overflows", "missed", "unsendable")
# Number of measurements of a link that seems slow, and the share of its rate above which it is not.
_MEASUREMENTS, _NEAR = 3, 0.98
# Share of frames that TCP loses while it searches for the rate of a link.
_MOST_OVERFLOWS = 0.001


def measured_network(cluster: EmulatedCluster) -> dict[str, Any]:
    """Measures each link alone, all links at once, and the delays; see `network_record`. Raises
    `RuntimeError` if a link carries no data."""
    one_by_one = link_rates(cluster)
    before = cluster.links.counters()
    together = rates_together(cluster)
    after = cluster.links.counters()
    delays = packet_delays(cluster) if cluster.links.left_out() is None else []
    slack_us = DELAY_SLACK_US / cluster.time_scale
    result = network_record(cluster.profile, one_by_one, together, delays, slack_us)
    switch = counted_between(before, after)
    busy = [f"while all links were busy {line}" for line in counter_notes(switch)]
    return result | {
        "links": cluster.links.kind,
        "congestion": cluster.congestion,
        "switch": switch,
        "notes": [*cluster.notes, *result["notes"], *busy],
    }


def link_rates(cluster: EmulatedCluster, seconds: float = 0.5) -> list[Row]:
    """Measures the rate of each link alone, between its host and the switch.

    A link that seems slow is measured again, and the best result counts: on a busy machine the
    sender is slow, not the link. `seconds` is the duration per direction, in seconds of this
    machine. Returns one row per host: `host`, `up_gbps` and `down_gbps`. The rates are emulated
    Gb/s on the wire (see hosts/network.py), computed from the TCP payload received. Raises
    `RuntimeError` if a link carries no data."""
    skip_s = _skipped_s(cluster, seconds)
    rows = []
    for host, requested_gbps in zip(cluster.hosts, cluster.gbps, strict=True):
        measure = partial(flow.measure_link, host, BRIDGE_ADDRESS, seconds + skip_s, skip_s)
        up, down = _best(measure, requested_gbps, cluster.time_scale)
        rows.append({"host": host.name, "up_gbps": up, "down_gbps": down})
    return rows


def _best(
    measure: Callable[[], Sequence[float]], requested_gbps: float, time_scale: float
) -> list[float]:
    """Returns the best rates of several measurements; stops once all are near the request."""
    best = [0.0]
    for _ in range(_MEASUREMENTS):
        rates = [rate * time_scale for rate in measure()]
        best = list(map(max, itertools.zip_longest(best, rates, fillvalue=0.0)))
        if min(best) > _NEAR * requested_gbps:
            break
    return best


def rates_together(cluster: EmulatedCluster, seconds: float = 1.0) -> list[Row]:
    """Measures all links at once: every host sends to the next one.

    If a link seems slow, all are measured again, as in `link_rates`. The connections use the same
    congestion control as the trials. Returns one row per host: `host`, `gbps` (the rate received,
    as in `link_rates`) and `requested_gbps`. `requested_gbps` is None if TCP limits the rate: with
    frame loss, and between sites. Empty for fewer than two hosts. Raises `RuntimeError` if a link
    carries no data."""
    hosts = len(cluster.hosts)
    if hosts < 2:
        return []
    skip_s = _skipped_s(cluster, seconds)
    measure = partial(flow.ring, cluster.hosts, seconds + skip_s, skip_s)
    best = _best(measure, min(cluster.gbps), cluster.time_scale)
    rows = []
    for index, host in enumerate(cluster.hosts):
        before = (index - 1) % hosts
        connection = cluster.profile.connection(before, index, hosts)
        limited = connection.loss_percent > 0 or connection.trunk is not None
        requested = None if limited else min(cluster.gbps[before], cluster.gbps[index])
        rows.append({"host": host.name, "gbps": best[index], "requested_gbps": requested})
    return rows


def packet_delays(cluster: EmulatedCluster, seconds: float = 0.5) -> list[Row]:
    """Measures one-way delays with small packets, for all pairs of hosts at once.

    Every host sends to the next one. Each other kind of connection, such as that between two sites,
    is measured with one more pair. Returns one row per pair: `source`, `target`, `requested_us`,
    `delay_us` and `delay_us_p99` (one way, emulated microseconds; median and 99th percentile),
    `sent`, `lost`. Raises `RuntimeError` if no packet arrives."""
    hosts, profile, scale = len(cluster.hosts), cluster.profile, cluster.time_scale
    pairs = {(host, (host + 1) % hosts) for host in range(hosts)} if hosts > 1 else set()
    seen = {profile.connection(*pair, hosts) for pair in pairs}
    for pair in itertools.permutations(range(hosts), 2):
        connection = profile.connection(*pair, hosts)
        if connection not in seen:
            seen.add(connection)
            pairs.add(pair)
    ends = [(cluster.hosts[a], cluster.hosts[b]) for a, b in sorted(pairs)]
    results = probe.all_pairs(ends, seconds, 2e-6 * profile.farthest_us * scale)
    return [
        {
            "source": source.name,
            "target": target.name,
            "requested_us": profile.connection(*pair, hosts).latency_us,
            "delay_us": round(result.median_us / scale, 3),
            "delay_us_p99": round(result.p99_us / scale, 3),
            "sent": result.sent,
            "lost": result.lost,
        }
        for pair, (source, target), result in zip(sorted(pairs), ends, results, strict=True)
    ]


def _skipped_s(cluster: EmulatedCluster, seconds: float) -> float:
    """Returns the time at the start of a transfer in which TCP searches for its rate."""
    return 0.2 * seconds + 24e-6 * cluster.profile.farthest_us * cluster.time_scale


def counted_between(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Returns what a switch counted between two calls of `Links.counters`, and the
    percentage of frames that it lost on purpose; None for links without counters."""
    if before is None or after is None:
        return None
    counted = {name: after[name] - before[name] for name in COUNTED}
    offered = counted["frames"] + counted["lost"] + counted["overflows"]
    loss = {"loss_percent": 100 * counted["lost"] / offered if offered else 0.0}
    return {**counted, **loss, "late_us": after["late_us"], "priority": after["priority"]}


def counter_notes(counted: Mapping[str, Any] | None) -> list[str]:
    """Returns sentences on events that a real network would not have; they start in lower case."""
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
    measured: Sequence[Row],
    together: Sequence[Row] = (),
    delays: Sequence[Row] = (),
    slack_us: float = 0.0,
) -> dict[str, Any]:
    """Returns what was requested and measured of a cluster's links, with notes on deviations.

    Args:
        measured, together, delays: results of `link_rates`, `rates_together`, `packet_delays`.
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
    limited = [host for host in together if host["requested_gbps"] is not None]
    rates += [(host["host"], "down with all links busy", host["gbps"]) for host in limited]
    deviations = [(100 * (rate[-1] / profile.gbps - 1), *rate) for rate in rates]
    worst = max(deviations, key=lambda deviation: abs(deviation[0]), default=None)
    flagged = worst is not None and abs(worst[0]) > FLAG_PERCENT
    notes = []
    if worst is not None and flagged:
        percent, host, direction, gbps = worst
        notes.append(
            f"links differ from the request: {host} {direction} {gbps:.3g} Gb/s instead of "
            f"{profile.gbps:.3g} ({percent:+.1f} %)"
        )
    for row in delays:
        off_us = row["delay_us"] - row["requested_us"]
        if abs(off_us) > max(slack_us, FLAG_PERCENT / 100 * row["requested_us"]):
            flagged = True
            notes.append(
                f"links differ from the request: from {row['source']} to {row['target']} packets "
                f"take {row['delay_us']:.3g} us instead of {row['requested_us']:g}"
            )
    return {
        "requested": json.loads(json.dumps(dataclasses.asdict(profile))),  # tuples become lists
        "measured": list(measured),
        "together": list(together),
        "delays": list(delays),
        "off_percent": None if worst is None else round(worst[0], 2),
        "flagged": flagged,
        "notes": notes,
    }
