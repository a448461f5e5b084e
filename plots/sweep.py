"""Input of figures: the trials of a sweep, each with its record, table row and look (a mark)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.results.records import Record, grouped
from common.results.store import Comparison
from common.results.timed import rows
from common.results.timed.rows import Row
from common.results.validity import flag_text
from dear.errors import UserError
from plots import style
from plots.looks import Look, looks, order

SINGLE = "none"
"""Name of the algorithm of a single worker."""
_PLACE = ("model", "batch_size", "world_size", "network", "fault")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Trial with timed steps, as drawn in a figure."""

    record: Record
    row: Row
    look: Look

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, without options."""
        return self.record.trial["algorithm"]

    def data(self, *fields: str) -> dict[str, Any]:
        """Returns a row of the figure's data: the trial, and the named fields of its table row."""
        return {name: getattr(self.row, name) for name in (*_PLACE, "algorithm", *fields)}


def timed(records: Sequence[Record]) -> list[Record]:
    """Returns the records that have timed steps."""
    return [each for each in records if each.ok and each.iters and not each.trial.get("learn")]


def load(folder: Path) -> tuple[list[Mark], str]:
    """Returns the trials with timed steps, in the order of figures, and the baseline's label.
    Raises `UserError` if no trial has timed steps."""
    comparison = Comparison.load(folder)
    records = timed(comparison.results(folder))
    if not records:
        raise UserError(f"{folder}: no trial has timed steps")
    records.sort(key=lambda record: order(record.trial["algorithm"]))
    by_label = looks(records)
    marks = [
        Mark(record=record, row=row, look=by_label[record.label])
        for record, row in zip(records, rows.make_rows(records, comparison.compare_to), strict=True)
    ]
    return marks, comparison.compare_to


def panels(marks: Iterable[Mark], *free: str) -> list[list[Mark]]:
    """Groups marks whose rows differ only in the fields `free`; keeps the order of the marks."""
    names = [name for name in _PLACE if name not in free]
    groups = grouped(marks, lambda mark: tuple(getattr(mark.row, name) for name in names))
    return list(groups.values())


def title(row: Row, free: str = "") -> str:
    """Returns the title of a panel: what its trials have in common, without the field `free`."""
    workers = "1 worker" if row.world_size == 1 else f"{row.world_size} workers"
    parts = {"model": row.model, "batch_size": f"batch {row.batch_size} per worker"}
    parts |= {"world_size": workers, "network": row.network, "fault": row.fault}
    return ", ".join(part for name, part in parts.items() if part and name != free)


def variants(records: Sequence[Record], *free: str, flagged: bool = False) -> list[list[Record]]:
    """Groups records whose trials differ only in the keys `free`; leaves out single workers. `free`
    has keys of a trial such as `world_size`. With `flagged`, flagged (invalid) records are
    included."""
    names = [name for name in (*_PLACE, "label") if name not in free]
    used = [
        record
        for record in timed(records)
        if record.trial["algorithm"] != SINGLE and (flagged or flag_text(record) is None)
    ]
    groups = grouped(used, lambda record: tuple(str(record.trial.get(name)) for name in names))
    return list(groups.values())


def sample_size(marks: Sequence[Mark]) -> str:
    """Returns the numbers of repeats and steps as a text for captions."""
    counts = [mark.row.repeats for mark in marks]
    steps = style.count(round(mark.row.n / mark.row.repeats) for mark in marks)
    repeats = "repeat" if max(counts) == 1 else "interleaved repeats"
    return f"n = {style.count(counts)} {repeats} of {steps} steps"
