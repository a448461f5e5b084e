"""Tables on the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from common.results.table import Table

_COLOURS = {"FASTER": "green", "SLOWER": "red", "NO": "bold red", "failed": "red", "timeout": "red"}


def print_table(table: Table, title: str) -> None:
    """A block per model; colours only where they can be seen."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=300)
    console.print(Text(title, style="bold"))
    grid, body = Grid(), table.body
    used = [i for i in range(len(table.columns)) if any(line[i] for line in body)]
    for i in used:
        column = table.columns[i]
        grid.add_column(column.title, justify="right" if column.numeric else "left")
    before = None
    for row, line in zip(table.rows, body, strict=True):
        if before is not None and before.model != row.model:
            grid.add_section()
        before = row
        grid.add_row(*(Text(line[i], style=_COLOURS.get(line[i], "")) for i in used))
    console.print(grid)
