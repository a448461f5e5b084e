"""The gallery's figures as elements of a page: SVG whose text stays text, and their data."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from common.results.report.parts import Figured
from common.results.table import significant
from plots import gallery

ROWS = 100
"""Of a figure's data that a page shows; all of it is in the CSV file."""
_PAD = 0.05
"""Inches around a figure."""
_OPTIONS = {"svg.fonttype": "none", "svg.hashsalt": "DeAR Bench"}
_NO_FACTS = {"Date": None, "Creator": None, "Format": None, "Type": None}
_DIGITS = re.compile(r"(\d\.\d\d)\d+")


def figures(folder: Path, processes: int = 1) -> list[Figured]:
    """All that fit the sweep in a folder, drawn anew.

    Args:
        processes: that draw side by side. They begin anew, which takes each a second: a fork would
            inherit locks that threads of numerical libraries may hold.
    """
    tasks = [(module.__name__, folder) for module in gallery.fitting(folder)]
    if min(processes, len(tasks)) < 2:
        return [_figured(*task) for task in tasks]
    anew, count = multiprocessing.get_context("spawn"), min(processes, len(tasks))
    with ProcessPoolExecutor(count, mp_context=anew, initializer=_leave_to_parent) as pool:
        return list(pool.map(_figured, *zip(*tasks, strict=True)))


def _leave_to_parent() -> None:
    """Ctrl-C reaches this process, too; the one that has started it says what there is to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _figured(module_name: str, folder: Path) -> Figured:
    module, name = importlib.import_module(module_name), module_name.rpartition(".")[2]
    drawn, data = module.figure(folder)
    alt = described(module.TITLE, data)
    shown = data.head(ROWS).astype(object)
    rows = [["" if pd.isna(one) else _text(one) for one in line] for line in shown.values.tolist()]
    return Figured(
        name=name,
        title=module.TITLE,
        alt=alt,
        svg=element(drawn, name),
        columns=[str(column) for column in data.columns],
        rows=rows,
        count=len(data),
        csv=data.to_csv(index=False),
    )


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def element(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page that has others, too; closes it.

    Args:
        name: what its identifiers begin with.
    """
    out = io.StringIO()
    with matplotlib.rc_context(_OPTIONS):
        # Laid out once; `bbox_inches="tight"` alone would do that, and draw everything twice.
        layout = figure.get_layout_engine()
        if layout is not None:
            layout.execute(figure)
            figure.set_layout_engine("none")
        box = figure.get_tightbbox().padded(_PAD)
        figure.savefig(out, format="svg", bbox_inches=box, metadata=_NO_FACTS)
    plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{name}-", text)
    # Hundredths of a point are enough; the width in points is that of a page's column.
    return re.sub(r' d="[^"]*"', lambda found: _DIGITS.sub(r"\1", found[0]), text)


def described(title: str, data: pd.DataFrame) -> str:
    """What a figure shows, in a sentence made of its data: the range of its first measure.

    Args:
        title: of the figure, without a full stop.
    """
    numbers = [name for name in data.columns if pd.api.types.is_float_dtype(data[name])]
    known = [name for name in numbers if data[name].notna().any()]
    text = title.rstrip(".")
    if not known:
        return f"{text}: {len(data)} rows of {', '.join(map(str, data.columns))}."
    measure = next((name for name in _MEASURES if name in known), known[0])
    who = next((name for name in _NAMES if name in data.columns), None)
    ends = [data[measure].astype(float).idxmin(), data[measure].astype(float).idxmax()]
    told = [significant_of(data.loc[at, measure]) for at in ends]
    if who is not None and not data.loc[ends, who].isna().any():
        told = [f"{value} ({data.loc[at, who]})" for value, at in zip(told, ends, strict=True)]
    words = str(measure).replace("_s", " in seconds").replace("_", " ")
    return f"{text}: {words} from {told[0]} to {told[1]}, over {len(data)} rows of data."


_MEASURES = ("throughput", "speedup", "accuracy", "step_s", "steps_per_s", "ratio")
_NAMES = ("algorithm", "label", "id")


def significant_of(value: float) -> str:
    """Three digits, of numbers of either sign."""
    return f"-{significant(-float(value))}" if value < 0 else significant(float(value))
