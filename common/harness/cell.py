"""The trials of a cell, which are compared with each other: their rounds, order, scale and end.

In each round every trial is launched once, in a random order. The first round also finds the time
scale of an emulated cell: where a trial lacks cores the whole cell begins again at a larger one, so
that all its trials stand for the same cluster equally well. The cell ends with a whole round: when
it has had its repeats, or when its intervals are narrow enough.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.emulation.dilation import Choice
from common.harness import notes
from common.harness.fabric import Fabric
from common.harness.record import FabricFacts, Result
from common.harness.trial import BASELINE, Trial
from common.harness.ui import Planned, Progress
from common.harness.underway import Standing
from common.launch.job import Outcome
from common.models.registry import is_replay
from common.results.records import Order, SetAside
from common.results.records.trust import Systematic, mean_step_s

RELAUNCHES = 2
"""How often a repeat that was disturbed is done again."""
_OK = Outcome(status="ok")


@dataclass(eq=False)
class Turn:
    """A trial of the cell under way: its repeats so far."""

    trial: Trial
    order: Order
    started: str = field(default_factory=lambda: now())
    duration_s: float = 0.0
    results: list[Result] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    at_2k: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: FabricFacts | None = None
    """Of the fabric that the results are of; None while it is the current one."""

    @classmethod
    def going_on(cls, trial: Trial, order: Order, kept: Standing) -> Turn:
        """From where a run that was stopped has left it."""
        turn = cls(trial, Order(seed=order.seed, positions=[*kept.positions]))
        for key in ("started", "duration_s", "results", "set_aside", "at_2k", "notes"):
            setattr(turn, key, getattr(kept, key))
        if turn.results:
            repeats = len(turn.results)
            turn.notes.append(f"the run was stopped after repeat {repeats} and went on later")
        return turn

    def standing(self, facts: FabricFacts) -> Standing:
        """What to keep of it, should the run be stopped."""
        keys = ("started", "duration_s", "results", "set_aside", "at_2k", "notes")
        own = {key: getattr(self, key) for key in keys}
        return Standing(**own, positions=self.order.positions, facts=self.facts or facts)

    @property
    def systematic(self) -> Systematic | None:
        """None without results at 2k."""
        if not self.at_2k or self.facts is None:
            return None
        return Systematic(
            time_scale=2 * self.facts.time_scale,
            iters=[result.iters for result in self.at_2k],
            step_s=mean_step_s(result.iters for result in self.results),
        )


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
        self._canaries: list[list[float]] = []
        self._heaviest: Turn | None = None

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
                    self._begin_again(turn, choice)
                    repeat = -1
                    break
                self._keep_all()
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
                outcome, result, _ = self._launched_until_quiet(turn, repeat, slower=2.0)
                if result is None:
                    message = (outcome.error or {}).get("message")
                    turn.notes.append(f"at time scale {scale:g}: {outcome.status}: {message}")
                else:
                    turn.at_2k.append(result)
                    self._keep_all()

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
        outcome, result, choice = self._launched_until_quiet(turn, repeat)
        if result is None:
            self._end(turn, outcome)
            return outcome, None
        if choice is not None:
            reason = self._too_heavy(turn, result, choice)
            if reason is not None:
                turn.set_aside.append(self._aside(result, repeat, choice.reason))
                outcome = Outcome.of("unsupported", reason)
                self._end(turn, outcome)
                return outcome, None
        turn.results.append(result)
        turn.order.positions.append(position)
        rate = result.rate(turn.trial)
        if turn.trial.algorithm != BASELINE and rate > self._best_rate:
            self._best_rate = rate
            self._progress.best = f"{turn.trial.label} {rate:.3g}/s"
        return outcome, None if self._settled else choice

    def _launched_until_quiet(
        self, turn: Turn, repeat: int, slower: float = 1.0
    ) -> tuple[Outcome, Result | None, Choice | None]:
        """A launch; done again if the machine was disturbed meanwhile, the last one counts.

        In the first round also the time scale that it needs, if that is a larger one. A disturbed
        launch tells nothing of that: its ranks waited for cores that others had.
        """
        disturbed: tuple[Outcome, Result] | None = None
        reason = ""
        for launch in range(1 + RELAUNCHES):
            outcome, result = self._launched(turn, repeat, slower)
            if result is None and disturbed is None:
                return outcome, None, None
            if result is None:  # what was disturbed is better than nothing
                turn.notes.append(f"a launch that was done again has {outcome.status}")
                turn.set_aside.pop()
                break
            found = disturbance(turn.trial, result, self._canaries)
            if found is None:
                choice = self._fabric.needed(turn.trial, result) if repeat == 0 else None
                return outcome, result, choice
            disturbed, reason = (outcome, result), found
            if launch < RELAUNCHES:
                turn.set_aside.append(self._aside(result, repeat, reason))
                self._plan(turn, slower=slower)
        if reason not in turn.notes:
            turn.notes.append(reason)
        return *disturbed, None

    def _launched(
        self, turn: Turn, repeat: int, slower: float = 1.0
    ) -> tuple[Outcome, Result | None]:
        trial, progress = turn.trial, self._progress
        progress.title, progress.label = trial.title, trial.label
        self._report(progress)
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
        longer_s = self._spent_s + more * result.stepping_s(turn.trial)
        if longer_s > self._timeout_s and not self._settled:
            return (
                f"too heavy for this machine: {choice.reason}, which takes time scale "
                f"{choice.time_scale:g} and up to {longer_s:.0f} s for a repeat; timeout_s is "
                f"{self._timeout_s:g}"
            )
        return None

    def _begin_again(self, heaviest: Turn, choice: Choice) -> None:
        """At a larger time scale, for all; what was measured is kept aside."""
        reason = f"{heaviest.trial.label}: {choice.reason}; found in the cell's first round"
        for turn in self._running:
            self._plan(turn, len(turn.results))
            turn.set_aside += [self._aside(one, 0, f"time scale: {reason}") for one in turn.results]
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


def order_seed(sweep: str, trial: Trial) -> int:
    """Of the rounds of the trial's cell; the same for all of them, and in every run.

    Args:
        sweep: the experiment's name: sweeps that repeat each other must not repeat their order.
    """
    text = f"{sweep} {trial.seed} {trial.cell}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def planned(trials: Sequence[Trial], kept: Mapping[str, Standing]) -> list[Planned]:
    """The launches that these take at least.

    Args:
        kept: what trials have already, by hash.
    """
    found = []
    for trial in trials:
        has = kept.get(trial.hash)
        repeats, at_2k = (len(has.results), len(has.at_2k)) if has else (0, 0)
        found += [Planned(trial)] * (trial.measure.least_repeats - repeats)
        found += [Planned(trial, slower=2.0)] * (trial.measure.repeats_at_2k - at_2k)
    return found


def disturbance(trial: Trial, result: Result, canaries: list[list[float]]) -> str | None:
    """Why a launch tells little, as the machine was not what it is else; None if it was quiet.

    Replayed compute takes its time on a slower core as well: what the core still has to do is
    judged by what ranks waited for it.

    Args:
        canaries: what the fixed work took in earlier launches, in seconds; this one's is added.
    """
    reason, canary_s = notes.disturbed(result.strain), result.strain.canary_s
    if canary_s is None or is_replay(trial.model):
        return reason
    reason = reason or notes.off_course(canary_s, canaries)
    canaries.append(canary_s)
    return reason


def now() -> str:
    """In UTC, for records."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
