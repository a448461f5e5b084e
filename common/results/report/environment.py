"""Environment of a sweep: machines, versions, time scales, links and settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.results.records import Record, grouped
from common.results.records.card import flat_card
from common.results.records.trust import Network
from common.results.report.flagged import title
from common.results.report.parts import Grid, plain
from common.results.tables.cells import Cell, number, significant

_FIRST = ("cpu", "cores", "gpus", "os", "kernel", "python", "packages.torch", "commit")
_UNKNOWN = "not on record"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine with one state of its software, and the number of trials that ran on it."""

    trials: int
    commit: str
    """Commit of the code, and whether files had uncommitted changes."""
    short: list[tuple[str, str]]
    rest: list[tuple[str, str]]


def machines(records: Iterable[Record]) -> list[Machine]:
    """Returns the machines of a sweep, by first use."""
    cards = [flat_card(record.machine) for record in records if record.machine]
    same = grouped(cards, lambda card: json.dumps(card, sort_keys=True))
    return [_machine(group[0], len(group)) for group in same.values()]


def _machine(card: Mapping[str, object], trials: int) -> Machine:
    names = [*_FIRST, *(name for name in card if name not in (*_FIRST, "diff"))]
    names.remove("commit")
    lines = [(name.removeprefix("packages."), _text(card.get(name))) for name in names]
    known = len(_FIRST) - 1
    return Machine(trials=trials, commit=_commit(card), short=lines[:known], rest=lines[known:])


def _commit(card: Mapping[str, object]) -> str:
    if card.get("commit") is None:
        return "not known: the code was no checkout of git"
    name, plus, _ = str(card["commit"]).partition("+")
    if not plus:
        return f"{name}, and no file differed from it"
    digest = card.get("diff")
    return f"{name}, but files differed from it" + (f" (digest {digest})" if digest else "")


def _text(value: object) -> str:
    if value is None:
        return "none, or not visible"
    if value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def scales(records: Sequence[Record]) -> Grid | None:
    """Returns the table of time scales with their reasons; None: nothing is emulated."""
    emulated = [record for record in records if record.fabric.kind == "emulated"]
    trials = grouped(
        emulated,
        lambda record: (record.fabric.time_scale, record.fabric.time_scale_reason or _UNKNOWN),
    )
    if not trials:
        return None
    body = [
        [f"{k:g}", len(same), why, "all" if len(trials) == 1 else "; ".join(map(title, same))]
        for (k, why), same in trials.items()
    ]
    return plain("scales", "Time scales", ["time scale", "trials", "reason", "which"], body)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links as requested and as measured."""

    summary: Grid
    """Row per network."""
    each: list[Grid]
    """Tables of single links."""


def links(records: Sequence[Record]) -> Links | None:
    """Returns the links of all networks of a sweep; None on a real network."""
    shaped = [record for record in records if record.fabric.network.requested is not None]
    networks = list(grouped(shaped, lambda record: _key(record.fabric.network)).values())
    if not networks:
        return None
    body = [_network(same[0], len(same)) for same in networks]
    each = [grid for i, same in enumerate(networks) for grid in _each(same[0], i)]
    summary = plain("links", "Links, as requested and as measured", _NETWORK, body)
    return Links(summary=summary, each=each)


def _key(net: Network) -> str:
    return json.dumps([net.requested, net.measured, net.together, net.delays])


_NETWORK = ["network", "trials", "stands for", "requested, Gb/s", "each alone, Gb/s"]
_NETWORK += ["all at once, Gb/s", "requested delay, us", "delay, us", "requested loss", "loss"]
_NETWORK += ["worst link", "shaped by"]


def _network(record: Record, trials: int) -> list[Cell | str | int]:
    net = record.fabric.network
    wanted = net.requested or {}
    alone = [link.get(end) for link in net.measured or () for end in ("up_gbps", "down_gbps")]
    sent = sum(delay["sent"] for delay in net.delays)
    lost = sum(delay["lost"] for delay in net.delays)
    off = "" if net.off_percent is None else f"{net.off_percent:+.1f} %"
    by = ", ".join(filter(None, (net.links, net.congestion)))
    sites = [f"{'-'.join(pair['sites'])} {pair['gbps']:g}" for pair in wanted.get("between", ())]
    latency = _range([delay["requested_us"] for delay in net.delays], "")
    return [
        wanted.get("name") or "",
        trials,
        wanted.get("stands_for") or "",
        Cell("; ".join([f"{wanted['gbps']:g}", *sites]), wanted["gbps"]),
        _range(alone),
        _range([link["gbps"] for link in net.together]),
        latency if latency.text else number(wanted["latency_us"], "{:g}".format),
        _range([delay["delay_us"] for delay in net.delays]),
        number(wanted.get("loss_percent", 0), "{:g} %".format),
        number(100 * lost / sent if sent else None, "{:.2g} %".format, missing=_UNKNOWN),
        Cell(f"{off}: not as requested" if off and net.flagged else off, net.off_percent),
        by or _UNKNOWN,
    ]


def _range(values: Iterable[float | None], missing: str = _UNKNOWN) -> Cell:
    known = [value for value in values if value is not None]
    if not known:
        return Cell(missing)
    ends = dict.fromkeys(significant(value) for value in (min(known), max(known)))
    return Cell(" to ".join(ends), min(known))


def _each(record: Record, index: int) -> list[Grid]:
    net, grids = record.fabric.network, []
    name = (net.requested or {}).get("name")
    together = {link["host"]: link for link in net.together}
    if net.measured:
        body = []
        for link in net.measured:
            busy = together.get(link["host"], {})
            ends = [link.get("up_gbps"), link.get("down_gbps")]
            ends += [busy.get("gbps"), busy.get("requested_gbps")]
            body.append([str(link["host"]), *(_range([end], "") for end in ends)])
        titles = ["host", "up, Gb/s", "down, Gb/s", "all at once, Gb/s", "requested, Gb/s"]
        grids.append(plain(f"links-{index}", f"{name}: every link", titles, body))
    if net.delays:
        body = []
        for delay in net.delays:
            times = (delay[key] for key in ("requested_us", "delay_us", "delay_us_p99"))
            lost = Cell(f"{delay['lost']} of {delay['sent']}", delay["lost"])
            way = f"{delay['source']} to {delay['target']}"
            body.append([way, *(_range([time], "") for time in times), lost])
        titles = ["one way", "requested, us", "median, us", "99 % below, us", "lost"]
        grids.append(plain(f"delays-{index}", f"{name}: every delay", titles, body))
    return grids


_PLACE = ("label", "algorithm", "model", "batch_size", "world_size", "network", "fault", "options")


def settings(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Returns the settings that are equal for all trials and that no table shows."""
    if not records:
        return []
    first, *others = (record.trial for record in records)
    return [
        (name, _setting(value))
        for name, value in first.items()
        if name not in _PLACE
        and value not in (None, {})
        and all(other.get(name) == value for other in others)
    ]


def _setting(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item is not None)
    return _text(value)


def options(records: Sequence[Record]) -> Grid | None:
    """Returns the table of every algorithm's options, defaults included."""
    lines = dict.fromkeys(
        (record.label, ", ".join(f"{k}={v}" for k, v in record.trial["options"].items()))
        for record in records
    )
    body = [list(line) for line in lines if line[1]]
    if not body:
        return None
    return plain("options", "Options of the algorithms, in full", ["algorithm", "options"], body)
