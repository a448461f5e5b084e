"""Table on a terminal: a block per model; its heading has the values that its rows share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.results.records.reading import grouped
from common.results.tables.cells import Cell, Column, R

if TYPE_CHECKING:
    from rich.console import Console

MANY = 400
"""Largest number of rows that are printed as a grid; larger tables are printed as Markdown."""
_NOTES = 30
"""Smallest width of the column of notes, whose texts may be broken into lines."""
_COLOURS = {"FASTER": "green", "SLOWER": "red", "NO": "bold red", "failed": "red", "timeout": "red"}


def show(
    columns: Sequence[Column[R]],
    cells: Sequence[Sequence[Cell]],
    grey: Sequence[bool],
    title: str,
    width: int | None = None,
) -> bool:
    """Prints a title and a table to stdout; returns False for a table of too many rows. On a
    terminal, columns that do not fit are left out; if the last one (notes) does not fit, it is
    printed below. If stdout is no terminal, everything is printed. `grey` has True for the rows to
    print in grey. `width` is that of the terminal in characters; None: the real width."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, width=width)
    console = console if console.is_terminal else Console(file=sys.stdout, width=300)
    console.print(Text(title, style="bold"))
    if len(cells) > MANY:
        return False
    if not console.is_terminal:
        _grid(console, columns, cells, grey, list(range(len(columns))))
        return True
    for rows in grouped(range(len(cells)), lambda i: cells[i][0].text).values():
        _block(console, columns, [cells[i] for i in rows], [grey[i] for i in rows])
    return True


def phrases(columns: Sequence[Column[R]], cells: Sequence[Sequence[Cell]]) -> dict[int, str]:
    """Returns the values that are equal in all rows, by column; such columns are not printed."""
    shared = {}
    for i, column in enumerate(columns):
        form = column.phrase or ("{}" if column.role == "place" else None)
        if form is not None and len({line[i].text for line in cells}) == 1:
            shared[i] = form.format(cells[0][i].text) if cells[0][i].text else ""
    return shared


def _block(
    console: Console,
    columns: Sequence[Column[R]],
    cells: Sequence[Sequence[Cell]],
    grey: Sequence[bool],
) -> None:
    from rich.text import Text

    shared = phrases(columns, cells)
    console.print(Text(", ".join(filter(None, shared.values())), style="bold"))
    used = [i for i in range(len(columns)) if i not in shared and any(c[i].text for c in cells)]
    used.sort(key=lambda i: columns[i].weight)
    kept = _fitting({i: _width(columns[i], cells, i) for i in used}, columns, console.width)
    _grid(console, columns, cells, grey, kept)
    last = len(columns) - 1
    if last in used and last not in kept:
        name = next(i for i, column in enumerate(columns) if column.role == "name")
        for line in cells:
            if line[last].text:
                console.print(Text(f"{line[name].text}: {line[last].text}"))


def _grid(
    console: Console,
    columns: Sequence[Column[R]],
    cells: Sequence[Sequence[Cell]],
    grey: Sequence[bool],
    chosen: Sequence[int],
) -> None:
    from rich.table import Table
    from rich.text import Text

    used = [i for i in chosen if any(line[i].text for line in cells)]
    grid = Table()
    for i in used:
        width = _width(columns[i], cells, i)
        fixed = width if console.is_terminal and i != len(columns) - 1 else None
        grid.add_column(
            columns[i].title,
            justify="right" if columns[i].right else "left",
            overflow="fold",
            min_width=fixed,
            max_width=fixed,
        )
    model = None
    for line, dim in zip(cells, grey, strict=True):
        if model is not None and model != line[0].text:
            grid.add_section()
        model = line[0].text
        style = "dim" if dim else ""
        texts = (
            Text(cell.text, style=_COLOURS.get(cell.text, style) if cell.word else style)
            for cell in (line[i] for i in used)
        )
        grid.add_row(*texts)
    console.print(grid)


def _width(column: Column[R], cells: Sequence[Sequence[Cell]], index: int) -> int:
    """Returns the width of a column in which no word is cut; titles are broken between words."""
    return max(*map(len, column.title.split()), *(len(line[index].text) for line in cells))


def _fitting(widths: dict[int, int], columns: Sequence[Column[R]], width: int) -> list[int]:
    """Returns the columns that fit; drops the heaviest first, and of equal ones the last."""
    kept = list(widths)
    while len(kept) > 1:
        needed = (min(widths[i], _NOTES) if columns[i].role == "notes" else widths[i] for i in kept)
        if sum(needed) + 3 * len(kept) + 1 <= width:
            break
        kept.remove(max(reversed(kept), key=lambda i: columns[i].weight))
    return kept
