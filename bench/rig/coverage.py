"""What the interval of a throughput covers, on simulated machines whose truth is known.

Two truths are looked for in each interval. *This run*: the step time that half of all repeats stay
below, on the machine as it was in the mean of the run's rounds; that is what the interval is of.
*Any hour*: the mean step of very many repeats on the machine as it is in the mean over days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.rig.table import layout
from common.results import stats

ENOUGH = 0.93
"""Share of runs in which the interval must hold the truth of this run."""
_MANY = 200_000
"""Repeats whose mean and median count as the truth."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Noise of the logs of step times; a launch is a repeat, and a round has one of each trial."""

    name: str
    step: float = 0.011
    """Standard deviation of single steps."""
    freedom: float | None = None
    """Of Student's t, if steps are noisy like that; None: normal."""
    launch: float = 0.003
    """Shared by the steps of a launch."""
    rare: float = 0.0
    """Share of steps that take longer."""
    longer: float = 0.0
    """By how much (log)."""
    drift: float = 0.0
    """Standard deviation of the machine's pace, which goes on from launch to launch."""
    memory: float = 0.0
    """How much of the pace is left a launch later (AR(1))."""
    trend: float = 0.0
    """Slower by so much with each launch."""

    def launches(self, rng: np.random.Generator, count: int, steps: int) -> np.ndarray:
        """Step times of so many repeats apart from the machine's pace: their logs."""
        shape = (count, steps)
        if self.freedom is None:
            logs = rng.normal(0, self.step, shape)
        else:
            deviation = (self.freedom / (self.freedom - 2)) ** 0.5
            logs = rng.standard_t(self.freedom, shape) * self.step / deviation
        logs += rng.normal(0, self.launch, (count, 1))
        return logs + (rng.random(shape) < self.rare) * self.longer

    def pace(self, rng: np.random.Generator, runs: int, count: int) -> np.ndarray:
        """Log of how slow the machine is, by run and launch; 0 in the mean over days."""
        found = np.empty((runs, count))
        found[:, 0] = rng.normal(0, 1, runs)
        kept = (1 - self.memory**2) ** 0.5
        for i in range(1, count):
            found[:, i] = self.memory * found[:, i - 1] + kept * rng.normal(0, 1, runs)
        return self.drift * found + self.trend * np.arange(count)


MACHINES = (
    Machine(name="steady", step=0.011),
    Machine(name="heavy tails (t, 3 degrees)", step=0.026, freedom=3.0, launch=0.0),
    Machine(name="8 % of steps 8 % longer", rare=0.08, longer=0.08),
    Machine(name="2 % of steps 30 % longer", rare=0.02, longer=0.30),
    Machine(name="drifts by 3 %, slowly", drift=0.03, memory=0.95),
    Machine(name="drifts by 3 %, fast", drift=0.03, memory=0.5),
    Machine(name="0.3 % slower with each launch", trend=0.003),
)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """In what share of the runs the interval held the truth."""

    machine: Machine
    least: int
    """Repeats."""
    most: int
    this_run: float
    any_hour: float
    runs: int

    @property
    def missed(self) -> bool:
        """By more than two errors of the simulation."""
        return self.this_run < ENOUGH - 2 * (ENOUGH * (1 - ENOUGH) / self.runs) ** 0.5


def cover(
    machine: Machine, repeats: tuple[int, int], precision: float | None, runs: int,
    steps: int = 2, trials: int = 10, seed: int = 1,
) -> Coverage:  # fmt: skip
    """Simulates so many runs, always the same, and asks `stats` for the interval of one trial.

    Args:
        repeats: the least and the most.
        precision: half width of the interval at which a run ends; None: it has the most.
        steps: of a repeat.
        trials: that take turns in a round, this one at a random place.
    """
    rng = np.random.default_rng(seed)
    least, most = repeats
    many = np.exp(machine.launches(rng, _MANY, steps)).mean(axis=1)
    usual, mean = float(np.median(many)), float(many.mean())
    pace = machine.pace(rng, runs, most * trials).reshape(runs, most, trials)
    place = rng.integers(trials, size=(runs, most, 1))
    own = np.take_along_axis(pace, place, axis=2)
    logs = machine.launches(rng, runs * most, steps).reshape(runs, most, steps) + own
    held = np.zeros(2)
    for run, times in enumerate(np.exp(logs).tolist()):
        count = least
        while count < most and not _narrow(times[:count], precision):
            count += 1
        found = stats.step_s(times[:count])
        meanwhile = usual * float(np.exp(pace[run, :count].mean()))
        held += [found.low <= truth <= found.high for truth in (meanwhile, mean)]
    this_run, any_hour = (held / runs).tolist()
    return Coverage(
        machine=machine, least=least, most=most, this_run=this_run, any_hour=any_hour, runs=runs
    )


def _narrow(times: Sequence[Sequence[float]], precision: float | None) -> bool:
    return precision is not None and stats.precise_enough([times], precision)


def report(kinds: Sequence[tuple[tuple[int, int], float | None]], runs: int) -> list[Coverage]:
    """Prints what the interval of a throughput covers; those that miss the bar.

    Args:
        kinds: repeats and precision, as of `cover`.
    """
    titles = [
        f"{most}" if precision is None else f"{least}-{most} to {precision:.0%}"
        for (least, most), precision in kinds
    ]
    found = [[cover(machine, *kind, runs) for kind in kinds] for machine in MACHINES]
    lines = [
        [machine.name, *(f"{100 * one.this_run:.0f} / {100 * one.any_hour:.0f}" for one in line)]
        for machine, line in zip(MACHINES, found, strict=True)
    ]
    print("\n" + layout(["machine", *(f"n = {title}" for title in titles)], lines))
    print(
        f"{runs} runs each: in how many of 100 the interval of a throughput holds what it is of, "
        "what half of the repeats reach while it runs, / and what it is not of, the mean over days"
    )
    missed = [one for line in found for one in line if one.missed]
    for one in missed:
        print(f"MISSED: {one.machine.name}: {one.this_run:.1%} of its run, under {ENOUGH:.0%}")
    return missed
