"""How algorithms learn, undisturbed and with each fault: `python -m plots.learning SWEEP`."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from common.results import learning
from common.results.records import Comparison, Evaluation, Record
from common.results.table import significant
from plots import style

Curve = tuple[Record, list[Evaluation]]
"""A trial and the evaluations of its first repeat."""

_FIELDS = ["fault", "algorithm", "repeat", "at_s", "seconds", "steps"]
_FIELDS += [f"{what}{end}" for what in ("accuracy", "loss") for end in ("", "_min", "_max")]
_FIELDS += ["consensus_distance", "staleness"]


def draw(folder: Path, out: Path) -> list[Path]:
    """Reads `folder/records.jsonl`; writes learning.{png,pdf,csv} to `out`, returns the paths."""
    good = [r for r in Comparison.load(folder).results(folder) if r.ok]
    good.sort(key=lambda record: style.order(record.trial["algorithm"]))
    colour = _colours(good)
    columns = _columns(good)
    style.setup()
    judged = any(record.learning[0].evaluations[0].accuracy is not None for record in good)
    figure = (_curves if judged else _paces)(columns, colour)
    style.caption(figure, _about(good[0]), good, 120)
    out.mkdir(parents=True, exist_ok=True)
    data = out / "learning.csv"
    _write(good, data)
    return [*style.save(figure, out / "learning"), data]


def _colours(good: Sequence[Record]) -> dict[str, str]:
    """By label; variants of one algorithm are told apart."""
    labels = list(dict.fromkeys(record.label for record in good))
    names = {record.label: record.trial["algorithm"] for record in good}
    first = {names[label]: label for label in reversed(labels)}
    keys = [names[label] if first[names[label]] == label else label for label in labels]
    found = style.colours(keys)
    return {label: found[key] for label, key in zip(labels, keys, strict=True)}


def _columns(good: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Trials that are compared with each other; the single worker stands beside all of them."""
    columns: dict[tuple[Any, ...], list[Record]] = {}
    singles = [record for record in good if record.trial["algorithm"] == "none"]
    for record in good:
        if record not in singles:
            columns.setdefault(_place(record), []).append(record)
    for single in singles:
        model, _, network, _ = own = _place(single)
        rivals = [key for key in columns if (key[0], key[2]) == (model, network)]
        for key in rivals or [own]:
            columns.setdefault(key, []).insert(0, single)
    return columns


def _place(record: Record) -> tuple[Any, ...]:
    trial = record.trial
    return (trial["model"], trial["world_size"], trial.get("network"), record.fault)


def _title(place: Sequence[Any]) -> str:
    """Of the panel for model, world size, network and fault; two lines."""
    model, world, network, fault = place
    where = f" on {network}" if network else ""
    return f"{model}, {world} workers{where}\n{fault or 'undisturbed'}"


def _curves(columns: dict[tuple[Any, ...], list[Record]], colour: dict[str, str]) -> Figure:
    panels = [partial(y, x=x) for y in (_accuracy, _loss) for x in ("seconds", "steps")]
    panels += [_consensus, _staleness]
    shape = (len(panels), len(columns))
    size = (1.2 + 3.9 * shape[1], 2.1 * shape[0])
    how = {"squeeze": False, "sharey": "row", "layout": "constrained"}
    figure, axes = plt.subplots(*shape, figsize=size, **how)
    handles: dict[str, Any] = {}
    for column, (place, records) in enumerate(columns.items()):
        curves = [(record, record.learning[0].evaluations) for record in records]
        for row, panel in enumerate(panels):
            handles |= panel(axes[row, column], curves, colour)
        style.title(axes[0, column], _title(place))
    figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8
    )
    return figure


def _paces(columns: dict[tuple[Any, ...], list[Record]], colour: dict[str, str]) -> Figure:
    """Steps per second where nothing is learned: of undisturbed ranks, and of the slowed host."""
    counts = [len(records) for records in columns.values()]
    figure, axes = style.stacked(counts, 6.8, 0.42, sharex=True)
    everything = [record for records in columns.values() for record in records]
    table = dict(zip(map(id, everything), learning.make_rows(everything), strict=True))
    for axis, (place, records) in zip(axes, columns.items(), strict=True):
        for at, record in enumerate(records):
            row, label = table[id(record)], record.label
            text = significant(row.steps_per_s)
            text += "" if row.kept is None else f" ({row.kept:.2f} of undisturbed)"
            axis.barh(at, row.steps_per_s, color=colour[label], height=0.7)
            axis.annotate(
                text, (row.steps_per_s, at), xytext=(8, 0), textcoords="offset points", va="center"
            )
            if row.slowed_steps_per_s is not None:
                axis.plot([row.slowed_steps_per_s], [at], marker="D", color="#222222", ms=5)
        axis.set_yticks(range(len(records)), [record.label for record in records])
        axis.invert_yaxis()
        style.title(axis, _title(place).replace("\n", ", "))
    axes[0].set_xlim(0, axes[0].get_xlim()[1] * 1.25)
    axes[-1].set_xlabel(
        "steps per second of the slowest rank that is not slowed; diamonds: of the slowed host",
        fontsize=8,
    )
    return figure


def _lines(
    axis: Axes,
    curves: Sequence[Curve],
    colour: dict[str, str],
    y: str,
    title: str,
    *,
    x: str = "seconds",
    band: bool = False,
) -> dict[str, Any]:
    """A line per trial, and around it the range of the single ranks' models."""
    axis.set_ylabel(title, fontsize=8)
    axis.set_xlabel("seconds of training" if x == "seconds" else "steps per rank", fontsize=8)
    handles = {}
    for record, evaluations in curves:
        label = record.label
        shown = [e for e in evaluations if getattr(e, y) is not None]
        along = [e.mean_steps if x == "steps" else e.seconds for e in shown]
        (line,) = axis.plot(along, [getattr(e, y) for e in shown], color=colour[label], lw=1.3)
        handles[label] = line
        if band and any(getattr(e, f"{y}_min") != getattr(e, f"{y}_max") for e in shown):
            low, high = ([getattr(e, f"{y}_{end}") for e in shown] for end in ("min", "max"))
            axis.fill_between(along, low, high, color=colour[label], alpha=0.12, lw=0)
    axis.grid(True, axis="both")
    axis.set_xlim(left=0)
    return handles


def _accuracy(
    axis: Axes, curves: Sequence[Curve], colour: dict[str, str], *, x: str
) -> dict[str, Any]:
    handles = _lines(axis, curves, colour, "accuracy", "test accuracy", x=x, band=True)
    target = curves[0][0].trial["learn"]["target_accuracy"]
    if target is not None:
        axis.axhline(target, color="#777777", lw=1, ls="--")
    final = [e.accuracy for _, evaluations in curves for e in evaluations[1:]]
    axis.set_ylim(max(0.0, min(0.8, sorted(final)[len(final) // 4] - 0.05)), 1.0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return handles


def _loss(axis: Axes, curves: Sequence[Curve], colour: dict[str, str], *, x: str) -> dict[str, Any]:
    axis.set_yscale("log")
    return _lines(axis, curves, colour, "loss", "test loss", x=x)


def _consensus(axis: Axes, curves: Sequence[Curve], colour: dict[str, str]) -> dict[str, Any]:
    # 0 has no logarithm.
    found = [(record, [e for e in all_ if e.consensus_distance]) for record, all_ in curves]
    shown = [(record, evaluations) for record, evaluations in found if evaluations]
    if shown:
        axis.set_yscale("log")
    title = "consensus distance\n(unless equal)"
    return _lines(axis, shown, colour, "consensus_distance", title)


def _staleness(axis: Axes, curves: Sequence[Curve], colour: dict[str, str]) -> dict[str, Any]:
    """The stalest neighbour's since the evaluation before, and at the end the most of any value."""
    found = [(record, [e for e in all_ if e.staleness is not None]) for record, all_ in curves]
    shown = [(record, evaluations) for record, evaluations in found if evaluations]
    title = "steps that the stalest\nneighbour is behind"
    handles = _lines(axis, shown, colour, "staleness", title)
    for record, evaluations in shown:
        most = max((most for _, most in learning.staleness(record)), default=0)
        axis.annotate(
            f"at most {most:g}",
            (evaluations[-1].seconds, evaluations[-1].staleness),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            fontsize=7,
            color=colour[record.label],
        )
    if not shown:
        counted = any(list(learning.staleness(record)) for record, _ in curves)
        why = "not recorded over time" if counted else "no algorithm counts it"
        axis.text(0.5, 0.5, why, transform=axis.transAxes, ha="center")
    return handles


def _about(first: Record) -> str:
    learn = first.trial["learn"]
    repeats = len(first.learning)
    text = f"n = {repeats} {'run' if repeats == 1 else 'runs'} of {learn['budget_s']:g} s each"
    if learn["data"] is not None:
        text += (
            f" on {learn['data']} (curves: the first); lines: the mean of all ranks' models, "
            "bands: their range; judging takes no training time"
        )
    return text


def _write(good: Sequence[Record], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for record in good:
            named = {"fault": record.fault, "algorithm": record.label}
            for number, repeat in enumerate(record.learning):
                for one in repeat.evaluations:
                    steps = " ".join("-" if n is None else str(n) for n in one.steps)
                    writer.writerow({**vars(one), **named, "repeat": number, "steps": steps})


if __name__ == "__main__":
    style.program(draw, "logs/time_to_accuracy")
