"""Simulated tables of trials whose true differences are known: how often are verdicts right?

A plan is the number of repeats and steps; the effect of a trial is by how much it is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.harness.settings import MeasureConfig
from common.results import stats
from common.results.records import Record, Result, Throughput
from common.results.records.trust import Check
from common.results.timed.rows import Row, make_rows

EFFECTS = (0.02, 0.05, 0.10)
FALSE_WORDS = 0.05
COVERAGE = (0.93, 0.97)
COMPARED = 9
"""Comparisons in a table of equal trials."""
WORDS = ("FASTER", "SLOWER")


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the logarithms of step times."""

    name: str
    step: float
    start: float
    """Deviation of whole repeats: all steps of a repeat share it."""
    round: float
    """Deviation of whole rounds: all trials of a round share it."""
    base: Noise | None = None


EMULATED = Noise("emulated, BERT and ResNet-50", 0.011, 0.003, 0.0025)
NOISES = (
    EMULATED,
    Noise("the same, rounds that drift", 0.011, 0.003, 0.03),
    Noise("emulated, DenseNet-201", 0.026, 0.003, 0.003),
    Noise("emulated, a saturated Horovod", 0.072, 0.014, 0.0025, base=EMULATED),
    Noise("real, ResNet-50 on 2 shared cores", 0.054, 0.089, 0.0),
    Noise("real, a CNN on 2 shared cores", 0.091, 0.043, 0.0),
)
"""Kinds of noise, as analysis of variance found them in the sweeps in docs/records."""


@dataclass(frozen=True)
class Plan:
    """Repeats (least and most), steps per repeat, and the precision at which repeats end."""

    repeats: tuple[int, int]
    steps: int
    precision: float | None = None

    @classmethod
    def of(cls, measure: MeasureConfig) -> Plan:
        """Returns the plan of an experiment, with the fewest steps that a repeat may have."""
        steps = measure.num_iters * (measure.steps_per_iter or measure.min_steps)
        return cls((measure.least_repeats, measure.most_repeats), steps, measure.precision)

    @property
    def title(self) -> str:
        least, most = self.repeats
        count = f"{least}" if least == most else f"{least}-{most} to {self.precision:.0%}"
        return f"{count} x {self.steps}"


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Rates of verdicts in simulated tables with one kind of noise and one plan.

    Tables of equal trials compare nine trials with a tenth. Tables with an effect have a baseline
    and two other trials, as the default sweep has; one of the two is faster than the baseline.

    Attributes:
        repeats: mean number of repeats.
        coverage: share of intervals that contain the true ratio.
        false_words: share of tables of equal trials with a verdict FASTER or SLOWER.
        false_leaders: share of tables of equal trials that call a trial slower than the best.
        same: share of equal comparisons with the verdict SAME.
        power: share of true differences with the verdict FASTER, by effect.
    """

    noise: Noise
    plan: Plan
    tables: int
    repeats: float
    coverage: float
    false_words: float
    false_leaders: float
    same: float
    power: dict[float, float]

    @classmethod
    def of(cls, noise: Noise, plan: Plan, tables: int, effects: Sequence[float] = EFFECTS) -> Tally:
        """Simulates tables; the same arguments give the same result."""
        rng = np.random.default_rng(1)
        counts: Counter[str | float] = Counter()
        for _ in range(tables):
            rows = _table(_cell(rng, noise, plan, [0.0] * COMPARED))
            verdicts = [row.verdict for row in rows[1:]]
            counts["held"] += sum(row.speedup_low <= 1 <= row.speedup_high for row in rows[1:])
            counts["same"] += verdicts.count("SAME")
            counts["false"] += any(verdict in WORDS for verdict in verdicts)
            counts["leaders"] += not all(row.leads for row in rows)
            counts["repeats"] += rows[0].repeats
            for effect in effects:
                _, faster, _ = _table(_cell(rng, noise, plan, [effect, 0.0]))
                counts[effect] += faster.verdict == "FASTER"
        return cls(
            noise=noise,
            plan=plan,
            tables=tables,
            repeats=counts["repeats"] / tables,
            coverage=counts["held"] / tables / COMPARED,
            false_words=counts["false"] / tables,
            false_leaders=counts["leaders"] / tables,
            same=counts["same"] / tables / COMPARED,
            power={effect: counts[effect] / tables for effect in effects},
        )

    def missed(self, needed: float | None = None) -> list[str]:
        """Returns the missed requirements; shares of tables have a margin of two standard errors.
        `needed` is the effect that must get the verdict FASTER with the probability
        `stats.POWER`."""
        low, high = COVERAGE
        most = FALSE_WORDS + 2 * (FALSE_WORDS * (1 - FALSE_WORDS) / self.tables) ** 0.5
        bars = []
        if not low <= self.coverage <= high:
            bars.append(f"coverage {self.coverage:.1%} is not {low:.0%} to {high:.0%}")
        if self.false_words > most:
            bars.append(f"false verdicts in {self.false_words:.1%}, over {FALSE_WORDS:.0%}")
        if self.false_leaders > most:
            bars.append(f"false leaders in {self.false_leaders:.1%}, over {FALSE_WORDS:.0%}")
        if needed is not None and self.power[needed] < stats.POWER:
            bars.append(f"{needed:.0%} found in {self.power[needed]:.1%}, under {stats.POWER:.0%}")
        return bars

    def cells(self) -> list[str]:
        """Returns the row of the table, in per cent."""
        shares = [self.coverage, self.false_words, self.false_leaders, self.same]
        shares += self.power.values()
        shown = [f"{100 * share:.1f}" for share in shares]
        return [self.noise.name, self.plan.title, f"{self.repeats:.1f}", *shown]


def _cell(
    rng: np.random.Generator, noise: Noise, plan: Plan, effects: Sequence[float]
) -> list[stats.Repeats]:
    """Simulates the step times of a baseline and of one more trial per effect. `effects` has the
    effect of each of these trials; 0.05 is 5 % faster than the baseline."""
    least, most = plan.repeats
    rounds = rng.normal(0, noise.round, (most, 1))
    trials = []
    noises = [noise.base or noise, *[noise] * len(effects)]
    for kind, effect in zip(noises, (0.0, *effects), strict=True):
        starts = rounds + rng.normal(0, kind.start, (most, 1))
        logs = starts + rng.normal(0, kind.step, (most, plan.steps)) - np.log1p(effect)
        trials.append(np.exp(logs).tolist())
    count = least
    while plan.precision is not None and count < most:
        so_far = [trial[:count] for trial in trials]
        if stats.precise_enough(so_far, plan.precision, base=so_far[0]):
            break
        count += 1
    return [trial[:count] for trial in trials]


def _table(trials: Sequence[stats.Repeats]) -> list[Row]:
    records = [_record(f"trial {index}", repeats) for index, repeats in enumerate(trials)]
    return make_rows(records, records[0].label)


def _record(label: str, repeats: stats.Repeats) -> Record:
    trial = {"model": "m", "batch_size": 1, "world_size": 2, "algorithm": label, "label": label}
    trial["brought"] = None
    check = Check(replicas_agree=True, matches_reference=True)
    return Record(
        id=label,
        hash=label,
        trial=trial,
        status="ok",
        started="",
        duration_s=0.0,
        machine={},
        run="simulated",
        results=[Result(iters=[list(steps)], cpu_s_per_s=1.0, check=check) for steps in repeats],
        check=check,
        throughput=Throughput(value=0.0, unit="", ci_low=None, ci_high=None, n=0),
    )
