"""Common style of all figures: fonts, panels, captions, and the files that are written."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from common.results.learning.summary import LearnRow
from common.results.records import Record, fabric_words, machine_words
from common.results.store import Comparison
from common.results.tables.cells import significant
from common.results.timed.rows import Row
from common.results.validity import flag_text
from dear.errors import UserError
from plots.looks import FLAGGED, GREY, LOOKS, Look

Drawn = tuple[Figure, pd.DataFrame]
# A white halo keeps text readable where it crosses lines.
_HALO = patheffects.withStroke(linewidth=2.5, foreground="white", alpha=0.8)
_REASON = {"fontsize": 7, "color": "#666666", "path_effects": [_HALO]}
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def setup(grid: str = "x") -> None:
    """Sets matplotlib's defaults; `grid` names the axis that has grid lines."""
    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.grid.axis": grid,
            "grid.color": "#dddddd",
            "hatch.linewidth": 0.6,
            "pdf.fonttype": 42,  # text stays text
        }
    )


def stacked(counts: Sequence[int], width: float, bar: float, **options: Any) -> tuple[Figure, Any]:
    """Returns a figure with panels below each other, and the axes of the panels. `counts` has the
    number of bars of each panel; a bar gets `bar` inches of height. `options` are arguments of
    `plt.subplots`."""
    setup()
    heights = [count + 1.2 for count in counts]
    options |= {"height_ratios": heights, "squeeze": False, "layout": "constrained"}
    size = (width, bar * sum(heights) + 0.6)
    figure, axes = plt.subplots(len(counts), 1, figsize=size, **options)
    return figure, axes[:, 0]


def literal(figure: Figure) -> None:
    """Makes every text literal but the powers of ten of logarithmic axes. Otherwise, a label with
    two dollar signs is read as mathematics, and may be none."""
    both = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    powers = [axis for axis in both if isinstance(axis.get_major_formatter(), LogFormatter)]
    kept = {id(label) for axis in powers for label in axis.get_ticklabels(which="both")}
    for text in figure.findobj(Text):
        if id(text) not in kept:
            text.set_parse_math(False)


def title(axis: Axes, text: str) -> None:
    """Writes the title of a panel."""
    axis.set_title(text, loc="left", fontsize=9, fontweight="bold")


def named_rows(axis: Axes, rows: Sequence[Row | LearnRow]) -> None:
    """Writes the labels of a panel's bars, from the top; labels of flagged results are grey."""
    # A long label is broken at its commas, so that the bars have most of the width.
    lines = [row.algorithm.replace(",", ", ") for row in rows]
    axis.set_yticks(range(len(rows)), [textwrap.fill(line, 28) for line in lines])
    for text, row in zip(axis.get_yticklabels(), rows, strict=True):
        text.set_color("#666666" if row.flag else "black")
        text.set_fontsize(6.5 if "\n" in text.get_text() else 9)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(rows) - 0.5, -0.6)


def whisker(axis: Axes, x: float, y: float, ends: Sequence[float], *, upright: bool = True) -> None:
    """Draws the interval `ends` of a value; draws nothing if `ends` is empty."""
    low, high = ends
    if low is not None and high is not None:
        value = y if upright else x
        error = {"yerr" if upright else "xerr": [[value - low], [high - value]]}
        sizes = {"capsize": 1.5, "lw": 0.8} if upright else {"capsize": 2.5, "lw": 1}
        axis.errorbar(x, y, color="#222222", **error, **sizes)


def write_at(
    axis: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **options: Any
) -> None:
    """Writes a text beside the position `at`; `offset` is in points (1/72 inch)."""
    axis.annotate(text, at, xytext=offset, textcoords="offset points", **options)


def row_bar(
    axis: Axes,
    index: int,
    value: float,
    ends: Sequence[float | None],
    look: Look,
    flag: str | None,
    remark: str = "",
) -> None:
    """Draws a horizontal bar with its interval and number; a flagged bar is grey, with the reason.
    Set the limits of the x axis before the call: they decide where the number fits."""
    axis.barh(index, value, height=0.72, **(FLAGGED if flag else look.bar))
    text = significant(value) + remark
    if flag:
        reason = textwrap.shorten(f"({text}) {flag}", 75)
        write_at(axis, reason, (0, index), (4, 0), va="center", **_REASON)
        return
    whisker(axis, value, index, ends, upright=False)
    at = (min(ends[1] or value, axis.get_xlim()[1] / 1.15), index)
    write_at(axis, text, at, (5, 0), va="center", bbox=_BOX)


def legend(figure: Figure, looks: Mapping[str, Look], *, hollow: bool = False) -> None:
    """Writes the legend of lines, and of hollow points, to the right of the panels."""
    handles = [Line2D([], [], **look.curve) for look in looks.values()]
    names = [textwrap.fill(label, 26) for label in looks]
    if hollow:
        handles.append(Line2D([], [], **dataclasses.replace(LOOKS["ddp"], colour=GREY).hollow))
        names.append("hollow: flagged")
    place = {"loc": "outside right upper", "frameon": False, "fontsize": 8, "handlelength": 3.2}
    figure.legend(handles, names, **place)


def caption(figure: Figure, text: str, records: Sequence[Record], width: int) -> None:
    """Writes a caption: `text`, and where the records were measured."""
    where = fabric_words(records)
    text += f". {where[:1].upper()}{where[1:]}, over {records[0].trial['backend']}, "
    text += f"{machine_words(records)}."
    lines = "\n".join(textwrap.wrap(text, width))
    figure.supxlabel(lines, fontsize=7, color="#555555", x=0.01, ha="left")


def count(values: Iterable[int]) -> str:
    """Returns the range of the values as `3` or `3 to 12`."""
    values = list(values)
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def flags(records: Iterable[Record], look: str = "grey") -> str:
    """Returns the end of a caption, which explains `look`; empty if no record is flagged."""
    reasons = dict.fromkeys(str(why).split(":")[0] for each in records if (why := flag_text(each)))
    return f"; {look}: flagged ({', '.join(reasons)})" if reasons else ""


def data(marks: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> pd.DataFrame:
    """Returns the data of a figure, with a row per mapping; missing values are `pd.NA`. `columns`
    names the columns, for data that may have no row."""
    rows = [dict(mark) for mark in marks]
    return pd.DataFrame(rows, columns=None if rows else list(columns)).convert_dtypes()


def writer(name: str, draw: Callable[[Path], Drawn]) -> Callable[[Path, Path], list[Path]]:
    """Returns the function `write(folder, out)`, which draws a sweep's figure and saves it. It
    saves `name`.png, `name`.pdf and, with the data, `name`.csv; it returns these paths."""

    def write(folder: Path, out: Path) -> list[Path]:
        figure, table = draw(folder)
        literal(figure)
        out.mkdir(parents=True, exist_ok=True)
        paths = [out / f"{name}.{kind}" for kind in ("png", "pdf", "csv")]
        for path in paths[:2]:
            figure.savefig(path, dpi=160, bbox_inches="tight")
        plt.close(figure)
        table.to_csv(paths[2], index=False)
        return paths

    return write


def program(
    fits: Callable[[Sequence[Record]], bool], needs: str, draw: Callable[[Path, Path], list[Path]]
) -> None:
    """Draws a sweep into its folder `figures` and prints the names of the files. A user error, or a
    sweep without the needed records, prints one line; the exit status is 2."""
    parser = argparse.ArgumentParser(description=f"Draw figures of a sweep. Needed: {needs}.")
    parser.add_argument("sweep", type=Path, help="folder of results, such as logs/quick")
    sweep = parser.parse_args().sweep
    try:
        if not fits(Comparison.load(sweep).results(sweep)):
            raise UserError(f"{sweep} has no data for this figure, which needs {needs}")
        for path in draw(sweep, sweep / "figures"):
            print(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
