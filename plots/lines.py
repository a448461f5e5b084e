"""Lines of algorithms over something of which a sweep has several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from plots import style
from plots.sweep import Mark


def draw(
    axis: Axes,
    panel: Sequence[Mark],
    field: str,
    ends: str,
    at: Callable[[Mark, float], float],
) -> None:
    """A line for each algorithm through what is believed; the rest is hollow, grey, on no line.

    Args:
        field: of a row, on the y axis.
        ends: its interval is in the fields `ends`_low and `ends`_high.
        at: where a mark is on the x axis, given how far it is to stand aside, from -1 to 1, so
            that algorithms do not hide each other.
    """
    labels = list(dict.fromkeys(mark.row.algorithm for mark in panel))
    for number, label in enumerate(labels):
        aside = (2 * number + 1) / len(labels) - 1
        own = [m for m in panel if m.row.algorithm == label and getattr(m.row, field) is not None]
        own.sort(key=lambda mark: at(mark, 0))
        good = [mark for mark in own if not mark.row.doubt]
        x = [at(mark, aside) for mark in good]
        y = [getattr(mark.row, field) for mark in good]
        if good:
            axis.plot(x, y, lw=1.3, **good[0].look.curve)
        for place, value, mark in zip(x, y, good, strict=True):
            low, high = (getattr(mark.row, f"{ends}_{end}") for end in ("low", "high"))
            if low is not None:
                error = {"yerr": [[value - low], [high - value]], "color": mark.look.colour}
                axis.errorbar(place, value, capsize=2, lw=0.8, **error)
        for mark in own:
            if mark.row.doubt:
                look = {"marker": mark.look.marker, "mfc": "none", "mec": style.GREY}
                axis.plot([at(mark, aside)], [getattr(mark.row, field)], ms=6.5, ls="none", **look)
