#!/usr/bin/env python3
"""How often tables tell the truth: simulated ones, and real ones of equal trials.

  python bench/words.py simulated                  intervals and words, by noise and repeats
  python bench/words.py twins N [EXPERIMENT]       N sweeps in which every algorithm stands twice;
                                                   asked again it goes on where it stopped
  python bench/words.py read FOLDER...             the words of such sweeps, which have run

Simulated tables are made by the code that makes those of sweeps; a second simulation tells what the
interval of a throughput covers (`bench/rig/coverage.py`). Bars: 93 to 97 % of intervals of ratios
hold the truth, and at least 93 % of those of throughputs the truth of their run; at most 5 % of
tables of equal trials have a word, and at most 5 % tell one from the best; the default sweep finds
a true difference of 5 % in 80 % of its tables; at most 5 % of twins have a word. Exit status: 0
within the bars, 3 not, 1 something failed, 2 a mistake in the options.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import yaml

from bench.rig import coverage
from bench.rig.output import note
from bench.rig.table import layout
from common.harness.experiment import load
from common.harness.trial import MeasureConfig
from common.machine import machine_card
from common.results import stats
from common.results.faith import doubt
from common.results.records import Record, Result, Throughput
from common.results.records.trust import Check
from common.results.rows import Row, difference, make_rows
from common.results.shipped import MISSED
from common.results.store import Comparison
from dear.errors import UserError

ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / "configs" / "experiments" / "emulated-quick.yaml"
EFFECTS = (0.02, 0.05, 0.10)
FALSE_WORDS = 0.05
COVERAGE = (0.93, 0.97)
NEEDED = 0.05
"""The effect that the default sweep must find (in `stats.POWER` of all tables)."""
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


@functools.cache
def default_plan() -> Plan:
    """Of the default sweep."""
    return Plan.of(load(DEFAULT).measure)


def plans() -> tuple[Plan, ...]:
    """Two of a fixed number of repeats, and the default sweep's."""
    return Plan((3, 3), 2), Plan((5, 5), 3), default_plan()


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
                _, faster, _ = table(cell(rng, noise, plan, [effect, 0.0]))
                tally.found[effect] += faster.verdict == "FASTER"
        return tally

    def _equal(self, trials: list[stats.Repeats]) -> None:
        rows = table(trials)
        rivals = rows[1:]
        words = [row.verdict for row in rivals]
        self.held += sum(row.speedup_low <= 1 <= row.speedup_high for row in rivals)
        self.same += words.count("SAME")
        self.false_tables += any(word in _WORDS for word in words)
        self.wrong_leaders += not all(row.leads for row in rows)
        self.repeats += rows[0].repeats

    @property
    def coverage(self) -> float:
        return self.held / self.tables / self.COMPARED

    @property
    def false_words(self) -> float:
        """Share of tables."""
        return self.false_tables / self.tables

    @property
    def false_leaders(self) -> float:
        """Share of tables."""
        return self.wrong_leaders / self.tables

    def power(self, effect: float) -> float:
        """How often that true difference got its word."""
        return self.found[effect] / self.tables

    @property
    def missed(self) -> list[str]:
        """The bars that were missed; shares of tables by more than two errors of the simulation."""
        low, high = COVERAGE
        most = FALSE_WORDS + 2 * (FALSE_WORDS * (1 - FALSE_WORDS) / self.tables) ** 0.5
        found = []
        if not low <= self.coverage <= high:
            found.append(f"coverage {self.coverage:.1%} is not {low:.0%} to {high:.0%}")
        if self.false_words > most:
            found.append(f"false words in {self.false_words:.1%} of tables, over {FALSE_WORDS:.0%}")
        if self.false_leaders > most:
            found.append(f"false leaders in {self.false_leaders:.1%}, over {FALSE_WORDS:.0%}")
        judged = self.noise is EMULATED and self.plan == default_plan() and NEEDED in self.found
        if judged and self.power(NEEDED) < stats.POWER:
            found.append(f"{NEEDED:.0%} found in {self.power(NEEDED):.1%}, under {stats.POWER:.0%}")
        return found

    def cells(self) -> list[str]:
        shares = [self.coverage, self.false_words, self.false_leaders]
        shares += [self.same / self.tables / self.COMPARED]
        shares += [self.power(effect) for effect in EFFECTS]
        mean = f"{self.repeats / self.tables:.1f}"
        texts = (f"{100 * share:.1f}" for share in shares)
        return [self.noise.name, self.plan.title, mean, *texts, "MISSED" if self.missed else "ok"]


def table(trials: Sequence[stats.Repeats]) -> list[Row]:
    """The rows that a sweep's table has of such step times, all compared with the first."""
    records = [_record(index, repeats) for index, repeats in enumerate(trials)]
    return make_rows(records, records[0].label)


def _record(index: int, repeats: stats.Repeats) -> Record:
    label = f"trial {index}"
    trial = {
        "model": "m",
        "batch_size": 1,
        "world_size": 2,
        "algorithm": label,
        "label": label,
        "brought": None,
    }
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


def simulated(tables: int) -> int:
    """Prints a line per noise and plan, shares in per cent, and the bars that were missed."""
    header = ["noise", "repeats x steps", "mean n", "coverage", "false", "leaders", "SAME"]
    header += [f"{effect:.0%}" for effect in EFFECTS]
    tallies = []
    for noise in NOISES:
        for plan in plans():
            tallies.append(Tally.of(noise, plan, tables))
            note(f"{noise.name}, {plan.title}: {', '.join(tallies[-1].missed) or 'ok'}")
    print(layout([*header, ""], [tally.cells() for tally in tallies]))
    print(
        f"{tables} tables each, in per cent. coverage: 95 % intervals that hold the truth; false: "
        f"tables of {Tally.COMPARED} equal comparisons with a FASTER or SLOWER; leaders: such "
        "tables that tell one from the best; SAME: of equal comparisons; then how often a true "
        "difference is called FASTER beside one other comparison"
    )
    low, high = COVERAGE
    print(
        f"bars: coverage {low:.0%} to {high:.0%}; false and leaders {FALSE_WORDS:.0%}; "
        f"{NEEDED:.0%} found in {stats.POWER:.0%} with {EMULATED.name}, {default_plan().title}"
    )
    missed = [(tally, bar) for tally in tallies for bar in tally.missed]
    for tally, bar in missed:
        print(f"MISSED: {tally.noise.name}, {tally.plan.title}: {bar}")
    plan = default_plan()
    kinds = [((3, 3), None), ((5, 5), None), (plan.repeats, plan.precision), ((12, 12), None)]
    uncovered = coverage.report(kinds, 4 * tables)
    return MISSED if missed or uncovered else 0


def twins(count: int, experiment: Path, logs: Path) -> int:
    """Runs the experiment `count` times with every algorithm twice, and judges the words.

    Sweeps of this commit that are complete in `logs` are not run again.
    """
    given = load(experiment)
    pairs = [
        dataclasses.asdict(dataclasses.replace(one, label=one.title + more))
        for one in given.algorithms
        for more in ("", _AGAIN)
    ]
    commit = (machine_card()["commit"] or "unknown").replace("+", "-")
    folders: list[Path] = []
    for index in range(count):
        name = f"{given.name}-twins-{commit}-{index}"
        folder = logs / name
        if not _complete(folder):
            changes = {"name": name, "algorithms": pairs, "baseline": False}
            command = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(experiment)]
            for key, value in changes.items():
                text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
                command += ["--set", f"{key}={text.removesuffix('...').strip()}"]
            # Trials of a sweep that was stopped would not have taken turns with the others.
            command += ["--logs", str(logs), "--rerun", "all", "--no-plot", "--quiet"]
            began = time.monotonic()
            done = subprocess.run(command, stdout=subprocess.DEVNULL)
            if done.returncode not in (0, 1):
                return done.returncode
            note(f"{name}: {(time.monotonic() - began) / 60:.1f} min")
        folders.append(folder)
        note(f"sweep {index + 1} of {count}: {_counted(_lines([folder]))}")
        note(f"so far: {_counted(_lines(folders))}")
    return read(folders)


def _complete(folder: Path) -> bool:
    """Whether one run has ended all trials of the sweep."""
    try:
        comparison = Comparison.load(folder)
    except UserError:  # it has not begun
        return False
    found = comparison.results(folder)
    ended = [one for one in found if one.status != "interrupted"]
    return len(ended) == len(comparison.trials) and len({one.run for one in ended}) == 1


Line = tuple[str, str, str, str, str]
"""Sweep, cell, label, ratio and word of a pair; without a ratio it is not believed."""


def _lines(folders: Sequence[Path]) -> list[Line]:
    return [
        (folder.name, *line)
        for folder in folders
        for line in judged(Comparison.load(folder).results(folder))
    ]


def _counted(lines: Sequence[Line]) -> str:
    words = [word for *_, ratio, word in lines if ratio]
    wrong = sum(word in _WORDS for word in words)
    share = f" ({wrong / len(words):.1%})" if words else ""
    return (
        f"{wrong} of {len(words)} rows{share} have a false word; SAME {words.count('SAME')}, "
        f"UNSURE {words.count('UNSURE')}; {len(lines) - len(words)} are not believed"
    )


def read(folders: Sequence[Path]) -> int:
    """Prints the words of all pairs of twins, and judges them."""
    lines = _lines(folders)
    words = [word for *_, ratio, word in lines if ratio]
    if not words:
        print("no pair of twins that both are believed")
        return 1
    print(layout(["sweep", "cell", "trial", "again / first (95 % CI)", "word"], lines))
    print(_counted(lines))
    return MISSED if sum(word in _WORDS for word in words) / len(words) > FALSE_WORDS else 0


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
    runs.add_argument(
        "--logs", type=Path, default=ROOT / "logs", help="where sweeps are kept; it goes on there"
    )
    verbs.add_parser("read", help="judge such sweeps again").add_argument(
        "folders", type=Path, nargs="+"
    )
    options = parser.parse_args(arguments)
    try:
        if options.verb == "simulated":
            return simulated(options.tables)
        if options.verb == "twins":
            return twins(options.count, options.experiment, options.logs)
        return read(options.folders)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
