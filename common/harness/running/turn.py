"""A trial of a cell under way, and the launches and the order that a cell begins with."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.harness.running.ui import Planned
from common.harness.running.underway import Standing
from common.harness.trial import Trial
from common.results.records import FabricFacts, Order, Result, SetAside
from common.results.records.trust import Note, Systematic, mean_step_s


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
    notes: list[Note] = field(default_factory=list)
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
            text = f"the run was stopped after repeat {repeats} and went on later"
            turn.notes.append(Note(kind="interrupted", text=text))
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


def now() -> str:
    """In UTC, for records."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
