"""Rows and table of predicted steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.results.tables.cells import Cell, Column, number, significant
from common.results.tables.fields import NOTES, PLACE
from common.results.tables.table import Table


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """Predicted trial; times in seconds. Without a prediction, `reason` says why."""

    model: str
    batch: int
    world_size: int
    network: str | None
    algorithm: str
    status: str = "ok"
    reason: str | None = None
    step_s: float | None = None
    step_low_s: float | None = None
    """Shortest and longest step within the range of costs and compute."""
    step_high_s: float | None = None
    exposed_s: float | None = None
    """Part of the step in which the device waits for transfers."""
    compute_s: float | None = None
    """Step of a single worker."""
    baseline_s: float | None = None
    """Step of the algorithm to which the others are compared."""
    messages: float | None = None
    """Transfers per step."""
    flag: str | None = None
    fault: str | None = None

    @property
    def place(self) -> tuple[object, ...]:
        """Settings that compared rows have in common."""
        return self.model, self.batch, self.world_size, self.network

    def samples_per_s(self, step_s: float | None) -> float | None:
        """Returns the samples per second of all workers with steps of `step_s`."""
        return None if step_s is None else self.batch * self.world_size / step_s


def _throughput(row: PredictedRow) -> Cell:
    ends = (row.step_high_s, row.step_low_s)
    low, high = (row.samples_per_s(step_s) for step_s in ends)
    return number(row.samples_per_s(row.step_s), ends=f"{significant(low)}-{significant(high)}")


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


COLUMNS: tuple[Column[PredictedRow], ...] = (
    *PLACE,
    Column(title="samples/s (range)", cell=_throughput, weight=1),
    Column(title="step ms", cell=lambda row: number(row.step_s and 1e3 * row.step_s), weight=3),
    Column(
        title="exposed ms",
        cell=lambda row: number(None if row.exposed_s is None else 1e3 * row.exposed_s),
        weight=3,
    ),
    Column(
        title="efficiency",
        cell=lambda row: number(_ratio(row.compute_s, row.step_s), "{:.0%}".format),
        weight=2,
    ),
    Column(
        title="speedup",
        cell=lambda row: number(_ratio(row.baseline_s, row.step_s), "{:.2f}".format, unit="x"),
        weight=1,
    ),
    Column(title="messages", cell=lambda row: number(row.messages, "{:g}".format), weight=6),
    NOTES,
)


def table_of(rows: Sequence[PredictedRow]) -> Table[PredictedRow]:
    """Returns the table of predicted trials."""
    return Table(rows, COLUMNS)


def overview(rows: Sequence[PredictedRow], base: str) -> list[list[str]]:
    """Returns lines for `markdown`: one per place, with the speed-up of each algorithm over `base`.

    A range is that of the ratio, as costs and compute change for both algorithms.
    """
    labels = [label for label in dict.fromkeys(row.algorithm for row in rows) if label != base]
    lines = [["model", "batch", "workers", "network", f"{base}, samples/s", *labels, "fastest"]]
    for place in dict.fromkeys(row.place for row in rows):
        cell = {row.algorithm: row for row in rows if row.place == place}
        known = [row for row in cell.values() if row.step_s is not None]
        fastest = min(known, key=lambda row: row.step_s or 0.0).algorithm if known else ""
        under = cell.get(base)
        texts = [_speedup(under, cell.get(label)) for label in labels]
        base_text = "" if under is None or under.step_s is None else _throughput(under).text
        lines.append([*(str(value or "") for value in place), base_text, *texts, fastest])
    return lines


def _speedup(under: PredictedRow | None, row: PredictedRow | None) -> str:
    if row is None or under is None or row.step_s is None or under.step_s is None:
        return "-"
    ratios = [
        _ratio(under.step_s, row.step_s),
        _ratio(under.step_low_s, row.step_low_s),
        _ratio(under.step_high_s, row.step_high_s),
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{known[0]:.2f} ({min(known):.2f}-{max(known):.2f})"
