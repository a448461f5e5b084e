"""One look for all figures: colours and order of algorithms, fonts, files."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.results.records import Record, fabric_words

# Okabe and Ito's palette, told apart with any kind of colour vision.
_COLOURS = {
    "none": "#999999",
    "allreduce": "#56B4E9",
    "wfbp": "#009E73",
    "horovod": "#E69F00",
    "ddp": "#0072B2",
    "dear": "#D55E00",
}
_FURTHER = ["#CC79A7", "#B8A800", "#000000", "#8C564B", "#17BECF", "#9467BD", "#7F7F7F"]


def colours(algorithms: list[str]) -> dict[str, str]:
    """A fixed colour for each known algorithm, and distinct ones for others."""
    spare = iter(_FURTHER * (1 + len(algorithms) // len(_FURTHER)))
    return {name: _COLOURS.get(name) or next(spare) for name in algorithms}


def order(algorithm: str) -> tuple[int, str]:
    """Sort key: the known ones as above, others after them by name."""
    known = list(_COLOURS)
    return (known.index(algorithm) if algorithm in known else len(known), algorithm)


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


def caption(figure: Figure, text: str, records: Sequence[Record], width: int) -> None:
    """Writes `text` and what the records were measured on below the panels."""
    words, machine = fabric_words(records), records[0].machine
    text += (
        f". {words[:1].upper()}{words[1:]}, over {records[0].trial['backend']}, on "
        f"{machine['cores']} x {machine['cpu']}, torch {machine['packages']['torch']}, commit "
        f"{machine['commit']}."
    )
    lines = "\n".join(textwrap.wrap(text, width))
    figure.supxlabel(lines, fontsize=7, color="#555555", x=0.01, ha="left")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes `stem`.png and `stem`.pdf and returns their paths."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".pdf")]
    for path in paths:
        figure.savefig(path, dpi=160, bbox_inches="tight")
    plt.close(figure)
    return paths


def program(draw: Callable[[Path, Path], list[Path]], default: str) -> None:
    """Draws the sweep that the command line names into plots/out and prints the files' names."""
    sweep = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    for written in draw(sweep, Path("plots/out") / sweep.name):
        print(written)
