"""Launches of a cell, and the progress line.

A launch starts the ranks of a trial for one repeat. A launch is repeated if other load on the
machine disturbed it; the first result is then discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from common.emulation.dilation import FOREIGN_CORES
from common.harness.running import notes
from common.harness.running.fabric import Fabric
from common.harness.running.record import samples_per_s
from common.harness.running.turn import Turn
from common.harness.running.ui import Planned, Progress
from common.harness.trial import BASELINE, Trial
from common.launch.job import Outcome
from common.results.records import Result, SetAside
from common.results.records.trust import Note

AGAIN_SHARE = 0.25
"""Number of extra launches of a cell, as a share of its least number of launches; at least one."""

Launch = Callable[[Trial, int, float], tuple[Outcome, Result | None]]
"""Function that runs a repeat of a trial. Arguments: trial, repeat, and a factor of the time limit.
The result is None if the repeat did not end well."""


@dataclass(frozen=True, kw_only=True)
class CellContext:
    """Objects and settings of a sweep that all its cells use.

    Attributes:
        sweep: name of the experiment.
        base: label of the baseline of the comparisons.
        timeout_s: time limit of a launch.
        record: called once for each trial, when it ends.
        report: called whenever the progress has changed.
    """

    sweep: str
    fabric: Fabric
    base: str
    timeout_s: float
    launch: Launch
    record: Callable[[Turn, Outcome], None]
    progress: Progress
    report: Callable[[Progress], None]


class Launches:
    """Launches of one cell, with a budget for extra launches.

    Args:
        least: smallest number of launches that the cell makes.

    Attributes:
        current: trial of the latest launch.
        spent_s: duration of the latest launch.
    """

    def __init__(self, context: CellContext, least: int) -> None:
        self.current: Turn | None = None
        self.spent_s = 0.0
        self._context = context
        self._left = max(1, int(AGAIN_SHARE * least))
        self._crowded = False
        self._best_rate = 0.0

    def begin(self) -> None:
        """Shows the load by other programs before the first launch."""
        foreign_cores = self._context.fabric.foreign_cores
        self._crowded = foreign_cores > FOREIGN_CORES
        if self._crowded:
            self.say(f"other programs use {foreign_cores:.1f} cores")

    def run(self, turn: Turn, repeat: int, slower: float = 1.0) -> tuple[Outcome, Result | None]:
        """Launches a repeat; launches it again if other load disturbed it and has passed."""
        outcome, result = self._once(turn, repeat, slower)
        reason = result and self._passing(turn, repeat, result)
        if result is None or reason is None:
            return outcome, result
        self._left -= 1
        turn.set_aside.append(self.discarded(result, repeat, reason))
        self.plan(turn, slower=slower)
        self.say(f"again: {reason}")
        second, better = self._once(turn, repeat, slower)
        if better is not None:
            self._crowded = notes.others(better.strain) is not None
            return second, better
        # A disturbed result is better than none.
        text = f"a launch was repeated; the second one ended as {second.status}"
        turn.notes.append(Note(kind="relaunch", text=text))
        turn.set_aside.pop()
        return outcome, result

    def _once(self, turn: Turn, repeat: int, slower: float) -> tuple[Outcome, Result | None]:
        context, progress = self._context, self._context.progress
        progress.title, progress.label = turn.trial.title, turn.trial.label
        context.report(progress)
        progress.why = ""
        self.current = turn
        began = time.monotonic()
        outcome, result = context.launch(turn.trial, repeat, slower)
        self.spent_s = time.monotonic() - began
        turn.duration_s += self.spent_s
        progress.end(Planned(turn.trial, slower), self.spent_s)
        return outcome, result

    def _passing(self, turn: Turn, repeat: int, result: Result) -> str | None:
        """Returns why a launch is invalid, if the cause has probably passed; else None.

        Load by other programs has not passed if the previous launch had it, too. If there was no
        such load, the trial needs a larger time scale, unless an earlier repeat was valid.
        """
        strain, crowded = result.strain, self._crowded
        self._crowded = notes.others(strain) is not None
        note = notes.invalid(strain, self.emulated(turn.trial))
        stays = crowded if self._crowded else repeat == 0
        return None if note is None or stays or self._left <= 0 else note.text

    def emulated(self, trial: Trial) -> bool:
        """Returns True if the trial runs on an emulated cluster."""
        return self._context.fabric.describe(trial).kind == "emulated"

    def discarded(self, result: Result, repeat: int, reason: str) -> SetAside:
        """Returns the record's entry for a discarded result, with the current time scale."""
        scale = self._context.fabric.time_scale
        return SetAside(repeat=repeat, time_scale=scale, reason=reason, iters=result.iters)

    def praise(self, trial: Trial, result: Result) -> None:
        """Shows the trial as the best so far, if its repeat was the fastest."""
        rate = samples_per_s(result, trial)
        if trial.algorithm != BASELINE and rate > self._best_rate:
            self._best_rate = rate
            self._context.progress.best = f"{trial.label} {rate:.3g}/s"

    def say(self, why: str) -> None:
        """Shows a reason in the progress line of the next launch."""
        self._context.progress.why = why

    def plan(self, turn: Turn, launches: int = 1, slower: float = 1.0) -> None:
        """Adds launches of a trial to the planned ones."""
        progress = self._context.progress
        progress.total += launches
        progress.left += [Planned(turn.trial, slower)] * launches

    def cancel(self, trial: Trial) -> None:
        """Removes the planned launches of a trial that has ended."""
        progress = self._context.progress
        left = [launch for launch in progress.left if launch.trial is not trial]
        progress.done += len(progress.left) - len(left)
        progress.left = left
        self._context.report(progress)

    def forget(self, cell: tuple[object, ...]) -> None:
        """Drops durations and the best rate, because the cell begins again."""
        self._best_rate = 0.0
        self._context.progress.forget(cell)
