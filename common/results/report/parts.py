"""Parts of a page: downloads, tables and figures."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.results.tables.cells import UNKNOWN, Cell, R, number
from common.results.tables.table import Table
from common.results.tables.terminal import phrases

_PACKED_FROM = 20_000
"""Bytes of the smallest file that is packed."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file inside the page."""

    name: str
    """Name of the file, with `.gz` if it is packed."""
    url: str
    """URL of the kind `data:`, in base64."""
    packed: bool
    """True: the file is packed by gzip; a browser with JavaScript unpacks it."""
    size: int
    """Bytes of the unpacked file."""


def download(name: str, content: str | bytes, kind: str) -> Download:
    """Returns a file of a MIME type, packed if it is large."""
    data = content.encode() if isinstance(content, str) else content
    packed, size = len(data) > _PACKED_FROM, len(data)
    if packed:  # without a date: the same records are the same page
        name, kind, data = f"{name}.gz", "application/gzip", gzip.compress(data, 9, mtime=0)
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return Download(name=name, url=url, packed=packed, size=size)


@dataclass(frozen=True, kw_only=True)
class Figured:
    """Figure with its data."""

    name: str
    """Name of files; unique in a page."""
    title: str
    alt: str
    """Description in a sentence, for readers who do not see it."""
    svg: str
    """SVG element; its identifiers are unique in a page, and it refers to nothing outside."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """First rows of the data."""
    count: int
    """Number of all rows."""
    csv: str
    """All rows of the data."""


Figures = Callable[[Path], Sequence[Figured]]
"""Function that draws the figures of the sweep in a folder."""


@dataclass(frozen=True, kw_only=True)
class Heading:
    """Title of a column."""

    text: str
    number: bool
    """True: numbers are aligned to the right and sorted by value."""
    name: bool
    """True: the column names the rows."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Row of a table, and the reason below it."""

    cells: Sequence[Cell]
    mark: str | None = None
    """State of a row without a valid result: flagged, failed, ..."""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Table of a page."""

    name: str
    caption: str
    headings: Sequence[Heading]
    lines: Sequence[Line]
    csv: Download | None = None


def grid(
    name: str,
    caption: str,
    table: Table[R],
    *,
    marks: Sequence[tuple[str | None, str | None]],
    csv: Download | None = None,
) -> Grid:
    """Returns a table for a page, without empty columns. Settings that all rows share are in the
    caption. `marks` has the mark and the reason of each row; they replace the column of notes."""
    columns, cells = table.columns, table.cells
    used = [i for i, column in enumerate(columns) if column.role != "notes"]
    used = [i for i in used if any(line[i].text not in ("", UNKNOWN) for line in cells)]
    shared = phrases([columns[i] for i in used], [[line[i] for i in used] for line in cells])
    heads = {used[k]: text for k, text in shared.items() if columns[used[k]].role == "place"}
    if len(cells) > 1 and heads:
        caption += f": {', '.join(heads.values())}"
        used = [i for i in used if i not in heads]
    return Grid(
        name=name,
        caption=caption,
        headings=[
            _heading(columns[i].title, i, cells, name=columns[i].role == "name") for i in used
        ],
        lines=[
            Line(cells=[line[i] for i in used], mark=mark, reason=reason)
            for line, (mark, reason) in zip(cells, marks, strict=True)
        ],
        csv=csv,
    )


def plain(
    name: str, caption: str, titles: Sequence[str], body: Sequence[Sequence[Cell | str | int]]
) -> Grid:
    """Returns a table of texts and numbers; the first column names the rows."""
    lines = [[_cell(item) for item in line] for line in body]
    headings = [_heading(title, i, lines, name=i == 0) for i, title in enumerate(titles)]
    return Grid(
        name=name, caption=caption, headings=headings, lines=[Line(cells=line) for line in lines]
    )


def _cell(item: Cell | str | int) -> Cell:
    if isinstance(item, str):
        return Cell(item)
    return number(item, str) if isinstance(item, int) else item


def _heading(title: str, i: int, lines: Sequence[Sequence[Cell]], *, name: bool) -> Heading:
    numbers = not name and any(line[i].value is not None for line in lines)
    return Heading(text=title, number=numbers, name=name)
