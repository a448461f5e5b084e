"""The comparison as a table on the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.results.tables import NUMERIC, Row, cells, headings

_COLOURS = {"FASTER": "green", "SLOWER": "red", "NO": "bold red", "failed": "red", "timeout": "red"}


def print_table(table: list[Row], title: str, compare_to: str) -> None:
    """The comparison on the terminal, a block per model; colours only where they can be seen."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=200)
    console.print(Text(title, style="bold"))
    shown = Table()
    titles = headings(compare_to)
    body = [cells(row) for row in table]
    used = [i for i in range(len(titles)) if any(line[i] for line in body)]
    for i in used:
        shown.add_column(titles[i], justify="right" if titles[i] in NUMERIC else "left")
    before: Row | None = None
    for row, line in zip(table, body, strict=True):
        if before is not None and before.model != row.model:
            shown.add_section()
        before = row
        shown.add_row(*(Text(line[i], style=_COLOURS.get(line[i], "")) for i in used))
    console.print(shown)
