"""Figures of the HTML report, as SVG elements with selectable text, and their data."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from common.results.report.parts import Figured
from plots import gallery, style

ROWS = 100
"""Largest number of rows of a figure's data on the page; the CSV file has all rows."""
_PAD = 0.05
_OPTIONS = {"svg.fonttype": "none", "svg.hashsalt": "DeAR Bench"}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_DIGITS = re.compile(r"(\d\.\d\d)\d+")


def figures(folder: Path) -> list[Figured]:
    """Draws all figures that fit the sweep in a folder."""
    drawn = []
    for module in gallery.fitting(folder):
        figure, data = module.figure(folder)
        name = gallery.name(module)
        shown = data.head(ROWS).astype(object)
        figured = Figured(
            name=name,
            title=module.TITLE,
            alt=described(module.TITLE, data),
            svg=element(figure, name),
            columns=[str(column) for column in data.columns],
            rows=[list(map(_text, row)) for row in shown.values],
            count=len(data),
            csv=data.to_csv(index=False),
        )
        drawn.append(figured)
    return drawn


def _text(value: object) -> str:
    if pd.isna(value):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def element(figure: Figure, name: str) -> str:
    """Returns the figure as an SVG element for a page with other figures, and closes it. `name` is
    the prefix of the element's identifiers."""
    out = io.StringIO()
    style.literal(figure)
    with plt.rc_context(_OPTIONS):
        # With a layout engine, `bbox_inches="tight"` would lay out and draw everything twice.
        layout = figure.get_layout_engine()
        if layout is not None:
            layout.execute(figure)
            figure.set_layout_engine("none")
        box = figure.get_tightbbox().padded(_PAD)
        figure.savefig(out, format="svg", bbox_inches=box, metadata=_NO_METADATA)
    plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{name}-", text)
    # Hundredths of a point are enough; a point is a pixel of the page.
    return re.sub(r' d="[^"]*"', lambda found: _DIGITS.sub(r"\1", found[0]), text)


def described(title: str, data: pd.DataFrame) -> str:
    """Describes a figure for readers who do not see it: its title, rows and columns."""
    return f"{title.rstrip('.')}: {len(data)} rows of {', '.join(map(str, data.columns))}."
