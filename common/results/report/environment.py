"""What a sweep was measured on and with: machines, versions, time scales, links, settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.results.records import Record
from common.results.records.card import flat_card
from common.results.report.flagged import title
from common.results.report.parts import Grid, plain
from common.results.tables.table import significant

_FIRST = ("cpu", "cores", "gpus", "os", "kernel", "python", "packages.torch", "commit")
_UNKNOWN = "not on record"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, in one state of its software, and which trials are of it."""

    trials: int
    commit: str
    """In words: is it known what code that was?"""
    short: list[tuple[str, str]]
    rest: list[tuple[str, str]]


def machines(records: Iterable[Record]) -> list[Machine]:
    """Every one that trials were measured on, by first use; logs of other programs tell of none."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in records:
        if one.machine:
            known = flat_card(one.machine)
            found.setdefault(json.dumps(known, sort_keys=True), []).append(known)
    return [_machine(same[0], len(same)) for same in found.values()]


def _machine(card: dict[str, Any], trials: int) -> Machine:
    names = [*_FIRST, *(name for name in card if name not in (*_FIRST, "diff"))]
    lines = [
        (name.removeprefix("packages."), _text(card.get(name)))
        for name in names
        if name != "commit"
    ]
    return Machine(
        trials=trials,
        commit=_commit(card),
        short=lines[: len(_FIRST) - 1],
        rest=lines[len(_FIRST) - 1 :],
    )


def _commit(card: dict[str, Any]) -> str:
    commit = card.get("commit")
    if commit is None:
        return "not known: it was no checkout of git"
    name, plus, _ = commit.partition("+")
    if not plus:
        return f"{name}, and no file differed from it"
    digest = card.get("diff")
    return f"{name}, but files differed from it" + (f" (digest {digest})" if digest else "")


def _text(value: Any) -> str:
    if value is None:
        return "none, or not visible"
    if value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def scales(records: Sequence[Record]) -> Grid | None:
    """How many times slower than real what is emulated ran, and why; None: nothing is emulated."""
    found: dict[tuple[float, str], list[str]] = {}
    for one in records:
        if one.fabric.kind == "emulated":
            key = (one.fabric.time_scale, one.fabric.time_scale_reason or _UNKNOWN)
            found.setdefault(key, []).append(title(one))
    if not found:
        return None
    body = [
        [f"{k:g}", len(of), why, "all" if len(found) == 1 else "; ".join(of)]
        for (k, why), of in found.items()
    ]
    return plain("scales", "Time scales", ["time scale", "trials", "reason", "which"], body)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of one network, as asked for and as measured, and every one of them."""

    summary: Grid
    each: list[Grid]


def links(records: Sequence[Record]) -> Links | None:
    """Of all networks of a sweep; None on real ones, of which nothing is asked."""
    found: dict[str, tuple[Record, int]] = {}
    for one in records:
        net = one.fabric.network
        if net.requested is not None:
            key = json.dumps([net.requested, net.measured, net.together, net.delays])
            found[key] = (found.get(key, (one, 0))[0], found.get(key, (one, 0))[1] + 1)
    if not found:
        return None
    body = [_network(one, trials) for one, trials in found.values()]
    each = [made for number, (one, _) in enumerate(found.values()) for made in _each(one, number)]
    summary = plain("links", "Links, as asked for and as measured", _NETWORK, body)
    return Links(summary=summary, each=each)


_NETWORK = ["network", "trials", "stands for", "asked, Gb/s", "each alone, Gb/s"]
_NETWORK += ["all at once, Gb/s", "asked delay, us", "delay, us", "asked loss", "loss"]
_NETWORK += ["worst link", "shaped by"]


def _network(record: Record, trials: int) -> list[Any]:
    net = record.fabric.network
    asked = net.requested or {}
    alone = [one.get(end) for one in net.measured or () for end in ("up_gbps", "down_gbps")]
    sent = sum(one["sent"] for one in net.delays)
    lost = sum(one["lost"] for one in net.delays)
    off = None if net.off_percent is None else f"{net.off_percent:+.1f} %"
    by = ", ".join(filter(None, (net.links, net.congestion)))
    sites = [f"{'-'.join(one['sites'])} {one['gbps']:g}" for one in asked.get("between", ())]
    return [
        asked.get("name"),
        trials,
        asked.get("stands_for"),
        "; ".join([f"{asked['gbps']:g}", *sites]),
        _range(alone) or _UNKNOWN,
        _range([one["gbps"] for one in net.together]) or _UNKNOWN,
        _range([one["requested_us"] for one in net.delays]) or f"{asked['latency_us']:g}",
        _range([one["delay_us"] for one in net.delays]) or _UNKNOWN,
        f"{asked.get('loss_percent', 0):g} %",
        f"{100 * lost / sent:.2g} %" if sent else _UNKNOWN,
        off and (f"{off}: not as asked" if net.flagged else off),
        by or _UNKNOWN,
    ]


def _range(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    ends = dict.fromkeys(significant(value) for value in (min(known), max(known)))
    return " to ".join(ends)


def _each(record: Record, number: int) -> list[Grid]:
    """Every link and every delay of a network."""
    net, made = record.fabric.network, []
    name = (net.requested or {}).get("name")
    together = {one["host"]: one for one in net.together}
    if net.measured:
        body = [
            [
                one["host"],
                *(_range([one.get(end)]) for end in ("up_gbps", "down_gbps")),
                _range([together.get(one["host"], {}).get("gbps")]),
                _range([together.get(one["host"], {}).get("requested_gbps")]),
            ]
            for one in net.measured
        ]
        titles = ["host", "up, Gb/s", "down, Gb/s", "all at once, Gb/s", "asked, Gb/s"]
        made.append(plain(f"links-{number}", f"{name}: every link", titles, body))
    if net.delays:
        body = [
            [
                f"{one['source']} to {one['target']}",
                *(_range([one[key]]) for key in ("requested_us", "delay_us", "delay_us_p99")),
                f"{one['lost']} of {one['sent']}",
            ]
            for one in net.delays
        ]
        titles = ["one way", "asked, us", "median, us", "99 % below, us", "lost"]
        made.append(plain(f"delays-{number}", f"{name}: every delay", titles, body))
    return made


_PLACE = ("label", "algorithm", "model", "batch_size", "world_size", "network", "fault", "options")


def settings(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What all trials were asked for alike; what tables have in columns is left out."""
    if not records:
        return []
    first, *others = (one.trial for one in records)
    return [
        (name, _setting(value))
        for name, value in first.items()
        if name not in _PLACE
        and value not in (None, {})
        and all(other.get(name) == value for other in others)
    ]


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(one)}" for key, one in value.items() if one is not None)
    return _text(value)


def options(records: Sequence[Record]) -> Grid | None:
    """The options of every algorithm, as they were resolved."""
    found = dict.fromkeys(
        (one.label, ", ".join(f"{k}={v}" for k, v in one.trial["options"].items()))
        for one in records
    )
    body = [list(one) for one in found if one[1]]
    if not body:
        return None
    return plain("options", "Options of the algorithms, in full", ["algorithm", "options"], body)
