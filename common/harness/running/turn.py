"""Turn: a trial of a cell that is being measured; its planned launches, and the cell's seed."""

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
    """Trial of a cell that is being measured, with its repeats so far."""

    trial: Trial
    order: Order
    started: str = field(default_factory=lambda: now())
    duration_s: float = 0.0
    results: list[Result] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    at_2k: list[Result] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    facts: FabricFacts | None = None
    """Facts of the fabric that the results were measured on; None: the current fabric."""

    @classmethod
    def going_on(cls, trial: Trial, order: Order, kept: Standing) -> Turn:
        """Returns a trial of an interrupted run, with the results that were kept."""
        turn = cls(trial, Order(seed=order.seed, positions=[*kept.positions]))
        for key in ("started", "duration_s", "results", "set_aside", "at_2k", "notes"):
            setattr(turn, key, getattr(kept, key))
        if turn.results:
            repeats = len(turn.results)
            text = f"the run was stopped after repeat {repeats} and went on later"
            turn.notes.append(Note(kind="interrupted", text=text))
        return turn

    def standing(self, facts: FabricFacts) -> Standing:
        """Returns the results so far, for a run that continues after an interruption."""
        keys = ("started", "duration_s", "results", "set_aside", "at_2k", "notes")
        values = {key: getattr(self, key) for key in keys}
        return Standing(**values, positions=self.order.positions, facts=self.facts or facts)

    @property
    def systematic(self) -> Systematic | None:
        """Results at twice the time scale; None without any."""
        if not self.at_2k or self.facts is None:
            return None
        return Systematic(
            time_scale=2 * self.facts.time_scale,
            iters=[result.iters for result in self.at_2k],
            step_s=mean_step_s(result.iters for result in self.results),
        )


def order_seed(sweep: str, trial: Trial) -> int:
    """Returns the seed of the order in a cell's rounds; it is the same in every run.

    Args:
        sweep: name of the experiment; sweeps with different names have different orders.
    """
    text = f"{sweep} {trial.seed} {trial.cell}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def planned(trials: Sequence[Trial], kept: Mapping[str, Standing]) -> list[Planned]:
    """Returns the launches that these trials need at least.

    Args:
        kept: results so far, by hash.
    """
    launches = []
    for trial in trials:
        has = kept.get(trial.hash)
        repeats, at_2k = (len(has.results), len(has.at_2k)) if has else (0, 0)
        launches += [Planned(trial)] * (trial.measure.least_repeats - repeats)
        launches += [Planned(trial, slower=2.0)] * (trial.measure.repeats_at_2k - at_2k)
    return launches


def now() -> str:
    """Returns the present time in UTC, as ISO 8601 text."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
