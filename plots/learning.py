"""How algorithms learn, undisturbed and with each fault: `python -m plots.learning SWEEP`."""

from __future__ import annotations

import csv
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from common.results.faith import doubt
from common.results.learning import race, summary
from common.results.learning.summary import LearnRow
from common.results.records import Record
from common.results.records.learned import Evaluation
from common.results.store import Comparison
from common.results.table import significant
from plots import style

_GREY = "#8a8a8a"
_ALONG = {"seconds": "seconds of training", "steps": "steps per rank", "epoch": "epochs"}
_FIELDS = ["fault", "algorithm", "repeat", "seed", "at_s", "epoch", "seconds", "steps"]
_FIELDS += [f"{what}{end}" for what in ("accuracy", "loss") for end in ("", "_min", "_max")]
_FIELDS += ["accuracy_top5", "train_loss", "consensus_distance", "staleness"]


def draw(folder: Path, out: Path) -> list[Path]:
    """Reads `folder/records.jsonl`; writes learning.{png,pdf,csv} to `out`, returns the paths."""
    comparison = Comparison.load(folder)
    good = [r for r in comparison.results(folder) if r.ok]
    rows = summary.make_rows(good, comparison.compare_to)
    table = {record.hash: row for record, row in zip(good, rows, strict=True)}
    good.sort(key=lambda record: style.order(record.trial["algorithm"]))
    colour = _colours(good)
    columns = _columns(good)
    style.setup()
    judged = any(record.learning[0].evaluations[0].accuracy is not None for record in good)
    figure = (_curves if judged else _paces)(columns, colour, table)
    style.caption(figure, _about(good, judged), good, 120)
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


def _shade(record: Record, colour: dict[str, str]) -> str:
    """Grey for what is not believed."""
    return _GREY if doubt(record) else colour[record.label]


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


def _curves(
    columns: dict[tuple[Any, ...], list[Record]],
    colour: dict[str, str],
    table: dict[str, LearnRow],
) -> Figure:
    everything = [record for records in columns.values() for record in records]
    panels: list[Callable[..., None]] = []
    heights = []
    if everything[0].trial["learn"]["target_accuracy"] is not None:
        panels.append(partial(_race, table=table))
        heights.append(0.5 + 0.27 * max(map(len, columns.values())))
    # Epochs are the same steps for all; seconds tell who is fast.
    along = "epoch" if everything[0].trial["learn"].get("epochs") else "steps"
    panels += [partial(_accuracy, x="seconds"), partial(_accuracy, x=along)]
    panels.append(partial(_loss, x="epoch" if along == "epoch" else "seconds"))
    if along == "epoch":
        panels.append(partial(_loss, x=along, y="train_loss"))
    for panel, key in ((_consensus, "consensus_distance"), (_staleness, "staleness")):
        if any(getattr(e, key) for record in everything for e in _evaluations(record)):
            panels.append(panel)
    heights += [2.1] * (len(panels) - len(heights))
    figure, axes = plt.subplots(
        *(len(panels), len(columns)),
        figsize=(1.6 + 4.1 * len(columns), sum(heights) + 0.5),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for column, (place, records) in enumerate(columns.items()):
        for row, panel in enumerate(panels):
            panel(axes[row, column], records, colour)
        style.title(axes[0, column], _title(place))
    for row, panel in enumerate(panels):
        _same_limits(axes[row], both=getattr(panel, "func", panel) is not _race)
    shades = {record.label: _shade(record, colour) for record in everything}
    # One that is believed in some panels only is grey in the others.
    shades |= {record.label: colour[record.label] for record in everything if not doubt(record)}
    handles = {label: plt.Line2D([], [], color=shade) for label, shade in shades.items()}
    figure.legend(
        handles.values(),
        [textwrap.fill(label, 26) for label in handles],
        loc="outside right upper",
        frameon=False,
        fontsize=8,
    )
    return figure


def _same_limits(axes: Sequence[Axes], both: bool) -> None:
    """The panels of a row are compared with each other."""
    for end, change in (("xlim", "set_xlim"), ("ylim", "set_ylim"))[: 2 if both else 1]:
        limits = [getattr(axis, f"get_{end}")() for axis in axes]
        for axis in axes:
            getattr(axis, change)(min(low for low, _ in limits), max(high for _, high in limits))


def _race(
    axis: Axes, records: Sequence[Record], colour: dict[str, str], *, table: dict[str, LearnRow]
) -> None:
    """When each has reached the target: runs, and their mean with its interval."""
    for place, record in enumerate(records):
        row, shade = table[record.hash], _shade(record, colour)
        there = [run.seconds for run in race.finishes(record) if run.there]
        axis.plot(there, [place] * len(there), "o", ms=3.5, mfc="none", mec=shade, alpha=0.7)
        if row.to_target_s is not None:
            axis.plot([row.to_target_s], [place], marker="D", ms=5, color=shade)
        if row.to_target_low_s is not None:
            ends = [row.to_target_low_s, row.to_target_high_s]
            axis.plot(ends, [place, place], color=shade, lw=2)
        if row.reached != row.runs:
            text = f"{row.reached} of {row.runs} in {row.limit}"
            at = (_longest_s(records), place)
            axis.annotate(text, at, ha="right", va="center", fontsize=7, color="#333333")
    axis.set_yticks(range(len(records)), [textwrap.fill(r.label, 24) for r in records], fontsize=7)
    for label, record in zip(axis.get_yticklabels(), records, strict=True):
        label.set_color(_GREY if doubt(record) else "black")
    axis.set_ylim(len(records) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, _longest_s(records) * 1.02)
    target = records[0].trial["learn"]["target_accuracy"]
    axis.set_xlabel(f"seconds of training to {target:.0%} test accuracy", fontsize=8)


def _longest_s(records: Sequence[Record]) -> float:
    """Of all runs; for an equal time that time."""
    learn = records[0].trial["learn"]
    if not learn.get("epochs"):
        return learn["budget_s"]
    return max(one.seconds for record in records for one in _evaluations(record))


def _paces(
    columns: dict[tuple[Any, ...], list[Record]],
    colour: dict[str, str],
    table: dict[str, LearnRow],
) -> Figure:
    """Steps per second where nothing is learned: of undisturbed ranks, and of the slowed host."""
    counts = [len(records) for records in columns.values()]
    figure, axes = style.stacked(counts, 6.8, 0.42, sharex=True)
    for axis, (place, records) in zip(axes, columns.items(), strict=True):
        for at, record in enumerate(records):
            row, shade = table[record.hash], _shade(record, colour)
            text = significant(row.steps_per_s)
            text += "" if row.kept is None else f" ({row.kept:.2f} of undisturbed)"
            axis.barh(at, row.steps_per_s, color="#e4e4e4" if row.doubt else shade, height=0.7)
            end = row.steps_per_s_high or row.steps_per_s
            if row.doubt:
                text = textwrap.shorten(f"({text}) {row.doubt}", 60)
            elif row.steps_per_s_low is not None:
                ends = [row.steps_per_s_low, row.steps_per_s_high]
                axis.plot(ends, [at, at], color="#222222", lw=1, marker="|", ms=5)
            more = {"textcoords": "offset points", "va": "center", "fontsize": 8}
            axis.annotate(text, (end, at), xytext=(8, 0), **more)
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


def _evaluations(record: Record) -> Iterator[Evaluation]:
    return (one for run in record.learning or () for one in run.evaluations)


def _lines(
    axis: Axes, records: Sequence[Record], colour: dict[str, str], y: str, x: str = "seconds"
) -> None:
    """Per trial the mean of its runs at each mark, and around it the range of the runs."""
    along = "mean_steps" if x == "steps" else x
    for record in sorted(records, key=lambda one: doubt(one) is None):
        points = []
        for marks in zip(*(run.evaluations for run in record.learning), strict=True):
            values = [getattr(one, y) for one in marks]
            if None not in values and not (y == "consensus_distance" and 0.0 in values):
                at = statistics.fmean(getattr(one, along) for one in marks)
                points.append((at, statistics.fmean(values), min(values), max(values)))
        if not points:
            continue
        at, mean, low, high = zip(*points, strict=True)
        shade = _shade(record, colour)
        axis.plot(at, mean, color=shade, lw=1.3)
        if low != high:
            axis.fill_between(at, low, high, color=shade, alpha=0.13, lw=0)
    axis.set_xlabel(_ALONG[x], fontsize=8)
    axis.grid(True, axis="both")
    axis.set_xlim(left=0)


def _accuracy(axis: Axes, records: Sequence[Record], colour: dict[str, str], *, x: str) -> None:
    _lines(axis, records, colour, "accuracy", x)
    axis.set_ylabel("test accuracy", fontsize=8)
    target = records[0].trial["learn"]["target_accuracy"]
    if target is not None:
        axis.axhline(target, color="#777777", lw=1, ls="--")
    final = sorted(e.accuracy for record in records for e in _evaluations(record) if e.at_s > 0)
    axis.set_ylim(max(0.0, min(0.8, final[len(final) // 4] - 0.05)), 1.0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _loss(
    axis: Axes, records: Sequence[Record], colour: dict[str, str], *, x: str, y: str = "loss"
) -> None:
    axis.set_yscale("log")
    axis.set_ylabel({"loss": "test loss", "train_loss": "training loss"}[y], fontsize=8)
    _lines(axis, records, colour, y, x)


def _consensus(axis: Axes, records: Sequence[Record], colour: dict[str, str]) -> None:
    axis.set_yscale("log")
    axis.set_ylabel("consensus distance\n(unless equal)", fontsize=8)
    _lines(axis, records, colour, "consensus_distance")


def _staleness(axis: Axes, records: Sequence[Record], colour: dict[str, str]) -> None:
    """The stalest neighbour's since the evaluation before, and at the end the most of any value."""
    axis.set_ylabel("steps that the stalest\nneighbour is behind", fontsize=8)
    _lines(axis, records, colour, "staleness")
    for record in records:
        shown = [one for one in record.learning[0].evaluations if one.staleness is not None]
        most = max((most for _, most in summary.staleness(record)), default=None)
        if shown and most is not None:
            axis.annotate(
                f"at most {most:g}",
                (shown[-1].seconds, shown[-1].staleness),
                xytext=(-2, 4),
                textcoords="offset points",
                ha="right",
                fontsize=7,
                color=_shade(record, colour),
            )


def _about(good: Sequence[Record], judged: bool) -> str:
    first = good[0]
    learn, counts = first.trial["learn"], {len(record.learning) for record in good}
    runs = max(counts)
    text = f"n = {runs} {'run' if runs == 1 else 'runs'} of {summary.limit(learn)} each"
    if judged:
        text += f" on {learn['data']}"
        if first.data is not None:
            text += f" (trained on {first.data.title})"
        text += ", each with a seed of its own" if runs > 1 else ""
        text += "; lines: the mean model of all ranks"
        if runs > 1:
            text += ", mean over the runs, and bands: their range"
        if learn["target_accuracy"] is not None:
            text += "; circles: runs"
            text += ", diamonds: geometric mean with its 95 % t interval" if runs > 1 else ""
    elif runs > 1:
        text += "; whiskers: 95 % t interval of the geometric mean"
    if any(doubt(record) for record in good):
        reasons = dict.fromkeys(str(doubt(one)).split(":")[0] for one in good if doubt(one))
        text += f"; grey: not believed ({', '.join(reasons)})"
    return text


def _write(good: Sequence[Record], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for record in good:
            named = {"fault": record.fault, "algorithm": record.label}
            for number, run in enumerate(record.learning):
                for one in run.evaluations:
                    steps = " ".join("-" if n is None else str(n) for n in one.steps)
                    more = {"repeat": number, "seed": run.seed, "steps": steps}
                    writer.writerow({**vars(one), **named, **more})


if __name__ == "__main__":
    style.program(draw, "logs/time_to_accuracy")
