"""What a page is made of: downloads, tables of cells, figures."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.results.tables.table import PLACE, Table
from common.results.timed.rows import UNKNOWN

_PACKED_FROM = 20_000
"""Bytes: what is smaller is not worth packing."""
_NUMBER = re.compile(r"\(?(?:over |below )?([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)")
_SHORT = 30
"""Characters: what is longer is a sentence that begins with a number."""
_WORDS = {"FASTER", "SLOWER", "SAME", "UNSURE", "NO", "unchecked"}
_SHARED = {"batch": "batch {}", "workers": "{} workers"}


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file inside the page."""

    name: str
    """With `.gz` if it is packed."""
    url: str
    """`data:`, in base64."""
    packed: bool
    """By gzip; a browser with JavaScript unpacks it."""
    size: int
    """Bytes, unpacked."""


def download(name: str, content: str | bytes, kind: str) -> Download:
    """A file of that MIME type, packed if that is worth it."""
    data = content.encode() if isinstance(content, str) else content
    packed = len(data) > _PACKED_FROM
    # Without a date: the same records are the same page.
    held = gzip.compress(data, 9, mtime=0) if packed else data
    kind = "application/gzip" if packed else kind
    return Download(
        name=f"{name}.gz" if packed else name,
        url=f"data:{kind};base64,{base64.b64encode(held).decode()}",
        packed=packed,
        size=len(data),
    )


@dataclass(frozen=True, kw_only=True)
class Figured:
    """A figure, and what it shows as data."""

    name: str
    """Of files, and unique in a page."""
    title: str
    alt: str
    """What can be seen in it, in a sentence, for who cannot see it."""
    svg: str
    """An element, with identifiers that are unique in a page, and no reference to the outside."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first ones of its data."""
    count: int
    """Of all rows."""
    csv: str
    """All of its data."""


Figures = Callable[[Path], Sequence[Figured]]
"""Draws what fits the sweep in a folder."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table."""

    text: str
    number: float | None = None
    """What it is sorted by; None: by its text, or there is nothing in it."""
    word: str | None = None
    """A verdict or a state, which gets a colour as well."""
    heads: bool = False
    """Names its row."""
    numeric: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row, and below it what is to be said of it."""

    cells: Sequence[Cell]
    mark: str | None = None
    """doubted, failed, ...; None: nothing is wrong."""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of a page."""

    name: str
    caption: str
    headings: Sequence[Cell]
    lines: Sequence[Line]
    csv: Download | None = None


def grid(
    name: str,
    caption: str,
    table: Table,
    *,
    marks: Sequence[tuple[str | None, str | None]],
    csv: Download | None = None,
) -> Grid:
    """A table for a page: without columns that are empty, and what all rows share in the caption.

    Args:
        marks: mark and reason of each row; they take the place of a column of notes.
    """
    titles, body = table.titles, table.body
    told = [i for i, title in enumerate(titles) if title != "notes"]
    used = [i for i in told if any(line[i] not in ("", UNKNOWN) for line in body)]
    head = len(PLACE) - 1
    shared = [i for i in used if i < head and len({line[i] for line in body}) == 1]
    if len(body) > 1 and shared:
        words = [_SHARED.get(titles[i], "{}").format(body[0][i]) for i in shared]
        caption += f": {', '.join(words)}"
        used = [i for i in used if i not in shared]
    good = [line for line, row in zip(body, table.rows, strict=True) if row.status == "ok"]
    numeric = {
        i
        for i in used
        if (PLACE[i].numeric if i <= head else _all_numbers([line[i] for line in good]))
    }
    return Grid(
        name=name,
        caption=caption,
        headings=[Cell(text=titles[i], numeric=i in numeric) for i in used],
        lines=[
            Line(
                cells=[_cell(line[i], i in numeric, heads=i == head) for i in used],
                mark=mark,
                reason=reason,
            )
            for line, (mark, reason) in zip(body, marks, strict=True)
        ],
        csv=csv,
    )


def plain(name: str, caption: str, titles: Sequence[str], body: Sequence[Sequence[Any]]) -> Grid:
    """A table of texts and numbers, the first of each row its name; None is an empty cell."""
    texts = [["" if value is None else str(value) for value in line] for line in body]
    numeric = {i for i in range(1, len(titles)) if _all_numbers([line[i] for line in texts])}
    return Grid(
        name=name,
        caption=caption,
        headings=[Cell(text=title, numeric=i in numeric) for i, title in enumerate(titles)],
        lines=[
            Line(cells=[_cell(text, i in numeric, heads=i == 0) for i, text in enumerate(line)])
            for line in texts
        ],
    )


def _all_numbers(texts: Sequence[str]) -> bool:
    """Whether a column is sorted by the numbers that it begins with."""
    known = [text for text in texts if text.lstrip("(") not in ("", UNKNOWN)]
    known = [text for text in known if not text.lstrip("(").startswith("not reached")]
    return bool(known) and all(_NUMBER.match(text) and len(text) < _SHORT for text in known)


def _cell(text: str, numeric: bool, heads: bool) -> Cell:
    found = _NUMBER.match(text) if numeric else None
    return Cell(
        text=text,
        number=float(found[1].replace(",", "")) if found else None,
        word=text.lower() if text in _WORDS else None,
        heads=heads,
        numeric=numeric,
    )
