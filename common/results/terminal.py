"""Tables on the terminal: the comparison, and where the time goes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.results import breakdown, learning_table, tables
from common.results.learning import LearnRow
from common.results.tables import Row

_COLOURS = {"FASTER": "green", "SLOWER": "red", "NO": "bold red", "failed": "red", "timeout": "red"}


def print_table(table: list[Row], title: str, compare_to: str) -> None:
    """The comparison, a block per model; colours only where they can be seen."""
    body = [tables.cells(row) for row in table]
    _print(table, title, tables.headings(compare_to), body, tables.NUMERIC)


def print_breakdown(table: list[Row], title: str) -> None:
    """Where the time of trials that have a result goes, a block per model."""
    body = [breakdown.cells(row) for row in table]
    _print(table, title, breakdown.HEADINGS, body, breakdown.NUMERIC)


def print_learning(table: list[LearnRow], title: str) -> None:
    """How soon and how well trials learn, a block per model."""
    body = [learning_table.cells(row) for row in table]
    _print(table, title, learning_table.HEADINGS, body, learning_table.NUMERIC)


def _print(
    table: Sequence[Row] | Sequence[LearnRow],
    title: str,
    headings: Sequence[str],
    body: Sequence[Sequence[str]],
    numeric: Collection[str],
) -> None:
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=300)
    console.print(Text(title, style="bold"))
    shown = Table()
    used = [i for i in range(len(headings)) if any(line[i] for line in body)]
    for i in used:
        shown.add_column(headings[i], justify="right" if headings[i] in numeric else "left")
    before: Row | LearnRow | None = None
    for row, line in zip(table, body, strict=True):
        if before is not None and before.model != row.model:
            shown.add_section()
        before = row
        shown.add_row(*(Text(line[i], style=_COLOURS.get(line[i], "")) for i in used))
    console.print(shown)
