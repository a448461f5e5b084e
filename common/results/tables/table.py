"""Table of typed cells, for output on terminals and as Markdown, LaTeX, HTML or CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from common.results.tables import terminal
from common.results.tables.cells import PROVISIONAL, Cell, Column, R
from dear.errors import UserError, one_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Table(Generic[R]):
    """Rows and columns. A row without a result shows only its first columns, status and reason. The
    first columns are the settings of the trial and the algorithm; the last has the notes."""

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
        if row.status in ("ok", PROVISIONAL):
            cells = [column.cell(row) for column in self.columns]
        else:
            known = [c.cell(row) for c in self.columns if c.role in ("place", "name")]
            blank = [Cell()] * (len(self.columns) - len(known) - 2)
            cells = [*known, Cell(row.status, word=True), *blank, Cell(row.reason or "")]
        return [dataclasses.replace(cell, text=" ".join(cell.text.split())) for cell in cells]

    def after(self, title: str, columns: Iterable[Column[R]]) -> Table[R]:
        """Returns the table with further columns behind the column `title`."""
        place = self.titles.index(title) + 1
        return Table(self.rows, [*self.columns[:place], *columns, *self.columns[place:]])

    def _written(self) -> list[int]:
        """Returns the indices of the columns that Markdown and LaTeX show."""
        body = self.body
        return [
            i
            for i, column in enumerate(self.columns)
            if not column.sparse or any(line[i] for line in body)
        ]

    def latex(self, titles: Sequence[str] | None = None) -> str:
        """Returns a tabular of the package booktabs for a paper, with notes as footnotes. Footnotes
        need the package threeparttable. `titles` names the columns to show, in this order; None:
        all columns that have a value. Raises `UserError` if a title has no column, or the column
        has no value."""
        roles = [column.role for column in self.columns]
        used = [i for i in self._written() if roles[i] != "notes"]
        if titles is not None:
            places = {self.titles[i]: i for i in used}
            for title in titles:
                if title in self.titles and title not in places:
                    raise UserError(
                        f"column {title}: no row has a value (see docs/results.md); with values: "
                        + ", ".join(places)
                    )
            used = [one_of("column", title, places) for title in titles]
        name = next((at for at, i in enumerate(used) if roles[i] == "name"), -1)
        marks: dict[str, str] = {}
        body = []
        for line in self.body:
            texts = [_escaped(line[i]) for i in used]
            note = line[roles.index("notes")] if "notes" in roles else ""
            if note:
                mark = marks.setdefault(note, _letters(len(marks)))
                texts[name] += rf"\tnote{{{mark}}}"
            body.append(" & ".join(texts) + r" \\")
        kinds = "".join("r" if self.columns[i].right else "l" for i in used)
        head = " & ".join(_escaped(self.titles[i]) for i in used) + r" \\"
        parts = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", head, r"\midrule", *body]
        parts += [r"\bottomrule", r"\end{tabular}"]
        if marks:
            items = [rf"\item[{mark}] {_escaped(note)}" for note, mark in marks.items()]
            notes = [r"\begin{tablenotes}", *items, r"\end{tablenotes}"]
            parts = [r"\begin{threeparttable}", *parts, *notes, r"\end{threeparttable}"]
        return "\n".join([*parts, ""])

    def markdown(self) -> str:
        """Returns a table for a README or a pull request."""
        used = self._written()
        lines = [[line[i] for i in used] for line in (self.titles, *self.body)]
        return markdown(lines, [self.columns[i].right for i in used])

    def print(self, title: str, width: int | None = None) -> None:
        """Prints the table; `width` is the terminal's width in characters; None: the real one."""
        cells, grey = self.cells, [row.flag is not None for row in self.rows]
        if not terminal.show(self.columns, cells, grey, title, width):
            print(self.markdown(), end="")


def markdown(lines: Sequence[Sequence[str]], right: Sequence[bool], *, padded: bool = True) -> str:
    """Returns a Markdown table.

    Args:
        lines: texts by line; the first line has the titles.
        right: alignment to the right, by column.
        padded: True to align the bars by spaces.
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


def _letters(number: int) -> str:
    """Returns a mark of a footnote: a, b, ..., z, aa, ab, ..."""
    before, last = divmod(number, 26)
    return (_letters(before - 1) if before else "") + chr(ord("a") + last)


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(mark, mark) for mark in text)


def csv_text(kind: type[DataclassInstance], rows: Iterable[DataclassInstance]) -> str:
    """Returns all fields of dataclasses of one kind as CSV, in full precision; None is empty."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(kind)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return out.getvalue()
