"""A table of rows, of whichever kind: as Markdown, as CSV, and as text for a terminal."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.results.records import Record

MANY = 400
_COLOURS = {"FASTER": "green", "SLOWER": "red", "NO": "bold red", "failed": "red", "timeout": "red"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str
    text: Callable[[Any], str]
    """What stands in it of a row that has a result."""
    numeric: bool = True
    """Aligned to the right."""
    sparse: bool = False
    """Left out of Markdown where no row has anything in it; terminals leave out all such."""
    weight: int = 5
    """On a terminal those of less come first, and those of more leave where it is narrow."""


_IN_WORDS = {"batch": "batch {}", "workers": "{} workers", "correct": "correct: {}"}
PLACE = (
    Column(title="model", text=lambda row: row.model, numeric=False, weight=0),
    Column(title="batch", text=lambda row: str(row.batch), weight=0),
    Column(title="workers", text=lambda row: str(row.world_size), weight=0),
    Column(
        title="network", text=lambda row: row.network or "", numeric=False, sparse=True, weight=0
    ),
    Column(title="fault", text=lambda row: row.fault or "", numeric=False, sparse=True, weight=0),
    Column(title="algorithm", text=lambda row: row.algorithm, numeric=False, weight=0),
)
"""The columns that every table begins with; all that is known of a trial without a result."""


@dataclass(frozen=True)
class Table:
    """Rows as text. The last column has the reason where a row has no result."""

    rows: Sequence[Any]
    columns: Sequence[Column]

    @property
    def titles(self) -> list[str]:
        return [column.title for column in self.columns]

    @property
    def body(self) -> list[list[str]]:
        """A line of texts per row, in the order of the columns."""
        return [[" ".join(text.split()) for text in self._texts(row)] for row in self.rows]

    def _texts(self, row: Any) -> list[str]:
        if row.status == "ok":
            return [column.text(row) for column in self.columns]
        blank = [""] * (len(self.columns) - len(PLACE) - 2)
        return [*(column.text(row) for column in PLACE), row.status, *blank, row.reason or ""]

    def _used(self, body: list[list[str]]) -> list[int]:
        """The columns that a written table has."""
        return [
            i
            for i, column in enumerate(self.columns)
            if not column.sparse or any(line[i] for line in body)
        ]

    def latex(self) -> str:
        """For a paper: a tabular of the package booktabs."""
        body = self.body
        used = self._used(body)
        kinds = "".join("r" if self.columns[i].numeric else "l" for i in used)
        lines = [[self.titles[i] for i in used], *([line[i] for i in used] for line in body)]
        written = [" & ".join(map(_escaped, line)) + r" \\" for line in lines]
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{kinds}}}",
                *(r"\toprule", written[0], r"\midrule", *written[1:], r"\bottomrule"),
                r"\end{tabular}",
                "",
            ]
        )

    def markdown(self) -> str:
        """For a README or a pull request."""
        body = self.body
        used = self._used(body)
        lines = [[self.titles[i] for i in used]]
        lines += [[line[i].replace("|", r"\|") for i in used] for line in body]
        right = [self.columns[i].numeric for i in used]
        # A rule of one character is no rule: at least "-:".
        widths = [max(2, *map(len, texts)) for texts in zip(*lines, strict=True)]

        def shown(texts: Sequence[str]) -> str:
            padded = [
                text.rjust(width) if aligned else text.ljust(width)
                for text, width, aligned in zip(texts, widths, right, strict=True)
            ]
            return "| " + " | ".join(padded) + " |"

        rule = [
            "-" * (width - 1) + (":" if aligned else "-")
            for width, aligned in zip(widths, right, strict=True)
        ]
        return "\n".join(map(shown, [lines[0], rule, *lines[1:]])) + "\n"

    def print(self, title: str, width: int | None = None) -> None:
        """To stdout, a block per model; colours, and grey, only where they can be seen.

        On a terminal what all rows of a block have in common stands above it, and what there is no
        room for is left out, or said below it; elsewhere everything is printed. More than `MANY`
        rows nobody reads on a terminal: they are printed as Markdown, which is there at once.

        Args:
            width: of the terminal, in columns; None: as it is.
        """
        from rich.console import Console
        from rich.text import Text

        console = Console(file=sys.stdout, width=width)
        console = console if console.is_terminal else Console(file=sys.stdout, width=300)
        console.print(Text(title, style="bold"))
        if len(self.rows) > MANY:
            print(self.markdown(), end="")
            return
        if not console.is_terminal:
            self._print_grid(console, range(len(self.columns)), self.rows, self.body)
            return
        blocks: dict[Any, list[int]] = {}
        for i, row in enumerate(self.rows):
            blocks.setdefault(row.model, []).append(i)
        for places in blocks.values():
            self._print_block(console, places)

    def _print_block(self, console: Any, places: Sequence[int]) -> None:
        """The rows at these places, as far as they fit."""
        from rich.text import Text

        rows = [self.rows[i] for i in places]
        body = Table(rows, self.columns).body
        of_place = range(len(PLACE) - 1)
        shared = [
            i
            for i, title in enumerate(self.titles)
            if (i in of_place or title in _IN_WORDS) and len({line[i] for line in body}) == 1
        ]
        words = [_IN_WORDS.get(self.titles[i], "{}").format(body[0][i]) for i in shared]
        console.print(Text(", ".join(word for i, word in zip(shared, words, strict=True)
                                     if body[0][i]), style="bold"))  # fmt: skip
        used = [i for i in range(len(self.columns)) if i not in shared and any(x[i] for x in body)]
        used.sort(key=lambda i: self.columns[i].weight)
        left = _fitting([(self.columns[i], _width(self.titles[i], [line[i] for line in body]))
                         for i in used], console.width)  # fmt: skip
        self._print_grid(console, [i for i in used if self.columns[i] in left], rows, body)
        last = len(self.columns) - 1
        if last in used and self.columns[last] not in left:
            for row, line in zip(rows, body, strict=True):
                if line[last]:
                    console.print(Text(f"{row.algorithm}: {line[last]}"))

    def _print_grid(
        self, console: Any, columns: Sequence[int], rows: Sequence[Any], body: list[list[str]]
    ) -> None:
        from rich.table import Table as Grid
        from rich.text import Text

        used = [i for i in columns if any(line[i] for line in body)]
        grid = Grid()
        for i in used:
            column = self.columns[i]
            least = _width(column.title, [line[i] for line in body])
            how = {"justify": "right" if column.numeric else "left", "overflow": "fold"}
            if console.is_terminal and i != len(self.columns) - 1:
                how |= {"min_width": least, "max_width": least}
            grid.add_column(column.title, **how)
        before = None
        for row, line in zip(rows, body, strict=True):
            if before is not None and before.model != row.model:
                grid.add_section()
            before = row
            usual = "dim" if getattr(row, "flag", None) else ""
            styles = [_COLOURS.get(line[i], usual) for i in used]
            grid.add_row(*(Text(line[i], style=how) for i, how in zip(used, styles, strict=True)))
        console.print(grid)


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {one: f"\\{one}" for one in "&%$#_{}"} | {"<": "$<$", ">": "$>$", "|": "$|$"}


def _escaped(text: str) -> str:
    """As LaTeX prints it."""
    return "".join(_LATEX.get(one, one) for one in text)


def _width(title: str, texts: Sequence[str]) -> int:
    """What a column needs so that no word is cut: titles are broken between words."""
    return max(*map(len, title.split()), *map(len, texts))


_NOTES = 30
"""Notes are broken into lines, but not of fewer characters."""


def _fitting(columns: Sequence[tuple[Column, int]], width: int) -> list[Column]:
    """Those that a terminal of this width has room for; the heaviest leave first, and the last of
    equals.

    Args:
        columns: with the characters that each needs; the notes, which come last, may have fewer.
    """
    left = list(columns)
    while left:
        needed = sum(min(w, _NOTES) if c.title == "notes" else w for c, w in left)
        if needed + 3 * len(left) + 1 <= width or len(left) == 1:
            break
        left.remove(max(reversed(left), key=lambda one: one[0].weight))
    return [column for column, _ in left]


def identity(record: Record) -> dict[str, Any]:
    """What every row says of its trial."""
    trial = record.trial
    known = {"model": trial["model"], "world_size": trial["world_size"], "fault": record.fault}
    known |= {"network": trial.get("network"), "algorithm": record.label}
    return known | {"status": record.status}


def csv_text(kind: type, rows: Sequence[Any]) -> str:
    """All fields of all rows, dataclasses of one `kind`, full precision; None is empty."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(kind)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return out.getvalue()


def given(field: str, form: str, missing: str = "") -> Callable[[Any], str]:
    """The text of a column that shows one field of a row, which may be None."""

    def text(row: Any) -> str:
        value = getattr(row, field)
        return missing if value is None else format(value, form)

    return text


def doubted(row: Any, text: str) -> str:
    """A number in parentheses where the row's number may not be believed."""
    return f"({text})" if text and row.flag else text


def significant(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return ""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(decimals, 0)}f}"
