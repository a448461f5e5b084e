"""Looks of algorithms: each has the same colour, marker, hatch and line style in every figure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_hex, to_rgb

from common.results.records import Record, grouped

GREY = "#8a8a8a"
FLAGGED = {"facecolor": "#e4e4e4", "edgecolor": "#9a9a9a", "linestyle": "--", "linewidth": 0.8}
"""Arguments of a flagged result's bar: no hatch, and a broken outline."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Look of an algorithm; the colour, the marker, the hatch or the line alone identifies it."""

    colour: str
    marker: Any
    hatch: str
    line: Any

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments of `Axes.bar`; the hatch is dark on light colours and light on dark ones."""
        edge = "#ffffff" if _lightness(self.colour) < 0.55 else "#444444"
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": edge, "linewidth": 0}

    @property
    def curve(self) -> dict[str, Any]:
        """Arguments of `Axes.plot`."""
        edge = {"markeredgecolor": "#333333", "markeredgewidth": 0.4, "markersize": self.size}
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker, **edge}

    @property
    def hollow(self) -> dict[str, Any]:
        """Arguments of `Axes.plot` for flagged points."""
        edge = {"markeredgecolor": self.colour, "markeredgewidth": 1.2, "markersize": self.size}
        return {"linestyle": "none", "marker": self.marker, "markerfacecolor": "none", **edge}

    @property
    def size(self) -> float:
        """Size of the marker in points; stars look smaller than they are."""
        return 6.5 if isinstance(self.marker, str) and self.marker != "*" else 9.0


def _dashes(*lengths: float) -> tuple[float, tuple[float, ...]]:
    return (0, lengths)


# The colours are those of Okabe and Ito, which colour-blind readers can distinguish, and shades of
# them. Algorithms of a family have related colours. Figures use the order of this list.
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
    ("auto", "#7A4B2A", (5, 1, 180), "+O", _dashes(3, 1, 6, 1)),
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
"""Look of every algorithm of the project; the single worker is called `none`."""
# Colours of algorithms that are not in LOOKS, and shades, markers, ... for variants.
_MORE_COLOURS = ("#7F6A00", "#1B5E7A", "#A83232", "#3D8B8B", "#6E6E00", "#B05F8E")
_SHADES = (0.0, 0.5, -0.45, 0.25, -0.7, 0.7)
_MARKERS: list[Any] = list("os^DvPXd<>ph*8H")
_MARKERS += [(4, 1, 0), (4, 1, 45), (3, 1, 0), (3, 1, 180), (6, 1, 0), (5, 0, 180), (3, 0, 30)]
_MARKERS += [(8, 1, 0), (7, 1, 0), (5, 1, 180), (12, 1, 0)]
_HATCHES = ["", "//", "\\\\", "||", "--", "xx", "++", "..", "oo", "OO", "//..", "\\\\..", "--.."]
_HATCHES += ["||..", "xx..", "++..", "/o", "\\o", "|o", "-o", "xo", "+o", "/O", "\\O", "|O", "-O"]
_LINES: list[Any] = ["-", "--", "-.", ":"]
_LINES += [_dashes(a, b) for a in (2, 5, 9) for b in (1, 2, 3)]
_LINES += [_dashes(a, 1, b, 1) for a in (3, 6, 9) for b in (1, 2, 3, 4)]


def order(algorithm: str) -> tuple[int, str]:
    """Returns the sort key of an algorithm: first the order of `LOOKS`, then other names."""
    known = list(LOOKS)
    return (known.index(algorithm) if algorithm in known else len(known), algorithm)


def looks(records: Iterable[Record]) -> dict[str, Look]:
    """Returns a look for each label, in the order of figures; no two labels look the same. Labels
    of one algorithm are its variants. The variant that is named like the algorithm (or else the
    first) has the algorithm's look. The others have shades of its colour, and unused markers,
    hatches and line styles."""
    return looks_of({record.label: record.trial["algorithm"] for record in records})


def looks_of(names: Mapping[str, str]) -> dict[str, Look]:
    """Returns the looks of labels, as `looks`; `names` has the algorithm of each label."""
    ordered = sorted(names, key=lambda label: (order(names[label]), label != names[label]))
    groups = grouped(ordered, names.__getitem__)
    taken = {labels[0]: LOOKS[name] for name, labels in groups.items() if name in LOOKS}
    more = itertools.cycle(_MORE_COLOURS)
    for name, labels in groups.items():
        colour = LOOKS[name].colour if name in LOOKS else next(more)
        for number, label in enumerate(labels):
            if label not in taken:
                taken[label] = _free(_shade(colour, number), taken)
    return {label: taken[label] for labels in groups.values() for label in labels}


def _free(colour: str, taken: Mapping[str, Look]) -> Look:

    def first(pool: Sequence[Any], key: str) -> Any:
        used = [getattr(look, key) for look in taken.values()]
        return next((value for value in pool if value not in used), pool[len(used) % len(pool)])

    return Look(
        colour=colour,
        marker=first(_MARKERS, "marker"),
        hatch=first(_HATCHES, "hatch"),
        line=first(_LINES, "line"),
    )


def _shade(colour: str, number: int) -> str:
    share = _SHADES[number % len(_SHADES)]
    target = 1.0 if share > 0 else 0.0
    return to_hex([part + (target - part) * abs(share) for part in to_rgb(colour)])


def _lightness(colour: str) -> float:
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue
