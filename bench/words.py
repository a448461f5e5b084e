#!/usr/bin/env python3
"""Rates of wrong verdicts and intervals, in simulated tables and in real ones of equal trials.

  python bench/words.py simulated                  simulate tables whose true ratios are known
  python bench/words.py twins N [EXPERIMENT]       N sweeps that have every algorithm twice; a run
                                                   that was stopped continues
  python bench/words.py read FOLDER...             verdicts of finished sweeps of that kind

`simulated` draws step times at random and computes tables with the code of sweeps. It also
simulates the interval of a throughput (`bench/rig/coverage.py`). Requirements: 93 to 97 % of the
intervals of ratios contain the true ratio. At least 93 % of the intervals of throughputs contain
the true rate of their run. At most 5 % of the tables of equal trials have a verdict FASTER or
SLOWER, and at most 5 % call a trial slower than the best. The default sweep finds a true difference
of 5 % in 80 % of its tables. Twins are the two trials of one algorithm; at most 5 % of them have a
verdict FASTER or SLOWER. Exit status: 0; 1 after a failure; 2 for a user error; 3 if a requirement
is missed.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from bench.rig import coverage, program
from bench.rig.output import note
from bench.rig.table import layout
from bench.rig.tables import (
    COMPARED,
    COVERAGE,
    EFFECTS,
    EMULATED,
    FALSE_WORDS,
    NOISES,
    WORDS,
    Plan,
    Tally,
)
from common.harness.experiment_file import load
from common.machine import machine_card
from common.results import stats
from common.results.committed.catalogue import MISSED
from common.results.records import Record
from common.results.store import Comparison
from common.results.timed.rows import difference
from common.results.validity import flag_text
from dear.errors import UserError

ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / "configs" / "experiments" / "emulated-quick.yaml"
NEEDED = 0.05
"""True difference that the default sweep must find (in `stats.POWER` of all tables)."""
_AGAIN = " again"

Line = tuple[str, str, str, str, str]
"""Sweep, cell, label, ratio and verdict of a pair of twins; a flagged pair has no ratio."""


@functools.cache
def default_plan() -> Plan:
    """Returns the numbers of repeats and steps of the default sweep."""
    return Plan.of(load(DEFAULT).measure)


def plans() -> tuple[Plan, ...]:
    """Returns two plans with a fixed number of repeats, and the plan of the default sweep."""
    return Plan((3, 3), 2), Plan((5, 5), 3), default_plan()


def simulated(tables: int) -> int:
    """Simulates `tables` tables per kind of noise and number of repeats, and prints the rates.
    Returns the exit status, `MISSED` if a requirement is missed."""
    rows, missed = [], []
    for noise in NOISES:
        for plan in plans():
            tally = Tally.of(noise, plan, tables)
            needed = NEEDED if noise is EMULATED and plan == default_plan() else None
            bars = tally.missed(needed)
            missed += [f"{noise.name}, {plan.title}: {bar}" for bar in bars]
            rows.append([*tally.cells(), "MISSED" if bars else "ok"])
            note(f"{noise.name}, {plan.title}: {', '.join(bars) or 'ok'}")
    header = ["noise", "repeats x steps", "mean n", "coverage", "false", "leaders", "SAME"]
    print(layout([*header, *(f"{effect:.0%}" for effect in EFFECTS), ""], rows))
    print(
        f"{tables} tables per row; shares in per cent. coverage: intervals (95 %) that contain the "
        f"true ratio. false: tables of {COMPARED} equal comparisons with a FASTER or SLOWER. "
        "leaders: such tables that call a trial slower than the best. SAME: equal comparisons with "
        "this verdict. Last columns: verdicts FASTER if a trial is faster by so much."
    )
    low, high = COVERAGE
    print(
        f"required: coverage {low:.0%} to {high:.0%}; false and leaders at most {FALSE_WORDS:.0%}; "
        f"{NEEDED:.0%} found in {stats.POWER:.0%} with {EMULATED.name}, {default_plan().title}"
    )
    missed += covered(4 * tables)
    for bar in missed:
        print(f"MISSED: {bar}")
    return MISSED if missed else 0


def covered(runs: int) -> list[str]:
    """Prints how often intervals of a throughput are right; returns the missed requirements."""
    default = default_plan()
    kinds = {f"n = {n}": ((n, n), None) for n in (3, 5, 12)}
    kinds[f"n = {default.title.partition(' x')[0]}"] = (default.repeats, default.precision)
    rows, missed = [], []
    for machine in coverage.MACHINES:
        row = [machine.name]
        for title, kind in kinds.items():
            share = coverage.cover(machine, *kind, runs)
            row.append(f"{100 * share.this_run:.0f} / {100 * share.any_hour:.0f}")
            if share.missed:
                bar = f"{share.this_run:.1%} of its run, under {coverage.ENOUGH:.0%}"
                missed.append(f"{machine.name}, {title}: {bar}")
        rows.append(row)
    print("\n" + layout(["machine", *kinds], rows))
    print(
        f"{runs} runs each. First number: per cent of a throughput's intervals that contain the "
        "run's median rate. Second number: those that contain the mean over days, for which the "
        "interval is not made."
    )
    return missed


def twins(count: int, experiment: Path, logs: Path) -> int:
    """Runs the experiment `count` times with every algorithm twice, and judges the verdicts.
    Complete sweeps of this commit in `logs` are not run again."""
    given = load(experiment)
    pairs = [
        dataclasses.asdict(dataclasses.replace(choice, label=choice.title + ending))
        for choice in given.algorithms
        for ending in ("", _AGAIN)
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
            # --rerun all: trials from a stopped sweep would not have taken turns with the others.
            command += ["--logs", str(logs), "--rerun", "all", "--no-plot", "--quiet"]
            began = time.monotonic()
            status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
            if status not in (0, 1):
                return status
            note(f"{name}: {(time.monotonic() - began) / 60:.1f} min")
        folders.append(folder)
        note(f"sweep {index + 1} of {count}: {_counted(_lines([folder]))}")
        note(f"so far: {_counted(_lines(folders))}")
    return read(folders)


def _complete(folder: Path) -> bool:
    try:
        comparison = Comparison.load(folder)
    except UserError:  # not begun
        return False
    ended = [each for each in comparison.results(folder) if each.status != "interrupted"]
    return len(ended) == len(comparison.trials) and len({each.run for each in ended}) == 1


def _lines(folders: Sequence[Path]) -> list[Line]:
    return [
        (folder.name, *line)
        for folder in folders
        for line in judged(Comparison.load(folder).results(folder))
    ]


def _counted(lines: Sequence[Line]) -> str:
    verdicts = [verdict for *_, ratio, verdict in lines if ratio]
    wrong = sum(verdict in WORDS for verdict in verdicts)
    share = f" ({wrong / len(verdicts):.1%})" if verdicts else ""
    return (
        f"{wrong} of {len(verdicts)} rows{share} have a false verdict; SAME "
        f"{verdicts.count('SAME')}, UNSURE {verdicts.count('UNSURE')}; "
        f"{len(lines) - len(verdicts)} are flagged"
    )


def read(folders: Sequence[Path]) -> int:
    """Prints the verdicts of all pairs of twins; returns the exit status."""
    lines = _lines(folders)
    verdicts = [verdict for *_, ratio, verdict in lines if ratio]
    if not verdicts:
        print("no pair of valid twins")
        return 1
    print(layout(["sweep", "cell", "trial", "again / first (95 % CI)", "verdict"], lines))
    print(_counted(lines))
    wrong = sum(verdict in WORDS for verdict in verdicts)
    return MISSED if wrong / len(verdicts) > FALSE_WORDS else 0


def judged(records: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """Returns cell, label, ratio and verdict of each pair of twins. Verdicts are corrected for the
    number of pairs in a cell (the trials that are compared with each other). The verdict of a
    flagged pair is the reason of the flag."""
    cells: dict[str, list[tuple[Record, Record]]] = {}
    for record in records:
        for other in records:
            if other.label == record.label + _AGAIN and _cell(other) == _cell(record):
                cells.setdefault(_cell(record), []).append((record, other))
    lines = []
    for cell, pairs in cells.items():
        reasons = [flag_text(first) or flag_text(again) for first, again in pairs]
        valid = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
        differences = [difference(again, first) for first, again in valid]
        verdicts = stats.verdicts(differences)
        for (first, _), each, verdict in zip(valid, differences, verdicts, strict=True):
            ratio = each.ratio
            ends = "" if ratio.low is None else f" ({ratio.low:.3f}-{ratio.high:.3f})"
            lines.append((cell, first.label, f"{ratio.value:.3f}{ends}", verdict))
        for (first, _), reason in zip(pairs, reasons, strict=True):
            if reason:
                lines.append((cell, first.label, "", reason))
    return lines


def _cell(record: Record) -> str:
    trial = record.trial
    text = f"{trial['model']} bs={trial['batch_size']} n={trial['world_size']}"
    return " ".join(filter(None, (text, trial.get("network"), record.fault)))


def main(argv: list[str]) -> int:
    parser = program.parser(__doc__, json=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("simulated", help="intervals and verdicts where the truth is known")
    verb.add_argument("--tables", type=int, default=1000, help="number of tables of each kind")
    verb = verbs.add_parser("twins", help="run an experiment with every algorithm twice")
    verb.add_argument("count", type=int, help="number of sweeps")
    verb.add_argument("experiment", type=Path, nargs="?", default=DEFAULT, help="experiment file")
    verb.add_argument("--logs", type=Path, default=ROOT / "logs", help="folder of the sweeps")
    verb = verbs.add_parser("read", help="judge finished sweeps")
    verb.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.verb == "simulated":
        return simulated(args.tables)
    if args.verb == "twins":
        return twins(args.count, args.experiment, args.logs)
    return read(args.folders)


if __name__ == "__main__":
    program.run(main)
