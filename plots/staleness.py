"""How far replicas are apart and how old what they hear is: `python -m plots.staleness SWEEP`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results.faith import doubt
from common.results.learning import summary
from common.results.records import Record
from common.results.store import Comparison
from dear.errors import UserError
from plots import learning, style
from plots.style import Look

TITLE = "Consensus and staleness"
NEEDS = "replicas that differ, or counted staleness"


def fits(records: Sequence[Record]) -> bool:
    """Whether replicas differed, or neighbours were behind, and that is on record."""
    return any(one.ok and (_apart(one) or _stale(one)) for one in records)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes staleness.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "staleness")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Over time where trials learned, else at the end; below it every pair of neighbours."""
    good = [one for one in Comparison.load(folder).results(folder) if one.ok]
    good.sort(key=lambda record: style.order(record.trial["algorithm"]))
    looks = style.looks(good)
    good = [one for one in good if _apart(one) or _stale(one)]
    if not good:
        raise UserError(f"{folder}: no replicas differed, and no staleness was counted")
    style.setup()
    columns = learning.cells(good)
    panels: list[Callable[..., None]] = []
    heights = []

    def height(shown: Callable[[Record], Any]) -> float:
        """Of a panel with a row for each such trial."""
        return 0.75 + 0.28 * max(sum(map(bool, map(shown, own))) for own in columns.values())

    for field, panel in _PANELS.items():
        if any(getattr(one, field) for record in good for one in learning.evaluations(record)):
            panels.append(partial(panel, looks=looks))
            heights.append(2.4)
    for shown, panel in ((_end, _at_the_end), (_stale, _pairs)):
        if any(map(shown, good)):
            panels.append(partial(panel, looks=looks))
            heights.append(height(shown))
    drawn, axes = plt.subplots(
        *(len(panels), len(columns)),
        figsize=(2.4 + 3.9 * len(columns), sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for column, (place, records) in enumerate(columns.items()):
        for row, panel in enumerate(panels):
            panel(axes[row, column], records)
        style.title(axes[0, column], learning.cell_title(place).replace(", ", "\n", 1))
    shown = {one.label: style.seen(one, looks) for one in good}
    shown |= {one.label: looks[one.label] for one in good if not doubt(one)}
    style.legend(drawn, shown)
    text = "Consensus distance: how far replicas are from their mean, on average over them; "
    text += "staleness: steps that what a neighbour had sent was behind, the mean since the "
    text += "evaluation before of the stalest one; of pairs, over the whole training"
    style.caption(drawn, text + style.doubts(good), good, 55 + 60 * len(columns))
    return drawn, style.data(_data(good))


def _consensus(axis: Axes, records: Sequence[Record], *, looks: Mapping[str, Look]) -> None:
    axis.set_yscale("log")
    axis.set_ylabel("consensus distance", fontsize=8)
    learning.lines(axis, records, looks, "consensus_distance")


def _behind(axis: Axes, records: Sequence[Record], *, looks: Mapping[str, Look]) -> None:
    axis.set_ylabel("steps that the stalest\nneighbour is behind", fontsize=8)
    learning.lines(axis, records, looks, "staleness")


_PANELS = {"consensus_distance": _consensus, "staleness": _behind}


def _at_the_end(axis: Axes, records: Sequence[Record], *, looks: Mapping[str, Look]) -> None:
    """Of trials that time steps: one number each."""
    found = [record for record in records if _end(record) is not None]
    for place, record in enumerate(found):
        axis.plot([_end(record)], [place], **style.seen(record, looks).point)
    axis.set_xlim(0, 1.15 * max(filter(None, map(_end, found)), default=1.0))
    axis.set_xlabel("consensus distance after the last step", fontsize=8)
    _rows(axis, found)


def _pairs(axis: Axes, records: Sequence[Record], *, looks: Mapping[str, Look]) -> None:
    """A small point for each pair of neighbours at its mean, a line to the most of any."""
    found = [record for record in records if _stale(record)]
    for place, record in enumerate(found):
        look = style.seen(record, looks)
        pairs = _stale(record)
        means, most = [mean for mean, _ in pairs], max(most for _, most in pairs)
        axis.plot([min(means), most], [place, place], color=look.colour, lw=0.8)
        small = {"markersize": 0.8 * look.size, "alpha": 0.8, "ls": "none"}
        axis.plot(means, [place] * len(means), **look.point | small)
        axis.plot([most], [place], "|", color="#222222", ms=11, mew=1.3)
    axis.set_xscale("symlog", linthresh=1.0)
    style.plain_numbers(axis.xaxis)
    axis.set_xlabel("steps behind: mean of each pair of neighbours; bar: the most", fontsize=8)
    _rows(axis, found)


def _rows(axis: Axes, found: Sequence[Record]) -> None:
    style.named_rows(axis, [one.label for one in found], [bool(doubt(one)) for one in found])


def _end(record: Record) -> float | None:
    """Consensus distance of a trial that times steps; None where replicas are equal."""
    distance = record.check and record.check.consensus_distance
    return distance if distance and not record.learning else None


def _apart(record: Record) -> bool:
    return _end(record) is not None or any(
        one.consensus_distance for one in learning.evaluations(record)
    )


def _stale(record: Record) -> list[tuple[float, float]]:
    return list(summary.staleness(record))


def _data(good: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in good:
        trial = record.trial
        known = {key: trial.get(key) for key in ("model", "world_size", "network")}
        known |= {"fault": record.fault, "algorithm": record.label, "doubt": doubt(record)}
        for number, run in enumerate(record.learning or ()):
            for one in run.evaluations:
                at = {**known, "repeat": number, "seconds": one.seconds}
                for kind in _PANELS:
                    if getattr(one, kind) is not None:
                        yield {**at, "kind": kind, "value": getattr(one, kind)}
        if _end(record) is not None:
            yield {**known, "kind": "consensus_distance", "value": _end(record)}
        for mean, most in _stale(record):
            yield {**known, "kind": "staleness of a pair", "value": mean, "most": most}


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/time_to_accuracy")
