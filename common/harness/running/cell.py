"""The trials of a cell, which are compared with each other: their rounds, order, scale and end.

In each round every trial is launched once, in a random order. The first round also finds the time
scale of an emulated cell: where a trial lacks cores the whole cell begins again at a larger one, so
that all its trials stand for the same cluster equally well. The cell ends with a whole round: when
it has had its repeats, when its intervals are narrow enough, or when what the others are compared
with cannot have a valid number. A trial ends before its cell when more repeats would tell nothing.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from common.emulation.dilation import FOREIGN_CORES, Choice
from common.harness.running import notes
from common.harness.running.fabric import Fabric
from common.harness.running.record import samples_per_s, stepping_s
from common.harness.running.turn import Turn, order_seed
from common.harness.running.ui import Planned, Progress
from common.harness.running.underway import Standing
from common.harness.trial import BASELINE, Trial
from common.launch.job import Outcome
from common.results.records import Order, Result, SetAside
from common.results.records.trust import Note

AGAIN_SHARE = 0.25
"""Launches that a cell may do again, as a share of those that it has at least; one in any case."""
_OK = Outcome(status="ok")


Launch = Callable[[Trial, int, float], tuple[Outcome, Result | None]]
"""Runs a repeat of a trial, within so many times its time limit; no result if it did not end well.
"""


class _UnpreparedError(Exception):
    """The fabric cannot run the cell."""


class Cell:
    """Runs trials that share model and settings.

    Args:
        trials: those of the cell that are to run.
        settled: the time scale of the others, if there are some; it is kept.
        base: what the trials are compared with, by label or name of its algorithm.
        timeout_s: of a launch.
        record: called once for every trial as it ends.
        report: called whenever the progress has changed.
        kept: what trials have already, by hash, of a run that was stopped in the middle.
        keep: called after each launch with what is to be kept, should this run be stopped.

    Attributes:
        whole: whether it has come to its end.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        *,
        sweep: str,
        fabric: Fabric,
        settled: Choice | None,
        base: str,
        timeout_s: float,
        launch: Launch,
        record: Callable[[Turn, Outcome], None],
        progress: Progress,
        report: Callable[[Progress], None],
        kept: Mapping[str, Standing],
        keep: Callable[[dict[str, Standing]], None],
    ) -> None:
        self.whole = False
        self._seed = order_seed(sweep, trials[0])
        order = Order(seed=self._seed)
        self._all = [
            Turn.going_on(trial, order, kept[trial.hash])
            if trial.hash in kept
            else Turn(trial, Order(seed=self._seed))
            for trial in trials
        ]
        self._kept, self._keep = kept, keep
        self._running = list(self._all)
        self._fabric, self._settled, self._base = fabric, settled, base
        self._timeout_s, self._launch = timeout_s, launch
        self._record, self._progress, self._report = record, progress, report
        self._measure = trials[0].measure
        self._best_rate = 0.0
        self._current: Turn | None = None
        self._spent_s = 0.0
        self._heaviest: Turn | None = None
        self._again = max(1, int(AGAIN_SHARE * self._measure.least_repeats * len(trials)))
        self._crowded = False
        self._begun_late = False
        self._lost: dict[int, str] = {}

    def run(self, unavailable: Callable[[Trial], str | None], fail_fast: bool) -> bool:
        """Runs all rounds; False if a trial failed and `fail_fast` says to stop.

        Repeats that are finished are never lost: where the cell ends early, by `fail_fast` or by an
        exception (Ctrl-C is one), they stand in a record that says so.

        Args:
            unavailable: why a trial cannot run here, or None.
        """
        trials = [turn.trial for turn in self._all]
        try:
            self._prepare(lambda: self._fabric.enter_cell(trials, self._settled or self._left_at()))
            self._crowded = self._fabric.foreign_cores > FOREIGN_CORES
            if self._crowded:
                self._say(f"others use {self._fabric.foreign_cores:.1f} cores")
            for trial in trials:
                if trial.hash in self._kept:
                    self._fabric.recall(trial, self._kept[trial.hash].facts)
            for turn in self._all:
                reason = unavailable(turn.trial)
                if reason:
                    self._end(turn, Outcome.of("unsupported", reason))
            if not self._rounds(fail_fast):
                self._interrupt("another trial failed, and --fail-fast stops at the first")
                return False
            self._rounds_at_2k()
            for turn in self._running:
                self._end(turn, _OK)
            self.whole = True
        except _UnpreparedError as error:
            outcome = Outcome.of("failed", f"the cluster could not be prepared: {error}")
            for turn in self._running:
                self._end(turn, _OK if turn.facts else outcome)
            return not fail_fast
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            self._interrupt("Ctrl-C or SIGTERM" if stopped else f"{type(error).__name__}: {error}")
            raise
        return True

    def _left_at(self) -> Choice | None:
        """The time scale of what is kept, if anything is."""
        for kept in self._kept.values():
            facts = kept.facts
            return Choice(time_scale=facts.time_scale, reason=facts.time_scale_reason or "")
        return None

    def _interrupt(self, reason: str) -> None:
        """Records what is finished of the trials under way."""
        for turn in self._running:
            if turn.facts is not None:  # only the repeats at another scale are missing
                self._end(turn, _OK)
            elif turn.results or turn.set_aside or turn is self._current:
                self._end(turn, Outcome.of("interrupted", reason))

    def _prepare(self, change: Callable[[], None]) -> None:
        """Changes the fabric."""
        try:
            change()
        except RuntimeError as error:  # the network is not what it should be
            raise _UnpreparedError(str(error)) from error

    def _rounds(self, fail_fast: bool) -> bool:
        """From the first round that is not whole; what it has already is not measured again."""
        had = [len(turn.results) for turn in self._running]
        repeat = min(had, default=0)
        torn = repeat < max(had, default=0)
        while self._running and (torn or not self._enough(repeat)):
            torn = False
            if repeat >= self._measure.least_repeats:
                for turn in self._running:
                    if len(turn.results) <= repeat:
                        self._plan(turn)
            for position, turn in enumerate(self._order(repeat)):
                if len(turn.results) > repeat:
                    continue
                outcome, choice = self._take_turn(turn, repeat, position)
                if outcome.status not in ("ok", "unsupported") and fail_fast:
                    return False
                if choice is not None:
                    self._begun_late |= repeat > 0
                    self._begin_again(turn, choice, repeat)
                    repeat = -1
                    break
                self._keep_all()
            else:
                self._part()
            repeat += 1
        for turn in self._running:
            turn.facts = self._fabric.describe(turn.trial)
        return True

    def _rounds_at_2k(self) -> None:
        if not self._running or not self._measure.repeats_at_2k:
            return
        scale = 2 * self._fabric.time_scale
        choice = Choice(time_scale=scale, reason="twice that of the cell")
        self._prepare(lambda: self._fabric.slow_down(choice))
        first = max(len(turn.results) for turn in self._running)
        for done in range(self._measure.repeats_at_2k):
            repeat = first + done
            for turn in self._order(repeat):
                if len(turn.at_2k) > done:
                    continue
                outcome, result = self._launched_well(turn, repeat, slower=2.0)
                if result is None:
                    message = (outcome.error or {}).get("message")
                    text = f"at time scale {scale:g}: {outcome.status}: {message}"
                    turn.notes.append(Note(kind="time scale", text=text))
                else:
                    turn.at_2k.append(result)
                    self._keep_all()

    def _part(self) -> None:
        """Ends, after a round, what more rounds can give no valid number, or no word.

        Those are trials with a launch that is not valid, and all that would be compared with one.
        """
        for turn in list(self._running):
            reason = self._invalid(turn)
            if reason is not None:
                self._lose(turn, reason)
                self._end(turn, _OK)
        for turn in list(self._running):
            lost = self._lost.get(turn.trial.world_size)
            if lost is not None:
                text = f"stopped: no verdict is possible, for {lost}"
                turn.notes.append(Note(kind="stopped", text=text))
                self._say(text)
                self._end(turn, _OK)

    def _lose(self, turn: Turn, reason: str) -> None:
        """The trial has no valid number, and whatever is compared with it no verdict."""
        lost = f"{turn.trial.label} is not valid: {reason}"
        if self._is_base(turn.trial):
            self._lost[turn.trial.world_size] = lost
        self._say(lost)

    def _invalid(self, turn: Turn) -> str | None:
        """Why one of its launches is not valid; None if all are."""
        emulated = self._emulated(turn.trial)
        invalid = (notes.invalid(result.strain, emulated) for result in turn.results)
        return next((note.text for note in invalid if note is not None), None)

    def _emulated(self, trial: Trial) -> bool:
        return self._fabric.describe(trial).kind == "emulated"

    def _keep_all(self) -> None:
        """As all trials under way stand."""
        now = {turn.trial.hash: self._fabric.describe(turn.trial) for turn in self._running}
        self._keep({turn.trial.hash: turn.standing(now[turn.trial.hash]) for turn in self._running})

    def _enough(self, repeats: int) -> bool:
        """Whether all trials have had their repeats, or their intervals are narrow enough."""
        measure = self._measure
        if repeats < measure.least_repeats:
            return False
        return repeats >= measure.most_repeats or self._precise()

    def _precise(self) -> bool:
        from common.results.stats import precise_enough  # numpy: a dry run must not pay for it

        repeats = {turn.trial.hash: [one.steps for one in turn.results] for turn in self._running}
        bases = {turn.trial.world_size: turn for turn in self._running if self._is_base(turn.trial)}
        for world_size in {turn.trial.world_size for turn in self._running}:
            base = bases.get(world_size)
            others = [
                repeats[turn.trial.hash]
                for turn in self._running
                if turn is not base and turn.trial.world_size == world_size
            ]
            known = base and repeats[base.trial.hash]
            if not precise_enough(others or [known], self._measure.precision, known):
                return False
        return True

    def _is_base(self, trial: Trial) -> bool:
        labels = {turn.trial.label for turn in self._all}
        return self._base == (trial.label if self._base in labels else trial.algorithm)

    def _order(self, repeat: int) -> Iterator[Turn]:
        """The trials under way, in an order that depends on the seed and the round alone.

        But a first round that is done again begins with the trial for which it is: if the new time
        scale is too small as well, nothing else has to be repeated.
        """
        mixed = list(self._all)
        random.Random(f"{self._seed} {repeat}").shuffle(mixed)
        if repeat == 0:
            mixed.sort(key=lambda turn: turn is not self._heaviest)
        return (turn for turn in mixed if turn in self._running)

    def _take_turn(self, turn: Turn, repeat: int, position: int) -> tuple[Outcome, Choice | None]:
        """How it ended, and the time scale that the cell must have instead, if it must."""
        outcome, result = self._launched_well(turn, repeat)
        if result is None:
            self._end(turn, outcome)
            return outcome, None
        valid = notes.invalid(result.strain, self._emulated(turn.trial)) is None
        choice = self._choice(turn, repeat, result, valid)
        reason = choice and self._too_heavy(turn, result, choice)
        if reason is not None:
            if repeat == 0 and (not valid or result.strain.core_wait is None):
                turn.set_aside.append(self._aside(result, repeat, choice.reason))
                outcome = Outcome.of("unsupported", reason)
                self._lose(turn, reason)
                self._end(turn, outcome)
                return outcome, None
            choice = None  # it is as good as can be had here
        if choice is not None and self._settled:
            if not valid:
                text = (
                    f"it needs time scale {choice.time_scale:g}; the others of its cell, on "
                    f"record, have {self._fabric.time_scale:g}: --rerun all measures all of them"
                )
                turn.notes.append(Note(kind="time scale", text=text))
            choice = None
        turn.results.append(result)
        turn.order.positions.append(position)
        verdict = turn.results[0].check.verdict
        if "NO" in (verdict, result.check.verdict):
            self._say(f"{turn.trial.label}: NOT the right training, no further repeats")
            self._end(turn, _OK)
            return outcome, None
        if valid and verdict == "yes":
            self._praise(turn.trial, result)
        return outcome, choice

    def _choice(self, turn: Turn, repeat: int, result: Result, valid: bool) -> Choice | None:
        """The time scale that a launch turned out to need, if that is a larger one.

        It is found in the first round; later only where all others wait for it, once.
        """
        late = self._is_base(turn.trial) and not valid and not self._begun_late
        return self._fabric.needed(turn.trial, result) if repeat == 0 or late else None

    def _praise(self, trial: Trial, result: Result) -> None:
        """Makes it the best so far, if it is."""
        rate = samples_per_s(result, trial)
        if trial.algorithm != BASELINE and rate > self._best_rate:
            self._best_rate = rate
            self._progress.best = f"{trial.label} {rate:.3g}/s"

    def _launched_well(
        self, turn: Turn, repeat: int, slower: float = 1.0
    ) -> tuple[Outcome, Result | None]:
        """A launch; done again, where that helps, if its ranks' threads waited for cores."""
        outcome, result = self._launched(turn, repeat, slower)
        reason = result and self._passing(turn, repeat, result)
        if reason is None:
            return outcome, result
        self._again -= 1
        turn.set_aside.append(self._aside(result, repeat, reason))
        self._plan(turn, slower=slower)
        self._say(f"again: {reason}")
        second, better = self._launched(turn, repeat, slower)
        if better is not None:
            self._crowded = notes.others(better.strain) is not None
            return second, better
        # What was disturbed is better than nothing.
        text = f"a launch that was done again has {second.status}"
        turn.notes.append(Note(kind="relaunch", text=text))
        turn.set_aside.pop()
        return outcome, result

    def _passing(self, turn: Turn, repeat: int, result: Result) -> str | None:
        """Why a launch is not valid, if that is likely to have passed; None otherwise.

        Load that others put on the machine is there to stay if the launch before had it as well.
        Where nobody else had cores the trial needs a larger scale, unless it has done without.
        """
        strain, crowded = result.strain, self._crowded
        self._crowded = notes.others(strain) is not None
        note = notes.invalid(strain, self._emulated(turn.trial))
        stays = crowded if self._crowded else repeat == 0
        return None if note is None or stays or self._again <= 0 else note.text

    def _say(self, why: str) -> None:
        """In the progress line, beside the launch that comes next."""
        self._progress.why = why

    def _launched(
        self, turn: Turn, repeat: int, slower: float = 1.0
    ) -> tuple[Outcome, Result | None]:
        trial, progress = turn.trial, self._progress
        progress.title, progress.label = trial.title, trial.label
        self._report(progress)
        progress.why = ""
        self._current = turn
        began = time.monotonic()
        outcome, result = self._launch(trial, repeat, slower)
        self._spent_s = time.monotonic() - began
        turn.duration_s += self._spent_s
        progress.end(Planned(trial, slower), self._spent_s)
        return outcome, result

    def _too_heavy(self, turn: Turn, result: Result, choice: Choice) -> str | None:
        """Why the trial cannot be had here at that time scale; None if it can."""
        most = self._fabric.max_time_scale
        if choice.time_scale > most:
            return (
                f"too heavy for this machine: {choice.reason}, which takes time scale "
                f"{choice.time_scale:g}; cluster.max_time_scale is {most:g}"
            )
        # Starting processes takes no longer at a larger scale.
        more = choice.time_scale - self._fabric.time_scale
        longer_s = self._spent_s + more * stepping_s(result, turn.trial)
        if longer_s > self._timeout_s and not self._settled:
            return (
                f"too heavy for this machine: {choice.reason}, which takes time scale "
                f"{choice.time_scale:g} and up to {longer_s:.0f} s for a repeat; timeout_s is "
                f"{self._timeout_s:g}"
            )
        return None

    def _begin_again(self, heaviest: Turn, choice: Choice, repeat: int) -> None:
        """At a larger time scale, for all; what was measured is kept aside."""
        where = "the cell's first round" if repeat == 0 else f"round {repeat + 1}"
        reason = f"{heaviest.trial.label}: {choice.reason}; found in {where}"
        self._say(f"all begin again at time scale {choice.time_scale:g}: {reason}")
        for turn in self._running:
            self._plan(turn, len(turn.results))
            turn.set_aside += [
                self._aside(result, repeat, f"time scale: {reason}")
                for repeat, result in enumerate(turn.results)
            ]
            turn.results, turn.notes, turn.order = [], [], Order(seed=self._seed)
        self._best_rate, self._heaviest = 0.0, heaviest
        # What launches took tells nothing of those to come.
        self._progress.forget(heaviest.trial.cell)
        self._prepare(lambda: self._fabric.slow_down(dataclasses.replace(choice, reason=reason)))

    def _aside(self, result: Result, repeat: int, reason: str) -> SetAside:
        scale = self._fabric.time_scale
        return SetAside(repeat=repeat, time_scale=scale, reason=reason, iters=result.iters)

    def _plan(self, turn: Turn, launches: int = 1, slower: float = 1.0) -> None:
        """More launches than were planned."""
        self._progress.total += launches
        self._progress.left += [Planned(turn.trial, slower)] * launches

    def _end(self, turn: Turn, outcome: Outcome) -> None:
        self._record(turn, outcome)
        self._running = [other for other in self._running if other is not turn]
        progress = self._progress
        still = [launch for launch in progress.left if launch.trial is not turn.trial]
        progress.done += len(progress.left) - len(still)  # they will not be
        progress.left = still
        self._report(progress)
