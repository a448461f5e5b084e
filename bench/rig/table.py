"""Sizes, bandwidths, ratios, and how they are printed. No torch, no processes."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dear.errors import UserError

T = TypeVar("T")
OPS = ("reduce_scatter", "all_gather", "all_reduce", "rs_ag")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str) -> int:
    """`4K` is 4000 bytes, `4Ki` is 4096; also M, Mi, G, Gi and plain numbers."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?I?)B?", text.strip().upper())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if size < 1:
        raise UserError(f"size {text!r} is not a number of bytes such as 4096, 4K, 4Ki or 25M")
    return int(size)


def bucket_bytes(size: int, world: int, item: int = 4) -> int:
    """`size`, rounded up so that every rank's part is a whole number of items."""
    return math.ceil(size / (item * world)) * item * world


def bus_factor(op: str, world: int) -> float:
    """Bytes that must leave each rank, as a fraction of the bucket: algbw times it is busbw.

    A reduce-scatter and an all-gather each move (n-1)/n of the bucket over every link; an
    all-reduce, and the pair of the two, twice that.
    """
    part = (world - 1) / world
    return part if op in ("reduce_scatter", "all_gather") else 2 * part


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Per iteration the time of the slowest rank; `times` is per rank and iteration."""
    return [max(step) for step in zip(*times, strict=True)]


def worst(ranks: Sequence[Mapping[str, float]], key: str) -> float:
    """The largest value that a rank has under this key."""
    return max(rank[key] for rank in ranks)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


Rounds = Mapping[int, float] | Sequence[float]
"""A value of every round, or of some by their number."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of one quotient per round, with its range."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, above: Rounds, below: Rounds) -> Ratio | None:
        """Quotients of values by round, of the rounds that both have; None if there is none."""
        first, second = (
            dict(kept if isinstance(kept, Mapping) else enumerate(kept)) for kept in (above, below)
        )
        quotients = [first[index] / second[index] for index in sorted(first.keys() & second.keys())]
        if not quotients:
            return None
        low, high, rounds = min(quotients), max(quotients), len(quotients)
        return cls(median=statistics.median(quotients), low=low, high=high, rounds=rounds)

    def text(self, unit: str = "x") -> str:
        """The median and its unit."""
        return f"{self.median:.2f}{unit}"

    def spread(self) -> str:
        """The range and the number of rounds."""
        return f"({self.low:.2f}..{self.high:.2f}, {self.rounds} rounds)"


def human_bytes(size: float) -> str:
    """`25 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} B"


def digits(value: float | None, count: int = 3) -> str:
    """`count` significant digits without an exponent; `-` for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, count - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 6)}f}"


def of_engines(
    header: Sequence[str],
    rounds: Mapping[str, T] | Mapping[tuple[str, ...], T],
    failures: Mapping[str, str],
    cells: Callable[[T], Sequence[str]],
) -> str:
    """A row for each label that has results, and one that says why for each with a failed engine.

    Args:
        rounds: results by label: an engine, perhaps with what it was asked for.
        cells: what stands behind the label.
    """
    rows = []
    for key, results in rounds.items():
        label = (key,) if isinstance(key, str) else key
        if results:
            rows.append([*label, *cells(results)])
        rows += [[*label, failures[part]] for part in label if part in failures]
    return layout(header, rows)


def layout(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: names to the left, numbers to the right; a short row's last cell is a remark."""

    def sized(row: Sequence[str]) -> Sequence[str]:
        return row if len(row) == len(header) else row[:-1]  # a remark is as long as it likes

    columns = itertools.zip_longest(header, *map(sized, rows), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(sized(row), widths, strict=False))
        ]
        lines.append("  ".join([*cells, *row[len(cells) :]]).rstrip())
    return "\n".join(lines)
