"""Table of typed cells, which terminals, Markdown, LaTeX, HTML and CSV have in common."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

UNKNOWN = "-"
"""Text of a cell whose value is unknown."""
Form = Callable[[float], str]
"""Format of a number."""


class Shown(Protocol):
    """Row of any table."""

    @property
    def status(self) -> str: ...
    @property
    def flag(self) -> str | None: ...
    @property
    def reason(self) -> str | None: ...


R = TypeVar("R", bound=Shown)
C = TypeVar("C", bound=Shown, contravariant=True)


@dataclass(frozen=True)
class Cell:
    """Content of a cell."""

    text: str = ""
    value: float | None = None
    """Number by which rows are sorted; None: the text counts, or the cell is empty."""
    word: bool = False
    """True for a verdict or a state. Some of them have colours."""


def significant(value: float | None) -> str:
    """Formats a number with three significant digits, without an exponent."""
    if value is None:
        return ""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(decimals, 0)}f}"


def percent(value: float) -> str:
    """Formats a share as a percentage without its sign, for the ends of intervals."""
    return f"{100 * value:.0f}"


def interval(low: float | None, high: float | None, form: Form) -> str:
    """Formats an interval; empty without one."""
    return "" if low is None or high is None else f"{form(low)}-{form(high)}"


def number(
    value: float | None,
    form: Form = significant,
    *,
    unit: str = "",
    ends: str = "",
    flag: str | None = None,
    missing: str = "",
) -> Cell:
    """Returns the cell of a number with its unit and interval; in parentheses if it is flagged.

    Args:
        ends: the text of the interval.
        flag: reason why the number is not valid.
        missing: text of a value that is None.
    """
    if value is None:
        return Cell(missing)
    text = form(value) + unit + (f" ({ends})" if ends else "")
    return Cell(f"({text})" if flag else text, value)


def word(text: str | None) -> Cell:
    """Returns the cell of a verdict or a state."""
    return Cell(text or "", word=True)


@dataclass(frozen=True, kw_only=True)
class Column(Generic[C]):
    """Column of a table, for rows that have a result."""

    title: str
    cell: Callable[[C], Cell]
    right: bool = True
    """Alignment to the right."""
    sparse: bool = False
    """True: Markdown and LaTeX leave the column out if it is empty, as terminals and pages do with
    every column."""
    weight: int = 5
    """Rank on a terminal: light columns come first, and heavy ones leave where it is narrow."""
    role: Literal["place", "name", "notes"] | None = None
    """Part of the place of a trial, the name of the row, or its notes."""
    phrase: str | None = None
    """Format of a value that all rows share, in a heading; None: it stays in its column. The
    columns of the place have one by default."""


@dataclass(frozen=True)
class Table(Generic[R]):
    """Rows and columns. A row without a result shows its place, status and reason.

    The first columns of such a table are the place and the name; the last column has the notes.
    """

    rows: Sequence[R]
    columns: Sequence[Column[R]]

    @property
    def titles(self) -> list[str]:
        return [column.title for column in self.columns]

    @property
    def cells(self) -> list[list[Cell]]:
        """Cells by row, in the order of the columns."""
        return [self._cells(row) for row in self.rows]

    @property
    def body(self) -> list[list[str]]:
        """Texts by row."""
        return [[cell.text for cell in cells] for cells in self.cells]

    def _cells(self, row: R) -> list[Cell]:
        if row.status == "ok":
            cells = [column.cell(row) for column in self.columns]
        else:
            known = [c.cell(row) for c in self.columns if c.role in ("place", "name")]
            blank = [Cell()] * (len(self.columns) - len(known) - 2)
            cells = [*known, word(row.status), *blank, Cell(row.reason or "")]
        return [dataclasses.replace(cell, text=" ".join(cell.text.split())) for cell in cells]

    def after(self, title: str, columns: Iterable[Column[R]]) -> Table[R]:
        """Returns the table with further columns behind that of the title."""
        place = self.titles.index(title) + 1
        return Table(self.rows, [*self.columns[:place], *columns, *self.columns[place:]])

    def _written(self) -> tuple[list[Column[R]], list[list[str]]]:
        """Returns the columns of a written table, and the texts of all lines, titles included."""
        lines = [self.titles, *self.body]
        used = [
            i
            for i, column in enumerate(self.columns)
            if not column.sparse or any(line[i] for line in lines[1:])
        ]
        return [self.columns[i] for i in used], [[line[i] for i in used] for line in lines]

    def latex(self) -> str:
        """Returns a tabular of the package booktabs, for a paper."""
        columns, lines = self._written()
        kinds = "".join("r" if column.right else "l" for column in columns)
        head, *body = [" & ".join(map(_escaped, line)) + r" \\" for line in lines]
        parts = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", head, r"\midrule", *body]
        return "\n".join([*parts, r"\bottomrule", r"\end{tabular}", ""])

    def markdown(self) -> str:
        """Returns a table for a README or a pull request."""
        columns, lines = self._written()
        return markdown(lines, [column.right for column in columns])

    def print(self, title: str, width: int | None = None) -> None:
        """Prints the table; `width` is that of the terminal in columns (None: as it is)."""
        from common.results.tables import terminal

        terminal.show(self, title, width)


def markdown(lines: Sequence[Sequence[str]], right: Sequence[bool], *, padded: bool = True) -> str:
    """Returns a Markdown table.

    Args:
        lines: texts by line; the first line has the titles.
        right: alignment to the right, by column.
        padded: whether the bars stand below each other.
    """
    texts = [[text.replace("|", r"\|") for text in line] for line in lines]
    # A rule of one character is no rule: at least "-:".
    widths = [max(2, *map(len, column)) if padded else 3 for column in zip(*texts, strict=True)]
    rule = ["-" * (w - 1) + ":-"[not r] for w, r in zip(widths, right, strict=True)]
    if padded:
        texts = [
            [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(line, widths, right, strict=True)]
            for line in texts
        ]
    return "".join(f"| {' | '.join(line)} |\n" for line in [texts[0], rule, *texts[1:]])


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"} | {"<": "$<$", ">": "$>$", "|": "$|$"}


def _escaped(text: str) -> str:
    """Escapes a text for LaTeX."""
    return "".join(_LATEX.get(mark, mark) for mark in text)


def csv_text(kind: type[DataclassInstance], rows: Iterable[DataclassInstance]) -> str:
    """Returns all fields of dataclasses of one kind as CSV, in full precision; None is empty."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(kind)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return out.getvalue()
