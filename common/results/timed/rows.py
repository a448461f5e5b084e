"""Rows and tables of a sweep's timed trials: the comparison, and the phases of a step.

A cell is the trials that are compared with each other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.results import stats
from common.results.records import JsonObject, Record, base_among, grouped
from common.results.records.trust import Foreseen, Modelled
from common.results.stats import Difference
from common.results.tables.cells import (
    UNKNOWN,
    Cell,
    Column,
    Form,
    interval,
    number,
    numbers,
    significant,
    texts,
)
from common.results.tables.fields import (
    NOTES,
    PLACE,
    USE,
    Compared,
    Identity,
    Use,
    Validity,
    with_lengths,
)
from common.results.tables.table import Table
from common.results.timed import bounds
from common.results.timed.bounds import BoundNote
from common.results.validity import flag, flag_text

LEGEND = (
    "milliseconds per step. step: elapsed time / number of steps. median, p95: of single steps. "
    "forward, backward, update, exposed comm: of the rank that waits least; they add up to its "
    "step (exposed comm '-': the other three contain it). event model: the simulated step. "
    "See docs/methodology.md."
)


_PHASES = ("forward_s", "backward_s", "update_s", "exposed_comm_s")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step: measured, by phase, and lower bounds."""

    step_s: float | None = None
    """Elapsed time per step of all ranks together."""
    step_median_s: float | None = None
    step_p95_s: float | None = None
    forward_s: float | None = None
    """Phases of the rank that waits least, without waiting; the four add up to about `step_s`."""
    backward_s: float | None = None
    update_s: float | None = None
    exposed_comm_s: float | None = None
    """Waiting for communication; None if the algorithm waits inside the other three phases."""
    bound: str | None = None
    """Name of the formula of `bound_s`."""
    bound_s: float | None = None
    compute_limit_s: float | None = None
    wire_limit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row(Validity, Times, Use, Compared):
    """Row of a timed trial, in the table and in the CSV file. If the trial has a result,
    `throughput`, `unit`, `n`, `repeats`, `correct` and the times of a step are set. Fields of
    comparisons are set if both trials are valid."""

    batch_size: int
    throughput: float | None = None
    """Samples of all workers per second of elapsed time."""
    unit: str | None = None
    ci_low: float | None = None
    """Ends of the 95 % interval; None for a single repeat."""
    ci_high: float | None = None
    n: int | None = None
    repeats: int | None = None
    paired: bool | None = None
    """True: the speed-up compares repeats of the same round."""
    efficiency: float | None = None
    """Throughput / (world size x the single worker's throughput)."""
    efficiency_low: float | None = None
    efficiency_high: float | None = None
    of_bound: float | None = None
    """Lower bound of the algorithm's step time, divided by the step time."""
    bound_note: BoundNote | None = None
    """Reason why `of_bound` is implausible, for a valid number; None: plausible."""
    systematic: float | None = None
    """Change of the step time T if the emulation runs at half its speed (2k times slower than real
    time instead of k times): |T(k) - T(2k)| / T(k)."""
    systematic_low: float | None = None
    """Ends of the 95 % interval of `systematic`; from 0 if sampling error explains the change."""
    systematic_high: float | None = None
    model_s: float | None = None
    off_model: float | None = None
    """(Measured step time - `model_s`) / `model_s`."""
    unmodelled: str | None = None
    """Reason why the event model has no step time."""
    predicted_s: float | None = None
    """Step on the virtual cluster."""
    predicted_ratio: float | None = None
    """`predicted_s` / measured step time."""
    correct: str | None = None
    """yes, NO or unchecked."""

    @property
    def what(self) -> str:
        return f"{self.model}, batch {self.batch_size}"

    @property
    def batch(self) -> int:
        return self.batch_size

    @property
    def place(self) -> tuple[object, ...]:
        return (self.model, self.batch_size, self.world_size, self.network, self.fault)


def make_rows(records: Iterable[Record], compare_to: str) -> list[Row]:
    """Returns one row per record; speed-ups are relative to the trial `compare_to` of its cell.
    Raises `UserError` if `compare_to` is no label, but an algorithm with several variants."""
    records = list(records)
    rows = {id(record): _measured(record) for record in records}
    # Single workers by settings, for all world sizes; of several, the first is used.
    alone = {_key(r): r for r in reversed(records) if r.trial["algorithm"] == "none"}
    for peers in grouped(records, lambda r: (_key(r), r.trial["world_size"])).values():
        for record in peers:
            single = alone.get(_key(record))
            if single is not None and flag(single) is None and flag(record) is None:
                rows[id(record)] = _efficient(rows[id(record)], record, single)
        _compare(peers, compare_to, rows)
        _lead(peers, rows)
    return with_lengths([rows[id(record)] for record in records], records)


def _measured(record: Record) -> Row:
    batch_size = record.trial["batch_size"]
    row = Row(**vars(Identity.of(record)), batch_size=batch_size)
    if record.throughput is None or record.check is None:
        return dataclasses.replace(row, reason=record.error and record.error.message)
    rate = stats.throughput(record.repeats, batch_size * row.world_size)
    why, model, bound = flag_text(record), record.modelled or Modelled(), record.bound
    foreseen = record.foreseen or Foreseen()
    notes = [why, *(note.text for note in record.notes)]
    notes.append(model.reason and f"no model: {model.reason}")
    notes.append(foreseen.reason and f"not predicted: {foreseen.reason}")
    known: JsonObject = {name: getattr(record.breakdown, name, None) for name in _PHASES}
    if record.systematic is not None:
        known |= stats.shift(record.repeats, record.systematic.repeats).fields("systematic")
    if bound is not None:
        known |= {"bound": bound.kind, "bound_s": bound.step_s}
        known |= {name: getattr(bound, name) for name in ("compute_limit_s", "wire_limit_s")}
        if bound.step_s is not None:
            share = bound.step_s / record.step_s
            kind = bounds.bound_note(share) if why is None else None
            known |= {"of_bound": share, "bound_note": kind}
            notes.append(kind and bounds.describe(kind, share))
    return dataclasses.replace(
        row,
        throughput=rate.value,
        unit=record.throughput.unit,
        **vars(Use.of(record, rate.value)),
        ci_low=rate.low,
        ci_high=rate.high,
        n=rate.n,
        repeats=len(record.repeats),
        correct=record.check.verdict,
        flag=why,
        step_s=record.step_s,
        step_median_s=stats.percentile_step_s(record.repeats, 0.5),
        step_p95_s=stats.percentile_step_s(record.repeats, 0.95),
        model_s=model.step_s,
        off_model=model.off(record.step_s),
        unmodelled=model.reason,
        predicted_s=foreseen.step_s,
        predicted_ratio=foreseen.step_s and foreseen.step_s / record.step_s,
        **known,
        reason=_joined(notes),
    )


def _joined(notes: Iterable[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(filter(None, notes))) or None


def _compare(peers: Sequence[Record], compare_to: str, rows: dict[int, Row]) -> None:
    base = base_of(peers, compare_to)
    if base is None:
        return
    rivals = [r for r in peers if r is not base and r.trial["algorithm"] != "none"]
    valid = [record for record in rivals if flag(record) is None and flag(base) is None]
    differences = [difference(record, base) for record in valid]
    for record in rivals:
        rows[id(record)] = dataclasses.replace(rows[id(record)], compared_to=base.label)
    verdicts = stats.verdicts(differences)
    for record, compared, verdict in zip(valid, differences, verdicts, strict=True):
        row, precision = rows[id(record)], asked_precision(record)
        unpaired = None if compared.paired else "not measured in turn with {}: compared unpaired"
        rows[id(record)] = dataclasses.replace(
            row,
            **compared.fields(len(differences), precision),
            paired=compared.paired,
            verdict=verdict,
            reason=_joined([row.reason, unpaired and unpaired.format(compare_to)]),
        )


def asked_precision(record: Record) -> float:
    """Returns the requested half width of the intervals of ratios, relative to the ratio."""
    return record.trial.get("measure", {}).get("precision") or stats.PRECISE


def _lead(peers: Sequence[Record], rows: dict[int, Row]) -> None:
    rivals = [r for r in peers if flag(r) is None and r.trial["algorithm"] != "none"]
    if len(rivals) < 2:
        return
    best, *others = stats.leaders(
        [record.repeats for record in rivals], lambda i, j: _took_turns(rivals[i], rivals[j])
    )
    verdicts, base = [rows[id(r)].verdict for r in rivals], rows[id(rivals[best])].compared_to
    # Verdicts are used, too: a trial that is SLOWER than the baseline is slower than a FASTER one.
    faster = verdicts[best] == "FASTER"
    if faster:
        others = [i for i in others if rivals[i].label != base]
    if faster or verdicts[best] is None:
        others = [i for i in others if verdicts[i] != "SLOWER"]
    for index, record in enumerate(rivals):
        leads = index in (best, *others)
        rows[id(record)] = dataclasses.replace(rows[id(record)], leads=leads)


def base_of(peers: Sequence[Record], compare_to: str) -> Record | None:
    """Returns the baseline of a cell, or None; raises like `base_among`."""
    index = base_among(compare_to, [(r.label, r.trial["algorithm"]) for r in peers])
    return None if index is None else peers[index]


def difference(record: Record, base: Record) -> Difference:
    """Compares two trials: per round if they took turns, else unpaired."""
    return stats.compare(record.repeats, base.repeats, _took_turns(record, base))


def _took_turns(first: Record, second: Record) -> bool:
    """Returns True if repeats with the same number ran in the same round of one run and cell."""
    seeds = [record.order and record.order.seed for record in (first, second)]
    together = bool(first.run) and first.run == second.run and seeds[0] == seeds[1]
    return together and len(first.repeats) == len(second.repeats)


def _efficient(row: Row, record: Record, single: Record) -> Row:
    value = single.step_s / record.step_s
    wide = stats.compare(record.repeats, single.repeats, paired=False).half_width
    if single is record or not math.isfinite(wide):
        return dataclasses.replace(row, efficiency=value)
    low, high = value * math.exp(-wide), value * math.exp(wide)
    return dataclasses.replace(row, efficiency=value, efficiency_low=low, efficiency_high=high)


def _key(record: Record) -> str:
    differ = ("algorithm", "options", "label", "world_size", "twin", "plugin")
    settings = {key: value for key, value in record.trial.items() if key not in differ}
    if settings["brought"] is not None:  # the folder of its files does not matter
        settings["brought"] = settings["brought"]["digest"]
    return json.dumps(settings, sort_keys=True)


def comparison(rows: Sequence[Row], compare_to: str) -> Table[Row]:
    """Returns the table of throughput, speed-ups, verdicts and checks."""
    title = f"speed-up vs {compare_to} (95 % CI)"
    ratio = Column(title=title, cell=_SPEEDUP.cell, right=False, weight=1)
    return Table(rows, (*PLACE, *_MEASURED, ratio, *_JUDGED))


def breakdown(rows: Iterable[Row]) -> Table[Row]:
    """Returns the table of times per phase and of bounds, in ms, for trials with a result."""
    return Table([row for row in rows if row.step_s is not None], (*PLACE, *_TIMES))


def _interval(row: Row) -> Cell:
    text = interval(row.ci_low, row.ci_high, significant)
    return Cell(f"({text})" if text and row.flag else text, row.ci_low)


def _count(row: Row) -> Cell:
    return Cell(f"{row.repeats} x {row.n / row.repeats:.3g}", row.repeats)


def _of_bound(row: Row) -> Cell:
    return number(row.of_bound, lambda x: bounds.share(x, row.bound_note), flag=row.flag)


def _off_model(row: Row) -> Cell:
    missing = "" if row.unmodelled is None else UNKNOWN
    return number(row.off_model, "{:+.1%}".format, flag=row.flag, missing=missing)


def _percent(decimals: int) -> Form:
    """Returns the format of a share as a percentage, without the character %."""
    return lambda share: f"{100 * share:.{decimals}f}"


_SPEEDUP = numbers("", "speedup", "{:.2f}".format)
_MEASURED: tuple[Column[Row], ...] = (
    numbers("throughput", "throughput", unit=True, weight=1),
    Column(title="95 % CI, this run", cell=_interval, weight=2),
    Column(title="n", cell=_count, weight=6),
)
_JUDGED: tuple[Column[Row], ...] = (
    texts("verdict", word=True, weight=1),
    numbers("efficiency", "efficiency", "{:.0%}".format, ends=_percent(0), sparse=True, weight=7),
    Column(title="of bound", cell=_of_bound, sparse=True, weight=3),
    numbers("systematic", "systematic", "{:.1%}".format, ends=_percent(1), sparse=True, weight=8),
    Column(title="event model", cell=_off_model, sparse=True, weight=5),
    numbers("predicted / measured", "predicted_ratio", "{:.3f}".format, sparse=True, weight=5),
    Column(
        title="correct",
        cell=lambda row: Cell(row.correct or "", word=row.correct != "yes"),
        right=False,
        weight=4,
        phrase="correct: {}",
    ),
    *USE,
    NOTES,
)


def _milliseconds(seconds: float) -> str:
    return significant(seconds * 1000) if seconds else "0"


def _phase(title: str, field: str) -> Column[Row]:

    def cell(row: Row) -> Cell:
        value = getattr(row, field)
        # An exact zero is not measured, so a flag does not put it in parentheses.
        return number(value, _milliseconds, flag=row.flag if value else None, missing=UNKNOWN)

    return Column(title=title, cell=cell)


_TIMES: tuple[Column[Row], ...] = (
    _phase("step", "step_s"),
    _phase("median", "step_median_s"),
    _phase("p95", "step_p95_s"),
    *(_phase(name.removesuffix("_s").replace("_", " "), name) for name in _PHASES),
    Column(title="event model", cell=lambda row: number(row.model_s, _milliseconds), sparse=True),
    _phase("bound", "bound_s"),
    _phase("compute limit", "compute_limit_s"),
    _phase("wire limit", "wire_limit_s"),
    Column(title="of bound", cell=lambda row: _of_bound(row) if row.of_bound else Cell(UNKNOWN)),
)
