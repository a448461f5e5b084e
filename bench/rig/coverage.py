"""Coverage of the interval of a throughput: how often does it contain the true value?

Runs are drawn at random for machines whose pace changes in a known way. There are two true values.
*This run*: the median step time of very many repeats at the run's mean pace; the interval estimates
this one. *Any hour*: the mean step time of very many repeats at the machine's mean pace over days.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.results import stats

ENOUGH = 0.93
"""Share of runs whose interval must contain the true step time of this run."""
_MANY = 200_000
"""Number of simulated repeats whose mean and median are taken as the true values."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Noise of the logarithms of a machine's step times; a launch (start of the ranks) is a repeat.

    Attributes:
        step: standard deviation of single steps.
        freedom: degrees of freedom of Student's t, for single steps; None: normal distribution.
        launch: deviation that the steps of a launch share.
        rare: share of steps that are slow: `longer` is added to their logarithm.
        drift: standard deviation of the machine's pace, which changes from launch to launch.
        memory: share of the deviation of the pace that is left after a launch (AR(1)).
        trend: increase of the logarithm with each launch.
    """

    name: str
    step: float = 0.011
    freedom: float | None = None
    launch: float = 0.003
    rare: float = 0.0
    longer: float = 0.0
    drift: float = 0.0
    memory: float = 0.0
    trend: float = 0.0

    def launches(self, rng: np.random.Generator, count: int, steps: int) -> np.ndarray:
        """Returns the logarithms of the step times of `count` repeats, without the pace."""
        shape = (count, steps)
        if self.freedom is None:
            logs = rng.normal(0, self.step, shape)
        else:
            deviation = (self.freedom / (self.freedom - 2)) ** 0.5
            logs = rng.standard_t(self.freedom, shape) * self.step / deviation
        logs += rng.normal(0, self.launch, (count, 1))
        return logs + (rng.random(shape) < self.rare) * self.longer

    def pace(self, rng: np.random.Generator, runs: int, count: int) -> np.ndarray:
        """Returns the logarithm of the pace (high: slow), by run and launch; its mean is 0."""
        state = np.empty((runs, count))
        state[:, 0] = rng.normal(0, 1, runs)
        change = (1 - self.memory**2) ** 0.5
        for i in range(1, count):
            state[:, i] = self.memory * state[:, i - 1] + change * rng.normal(0, 1, runs)
        return self.drift * state + self.trend * np.arange(count)


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
    """Shares of the runs whose interval contained each of the two true values."""

    this_run: float
    any_hour: float
    runs: int

    @property
    def missed(self) -> bool:
        """True if `this_run` is below `ENOUGH` by more than two standard errors."""
        return self.this_run < ENOUGH - 2 * (ENOUGH * (1 - ENOUGH) / self.runs) ** 0.5


def cover(
    machine: Machine, repeats: tuple[int, int], precision: float | None, runs: int,
    steps: int = 2, trials: int = 10, seed: int = 1,
) -> Coverage:  # fmt: skip
    """Simulates runs and the interval of one trial's step time; a seed gives the same result.

    Args:
        repeats: least and largest number of repeats.
        precision: half width of the interval at which a run ends; None: all repeats are run.
        steps: steps of a repeat.
        trials: number of trials of a round, which take turns in a random order.
    """
    rng = np.random.default_rng(seed)
    least, most = repeats
    many = np.exp(machine.launches(rng, _MANY, steps)).mean(axis=1)
    usual, mean = float(np.median(many)), float(many.mean())
    pace = machine.pace(rng, runs, most * trials).reshape(runs, most, trials)
    turn = rng.integers(trials, size=(runs, most, 1))
    slowness = np.take_along_axis(pace, turn, axis=2)
    logs = machine.launches(rng, runs * most, steps).reshape(runs, most, steps) + slowness
    held = np.zeros(2)
    for run, times in enumerate(np.exp(logs).tolist()):
        count = least
        while count < most:
            if precision is not None and stats.precise_enough([times[:count]], precision):
                break
            count += 1
        interval = stats.step_s(times[:count])
        meanwhile = usual * float(np.exp(pace[run, :count].mean()))
        held += [interval.low <= truth <= interval.high for truth in (meanwhile, mean)]
    this_run, any_hour = (held / runs).tolist()
    return Coverage(this_run=this_run, any_hour=any_hour, runs=runs)
