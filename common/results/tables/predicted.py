"""Rows and table of predicted steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.results.tables.cells import Cell, Column, number, significant, texts
from common.results.tables.fields import NOTES, PLACE
from common.results.tables.table import Table, markdown
from common.virtual.over import Point

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)
"""Shares of the speed of compute alone, of `ReachRow`."""


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """Predicted trial; times in seconds. Without a prediction, `reason` says why."""

    model: str
    batch: int | str
    """Samples per step of each worker, or a list if they differ."""
    world_size: int
    samples: float
    """Samples of all workers in the time `step_s`."""
    network: str | None
    algorithm: str
    kind: str = ""
    """Name of the algorithm, if `algorithm` is the label of a variant."""
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
    """Step of the algorithm to which the others are compared; None if that one is flagged."""
    event_model_s: float | None = None
    """Step by the event model, which uses the algorithm's declared order of transfers and not its
    code; None: the event model does not cover the algorithm."""
    messages: float | None = None
    """Transfers per step."""
    fault: str | None = None
    slowest_s: float | None = None
    """Step of the slowest rank; None: one rank stands for all."""
    staleness: tuple[float, float] | None = None
    """Mean age of the stalest neighbour's values, and the largest age, in steps."""
    point: Point | None = None
    """Value of the property that varies in the series."""

    @property
    def flag(self) -> str | None:
        """Reason why the prediction is not valid: the two methods disagree beyond the range."""
        low, second, high = self.step_low_s, self.event_model_s, self.step_high_s
        if low is None or high is None or second is None or low <= second <= high:
            return None
        return f"the event model gives {1e3 * second:.1f} ms, outside the range"

    @property
    def place(self) -> tuple[object, ...]:
        """Settings that compared rows have in common."""
        return self.model, self.batch, self.world_size, self.network, self.fault, self.at

    @property
    def at(self) -> str:
        """Value of the property that a series goes over; empty if another column has it."""
        return "" if self.point is None or self.point.axis == "workers" else self.point.text

    def speed_up(self, base: PredictedRow) -> tuple[float, float, float]:
        """Returns the speed-up over the row `base`, and its range; both rows have predictions.

        The range is that of the ratio, since costs and compute change for both algorithms.
        """
        ratios = [
            _ratio(base.step_s, self.step_s),
            _ratio(base.step_low_s, self.step_low_s),
            _ratio(base.step_high_s, self.step_high_s),
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        return known[0], min(known), max(known)

    def samples_per_s(self, step_s: float | None) -> float | None:
        """Returns the samples per second of all workers with steps of `step_s`."""
        return None if step_s is None else self.samples / step_s


def _throughput(row: PredictedRow) -> Cell:
    ends = (row.step_high_s, row.step_low_s)
    low, high = (row.samples_per_s(step_s) for step_s in ends)
    ends_text = f"{significant(low)}-{significant(high)}"
    return number(row.samples_per_s(row.step_s), ends=ends_text, flag=row.flag)


def _staleness(row: PredictedRow) -> Cell:
    mean, most = row.staleness or (None, None)
    unit = "" if most is None else f", max {most:g}"
    return number(mean, "{:.1f}".format, unit=unit, flag=row.flag)


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


def _off(row: PredictedRow) -> float | None:
    ratio = _ratio(row.event_model_s, row.step_s)
    return None if ratio is None else ratio - 1


def _milliseconds(row: PredictedRow, seconds: float | None) -> Cell:
    return number(None if seconds is None else 1e3 * seconds, flag=row.flag)


def _notes(row: PredictedRow) -> Cell:
    return Cell("; ".join(filter(None, (row.flag, row.reason))))


COLUMNS: tuple[Column[PredictedRow], ...] = (
    *PLACE[:-1],
    texts("at", sparse=True, weight=0, role="place"),
    PLACE[-1],
    Column(title="samples/s (range)", cell=_throughput, weight=1),
    Column(title="step ms", cell=lambda row: _milliseconds(row, row.step_s), weight=3),
    Column(title="exposed ms", cell=lambda row: _milliseconds(row, row.exposed_s), weight=3),
    Column(
        title="efficiency",
        cell=lambda row: number(_ratio(row.compute_s, row.step_s), "{:.0%}".format, flag=row.flag),
        weight=2,
    ),
    Column(
        title="speedup",
        cell=lambda row: number(
            _ratio(row.baseline_s, row.step_s), "{:.2f}".format, unit="x", flag=row.flag
        ),
        weight=1,
    ),
    Column(
        title="event model",
        cell=lambda row: number(_off(row), "{:+.1%}".format, flag=row.flag),
        weight=5,
    ),
    Column(title="messages", cell=lambda row: number(row.messages, "{:.4g}".format), weight=6),
    Column(
        title="slowest rank ms",
        cell=lambda row: _milliseconds(row, row.slowest_s),
        sparse=True,
        weight=2,
    ),
    Column(title="staleness", cell=_staleness, sparse=True, weight=2),
    dataclasses.replace(NOTES, cell=_notes),
)


def table_of(rows: Sequence[PredictedRow]) -> Table[PredictedRow]:
    """Returns the table of predicted trials."""
    return Table(rows, COLUMNS)


def overview(rows: Sequence[PredictedRow], base: str) -> str:
    """Returns a Markdown table: a line per cell, with each algorithm's speed-up over `base`; below
    it, the notes. A flagged number is in parentheses.
    """
    labels = [label for label in dict.fromkeys(row.algorithm for row in rows) if label != base]
    place_titles = ["model", "batch", "workers", "network", "fault", "at"]
    lines = [[*place_titles, f"{base}, samples/s", *labels, "fastest"]]
    right = [False, True, True, False, False, True, True, *[True] * len(labels), False]
    for place in dict.fromkeys(row.place for row in rows):
        cell = {row.algorithm: row for row in rows if row.place == place}
        valid = {n: row.step_s for n, row in cell.items() if row.step_s and row.flag is None}
        under = cell.get(base)
        texts = [_speedup(under, cell.get(label)) for label in labels]
        first = "-" if under is None or under.step_s is None else _throughput(under).text
        fastest = min(valid, key=valid.__getitem__) if valid else ""
        lines.append([*(str(value or "") for value in place), first, *texts, fastest])
    for index, used in ((5, any(row.at for row in rows)), (4, any(row.fault for row in rows))):
        for line in [right, *lines] if not used else ():
            del line[index]
    notes = [f"{row.algorithm}: {note}" for row in rows for note in (row.reason, row.flag) if note]
    return "\n".join([markdown(lines, right), *dict.fromkeys(notes)])


def _speedup(under: PredictedRow | None, row: PredictedRow | None) -> str:
    if row is None or under is None or row.step_s is None or under.step_s is None:
        return "-"
    ratio, low, high = row.speed_up(under)
    text = f"{ratio:.2f} ({low:.2f}-{high:.2f})"
    return f"({text})" if row.flag or under.flag else text


@dataclass(frozen=True, kw_only=True)
class ReachRow:
    """Bandwidths at which an algorithm reaches `SHARES` of the speed of compute alone."""

    model: str
    batch: int | str
    workers: int
    network: str | None
    fault: str | None = None
    algorithm: str
    gbps: Mapping[float, float | None] = field(default_factory=dict)
    """Bandwidth of a host's link in Gb/s by share; None: no bandwidth is enough."""
    reason: str | None = None
    """Reason why there is no bandwidth."""


def reach_text(rows: Sequence[ReachRow]) -> str:
    """Returns a Markdown table of the bandwidths, with the notes below it."""
    faults = ["fault"] if any(row.fault for row in rows) else []
    place = ["model", "batch", "workers", "network", *faults, "algorithm"]
    titles = [*place, *(f"{share:.0%}, Gb/s" for share in SHARES)]
    lines = [titles]
    for row in rows:
        cells = [row.gbps.get(share) for share in SHARES]
        texts = ["never" if value is None else significant(value) for value in cells]
        if row.reason is None:
            lines.append([*(str(getattr(row, name) or "") for name in place), *texts])
    notes = [f"{row.algorithm}: {row.reason}" for row in rows if row.reason]
    left = [False] * (2 + len(faults))  # network, fault, algorithm
    table = markdown(lines, [False, True, True, *left, *[True] * len(SHARES)])
    return "\n".join([table, *dict.fromkeys(notes)])
