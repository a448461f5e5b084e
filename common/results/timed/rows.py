"""Rows and tables of a sweep's timed trials: comparison and breakdown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.results import stats
from common.results.records import Record, base_among
from common.results.stats import Difference
from common.results.tables.fields import Compared, Identity, Validity
from common.results.tables.table import PLACE, Column, Table, doubted, given, identity, significant
from common.results.timed.bounds import Reach, note, percent, reach
from common.results.validity import flag_text

UNKNOWN = "-"
LEGEND = (
    "milliseconds per step; step is elapsed time over steps, median and p95 are of single steps; "
    "forward, backward, update and exposed comm are of the rank that waits least and add up "
    "to its step; event model is the step by that; exposed comm -: contained in the others "
    "(docs/methodology.md)"
)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step: measured, by phase, and at least."""

    step_s: float | None = None
    """Elapsed time per step of all ranks together."""
    step_median_s: float | None = None
    """Median of single steps."""
    step_p95_s: float | None = None
    """95th percentile of single steps."""
    forward_s: float | None = None
    """Phases of the rank that waits least, without waiting; the four add up to about `step_s`."""
    backward_s: float | None = None
    update_s: float | None = None
    exposed_comm_s: float | None = None
    """Waiting for communication; None if an algorithm hides it in the other three phases."""
    bound: str | None = None
    """Formula of `bound_s`."""
    bound_s: float | None = None
    compute_limit_s: float | None = None
    wire_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row(Validity, Times, Compared, Identity):
    """Timed trial in a table, and a line of its CSV file.

    A trial with a result has `throughput`, `unit`, `n`, `repeats`, `correct` and the times of a
    step. Comparisons need two valid trials.
    """

    batch_size: int
    throughput: float | None = None
    """Samples of all workers over elapsed time."""
    unit: str | None = None
    ci_low: float | None = None
    """Ends of the 95 % interval; None for a single repeat."""
    ci_high: float | None = None
    n: int | None = None
    """Number of timed steps."""
    repeats: int | None = None
    paired: bool | None = None
    """Whether the speed-up compares repeats of the same round."""
    efficiency: float | None = None
    """Throughput over world size times the single worker's throughput."""
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    of_bound: float | None = None
    """Shortest possible step time of the algorithm over the step time."""
    reach: Reach | None = None
    """Kind of an implausible `of_bound`, for a valid number."""
    systematic: float | None = None
    """|T(k) - T(2k)| / T(k): dependence of the step on the time scale k of the emulation."""
    systematic_low: float | None = None
    """Ends of its 95 % interval; 0 if sampling error explains it."""
    systematic_high: float | None = None
    model_s: float | None = None
    """Step time by the event model."""
    off_model: float | None = None
    """Difference of the measured step from the model's, relative to the model's."""
    unmodelled: str | None = None
    """Reason why the event model has no step time."""
    correct: str | None = None
    """yes, NO or unchecked."""

    @property
    def batch(self) -> int:
        return self.batch_size

    @property
    def place(self) -> tuple[Any, ...]:
        """Settings that compared rows have in common."""
        return (self.model, self.batch_size, self.world_size, self.network, self.fault)


def make_rows(records: Iterable[Record], compare_to: str) -> list[Row]:
    """Makes one row per record; speed-ups are relative to `compare_to` in the same cell and world.

    Raises:
        UserError: `compare_to` is no label, and the algorithm has several variants.
    """
    records = list(records)
    values = {id(record): _measured(record) for record in records}
    # By settings, for all world sizes; of several single workers the first counts.
    alone = {_key(r): r for r in reversed(records) if r.trial["algorithm"] == "none"}
    for peers in _cells(records):
        for record in peers:
            values[id(record)] |= _efficiency(record, alone.get(_key(record)))
        _compare(peers, compare_to, values)
        _lead(peers, values)
    return [Row(**_with_reason(values[id(record)])) for record in records]


def _measured(record: Record) -> dict[str, Any]:
    """Returns the values of a row that need no other record; `notes` become its reason."""
    trial, throughput = record.trial, record.throughput
    values: dict[str, Any] = {**identity(record), "batch_size": trial["batch_size"]}
    if throughput is None or record.check is None:
        return values | {"notes": [record.error and record.error.message]}
    rate = stats.throughput(record.repeats, trial["batch_size"] * trial["world_size"])
    why = flag_text(record)
    values |= {
        "throughput": rate.value,
        "unit": throughput.unit,
        "ci_low": rate.low,
        "ci_high": rate.high,
        "n": rate.n,
        "repeats": len(record.repeats),
        "correct": record.check.verdict,
        "flag": why,
        "notes": [why, *(note.text for note in record.notes)],
        "step_s": record.step_s,
        "step_median_s": stats.percentile_step_s(record.repeats, 0.5),
        "step_p95_s": stats.percentile_step_s(record.repeats, 0.95),
    }
    if record.systematic is not None:
        shift = stats.shift(record.repeats, record.systematic.repeats)
        values |= {"systematic": shift.value}
        values |= {"systematic_low": shift.low, "systematic_high": shift.high}
    model = record.modelled
    if model is not None:
        values |= {"model_s": model.step_s, "off_model": model.off(record.step_s)}
        values["unmodelled"] = model.reason
        values["notes"].append(model.reason and f"no model: {model.reason}")
    if record.breakdown is not None:
        values |= {name: getattr(record.breakdown, name) for name in _PARTS}
    bound = record.bound
    if bound is not None:
        values |= {name: getattr(bound, name) for name in ("compute_limit_s", "wire_limit_s")}
        values |= {"bound": bound.kind, "bound_s": bound.step_s}
        if bound.step_s is not None:
            values["of_bound"] = share = bound.step_s / record.step_s
            kind = reach(share) if why is None else None
            values["reach"] = kind
            values["notes"].append(kind and note(kind, share))
    return values


_PARTS = ("forward_s", "backward_s", "update_s", "exposed_comm_s")


def _cells(records: Sequence[Record]) -> list[list[Record]]:
    """Groups records that are compared with each other, in the order of first appearance."""
    cells: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        cells.setdefault((_key(record), record.trial["world_size"]), []).append(record)
    return list(cells.values())


def _compare(peers: Sequence[Record], compare_to: str, values: dict[int, dict[str, Any]]) -> None:
    """Adds to the rows of a cell their comparison with the baseline, if both are valid."""
    base = base_of(peers, compare_to)
    if base is None:
        return
    rivals = [r for r in peers if r is not base and r.trial["algorithm"] != "none"]
    valid = [record for record in rivals if flag_text(record) is None and flag_text(base) is None]
    differences = [difference(record, base) for record in valid]
    for record in rivals:
        values[id(record)]["compared_to"] = base.label
    verdicts = stats.verdicts(differences)
    for record, found, verdict in zip(valid, differences, verdicts, strict=True):
        row, ratio = values[id(record)], found.ratio
        row |= {"speedup": ratio.value, "speedup_low": ratio.low, "speedup_high": ratio.high}
        row |= {"paired": found.paired, "verdict": verdict}
        row["detectable"] = stats.detectable(found, len(differences))
        row["precision"] = asked_precision(record)
        row["more_repeats"] = found.repeats_to(row["precision"])
        if not found.paired:
            row["notes"].append(f"not measured in turn with {compare_to}: compared unpaired")


def asked_precision(record: Record) -> float:
    """Returns the requested half width of the intervals of ratios, relative to the ratio."""
    return record.trial.get("measure", {}).get("precision") or stats.PRECISE


def _lead(peers: Sequence[Record], values: dict[int, dict[str, Any]]) -> None:
    """Adds to the rows of a cell whether they are the fastest, or not distinguishable from it."""
    rivals = [r for r in peers if flag_text(r) is None and r.trial["algorithm"] != "none"]
    if len(rivals) < 2:
        return
    rows = [values[id(record)] for record in rivals]
    best, *others = stats.leaders([record.repeats for record in rivals], _in_turn(rivals))
    verdicts, base = [row.get("verdict") for row in rows], rows[best].get("compared_to")
    # The verdicts hold here too: what is SLOWER than the baseline is slower than a FASTER trial.
    faster = verdicts[best] == "FASTER"
    if faster:
        others = [i for i in others if rivals[i].label != base]
    if faster or verdicts[best] is None:
        others = [i for i in others if verdicts[i] != "SLOWER"]
    for index, row in enumerate(rows):
        row["leads"] = index in (best, *others)


def base_of(peers: Sequence[Record], compare_to: str) -> Record | None:
    """Returns the baseline of a cell, or None; raises like `base_among`."""
    index = base_among(compare_to, [(r.label, r.trial["algorithm"]) for r in peers])
    return None if index is None else peers[index]


def difference(record: Record, base: Record) -> Difference:
    """Compares two trials: by rounds if they took turns, else unpaired."""
    return stats.compare(record.repeats, base.repeats, _took_turns(record, base))


def _took_turns(first: Record, second: Record) -> bool:
    """Returns whether repeats of the same number ran in the same round of one run and one cell."""
    seeds = [record.order and record.order.seed for record in (first, second)]
    together = bool(first.run) and first.run == second.run and seeds[0] == seeds[1]
    return together and len(first.repeats) == len(second.repeats)


def _in_turn(records: Sequence[Record]) -> Callable[[int, int], bool]:
    return lambda i, j: _took_turns(records[i], records[j])


def _efficiency(record: Record, single: Record | None) -> dict[str, float]:
    """Returns the efficiency relative to the single worker, if both are valid."""
    if single is None or flag_text(single) is not None or flag_text(record) is not None:
        return {}
    value = single.step_s / record.step_s
    wide = stats.compare(record.repeats, single.repeats, paired=False).half_width
    values = {"efficiency": value}
    if single is not record and math.isfinite(wide):
        values |= {"efficiency_low": value * math.exp(-wide)}
        values |= {"efficiency_high": value * math.exp(wide)}
    return values


def _with_reason(values: dict[str, Any]) -> dict[str, Any]:
    """Joins all notes to one reason."""
    notes = dict.fromkeys(filter(None, values.pop("notes")))
    return values | {"reason": "; ".join(notes) or None}


def _key(record: Record) -> str:
    """Returns the settings that compared trials have in common."""
    differ = ("algorithm", "options", "label", "world_size", "twin", "plugin")
    settings = {key: value for key, value in record.trial.items() if key not in differ}
    if settings["brought"] is not None:  # the folder of its files does not matter
        settings["brought"] = settings["brought"]["digest"]
    return json.dumps(settings, sort_keys=True)


def comparison(rows: list[Row], compare_to: str) -> Table:
    """Returns the table of throughput, speed-ups, verdicts and checks."""
    return Table(rows, (*PLACE, *_MEASURED, _ratio(compare_to), *_JUDGED))


def breakdown(rows: Iterable[Row]) -> Table:
    """Returns the table of times per phase and of bounds, in ms, for trials with a result."""
    return Table([row for row in rows if row.status == "ok"], (*PLACE, *_TIMES))


def _interval(low: float | None, high: float | None, form: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f"{form(low)}-{form(high)}"


def _ratio(compare_to: str) -> Column:
    def text(row: Row) -> str:
        if row.speedup is None:
            return ""
        ends = _interval(row.speedup_low, row.speedup_high, "{:.2f}".format)
        return f"{row.speedup:.2f}" + (f" ({ends})" if ends else "")

    return Column(title=f"speed-up vs {compare_to} (95 % CI)", text=text, numeric=False, weight=1)


def _efficient(row: Row) -> str:
    if row.efficiency is None:
        return ""
    ends = _interval(row.efficiency_low, row.efficiency_high, lambda end: f"{100 * end:.0f}")
    return f"{row.efficiency:.0%}" + (f" ({ends})" if ends else "")


def _model(row: Row) -> str:
    if row.unmodelled is not None:
        return UNKNOWN
    return doubted(row, given("off_model", "+.1%")(row))


def _systematic(row: Row) -> str:
    text = given("systematic", ".1%")(row)
    ends = _interval(row.systematic_low, row.systematic_high, lambda end: f"{100 * end:.1f}")
    return doubted(row, f"{text} ({ends})" if ends else text)


_MEASURED = (
    Column(
        title="throughput",
        text=lambda row: doubted(row, f"{significant(row.throughput)} {row.unit}"),
        weight=1,
    ),
    Column(
        title="95 % CI, this run",
        text=lambda row: doubted(row, _interval(row.ci_low, row.ci_high, significant)),
        weight=2,
    ),
    Column(title="n", text=lambda row: f"{row.repeats} x {row.n / row.repeats:.3g}", weight=6),
)
_JUDGED = (
    Column(title="verdict", text=lambda row: row.verdict or "", numeric=False, weight=1),
    Column(title="efficiency", text=_efficient, weight=7),
    Column(
        title="of bound",
        text=lambda row: doubted(row, percent(row.of_bound, row.reach)),
        sparse=True,
        weight=3,
    ),
    Column(title="systematic", text=_systematic, sparse=True, weight=8),
    Column(title="event model", text=_model, sparse=True, weight=5),
    Column(title="correct", text=lambda row: row.correct, numeric=False, weight=4),
    Column(title="notes", text=lambda row: row.reason or "", numeric=False, weight=9),
)


def _milliseconds(title: str, field: str | None = None) -> Column:
    name = field or f"{title.replace(' ', '_')}_s"

    def text(row: Row) -> str:
        seconds = getattr(row, name)
        if seconds is None:
            return UNKNOWN
        return doubted(row, significant(seconds * 1000)) if seconds else "0"

    return Column(title=title, text=text)


_TIMES = (
    _milliseconds("step"),
    _milliseconds("median", "step_median_s"),
    _milliseconds("p95", "step_p95_s"),
    *(_milliseconds(part) for part in ("forward", "backward", "update", "exposed comm")),
    Column(
        title="event model",
        text=lambda row: "" if row.model_s is None else significant(row.model_s * 1000),
        sparse=True,
    ),
    *(_milliseconds(limit) for limit in ("bound", "compute limit", "wire limit")),
    Column(
        title="of bound",
        text=lambda row: doubted(row, percent(row.of_bound, row.reach)) or UNKNOWN,
    ),
)
