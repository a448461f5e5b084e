#!/usr/bin/env python3
"""How often tables tell the truth: simulated ones, and real ones of equal trials.

  python bench/words.py simulated                  intervals and words, by noise and repeats
  python bench/words.py twins N [EXPERIMENT]       N sweeps in which every algorithm stands twice
  python bench/words.py read FOLDER...             the words of such sweeps, which have run

Bars: 93 to 97 % of intervals hold the truth (from 92.5 where repeats stop at a precision), at most
5 % of tables of equal trials have a word, and at most 5 % of twins. Exit status: 0 within the bars,
1 not or something failed, 2 a mistake in the options.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import yaml

from bench.rig.table import layout
from common.harness.experiment import load
from common.harness.trial import MeasureConfig
from common.results import stats
from common.results.faith import doubt
from common.results.records import Comparison, Record
from common.results.rows import difference
from dear.errors import UserError

ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / "configs" / "experiments" / "emulated-quick.yaml"
EFFECTS = (0.02, 0.05, 0.10)
FALSE_WORDS = 0.05
COVERAGE = (0.93, 0.97)
_AGAIN = " again"
_WORDS = ("FASTER", "SLOWER")


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the log of step times."""

    name: str
    step: float
    start: float
    """Shared by the steps of a repeat."""
    round: float
    """Shared by all trials of a round."""
    base: Noise | None = None
    """Of what all are compared with, where that is another one."""


EMULATED = Noise("emulated, BERT and ResNet-50", 0.011, 0.003, 0.0025)
NOISES = (
    EMULATED,
    Noise("the same, rounds that drift", 0.011, 0.003, 0.03),
    Noise("emulated, DenseNet-201", 0.026, 0.003, 0.003),
    Noise("emulated, a saturated Horovod", 0.072, 0.014, 0.0025, base=EMULATED),
    Noise("real, ResNet-50 on 2 shared cores", 0.054, 0.089, 0.0),
    Noise("real, a CNN on 2 shared cores", 0.091, 0.043, 0.0),
)
"""As the sweeps in docs/records showed them (analysis of variance of the logs)."""


@dataclass(frozen=True)
class Plan:
    """How a cell is measured."""

    repeats: tuple[int, int]
    """Least and most."""
    steps: int
    precision: float | None = None

    @classmethod
    def of(cls, measure: MeasureConfig) -> Plan:
        """As an experiment has it, with the fewest steps that a repeat may have."""
        steps = measure.num_iters * (measure.steps_per_iter or measure.min_steps)
        return cls((measure.least_repeats, measure.most_repeats), steps, measure.precision)

    @property
    def title(self) -> str:
        least, most = self.repeats
        count = f"{least}" if least == most else f"{least}-{most} to {self.precision:.0%}"
        return f"{count} x {self.steps}"


def plans() -> tuple[Plan, ...]:
    """Two of a fixed number of repeats, and the default sweep's."""
    return Plan((3, 3), 2), Plan((5, 5), 3), Plan.of(load(DEFAULT).measure)


def cell(
    rng: np.random.Generator, noise: Noise, plan: Plan, effects: Sequence[float]
) -> list[stats.Repeats]:
    """The step times of a base and of its rivals, in as many rounds as the plan takes.

    Args:
        effects: of each rival: 0.05 is 5 % faster than the base.
    """
    most = plan.repeats[1]
    rounds = rng.normal(0, noise.round, (most, 1))
    trials = []
    for kind, effect in zip(
        (noise.base or noise, *[noise] * len(effects)), (0.0, *effects), strict=True
    ):
        starts = rounds + rng.normal(0, kind.start, (most, 1))
        logs = starts + rng.normal(0, kind.step, (most, plan.steps)) - np.log1p(effect)
        trials.append(np.exp(logs).tolist())
    count = plan.repeats[0]
    while plan.precision is not None and count < most:
        so_far = [trial[:count] for trial in trials]
        if stats.precise_enough(so_far, plan.precision, base=so_far[0]):
            break
        count += 1
    return [trial[:count] for trial in trials]


@dataclass
class Tally:
    """What some simulated tables of one noise and plan said.

    Tables of equal trials have ten, of which nine are compared with the first; those with an effect
    have a base and two rivals, as the default sweep, one of them faster.
    """

    noise: Noise
    plan: Plan
    tables: int
    held: int = 0
    """Intervals that held the truth."""
    same: int = 0
    false_tables: int = 0
    """With a FASTER or SLOWER."""
    wrong_leaders: int = 0
    """Tables that told one from the best though it is not slower."""
    found: Counter[float] = field(default_factory=Counter)
    """FASTER, by the true effect."""
    repeats: int = 0

    COMPARED = 9

    @classmethod
    def of(cls, noise: Noise, plan: Plan, tables: int, effects: Sequence[float] = EFFECTS) -> Tally:
        """Simulates, always the same."""
        rng = np.random.default_rng(1)
        tally = cls(noise, plan, tables)
        for _ in range(tables):
            tally._equal(cell(rng, noise, plan, [0.0] * cls.COMPARED))
            for effect in effects:
                base, *rivals = cell(rng, noise, plan, [effect, 0.0])
                words = stats.verdicts([stats.compare(one, base, paired=True) for one in rivals])
                tally.found[effect] += words[0] == "FASTER"
        return tally

    def _equal(self, trials: list[stats.Repeats]) -> None:
        base, *rivals = trials
        found = [stats.compare(one, base, paired=True) for one in rivals]
        words = stats.verdicts(found)
        self.held += sum(abs(one.log_ratio) <= one.half_width for one in found)
        self.same += words.count("SAME")
        self.false_tables += any(word in _WORDS for word in words)
        self.wrong_leaders += len(stats.leaders(trials, lambda i, j: True)) < len(trials)
        self.repeats += len(base)

    @property
    def coverage(self) -> float:
        return self.held / self.tables / self.COMPARED

    @property
    def false_words(self) -> float:
        """Share of tables."""
        return self.false_tables / self.tables

    def power(self, effect: float) -> float:
        """How often that true difference got its word."""
        return self.found[effect] / self.tables

    @property
    def good(self) -> bool:
        """Whether it is within the bars, two standard errors of a simulation aside."""
        least = COVERAGE[0] - (0.005 if self.plan.precision else 0.0)
        luck = 2 * (FALSE_WORDS * (1 - FALSE_WORDS) / self.tables) ** 0.5
        wrong = max(self.false_tables, self.wrong_leaders) / self.tables
        return least <= self.coverage <= COVERAGE[1] and wrong <= FALSE_WORDS + luck

    def cells(self) -> list[str]:
        shares = [self.coverage, self.false_words, self.wrong_leaders / self.tables]
        shares += [self.same / self.tables / self.COMPARED]
        shares += [self.power(effect) for effect in EFFECTS]
        mean = f"{self.repeats / self.tables:.1f}"
        texts = (f"{100 * share:.1f}" for share in shares)
        return [self.noise.name, self.plan.title, mean, *texts, "ok" if self.good else "MISSED"]


def simulated(tables: int) -> int:
    """Prints a line per noise and plan, shares in per cent."""
    header = ["noise", "repeats x steps", "mean n", "coverage", "false", "leaders", "SAME"]
    header += [f"{effect:.0%}" for effect in EFFECTS]
    tallies = [Tally.of(noise, plan, tables) for noise in NOISES for plan in plans()]
    print(layout([*header, ""], [tally.cells() for tally in tallies]))
    print(
        f"{tables} tables each, in per cent. coverage: 95 % intervals that hold the truth; false: "
        f"tables of {Tally.COMPARED} equal comparisons with a FASTER or SLOWER; leaders: such "
        "tables that tell one from the best; SAME: of equal comparisons; then how often a true "
        "difference is called FASTER beside one other comparison"
    )
    return int(not all(tally.good for tally in tallies))


def twins(count: int, experiment: Path) -> int:
    """Runs the experiment `count` times with every algorithm twice, and judges the words."""
    folders = []
    for index in range(count):
        given = load(experiment)
        pairs = [
            dataclasses.asdict(dataclasses.replace(one, label=one.title + more))
            for one in given.algorithms
            for more in ("", _AGAIN)
        ]
        name = f"{given.name}-twins-{index}"
        changes = {"name": name, "algorithms": pairs, "baseline": False}
        command = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(experiment)]
        for key, value in changes.items():
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
            command += ["--set", f"{key}={text.removesuffix('...').strip()}"]
        done = subprocess.run([*command, "--no-plot"])
        if done.returncode not in (0, 1):
            return done.returncode
        folders.append(ROOT / "logs" / name)
    return read(folders)


def read(folders: Sequence[Path]) -> int:
    """Prints the words of all pairs of twins, and judges them."""
    lines: list[list[str]] = []
    for folder in folders:
        found = judged(Comparison.load(folder).results(folder))
        lines += [[folder.name, *line] for line in found]
    counts = Counter(word for *_, ratio, word in lines if ratio)
    total = sum(counts.values())
    if not total:
        print("no pair of twins that both are believed")
        return 1
    wrong = sum(counts[word] for word in _WORDS)
    print(layout(["sweep", "cell", "trial", "again / first (95 % CI)", "word"], lines))
    print(
        f"{wrong} of {total} rows ({wrong / total:.1%}) have a false word; SAME {counts['SAME']}, "
        f"UNSURE {counts['UNSURE']}; {len(lines) - total} are not believed"
    )
    return int(wrong / total > FALSE_WORDS)


def judged(records: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """Cell, label, ratio and word of each pair of twins; words hold among the pairs of a cell.

    The word of a pair of which one is not believed is the reason.
    """
    cells: dict[str, list[tuple[Record, Record]]] = {}
    for record in records:
        for other in records:
            if other.label == record.label + _AGAIN and _place(other) == _place(record):
                cells.setdefault(_place(record), []).append((record, other))
    found = []
    for where, pairs in cells.items():
        sure = [pair for pair in pairs if not (doubt(pair[0]) or doubt(pair[1]))]
        differences = [difference(again, first) for first, again in sure]
        words = stats.verdicts(differences)
        for (first, _), one, word in zip(sure, differences, words, strict=True):
            ratio = one.ratio
            ends = "" if ratio.low is None else f" ({ratio.low:.3f}-{ratio.high:.3f})"
            found.append((where, first.label, f"{ratio.value:.3f}{ends}", word))
        for first, again in pairs:
            reason = doubt(first) or doubt(again)
            if reason:
                found.append((where, first.label, "", reason))
    return found


def _place(record: Record) -> str:
    trial = record.trial
    more = (trial.get("network"), record.fault)
    words = (
        f"{trial['model']} bs={trial['batch_size']} n={trial['world_size']}",
        *filter(None, more),
    )
    return " ".join(words)


def main(arguments: Sequence[str]) -> int:
    """Runs one verb; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    simulation = verbs.add_parser("simulated", help="intervals and words where the truth is known")
    simulation.add_argument("--tables", type=int, default=1000, help="of each kind")
    runs = verbs.add_parser("twins", help="run an experiment with every algorithm twice")
    runs.add_argument("count", type=int, help="how many sweeps")
    runs.add_argument(
        "experiment", type=Path, nargs="?", default=DEFAULT, help="default: %(default)s"
    )
    verbs.add_parser("read", help="judge such sweeps again").add_argument(
        "folders", type=Path, nargs="+"
    )
    options = parser.parse_args(arguments)
    try:
        if options.verb == "simulated":
            return simulated(options.tables)
        if options.verb == "twins":
            return twins(options.count, options.experiment)
        return read(options.folders)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
