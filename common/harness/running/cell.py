"""Cell: trials that are compared with each other, measured in rounds.

A launch starts the ranks of a trial and measures one repeat. Each round launches every trial once,
in random order. An emulated cluster runs slower than real time by a factor, the time scale. If a
trial of the first round lacks cores, the whole cell begins again at a larger time scale, so that
all trials run on the same cluster. A cell ends after a complete round: when it has all repeats,
when its intervals are narrow enough, or when its baseline cannot have a valid result. A trial ends
earlier if more repeats cannot give it a verdict.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from common.emulation.dilation import Choice
from common.harness.running import notes
from common.harness.running.launches import CellContext, Launches
from common.harness.running.record import stepping_s
from common.harness.running.turn import Turn, order_seed
from common.harness.running.underway import Standing
from common.harness.trial import Trial
from common.launch.job import Outcome
from common.paths import COMMAND
from common.results.records import Order, Result
from common.results.records.trust import Note

_OK = Outcome(status="ok")


class _UnpreparedError(Exception):
    """Error if the cluster (fabric) cannot be prepared for the cell."""


class Cell:
    """Measurement of a cell; its trials share model and settings.

    Args:
        trials: trials of the cell that must run.
        settled: time scale of the cell's trials that have a record already; None: there are none.
        kept: results by hash, from a run that was interrupted in this cell.
        keep: called after each launch with the results so far, which a later run may continue.

    Attributes:
        whole: True if all rounds have ended.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        context: CellContext,
        *,
        settled: Choice | None,
        kept: Mapping[str, Standing],
        keep: Callable[[dict[str, Standing]], None],
    ) -> None:
        self.whole = False
        self._seed = order_seed(context.sweep, trials[0])
        order = Order(seed=self._seed)
        self._all = [
            Turn.going_on(trial, order, kept[trial.hash])
            if trial.hash in kept
            else Turn(trial, Order(seed=self._seed))
            for trial in trials
        ]
        self._kept, self._keep = kept, keep
        self._running = list(self._all)
        self._context, self._fabric, self._settled = context, context.fabric, settled
        self._measure = trials[0].measure
        self._launches = Launches(context, self._measure.least_repeats * len(trials))
        self._heaviest: Turn | None = None
        self._begun_late = False
        self._lost: dict[int, str] = {}

    def run(self, unavailable: Callable[[Trial], str | None], fail_fast: bool) -> bool:
        """Runs all rounds; returns False if a trial failed and `fail_fast` is True.

        If the cell ends early, by `fail_fast` or by an exception such as Ctrl-C, the finished
        repeats are recorded.

        Args:
            unavailable: returns why a trial cannot run here, or None.
        """
        trials = [turn.trial for turn in self._all]
        try:
            scale = self._settled or _scale_of(self._kept)
            self._prepare(lambda: self._fabric.enter_cell(trials, scale))
            self._launches.begin()
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

    def _interrupt(self, reason: str) -> None:
        for turn in self._running:
            if turn.facts is not None:  # only repeats at twice the scale are missing
                self._context.record(turn, _OK)
            elif turn.results or turn.set_aside or turn is self._launches.current:
                self._context.record(turn, Outcome.of("interrupted", reason))

    def _prepare(self, change: Callable[[], None]) -> None:
        """Calls `change`, which prepares the cluster, and converts its errors."""
        try:
            change()
        except RuntimeError as error:  # the network is not as requested
            raise _UnpreparedError(str(error)) from error

    def _rounds(self, fail_fast: bool) -> bool:
        had = [len(turn.results) for turn in self._running]
        repeat = min(had, default=0)
        torn = repeat < max(had, default=0)
        while self._running and (torn or not self._enough(repeat)):
            torn = False
            if repeat >= self._measure.least_repeats:
                for turn in self._running:
                    if len(turn.results) <= repeat:
                        self._launches.plan(turn)
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
                outcome, result = self._launches.run(turn, repeat, slower=2.0)
                invalid = result and self._invalid(turn, result)
                if result is None:
                    message = (outcome.error or {}).get("message")
                    text = f"at time scale {scale:g}: {outcome.status}: {message}"
                    turn.notes.append(Note(kind="time scale", text=text))
                elif invalid:  # its steps would show another program, and not the time scale
                    text = f"a repeat at time scale {scale:g} does not count: {invalid.text}"
                    turn.notes.append(Note(kind="time scale", text=text))
                else:
                    turn.at_2k.append(result)
                    self._keep_all()

    def _part(self) -> None:
        """Ends trials that can get no verdict any more.

        These are trials with an invalid launch, and all trials if the baseline has one.
        """
        for turn in list(self._running):
            invalid = (self._invalid(turn, result) for result in turn.results)
            note = next(filter(None, invalid), None)
            if note is not None:
                self._lose(turn, note.text)
                self._end(turn, _OK)
        for turn in list(self._running):
            reason = self._lost.get(turn.trial.world_size)
            if reason is not None:
                text = f"stopped: no verdict is possible, for {reason}"
                turn.notes.append(Note(kind="stopped", text=text))
                self._launches.say(text)
                self._end(turn, _OK)

    def _lose(self, turn: Turn, reason: str) -> None:
        """Marks a trial as invalid; if it is the baseline, the others get no verdict, either."""
        text = f"{turn.trial.label} is not valid: {reason}"
        if self._is_base(turn.trial):
            self._lost[turn.trial.world_size] = text
        self._launches.say(text)

    def _invalid(self, turn: Turn, result: Result) -> Note | None:
        return notes.invalid(result.strain, self._launches.emulated(turn.trial))

    def _keep_all(self) -> None:
        self._keep(
            {
                turn.trial.hash: turn.standing(self._fabric.describe(turn.trial))
                for turn in self._running
            }
        )

    def _enough(self, repeats: int) -> bool:
        if repeats < self._measure.least_repeats:
            return False
        if repeats >= self._measure.most_repeats:
            return True
        bases = {turn.trial.world_size: turn for turn in self._running if self._is_base(turn.trial)}
        return _precise(self._running, bases, self._measure.precision)

    def _is_base(self, trial: Trial) -> bool:
        return trial.label == self._context.base

    def _order(self, repeat: int) -> Iterator[Turn]:
        """Yields the running trials in a random order that depends only on the seed and the round.

        If the first round begins again, the trial that needed the larger time scale comes first. If
        the new scale is still too small, only this launch is lost.
        """
        mixed = list(self._all)
        random.Random(f"{self._seed} {repeat}").shuffle(mixed)
        if repeat == 0:
            mixed.sort(key=lambda turn: turn is not self._heaviest)
        return (turn for turn in mixed if turn in self._running)

    def _take_turn(self, turn: Turn, repeat: int, position: int) -> tuple[Outcome, Choice | None]:
        """Launches a repeat; returns its outcome, and a larger time scale if the cell needs one."""
        outcome, result = self._launches.run(turn, repeat)
        if result is None:
            self._end(turn, outcome)
            return outcome, None
        valid = self._invalid(turn, result) is None
        wrong = result.check.verdict == "NO"
        # Times of a training that is incorrect need no larger scale.
        choice = None if wrong else self._choice(turn, repeat, result, valid)
        reason = choice and self._too_heavy(turn, result, choice)
        if choice is not None and reason is not None:
            if repeat == 0 and (not valid or result.strain.core_wait is None):
                turn.set_aside.append(self._launches.discarded(result, repeat, choice.reason))
                outcome = Outcome.of("unsupported", reason)
                self._lose(turn, reason)
                self._end(turn, outcome)
                return outcome, None
            choice = None  # no larger scale is possible here
        if choice is not None and self._settled:
            if not valid:
                text = (
                    f"it needs time scale {choice.time_scale:g}, but the records of its cell have "
                    f"{self._fabric.time_scale:g}; --rerun all measures all of them again"
                )
                turn.notes.append(Note(kind="time scale", text=text))
            choice = None
        turn.results.append(result)
        turn.order.positions.append(position)
        verdict = turn.results[0].check.verdict
        if wrong or verdict == "NO":
            self._launches.say(f"{turn.trial.label}: trained incorrectly, no further repeats")
            self._end(turn, _OK)
            return outcome, None
        if valid and verdict == "yes":
            self._launches.praise(turn.trial, result)
        return outcome, choice

    def _choice(self, turn: Turn, repeat: int, result: Result, valid: bool) -> Choice | None:
        """Returns the larger time scale that a launch needs; None: the present one is enough.

        After the first round, the time scale changes at most once, and only for the baseline.
        """
        late = self._is_base(turn.trial) and not valid and not self._begun_late
        return self._fabric.needed(turn.trial, result) if repeat == 0 or late else None

    def _too_heavy(self, turn: Turn, result: Result, choice: Choice) -> str | None:
        """Returns why the trial cannot run here at the chosen time scale; None if it can."""
        most = self._fabric.max_time_scale
        if choice.time_scale > most:
            return (
                f"too heavy for this machine: {choice.reason}, which needs time scale "
                f"{choice.time_scale:g}, but cluster.max_time_scale is {most:g}; "
                f"`{COMMAND} predict` computes its steps"
            )
        # Only the steps take longer at a larger scale, not the start of the processes.
        more = choice.time_scale - self._fabric.time_scale
        longer_s = self._launches.spent_s + more * stepping_s(result, turn.trial)
        if longer_s > self._context.timeout_s and not self._settled:
            return (
                f"too heavy for this machine: {choice.reason}, which needs time scale "
                f"{choice.time_scale:g} and up to {longer_s:.0f} s for a repeat, but timeout_s is "
                f"{self._context.timeout_s:g}"
            )
        return None

    def _begin_again(self, heaviest: Turn, choice: Choice, repeat: int) -> None:
        """Restarts the cell at a larger time scale; earlier results are set aside."""
        where = "the cell's first round" if repeat == 0 else f"round {repeat + 1}"
        reason = f"{heaviest.trial.label}: {choice.reason}; found in {where}"
        self._launches.say(f"all trials begin again at time scale {choice.time_scale:g}: {reason}")
        for turn in self._running:
            self._launches.plan(turn, len(turn.results))
            turn.set_aside += [
                self._launches.discarded(result, number, f"time scale: {reason}")
                for number, result in enumerate(turn.results)
            ]
            turn.results, turn.notes, turn.order = [], [], Order(seed=self._seed)
        self._heaviest = heaviest
        self._launches.forget(heaviest.trial.cell)
        self._prepare(lambda: self._fabric.slow_down(dataclasses.replace(choice, reason=reason)))

    def _end(self, turn: Turn, outcome: Outcome) -> None:
        self._context.record(turn, outcome)
        self._running = [other for other in self._running if other is not turn]
        self._launches.cancel(turn.trial)


def _scale_of(kept: Mapping[str, Standing]) -> Choice | None:
    for standing in kept.values():
        facts = standing.facts
        return Choice(time_scale=facts.time_scale, reason=facts.time_scale_reason or "")
    return None


def _precise(running: Sequence[Turn], bases: Mapping[int, Turn], precision: float | None) -> bool:
    from common.results.stats import precise_enough  # numpy: slow, and not for dry runs

    for world_size in {turn.trial.world_size for turn in running}:
        base = bases.get(world_size)
        others = [
            [result.steps for result in turn.results]
            for turn in running
            if turn is not base and turn.trial.world_size == world_size
        ]
        known = base and [result.steps for result in base.results]
        if not precise_enough(others or [known], precision, known):
            return False
    return True
