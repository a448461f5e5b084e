"""What a figure is drawn from: the records of a sweep, their rows, and how each looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.results import rows
from common.results.faith import doubt
from common.results.records import Record
from common.results.rows import Row
from common.results.store import Comparison
from dear.errors import UserError
from plots import style
from plots.style import Look

SINGLE = "none"
"""The algorithm of a single worker."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A trial that has timed steps, in a figure."""

    record: Record
    row: Row
    look: Look

    @property
    def algorithm(self) -> str:
        return self.record.trial["algorithm"]

    @property
    def place(self) -> dict[str, Any]:
        """What the first columns of every figure's data say."""
        row = self.row
        place = {"model": row.model, "batch_size": row.batch_size, "world_size": row.world_size}
        return place | {"network": row.network, "fault": row.fault, "algorithm": row.algorithm}


def timed(records: Sequence[Record]) -> list[Record]:
    """Those that have timed steps."""
    return [one for one in records if one.ok and one.iters and not one.trial.get("learn")]


def load(folder: Path) -> tuple[list[Mark], str]:
    """All trials of a sweep that have timed steps, in the order of figures, and what they are
    compared to.

    Raises:
        UserError: there are none.
    """
    comparison = Comparison.load(folder)
    good = timed(comparison.results(folder))
    if not good:
        raise UserError(f"{folder}: no trial has timed steps")
    good.sort(key=lambda record: style.order(record.trial["algorithm"]))
    looks = style.looks(good)
    made = rows.make_rows(good, comparison.compare_to)
    marks = [
        Mark(record=record, row=row, look=looks[record.label])
        for record, row in zip(good, made, strict=True)
    ]
    return marks, comparison.compare_to


def panels(
    marks: Sequence[Mark], key: Callable[[Row], tuple[Any, ...]] = lambda row: row.place
) -> list[list[Mark]]:
    """Marks by what they have in common, in the order of their first ones."""
    found: dict[tuple[Any, ...], list[Mark]] = {}
    for mark in marks:
        found.setdefault(key(mark.row), []).append(mark)
    return list(found.values())


def title(row: Row, *, world: bool = True, network: bool = True) -> str:
    """Of a panel: what its trials have in common."""
    text = f"{row.model}, batch {row.batch_size} per worker"
    workers = "1 worker" if row.world_size == 1 else f"{row.world_size} workers"
    text += f", {workers}" if world else ""
    names = (row.network if network else None, row.fault)
    return text + "".join(f", {name}" for name in names if name)


def variants(records: Sequence[Record], *own: str) -> dict[tuple[Any, ...], list[Record]]:
    """Believed ones of several workers by everything but the keys `own`: the same trial elsewhere.

    Args:
        own: keys of a trial, such as `world_size`.
    """
    kept = ("model", "batch_size", "world_size", "network", "fault", "label")
    found: dict[tuple[Any, ...], list[Record]] = {}
    for one in timed(records):
        if one.trial["algorithm"] != SINGLE and doubt(one) is None:
            key = tuple(str(one.trial.get(name)) for name in kept if name not in own)
            found.setdefault(key, []).append(one)
    return found


def told(marks: Sequence[Mark]) -> str:
    """How often was measured, for captions."""
    counts = [mark.row.repeats for mark in marks]
    steps = style.count(round(mark.row.n / mark.row.repeats) for mark in marks)
    what = "repeat" if max(counts) == 1 else "repeats, in turns,"
    return f"n = {style.count(counts)} {what} of {steps} steps"
