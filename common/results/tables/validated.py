"""Comparison of predicted with measured steps: rows, errors, and the choices that follow."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from common.results.tables.table import markdown

APART = 0.05
"""Smallest relative difference of two measured steps whose order must be predicted."""
GOOD = 0.03
"""Largest relative distance of a good choice from the shortest measured step."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Measured and predicted step of a trial, in seconds."""

    sweep: str
    model: str
    batch: int
    world_size: int
    network: str
    algorithm: str
    scales: str
    """Time scale k of the emulation, or `k, 2k` if the step is extrapolated from both."""
    measured_s: float
    """Step; T(inf) = 2 T(2k) - T(k) if both are known, since the emulation's errors shrink as 1 / k
    does."""
    predicted_s: float
    low_s: float
    """Lower end of the prediction's range."""
    high_s: float
    costs_of: str
    """Model of the trial whose costs of collectives were used."""
    exact: bool
    """True if the algorithm does not change the result of training."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        """True if the measured step lies in the range of the prediction."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def width(self) -> float:
        """Width of the range, relative to the predicted step."""
        return (self.high_s - self.low_s) / self.predicted_s

    @property
    def place(self) -> tuple[object, ...]:
        """Settings that compared trials have in common."""
        return self.sweep, self.model, self.batch, self.world_size, self.network


@dataclass(frozen=True, kw_only=True)
class Advised:
    """Choice by predicted steps among the exact algorithms that were measured in a setting."""

    place: tuple[object, ...]
    """Setting, see `Check.place`."""
    chosen: str
    """Algorithm with the shortest predicted step."""
    fastest: str
    """Algorithm with the shortest measured step."""
    algorithms: int
    excess: float
    """Relative distance of the measured step of the chosen algorithm from the shortest one."""

    @property
    def good(self) -> bool:
        return self.excess <= GOOD

    @classmethod
    def of(cls, checks: Sequence[Check]) -> list[Advised]:
        """Returns the choices in all settings with at least two algorithms."""
        cells: dict[tuple[object, ...], list[Check]] = {}
        for check in checks:
            if check.exact:
                cells.setdefault(check.place, []).append(check)
        choices = []
        for place, cell in cells.items():
            chosen = min(cell, key=lambda check: check.predicted_s)
            fastest = min(cell, key=lambda check: check.measured_s)
            if len(cell) > 1:
                choices.append(
                    cls(
                        place=place,
                        chosen=chosen.algorithm,
                        fastest=fastest.algorithm,
                        algorithms=len(cell),
                        excess=chosen.measured_s / fastest.measured_s - 1,
                    )
                )
        return choices


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of all comparisons, relative to the measured steps."""

    comparisons: int
    mean_error: float
    """Mean of the absolute errors."""
    signed_mean_error: float
    worst_error: float
    pairs: int
    """Pairs of algorithms in the same cell whose measured steps differ by more than `APART`."""
    pairs_in_order: int
    """Pairs whose order the prediction has right."""
    inside: int
    """Measured steps in the range of their prediction."""
    median_width: float
    """Median width of the ranges, relative to the predicted step."""

    @classmethod
    def of(cls, checks: Sequence[Check]) -> Summary:
        """Returns the summary of at least one comparison."""
        errors = [check.error for check in checks]
        orders = [
            (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)
            for a, b in itertools.combinations(checks, 2)
            if a.place == b.place and abs(math.log(a.measured_s / b.measured_s)) > math.log1p(APART)
        ]
        return cls(
            comparisons=len(checks),
            mean_error=statistics.fmean(map(abs, errors)),
            signed_mean_error=statistics.fmean(errors),
            worst_error=max(errors, key=abs),
            pairs=len(orders),
            pairs_in_order=sum(orders),
            inside=sum(check.inside for check in checks),
            median_width=statistics.median(check.width for check in checks),
        )

    def __str__(self) -> str:
        return (
            f"{self.comparisons} comparisons: mean error {self.mean_error:.2%}, signed mean "
            f"{self.signed_mean_error:+.2%}, worst {self.worst_error:+.2%}; {self.pairs} pairs "
            f"differ by more than {APART:.0%}, {self.pairs_in_order} of them in the right order; "
            f"{self.inside} measured steps lie in the range, whose median width is "
            f"{self.median_width:.1%}"
        )


def text(checks: Sequence[Check], skipped: Sequence[str]) -> str:
    """Returns a row per trial, what was not compared, and summaries."""
    head = ("sweep", "model", "batch", "workers", "network", "algorithm", "time scale")
    lines = [(*head, "measured ms", "predicted ms", "range", "error", "costs of")]
    for check in checks:
        lines.append(
            (
                *map(str, check.place[:4]),
                check.network,
                check.algorithm,
                check.scales,
                f"{1e3 * check.measured_s:.1f}",
                f"{1e3 * check.predicted_s:.1f}",
                f"{1e3 * check.low_s:.1f}-{1e3 * check.high_s:.1f}{'' if check.inside else ' !'}",
                f"{check.error:+.1%}",
                check.costs_of,
            )
        )
    right = [False, False, True, True, False, False, True, True, True, True, True, False]
    result = [markdown(lines, right), "!: the measured step lies outside the range"]
    result += [f"not compared: {line}" for line in skipped]
    result.append(str(Summary.of(checks)) if checks else "nothing to compare")
    choices = Advised.of(checks)
    return "\n".join([*result, *(["", _advised(choices)] if choices else [])])


def as_json(checks: Sequence[Check], skipped: Sequence[str]) -> dict[str, object]:
    """Returns the rows and the summaries."""
    choices = Advised.of(checks)
    return {
        "rows": [{**asdict(c), "error": c.error, "inside": c.inside} for c in checks],
        "summary": asdict(Summary.of(checks)) if checks else None,
        "skipped": [*skipped],
        "advised": [asdict(choice) for choice in choices],
        "good_advice": sum(choice.good for choice in choices),
        "settings": len(choices),
    }


def _advised(choices: Sequence[Advised]) -> str:
    head = ("sweep", "model", "batch", "workers", "network")
    lines = [(*head, "of", "advised", "fastest measured", "distance")]
    for choice in choices:
        texts = (str(choice.algorithms), choice.chosen, choice.fastest, f"{choice.excess:.1%}")
        lines.append((*map(str, choice.place), *texts))
    good = sum(choice.good for choice in choices)
    table = markdown(lines, [False, False, True, True, False, True, False, False, True])
    return (
        f"{table}\nadvice among the measured exact algorithms: in {good} of {len(choices)} "
        f"settings, the advised one is within {GOOD:.0%} of the fastest"
    )
