"""One look for all figures: what an algorithm looks like in colour and in grey, fonts, files."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from common.results.faith import doubt
from common.results.records import Record, fabric_words
from common.results.store import Comparison
from dear.errors import UserError

GREY = "#8a8a8a"
"""Of what is not believed."""
_DARK = "#222222"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What an algorithm looks like in every figure; any one of these tells it from others."""

    colour: str
    marker: Any
    hatch: str
    line: Any
    """A line style of matplotlib."""

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments of `Axes.bar`; the hatch is dark on light colours and light on dark ones."""
        dark = _lightness(self.colour) < 0.55
        edge = "#ffffff" if dark else "#444444"
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": edge, "linewidth": 0}

    @property
    def curve(self) -> dict[str, Any]:
        """Arguments of `Axes.plot`."""
        return {"linestyle": self.line, **self.point}

    @property
    def point(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` and `Axes.errorbar` but the style of the line."""
        edge = {"markeredgecolor": "#333333", "markeredgewidth": 0.4}
        return {"color": self.colour, "marker": self.marker, "markersize": self.size, **edge}

    @property
    def size(self) -> float:
        """Of its marker in points: stars look smaller than they are."""
        return 6.5 if isinstance(self.marker, str) and self.marker != "*" else 9.0


DOUBTED = {"facecolor": "#e4e4e4", "edgecolor": "#9a9a9a", "linestyle": "--", "linewidth": 0.8}
"""The bar of what is not believed: no hatch, and a broken outline."""


def _dashes(*lengths: float) -> tuple[float, tuple[float, ...]]:
    return (0, lengths)


# Colours are Okabe and Ito's, told apart with any kind of colour vision, and shades of them; those
# of a family are related. In the order of figures.
_TABLE: tuple[tuple[str, str, Any, str, Any], ...] = (
    ("none", "#999999", "X", "..", ":"),
    ("allreduce", "#56B4E9", "s", "xx", _dashes(6, 1, 1, 1, 1, 1)),
    ("wfbp", "#009E73", "^", "\\\\", "-."),
    ("mgwfbp", "#CC79A7", "v", "||", _dashes(7, 2)),
    ("mgs", "#8E4B73", "<", "||..", _dashes(4, 1, 2, 1)),
    ("horovod", "#E69F00", "P", "--", _dashes(2, 1)),
    ("bytescheduler", "#9C6500", "p", "--..", _dashes(2, 2, 6, 2)),
    ("ddp", "#0072B2", "o", "", "-"),
    ("fsdp", "#003F66", "h", "++", _dashes(10, 2)),
    ("hierarchical", "#6B8E23", (5, 1, 0), "++..", _dashes(7, 1, 3, 1)),
    ("dear", "#D55E00", "D", "//", "--"),
    ("dadt", "#B8A800", "*", "oo", _dashes(5, 2, 1, 2)),
    ("decentralized", "#000000", "d", "//..", _dashes(8, 1, 1, 1)),
    ("neighbor", "#17A2B8", ">", "OO", _dashes(3, 3)),
    ("exact-diffusion", "#4C7F5B", "H", "\\\\..", _dashes(1, 2)),
    ("gradient-tracking", "#8C564B", "8", "xx..", _dashes(4, 2, 4, 2, 1, 2)),
    ("push-diging", "#C79A8E", (4, 1, 0), "/o", _dashes(9, 3, 2, 3)),
    ("win-put", "#6A51A3", (4, 1, 45), "|o", _dashes(1, 3)),
    ("pull-get", "#B9A3D9", (3, 1, 0), "-o", _dashes(6, 4)),
    ("push-sum", "#9467BD", (3, 1, 180), "\\o", _dashes(2, 4)),
    ("asyncddp", "#E078B5", (6, 1, 0), "xo", _dashes(5, 1, 1, 3)),
)
LOOKS = {
    name: Look(colour=colour, marker=marker, hatch=hatch, line=line)
    for name, colour, marker, hatch, line in _TABLE
}
"""Of every algorithm of today; the single worker is called `none`."""
# For algorithms that came later, and for variants of one, which have shades of its colour.
_FURTHER = ("#7F6A00", "#1B5E7A", "#A83232", "#3D8B8B", "#6E6E00", "#B05F8E")
_SHADES = (0.0, 0.5, -0.45, 0.25, -0.7, 0.7)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "d", "<", ">", "p", "h", "*", "8", "H")
_MARKERS += ((4, 1, 0), (4, 1, 45), (3, 1, 0), (3, 1, 180), (6, 1, 0), (5, 0, 180), (3, 0, 30))
_MARKERS += ((8, 1, 0), (7, 1, 0), (5, 1, 180), (12, 1, 0))
_HATCHES = ("", "//", "\\\\", "||", "--", "xx", "++", "..", "oo", "OO", "//..", "\\\\..", "--..")
_HATCHES += ("||..", "xx..", "++..", "/o", "\\o", "|o", "-o", "xo", "+o", "/O", "\\O", "|O", "-O")
_LINES = ("-", "--", "-.", ":", *(_dashes(a, b) for a in (2, 5, 9) for b in (1, 2, 3)))
_LINES += tuple(_dashes(a, 1, b, 1) for a in (3, 6, 9) for b in (1, 2, 3, 4))


def order(algorithm: str) -> tuple[int, str]:
    """Sort key: the known ones as in `LOOKS`, others after them by name."""
    known = list(LOOKS)
    return (known.index(algorithm) if algorithm in known else len(known), algorithm)


def looks(records: Iterable[Record]) -> dict[str, Look]:
    """By label, in the order of figures: known algorithms have their own look, and no two the same.

    Of variants of one algorithm the one that has its name, or the first, looks like it; others have
    shades of its colour, and what nobody else has of the rest.
    """
    names = {record.label: record.trial["algorithm"] for record in records}
    labels = sorted(names, key=lambda label: order(names[label]))
    plain_first = sorted(labels, key=lambda label: (order(names[label]), label != names[label]))
    found: dict[str, Look] = {}
    variants: dict[str, list[str]] = {}
    for label in plain_first:
        variants.setdefault(names[label], []).append(label)
    further = iter(_FURTHER * (1 + len(variants) // len(_FURTHER)))
    for name, own in variants.items():
        if name in LOOKS:
            found[own[0]] = LOOKS[name]
    for name, own in variants.items():
        colour = LOOKS[name].colour if name in LOOKS else next(further)
        for number, label in enumerate(own):
            if label not in found:
                found[label] = _spare(_shade(colour, number), found)
    return {label: found[label] for label in labels}


def _spare(colour: str, taken: Mapping[str, Look]) -> Look:
    """That colour, and of everything else the first that nobody has."""

    def first(pool: Sequence[Any], key: str) -> Any:
        used = [getattr(look, key) for look in taken.values()]
        return next((one for one in pool if one not in used), pool[len(used) % len(pool)])

    return Look(
        colour=colour,
        marker=first(_MARKERS, "marker"),
        hatch=first(_HATCHES, "hatch"),
        line=first(_LINES, "line"),
    )


def _shade(colour: str, number: int) -> str:
    """The colour mixed with white or with black."""
    share = _SHADES[number % len(_SHADES)]
    towards = 1.0 if share > 0 else 0.0
    return to_hex([part + (towards - part) * abs(share) for part in to_rgb(colour)])


def _lightness(colour: str) -> float:
    """From 0 to 1, as a grey print shows it."""
    return sum(w * part for w, part in zip((0.299, 0.587, 0.114), to_rgb(colour), strict=True))


def seen(record: Record, of: Mapping[str, Look]) -> Look:
    """Its look in grey where it is not believed."""
    look = of[record.label]
    return dataclasses.replace(look, colour=GREY) if doubt(record) else look


def setup() -> None:
    """Sets matplotlib's defaults for all figures."""
    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.grid.axis": "x",
            "grid.color": "#dddddd",
            "hatch.linewidth": 0.6,
            "pdf.fonttype": 42,  # text stays text
        }
    )


def stacked(counts: Sequence[int], width: float, bar: float, **more: Any) -> tuple[Figure, Any]:
    """A figure of panels below each other, and their axes.

    Args:
        counts: bars of each panel, each `bar` inches high.
        more: of `plt.subplots`.
    """
    heights = [count + 1.2 for count in counts]
    size = (width, bar * sum(heights) + 0.6)
    more |= {"height_ratios": heights, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(counts), 1, figsize=size, **more)
    return figure, axes[:, 0]


def title(axis: Axes, text: str) -> None:
    """What a panel shows."""
    axis.set_title(text, loc="left", fontsize=9, fontweight="bold")


def named_rows(axis: Axes, labels: Sequence[str], doubted: Sequence[bool]) -> None:
    """A row for each label from above, with room above the first; grey where not believed."""
    axis.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
    for text, grey in zip(axis.get_yticklabels(), doubted, strict=True):
        text.set_color("#666666" if grey else "black")
        text.set_fontsize(6.5 if "\n" in text.get_text() else 9)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(labels) - 0.5, -0.6)


def wrapped(label: str, width: int = 26) -> str:
    """On lines that leave most of the figure to what is drawn."""
    if len(label) <= width:
        return label
    return "\n".join(textwrap.wrap(label.replace(",", ", ").replace(",  ", ", "), width + 4))


def plain_numbers(axis: Any, values: Iterable[float] | None = None) -> None:
    """Ticks of a logarithmic axis as 1, 10, 100; at `values` where they are given.

    Args:
        axis: `Axes.xaxis` or `Axes.yaxis`.
    """
    if values is not None:
        axis.set_ticks(sorted(set(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, of: Mapping[str, Look], *, bars: bool = False, **more: Any) -> None:
    """Names each look, right of the panels."""
    handles: list[Artist] = [
        Patch(**look.bar) if bars else Line2D([], [], **look.curve) for look in of.values()
    ]
    place = {"loc": "outside right upper", "frameon": False, "fontsize": 8, "handlelength": 3.2}
    figure.legend(handles, [textwrap.fill(label, 26) for label in of], **place | more)


def caption(figure: Figure, text: str, records: Sequence[Record], width: int) -> None:
    """Writes `text` and what the records were measured on below the panels."""
    words, machine = fabric_words(records), records[0].machine
    packages = machine.get("packages") or {}
    text += (
        f". {words[:1].upper()}{words[1:]}, over {records[0].trial['backend']}, on "
        f"{machine.get('cores', '?')} x {machine.get('cpu', 'an unknown CPU')}, torch "
        f"{packages.get('torch', 'unknown')}, commit {machine.get('commit', 'unknown')}."
    )
    lines = "\n".join(textwrap.wrap(text, width))
    figure.supxlabel(lines, fontsize=7, color="#555555", x=0.01, ha="left")


def count(values: Iterable[int]) -> str:
    """`3`, or `3 to 12`."""
    values = list(values)
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def doubts(records: Iterable[Record]) -> str:
    """Why some are grey, as the end of a caption; nothing if none is."""
    reasons = dict.fromkeys(str(why).split(":")[0] for one in records if (why := doubt(one)))
    return f"; grey: not believed ({', '.join(reasons)})" if reasons else ""


def data(marks: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> pd.DataFrame:
    """What a figure shows, a row per mark, with types; missing values are `pd.NA`.

    Args:
        columns: all there are, where there may be no mark.
    """
    found = [dict(mark) for mark in marks]
    return pd.DataFrame(found, columns=None if found else list(columns)).convert_dtypes()


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes `stem`.png and `stem`.pdf and returns their paths."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".pdf")]
    for path in paths:
        figure.savefig(path, dpi=160, bbox_inches="tight")
    plt.close(figure)
    return paths


def write(drawn: tuple[Figure, pd.DataFrame], stem: Path) -> list[Path]:
    """A figure and the data behind it as `stem`.png, .pdf and .csv; their paths."""
    figure, table = drawn
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_suffix(".csv")
    table.to_csv(path, index=False)
    return [*save(figure, stem), path]


def program(
    fits: Callable[[Sequence[Record]], bool],
    needs: str,
    draw: Callable[[Path, Path], list[Path]],
    default: str,
) -> None:
    """Draws the sweep that the command line names into plots/out and prints the files' names.

    A mistake, or a sweep that it does not fit, is one line, and status 2.
    """
    sweep = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    try:
        if not fits(Comparison.load(sweep).results(sweep)):
            raise UserError(f"{sweep} has not what this figure shows: it needs {needs}")
        for written in draw(sweep, Path("plots/out") / sweep.name):
            print(written)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
