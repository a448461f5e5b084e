"""Figures of claims: ratios of rows of committed records, measured or predicted."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.results import stats
from common.results.committed import catalogue
from common.results.learning import race, summary
from common.results.learning.summary import LearnRow
from common.results.records import Record, grouped, is_learning
from common.results.store import Comparison
from common.results.tables.predicted import PredictedRow
from common.results.timed.rows import Row, difference, make_rows
from common.results.validity import flag
from common.virtual.costs.parts import COMPUTE
from dear.errors import UserError, one_of
from dear.options import build_options

_recipes = functools.cache(catalogue.recipes)
Measure = Literal["speed", "throughput", "accuracy", "efficiency"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Ratio from records, with the ends of its interval or range."""

    value: float | None
    """None: a trial has no result."""
    low: float | None = None
    """Ends of the interval; None for a single repeat."""
    high: float | None = None
    doubt: str | None = None
    """Reason why the figure decides nothing: a flag of one of its rows."""
    of: str = ""
    """Model, and point of its series, if the figure is the largest or the smallest of several."""
    without: str = ""
    """Models and points that are left out: their figures are larger (or smaller), but in doubt."""

    @property
    def text(self) -> str:
        """Figure for a table; in brackets if it decides nothing."""
        if self.value is None:
            return "[no result]"
        ends = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        text = f"{self.value:.2f}{ends}{self.of and f', {self.of}'}"
        text += f"; without {self.without}" if self.without else ""
        return f"[{text}]" if self.doubt else text


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of a record whose ratio is a figure: `of` over the fastest of `over`."""

    record: str
    of: str
    """Label of the algorithm."""
    over: tuple[str, ...] = ()
    """Labels of the algorithms that it is compared with; empty for `efficiency` only."""
    file: str | None = None
    """File of the record with rows of `predict --json`; None: the record is a sweep."""
    model: str = ""
    """Start of the model's name."""
    network: str | None = None
    workers: int | None = None
    at: str | None = None
    """Value of the series of `predict --over`, as its tables write it."""
    fault: bool = False
    over_fault: bool | None = None
    """True if `over` had the fault; None: as `of`."""
    measure: Measure = "speed"
    """speed: the inverse of the step, or of the time to the target accuracy. throughput: samples of
    all workers per second. efficiency: relative to compute alone."""
    take: Literal["only", "largest", "smallest"] = "only"
    """The ratio that counts if several models or settings match."""
    what: str = ""
    """Difference of the setting from that of the claim."""

    def __post_init__(self) -> None:
        recipe = one_of("record of claims.yaml", self.record, _recipes())
        if (self.measure == "efficiency") == bool(self.over):
            raise UserError(f"{self.record}: `over` is needed except for efficiency")
        if self.file is None and recipe.sweep is None:
            raise UserError(f"{self.record} is no sweep, so it needs `file`")
        if self.file is not None and not recipe.computed:
            raise UserError(f"{self.record} is not computed, so it has no `file`")
        if self.file is not None and f"{{out}}/{self.file}" not in " ".join(recipe.commands):
            raise UserError(f"no command of {self.record} writes {self.file}")


@dataclass(frozen=True)
class Case:
    """Row of a record; `record` is None for a predicted row."""

    row: Row | LearnRow | PredictedRow
    record: Record | None = None

    @property
    def at(self) -> str:
        """Value of the property that a series goes over; empty for measured rows."""
        return self.row.at if isinstance(self.row, PredictedRow) else ""

    @property
    def place(self) -> tuple[object, ...]:
        """Settings that compared rows have in common, except the fault."""
        return self.row.model, self.row.batch, self.row.world_size, self.row.network, self.at

    def of(self, label: str, fault: bool) -> bool:
        """Returns True for the row of an algorithm with or without a fault."""
        return self.row.algorithm == label and bool(self.row.fault) == fault

    def matches(self, source: Source) -> bool:
        """Returns True if the settings are those of the source."""
        wanted = (source.network, source.workers, source.at)
        known = (self.row.network, self.row.world_size, self.at)
        same = all(w is None or w == k for w, k in zip(wanted, known, strict=True))
        return same and self.row.model.startswith(source.model)


def missing(source: Source, folder: Path = catalogue.FOLDER) -> bool:
    """Returns True if the record is withdrawn or was not made yet."""
    return source.record in catalogue.withdrawn(folder) or not (folder / source.record).is_dir()


def cases(source: Source, folder: Path) -> list[Case]:
    """Returns the rows of a source's record."""
    record = folder / source.record
    if source.file is not None:
        rows = json.loads((record / source.file).read_bytes())
        return [Case(build_options(PredictedRow, row, "key")) for row in rows]
    comparison = Comparison.load(record)
    records = comparison.results(record)
    if is_learning(records):
        learned = summary.make_rows(records, comparison.compare_to)
        return [Case(row, each) for row, each in zip(learned, records, strict=True)]
    timed = make_rows(records, comparison.compare_to)
    return [Case(row, each) for row, each in zip(timed, records, strict=True)]


def figure(source: Source, folder: Path = catalogue.FOLDER) -> Figure | None:
    """Returns the figure of a source; None if its record is `missing`. Raises `UserError` if no row
    matches, or several do and the source does not say which counts."""
    if missing(source, folder):
        return None
    here = [case for case in cases(source, folder) if case.matches(source)]
    over_fault = source.fault if source.over_fault is None else source.over_fault
    several = len({case.at for case in here}) > 1
    figures = []
    for place in grouped(here, lambda case: case.place).values():
        ours = [c for c in place if c.of(source.of, source.fault)]
        bases = [c for label in source.over for c in place if c.of(label, over_fault)]
        if not ours:
            continue
        if len(ours) > 1 or len(bases) != len(source.over):
            raise UserError(f"no single row of each label matches {source}")
        ratios = [_ratio(ours[0], base, source.measure) for base in bases]
        ratios = ratios or [_ratio(ours[0], None, source.measure)]
        # The smallest ratio is that to the fastest rival, if all rivals are known.
        best = min(ratios, key=lambda ratio: ratio.value or 0)
        doubt = best.doubt or next((ratio.doubt for ratio in ratios if ratio.doubt), None)
        of = f"{best.of} at {ours[0].at}" if several else best.of
        figures.append(dataclasses.replace(best, doubt=doubt, of=of))
    if not figures:
        raise UserError(f"no rows match {source}")
    if source.take == "only":
        if len(figures) > 1:
            raise UserError(f"{len(figures)} settings match {source}; use `take`")
        return dataclasses.replace(figures[0], of="")
    sign = 1 if source.take == "largest" else -1
    figures.sort(key=lambda each: sign * (each.value or 0), reverse=True)
    chosen = next((each for each in figures if each.doubt is None), figures[0])
    before = figures[: figures.index(chosen)]
    return dataclasses.replace(chosen, without=", ".join(each.of for each in before))


def _ratio(ours: Case, base: Case | None, measure: Measure) -> Figure:
    flags = [_doubt(case, measure) for case in (ours, base) if case is not None]
    name = ours.row.model.partition("@")[0]
    try:
        result = _known(ours, base, measure)
    except _NoResultError as error:
        return Figure(value=None, doubt=str(error), of=name)
    doubt = next((flag for flag in flags if flag), result.doubt)
    return dataclasses.replace(result, doubt=doubt, of=name)


def _doubt(case: Case, measure: Measure) -> str | None:
    """Returns the flag of a row, unless it is about time and the figure does not depend on it: too
    few cores delay epochs of synchronous training, and change nothing else."""
    record = case.record
    if measure != "accuracy" or record is None or record.check is None:
        return case.row.flag
    reason, learn = flag(record), record.trial["learn"] or {}
    only_late = reason is not None and reason.kind == "short of cores" and learn.get("epochs")
    return None if only_late and record.check.matches_reference else case.row.flag


class _NoResultError(Exception):
    """Error of a trial that has not what is compared."""


def _known(ours: Case, base: Case | None, measure: Measure) -> Figure:
    if isinstance(ours.row, PredictedRow):
        under = base.row if base and isinstance(base.row, PredictedRow) else None
        values = _predicted(ours.row, under)
        return Figure(value=values[0], low=min(values), high=max(values))
    if ours.record is not None and base is not None and base.record is not None:
        return _compared(ours.record, base.record, measure)
    if not isinstance(ours.row, Row) or ours.row.efficiency is None:
        raise _NoResultError("there is no single worker beside it")
    low, high = ours.row.efficiency_low, ours.row.efficiency_high
    return Figure(value=ours.row.efficiency, low=low, high=high)


def _predicted(row: PredictedRow, base: PredictedRow | None) -> list[float]:
    """Returns a ratio of throughputs, and the same with costs and compute at the ends of their
    ranges; without `base`, relative to compute alone."""
    theirs, samples = [row.compute_s] * 3, row.samples
    if base is not None:
        theirs, samples = [base.step_s, base.step_low_s, base.step_high_s], base.samples
    ours = [row.step_s, row.step_low_s, row.step_high_s]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
    if len(pairs) < len(ours):
        raise _NoResultError(row.reason or (base and base.reason) or "not predicted")
    factors = (1, 1 - COMPUTE, 1 + COMPUTE) if base is None else (1, 1, 1)
    return [row.samples / samples * f * b / a for f, (a, b) in zip(factors, pairs, strict=True)]


def _compared(record: Record, base: Record, measure: Measure) -> Figure:
    """Compares two trials of a sweep."""
    doubt = None
    if not (record.ok and base.ok):
        raise _NoResultError("a trial has failed")
    if measure == "speed" and not record.learning:
        known = difference(record, base)
    elif measure == "speed":
        sides = [race.finishes(record), race.finishes(base)]
        ours, theirs = (_by_seed([(f.seed, f.seconds) for f in side]) for side in sides)
        known = stats.compare(ours, theirs, paired=len(ours) == len(theirs))
        if not all(finish.there for side in sides for finish in side):
            doubt = "a run has missed the target"
    else:  # larger is better, other than for times
        ours, theirs = (_by_seed(_of_runs(each, measure)) for each in (record, base))
        known = stats.compare(theirs, ours, paired=len(ours) == len(theirs))
    ratio = known.ratio
    return Figure(value=ratio.value, low=ratio.low, high=ratio.high, doubt=doubt)


def _of_runs(record: Record, measure: Measure) -> list[tuple[int, float]]:
    """Returns the seed and the value of each run of a training trial."""
    values = []
    for run, result in zip(record.learning, record.results, strict=True):
        value = run.evaluations[-1].accuracy if measure == "accuracy" else result.samples_per_s
        values.append((run.seed, value or 0.0))
    return values


def _by_seed(values: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Returns positive values in the order of their seeds, in the form of `stats.compare`."""
    if not values or min(value for _, value in values) <= 0:
        raise _NoResultError("a run has no value")
    return [[value] for _, value in sorted(values)]
