"""How algorithms learn, undisturbed and with each fault: `python -m plots.learning SWEEP`."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pandas import DataFrame

from common.results.faith import doubt
from common.results.learning import race, summary
from common.results.learning.summary import LearnRow
from common.results.records import Record
from common.results.records.learned import Evaluation
from common.results.store import Comparison
from common.results.table import significant
from dear.errors import UserError
from plots import style
from plots.style import Look

_ALONG = {"seconds": "seconds of training", "steps": "steps per rank", "epoch": "epochs"}
_FIELDS = ["fault", "algorithm", "repeat", "seed", "at_s", "epoch", "seconds", "steps"]
_FIELDS += [f"{what}{end}" for what in ("accuracy", "loss") for end in ("", "_min", "_max")]
_FIELDS += ["accuracy_top5", "train_loss", "consensus_distance", "staleness"]


TITLE = "Accuracy and loss over time"
NEEDS = "trials that train for a time"


def fits(records: Sequence[Record]) -> bool:
    """Whether any trial has trained for a time."""
    return any(one.ok and one.learning for one in records)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes learning.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "learning")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """What was learned over seconds and steps, or the pace where nothing was to be learned; the
    data are all evaluations."""
    good, compare_to = learners(folder)
    rows = summary.make_rows(good, compare_to)
    table = {record.hash: row for record, row in zip(good, rows, strict=True)}
    looks = style.looks(good)
    style.setup()
    judged = any(record.learning[0].evaluations[0].accuracy is not None for record in good)
    drawn = (_curves if judged else _paces)(cells(good), looks, table)
    style.caption(drawn, _about(good, judged), good, 120)
    return drawn, style.data(_evaluated(good), _FIELDS)[_FIELDS]


def learners(folder: Path) -> tuple[list[Record], str]:
    """The trials of a sweep that have trained for a time, in the order of figures, and what they
    are compared to.

    Raises:
        UserError: there are none.
    """
    comparison = Comparison.load(folder)
    good = [one for one in comparison.results(folder) if one.ok and one.learning]
    if not good:
        raise UserError(f"{folder}: no trial has trained for a time")
    good.sort(key=lambda record: style.order(record.trial["algorithm"]))
    return good, comparison.compare_to


def cells(good: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
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


def cell_title(place: Sequence[Any]) -> str:
    """Of the panel for model, world size, network and fault; two lines."""
    model, world, network, fault = place
    where = f" on {network}" if network else ""
    return f"{model}, {world} workers{where}\n{fault or 'undisturbed'}"


def _curves(
    columns: dict[tuple[Any, ...], list[Record]],
    looks: Mapping[str, Look],
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
        if any(getattr(e, key) for record in everything for e in evaluations(record)):
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
            panel(axes[row, column], records, looks)
        style.title(axes[0, column], cell_title(place))
    for row, panel in enumerate(panels):
        _same_limits(axes[row], both=getattr(panel, "func", panel) is not _race)
    shown = {record.label: style.seen(record, looks) for record in everything}
    # One that is believed in some panels only is grey in the others.
    shown |= {record.label: looks[record.label] for record in everything if not doubt(record)}
    style.legend(figure, shown)
    return figure


def _same_limits(axes: Sequence[Axes], both: bool) -> None:
    """The panels of a row are compared with each other."""
    for end, change in (("xlim", "set_xlim"), ("ylim", "set_ylim"))[: 2 if both else 1]:
        limits = [getattr(axis, f"get_{end}")() for axis in axes]
        for axis in axes:
            getattr(axis, change)(min(low for low, _ in limits), max(high for _, high in limits))


def _race(
    axis: Axes, records: Sequence[Record], looks: Mapping[str, Look], *, table: dict[str, LearnRow]
) -> None:
    """When each has reached the target: runs, and their mean with its interval."""
    for place, record in enumerate(records):
        row, shade = table[record.hash], style.seen(record, looks).colour
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
        label.set_color(style.GREY if doubt(record) else "black")
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
    return max(one.seconds for record in records for one in evaluations(record))


def _paces(
    columns: dict[tuple[Any, ...], list[Record]],
    looks: Mapping[str, Look],
    table: dict[str, LearnRow],
) -> Figure:
    """Steps per second where nothing is learned: of undisturbed ranks, and of the slowed host."""
    counts = [len(records) for records in columns.values()]
    figure, axes = style.stacked(counts, 6.8, 0.42, sharex=True)
    for axis, (place, records) in zip(axes, columns.items(), strict=True):
        for at, record in enumerate(records):
            row = table[record.hash]
            text = significant(row.steps_per_s)
            text += "" if row.kept is None else f" ({row.kept:.2f} of undisturbed)"
            look = style.DOUBTED if row.doubt else looks[record.label].bar
            axis.barh(at, row.steps_per_s, height=0.7, **look)
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
        style.title(axis, cell_title(place).replace("\n", ", "))
    axes[0].set_xlim(0, axes[0].get_xlim()[1] * 1.25)
    axes[-1].set_xlabel(
        "steps per second of the slowest rank that is not slowed; diamonds: of the slowed host",
        fontsize=8,
    )
    return figure


def evaluations(record: Record) -> Iterator[Evaluation]:
    return (one for run in record.learning or () for one in run.evaluations)


def lines(
    axis: Axes, records: Sequence[Record], looks: Mapping[str, Look], y: str, x: str = "seconds"
) -> None:
    """Per trial the mean of its runs at each mark, and around it the range of the runs."""
    along = "mean_steps" if x == "steps" else x
    last = sorted(records, key=lambda one: doubt(one) is None)
    for number, record in enumerate(last):
        points = []
        for marks in zip(*(run.evaluations for run in record.learning), strict=True):
            values = [getattr(one, y) for one in marks]
            if None not in values and not (y == "consensus_distance" and 0.0 in values):
                at = statistics.fmean(getattr(one, along) for one in marks)
                points.append((at, statistics.fmean(values), min(values), max(values)))
        if not points:
            continue
        at, mean, low, high = zip(*points, strict=True)
        look = style.seen(record, looks)
        every = max(1, len(at) // 5)
        # Not where those of others are.
        marked = {"markevery": (number % every, every), "markersize": 0.7 * look.size}
        axis.plot(at, mean, lw=1.3, **look.curve | marked)
        if low != high:
            axis.fill_between(at, low, high, color=look.colour, alpha=0.13, lw=0)
    axis.set_xlabel(_ALONG[x], fontsize=8)
    axis.grid(True, axis="both")
    axis.set_xlim(left=0)


def _accuracy(axis: Axes, records: Sequence[Record], looks: Mapping[str, Look], *, x: str) -> None:
    lines(axis, records, looks, "accuracy", x)
    axis.set_ylabel("test accuracy", fontsize=8)
    target = records[0].trial["learn"]["target_accuracy"]
    if target is not None:
        axis.axhline(target, color="#777777", lw=1, ls="--")
    final = sorted(e.accuracy for record in records for e in evaluations(record) if e.at_s > 0)
    axis.set_ylim(max(0.0, min(0.8, final[len(final) // 4] - 0.05)), 1.0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _loss(
    axis: Axes, records: Sequence[Record], looks: Mapping[str, Look], *, x: str, y: str = "loss"
) -> None:
    axis.set_yscale("log")
    axis.set_ylabel({"loss": "test loss", "train_loss": "training loss"}[y], fontsize=8)
    lines(axis, records, looks, y, x)


def _consensus(axis: Axes, records: Sequence[Record], looks: Mapping[str, Look]) -> None:
    axis.set_yscale("log")
    axis.set_ylabel("consensus distance\n(unless equal)", fontsize=8)
    lines(axis, records, looks, "consensus_distance")


def _staleness(axis: Axes, records: Sequence[Record], looks: Mapping[str, Look]) -> None:
    """The stalest neighbour's since the evaluation before, and at the end the most of any value."""
    axis.set_ylabel("steps that the stalest\nneighbour is behind", fontsize=8)
    lines(axis, records, looks, "staleness")
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
                color=style.seen(record, looks).colour,
            )


def _about(good: Sequence[Record], judged: bool) -> str:
    first = good[0]
    learn, counts = first.trial["learn"], {len(record.learning) for record in good}
    runs = max(counts)
    text = f"n = {runs} {'run' if runs == 1 else 'runs'} of {summary.limit(learn)} each"
    if judged:
        text += f" on {learn['data']}"
        data = first.results[0].data
        if data is not None:
            text += f" (trained on {data.title})"
        text += ", each with a seed of its own" if runs > 1 else ""
        text += "; lines: the mean model of all ranks"
        if runs > 1:
            text += ", mean over the runs, and bands: their range"
        if learn["target_accuracy"] is not None:
            text += "; circles: runs"
            text += ", diamonds: geometric mean with its 95 % t interval" if runs > 1 else ""
    elif runs > 1:
        text += "; whiskers: 95 % t interval of the geometric mean"
    return text + style.doubts(good)


def _evaluated(good: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in good:
        named = {"fault": record.fault, "algorithm": record.label}
        for number, run in enumerate(record.learning):
            for one in run.evaluations:
                steps = " ".join("-" if n is None else str(n) for n in one.steps)
                more = {"repeat": number, "seed": run.seed, "steps": steps}
                yield {**vars(one), **named, **more}


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/time_to_accuracy")
