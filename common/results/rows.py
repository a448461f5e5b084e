"""The comparison that a sweep is run for: rows, their tables, and the references' reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.results.records import Record
from common.results.stats import speedup, verdict
from common.results.table import PLACE, Column, Table, given, identity, significant

# A bound comes from a short measurement: only more than this beyond it is worth a remark.
_BEYOND = 1.02
UNKNOWN = "-"
LEGEND = (
    "milliseconds per step; forward, backward, update and exposed comm are rank 0's and add up to "
    "its step; exposed comm -: contained in the others (docs/measurement.md)"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial in a table, and a line of its CSV file; None where there is nothing to say.

    Every trial with a result has `throughput` to `repeats`, `correct` and `step_s`.
    """

    model: str
    batch_size: int
    world_size: int
    algorithm: str
    status: str
    network: str | None = None
    """Of an emulated cluster."""
    fault: str | None = None
    """What was done to the emulated cluster meanwhile."""
    throughput: float | None = None
    unit: str | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    n: int | None = None
    """Timed steps."""
    repeats: int | None = None
    speedup: float | None = None
    """Median step time of the algorithm compared to, over this one's."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    verdict: str | None = None
    efficiency: float | None = None
    """Throughput over world size times the single worker's throughput."""
    of_bound: float | None = None
    """The least step time that the algorithm allows here, over the median step time."""
    correct: bool | None = None
    """Replicas agree, and the first steps match plain training."""
    reason: str | None = None
    """Why there is no number, or why to doubt it."""
    step_s: float | None = None
    """Median of the slowest rank."""
    forward_s: float | None = None
    """Of rank 0, as the next three, which add up to about `step_s`; without waiting."""
    backward_s: float | None = None
    update_s: float | None = None
    exposed_comm_s: float | None = None
    """Waiting for communication; None where an algorithm hides it in the other three."""
    bound: str | None = None
    """Which formula `bound_s` follows."""
    bound_s: float | None = None
    compute_limit_s: float | None = None
    wire_limit_s: float | None = None

    @property
    def batch(self) -> int:
        return self.batch_size

    @property
    def place(self) -> tuple[Any, ...]:
        """What rows that are compared with each other have in common."""
        return (self.model, self.batch_size, self.world_size, self.network, self.fault)


def make_rows(records: Iterable[Record], compare_to: str) -> list[Row]:
    """One row per record; speed-ups are relative to `compare_to` in the same cell and world."""
    records = list(records)
    return [_row(record, records, compare_to) for record in records]


def _row(record: Record, records: list[Record], compare_to: str) -> Row:
    trial, found, check = record.trial, record.throughput, record.check
    known: dict[str, Any] = {**identity(record), "batch_size": trial["batch_size"]}
    if found is None or check is None:
        return Row(**known, reason=record.error and record.error.message)
    known |= {key: getattr(found, key) for key in ("unit", "ci_low", "ci_high", "n")}
    known |= {
        "throughput": found.value,
        "repeats": len(record.repeats),
        "correct": check.replicas_agree and check.matches_reference,
        "step_s": record.step_s,
    }
    notes = list(record.notes)

    peers = [one for one in records if one.ok and _settings(one.trial) == _settings(trial)]
    base = next((one for one in peers if _is(one.trial, compare_to, trial["world_size"])), None)
    if base is not None and base is not record and trial["algorithm"] != "none":
        ratio = speedup(record.repeats, base.repeats)
        known |= {
            "speedup": ratio.value,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
            "verdict": verdict(ratio, min(len(record.repeats), len(base.repeats))),
        }
        if record.run != base.run:
            notes.append(f"not measured together with {compare_to}")
    single = next((one for one in peers if one.trial["algorithm"] == "none"), None)
    if single is not None and single.throughput is not None:
        known["efficiency"] = found.value / (trial["world_size"] * single.throughput.value)
    if record.breakdown is not None and record.breakdown.step_s is not None:
        known |= {name: getattr(record.breakdown, name) for name in _PARTS}
    if record.bound is not None:
        known |= {name: getattr(record.bound, name) for name in ("compute_limit_s", "wire_limit_s")}
        known |= {"bound": record.bound.kind, "bound_s": record.bound.step_s}
        known["of_bound"] = record.bound.reached
    return Row(**known, reason="; ".join(notes) or None)


_PARTS = ("forward_s", "backward_s", "update_s", "exposed_comm_s")


def _is(trial: dict[str, Any], algorithm: str, world_size: int) -> bool:
    named = algorithm in (trial["algorithm"], trial["label"])
    return named and trial["world_size"] == world_size


def _settings(trial: dict[str, Any]) -> dict[str, Any]:
    own = ("algorithm", "options", "label", "world_size")
    return {key: value for key, value in trial.items() if key not in own}


def comparison(rows: list[Row], compare_to: str) -> Table:
    """Who is how fast, relative to whom, and whether it was the right training."""
    return Table(rows, (*PLACE, *_MEASURED, _ratio(compare_to), *_JUDGED))


def breakdown(rows: Iterable[Row]) -> Table:
    """Where the time of trials that have a result goes, and how little it could be, in ms."""
    return Table([row for row in rows if row.status == "ok"], (*PLACE, *_TIMES))


def _ratio(compare_to: str) -> Column:
    def text(row: Row) -> str:
        if row.speedup is None:
            return ""
        return f"{row.speedup:.2f} ({row.speedup_low:.2f}-{row.speedup_high:.2f})"

    return Column(title=f"speed-up vs {compare_to} (95 % CI)", text=text, numeric=False)


_MEASURED = (
    Column(title="throughput", text=lambda row: f"{significant(row.throughput)} {row.unit}"),
    Column(
        title="95 % CI",
        text=lambda row: f"{significant(row.ci_low)}-{significant(row.ci_high)}",
    ),
    Column(title="n", text=lambda row: str(row.n)),
)
_JUDGED = (
    Column(title="verdict", text=lambda row: row.verdict or "", numeric=False),
    Column(title="efficiency", text=given("efficiency", ".0%")),
    Column(title="of bound", text=given("of_bound", ".0%"), sparse=True),
    Column(title="correct", text=lambda row: "yes" if row.correct else "NO", numeric=False),
    Column(title="notes", text=lambda row: row.reason or "", numeric=False),
)


def _milliseconds(title: str) -> Column:
    def text(row: Row) -> str:
        seconds = getattr(row, f"{title.replace(' ', '_')}_s")
        if seconds is None:
            return UNKNOWN
        return significant(seconds * 1000) if seconds else "0"

    return Column(title=title, text=text)


_TIMES = (
    *(_milliseconds(part) for part in ("step", "forward", "backward", "update", "exposed comm")),
    *(_milliseconds(limit) for limit in ("bound", "compute limit", "wire limit")),
    Column(title="of bound", text=given("of_bound", ".0%", UNKNOWN)),
)


def remarks(records: Iterable[Record]) -> list[str]:
    """What is to be said of the network and of bounds, once for all rows."""
    records = list(records)
    notes = [f"{one.trial['network']}: {note}" for one in records for note in one.network.notes]
    beyond = [one.label for one in records if one.bound and (one.bound.reached or 0.0) > _BEYOND]
    found = [*dict.fromkeys(notes)]
    if beyond:
        found.append(
            f"beyond its bound: {', '.join(dict.fromkeys(beyond))}; a bound comes from a short "
            "measurement, and does not know of compression"
        )
    return found


def summary(table: list[Row], compare_to: str) -> list[str]:
    """The answer in a sentence per model and world size."""
    lines = []
    for cell in dict.fromkeys(row.place for row in table):
        rivals = [row for row in table if row.place == cell and row.throughput and row.correct]
        if len(rivals) < 2:
            continue
        best = max(rivals, key=lambda row: row.throughput or 0.0)
        where = "".join(f", {name}" for name in (best.network, best.fault) if name)
        text = f"{best.model}, {best.world_size} workers{where}: "
        text += f"{best.algorithm} has the highest median"
        if best.speedup is None:
            others = [row for row in rivals if row.speedup is not None]
            text += "" if others else f" (no {compare_to} to compare with)"
        else:
            text += (
                f", {best.speedup:.2f}x {compare_to} "
                f"(95 % CI {best.speedup_low:.2f}-{best.speedup_high:.2f}: {best.verdict})"
            )
        lines.append(text)
    return lines


def reference_reports(records: Iterable[Record], rdma: int = 0) -> dict[str, Any]:
    """`reports.json` of the reference suites: {rdma: {MODEL_BS: {method: [samples/s, ...]}}}.

    One number per world size, ascending, as text with three decimals; mean rate as they take it.
    """
    speeds: dict[str, dict[str, Any]] = {}
    for record in records:
        trial = record.trial
        if not record.ok or trial["algorithm"] == "none":
            continue
        task = f"{trial['model']}_{trial['batch_size']}"
        rates = [
            trial["world_size"] * trial["batch_size"] * len(block) / sum(block)
            for repeat in record.iters
            for block in repeat
        ]
        by_world = speeds.setdefault(task, {}).setdefault(trial["label"], {})
        by_world[trial["world_size"]] = sum(rates) / len(rates)
    for methods in speeds.values():
        for method, by_world in methods.items():
            methods[method] = [f"{by_world[world]:.3f}" for world in sorted(by_world)]
    return {str(rdma): speeds}
