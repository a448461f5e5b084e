"""Typed cells and columns of tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

UNKNOWN = "-"
"""Text of a cell whose value is unknown."""
PROVISIONAL = "provisional"
"""Status of a row whose trial was interrupted but has some repeats."""
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
    """Number by which rows are sorted; None: they are sorted by the text, or the cell is empty."""
    word: bool = False
    """True for a verdict or a state. Some of them have colours."""


def significant(value: float | None) -> str:
    """Formats a number with three significant digits, without an exponent."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(decimals, 0)}f}"


def percent(share: float) -> str:
    """Formats a share in percent, with as many digits as it has: 0.975 is 97.5%."""
    return f"{100 * share:g}%"


def interval(low: float | None, high: float | None, form: Form) -> str:
    """Formats an interval; returns an empty text if an end is None."""
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
    """Order on a terminal: light columns come first; a narrow terminal drops the heaviest."""
    role: Literal["place", "name", "notes"] | None = None
    """Role of the column: a part of the trial's cell, the name of the row, or its notes."""
    phrase: str | None = None
    """Format by which a heading shows a value that is equal in all rows; None: the value stays in
    its column. Columns with the role `place` have a format by default."""


def texts(
    title: str,
    field: str = "",
    *,
    word: bool = False,
    sparse: bool = False,
    weight: int = 5,
    role: Literal["place", "name", "notes"] | None = None,
) -> Column[Shown]:
    """Returns the column of a row's field with texts; by default, the field is named as the title.
    The other arguments are those of `Cell` and `Column`."""
    return Column(
        title=title,
        cell=lambda row: Cell(getattr(row, field or title) or "", word=word),
        right=False,
        sparse=sparse,
        weight=weight,
        role=role,
    )


def numbers(
    title: str,
    field: str,
    form: Form = significant,
    *,
    ends: Form | None = None,
    unit: bool = False,
    missing: str = "",
    sparse: bool = False,
    weight: int = 5,
) -> Column[Shown]:
    """Returns the column of a row's field with numbers; flagged ones are in parentheses. Cells have
    an interval if there are fields with the same name and the endings `_low`, `_high`. `ends` is
    the format of the ends of intervals; None: `form`. `missing` is the text of a value that is
    None."""

    def cell(row: Shown) -> Cell:
        low, high = (getattr(row, f"{field}_{end}", None) for end in ("low", "high"))
        text = interval(low, high, ends or form)
        value, after = getattr(row, field), f" {row.unit}" if unit else ""
        return number(value, form, unit=after, ends=text, flag=row.flag, missing=missing)

    return Column(title=title, cell=cell, sparse=sparse, weight=weight)
