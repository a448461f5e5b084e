"""Sizes, bandwidths and ratios, and tables of them. Nothing here needs torch."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dear.errors import UserError

OPS = ("reduce_scatter", "all_gather", "all_reduce", "rs_ag")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(text: str) -> int:
    """Reads a size: `4K` is 4000 bytes, `4Ki` is 4096; also M, Mi, G, Gi and plain numbers."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?I?)B?", text.strip().upper())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if size < 1:
        raise UserError(f"size {text!r} is not a number of bytes such as 4096, 4K, 4Ki or 25M")
    return int(size)


def bucket_bytes(text: str, world: int, item: int = 4) -> int:
    """Reads a size and rounds it up, so that each rank's part is a whole number of items."""
    return math.ceil(parse_size(text) / (item * world)) * item * world


def bus_factor(op: str, world: int) -> float:
    """Returns the bytes that leave each rank, divided by those of the bucket (busbw / algbw). This
    is (n-1)/n for a reduce-scatter and for an all-gather, and 2(n-1)/n for an all-reduce and for a
    reduce-scatter followed by an all-gather."""
    part = (world - 1) / world
    return part if op in ("reduce_scatter", "all_gather") else 2 * part


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Returns the time of the slowest rank by iteration; `times` is by rank and iteration."""
    return [max(step) for step in zip(*times, strict=True)]


Rounds = Mapping[int, float] | Sequence[float]
"""Values by round; rounds may be missing."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Median and range of a quotient that is computed once per round."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, above: Rounds, below: Rounds) -> Ratio | None:
        """Divides the values of the rounds that both have; None if there is no such round."""
        first, second = (
            dict(kept if isinstance(kept, Mapping) else enumerate(kept)) for kept in (above, below)
        )
        quotients = [first[index] / second[index] for index in sorted(first.keys() & second.keys())]
        if not quotients:
            return None
        low, high, rounds = min(quotients), max(quotients), len(quotients)
        return cls(median=statistics.median(quotients), low=low, high=high, rounds=rounds)

    def text(self, unit: str = "x") -> str:
        """Returns the median with its unit, the range and the number of rounds."""
        return f"{self.median:.2f}{unit} ({self.low:.2f}..{self.high:.2f}, {self.rounds} rounds)"


def human_bytes(size: float) -> str:
    """Returns a size such as `25 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} B"


def layout(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table: the first two columns are aligned to the left, the others to the right. The
    last cell of a row that is shorter than the header is a remark of any length."""

    def aligned(row: Sequence[str]) -> Sequence[str]:
        return row if len(row) == len(header) else row[:-1]

    columns = itertools.zip_longest(header, *map(aligned, rows), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(aligned(row), widths, strict=False))
        ]
        lines.append("  ".join([*cells, *row[len(cells) :]]).rstrip())
    return "\n".join(lines)
