"""Choice of an exact algorithm by a model of the step."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from dear.algorithms.planning import foreseen, measured_pass, passes_of
from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.buckets.compressors import HalfOptions
from dear.cost.event_model.passes import UnmodelledError
from dear.cost.fit import OnWire
from dear.cost.measurement import Operation
from dear.cost.overlap import Unstated
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities, algorithm_class, algorithm_options
from dear.training.engine import Distributed, Replica, Update
from dear.training.hooks import ReaderMap
from dear.training.tuning import LayerTimes, cost_of_gradients

log = logging.getLogger("dear")

Candidate: TypeAlias = Literal["wfbp", "mgwfbp", "bytescheduler", "dear"]
CHOSEN: Mapping[str, Mapping[str, object]] = {"dear": {"fusion": "planned"}}
"""Options of a candidate that differ from its defaults."""
COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")


class Auto(Algorithm["Auto.Options"]):
    """Trains with the algorithm that a model of the step expects to be the fastest.

    The first steps send one all-reduce per tensor after the backward pass, and measure the passes.
    Then the costs of collectives are measured, and `dear.cost.event_model` predicts a step of each
    candidate from the order of transfers that it declares. All ranks go on with rank 0's choice.
    Invariant: those of the candidates: after each step, all replicas equal serial training.
    Bytes move, and cost per step and rank: those of `allreduce` at first, then those of the choice.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """Candidates, their compression, and the length of the measurement."""

        candidates: tuple[Candidate, ...] = get_args(Candidate)
        """Algorithms to choose from, with their own defaults; `dear` with fusion=planned."""
        profile_steps: int = 5
        """Number of steps whose passes are measured before the choice."""

        def __post_init__(self) -> None:
            at_least("option of auto 'profile_steps'", self.profile_steps, 1)
            if not self.candidates:
                raise UserError("option of auto 'candidates' must name an algorithm, got none")

        def settling_steps(self) -> int:
            later = (self.of(name).settling_steps() for name in self.candidates)
            return self.profile_steps + max(later)

        def of(self, name: str) -> Any:
            """Returns the options of a candidate."""
            given = {**CHOSEN.get(name, {}), "compression": self.compression}
            return algorithm_options(name, given)

    capabilities = Capabilities(consistency="synchronous")
    candidates = None
    overlap = Unstated("it is the order of the chosen algorithm.")

    def refuse(self, replica: Replica[Options]) -> None:
        if not _accepted(replica):
            raise UserError(
                f"option of auto 'candidates': none of {', '.join(replica.options.candidates)} can "
                "train this model with this optimizer; name other candidates, or an algorithm in "
                "place of auto"
            )

    def engine(self, replica: Replica[Options]) -> AutoEngine:
        return AutoEngine(replica)


def _accepted(replica: Replica[Auto.Options]) -> dict[str, Any]:
    """Returns the candidates that can train this rank's replica, with their options."""
    accepted = {}
    for name in dict.fromkeys(replica.options.candidates):
        options = replica.options.of(name)
        try:
            algorithm_class(name)()._refuse(replica.with_options(options))
        except UserError:
            continue
        # Without priorities, its messages cannot overtake each other, as the model assumes.
        if name != "bytescheduler" or replica.params[0].device.type in replica.communicator.native:
            accepted[name] = options
    return accepted


class AutoEngine(AveragingEngine):
    """Engine of the first steps; it replaces itself by the engine of the chosen algorithm."""

    options: Auto.Options

    def __init__(self, replica: Replica[Auto.Options]) -> None:
        self._accepted = _accepted(replica)
        self._readers = ReaderMap(replica.model, replica.params)
        self._times = LayerTimes(replica.model, replica.params, replica.communicator, self._readers)
        self._updates_s: list[float] = []
        self._left = replica.options.profile_steps
        super().__init__(replica, replica.params, overlap=False)

    def step(self, update: Update) -> object:
        return super().step(lambda: self._timed(update))

    def _timed(self, update: Update) -> object:
        self._wait_for_device()
        began_s = self.communicator.clock()
        result = update()
        self._wait_for_device()
        self._updates_s.append(self.communicator.clock() - began_s)
        return result

    def _wait_for_device(self) -> None:
        if self.params[0].device.type == "cuda":
            torch.cuda.synchronize(self.params[0].device)

    def stepped(self) -> None:
        self._readers.freeze()
        self._left -= 1
        if self._left <= 0 and not self.schedule.sends_nothing:
            self._replace(self._choose())

    def _choose(self) -> str:
        """Returns rank 0's choice; a collective call."""
        like, communicator = self.params[0], self.communicator
        costs: dict[str, OnWire] = {
            operation: cost_of_gradients(
                communicator, self.options, like, operation=operation, queues=True
            )
            for operation in COLLECTIVES
        }
        profile = self._times.stop()
        arrived = measured_pass(self.model, self.params, self._readers, profile)
        update_s = statistics.median_low(self._updates_s or [0.0])
        passes = passes_of(arrived, profile.forward_s, update_s)
        steps_s: dict[str, float] = {}
        for name, options in self._accepted.items():
            kind = algorithm_class(name)
            try:
                prediction = foreseen(kind, options, arrived, passes, costs, communicator.size)
            except UnmodelledError:
                continue
            steps_s[name] = prediction.step_s
        ranks = communicator.gather_objects(steps_s)
        common = [name for name in ranks[0] if all(name in steps_s for steps_s in ranks)]
        if not common:
            raise UserError(
                "algorithm='auto': no candidate can train the model on every rank; name an "
                "algorithm in place of auto"
            )
        chosen = min(common, key=ranks[0].__getitem__)
        if communicator.rank == 0:
            compute_s = profile.forward_s + passes.backward_s + update_s
            log.info("%s", _reason(chosen, {name: ranks[0][name] for name in common}, compute_s))
        return chosen

    def _replace(self, name: str) -> None:
        optimizer, options = self.optimizer, self._accepted[name]
        assert isinstance(optimizer, Distributed), "a step runs"
        before = vars(optimizer).pop("before_engine", None)
        optimizer.close()
        algorithm_class(name)().wrap(self.model, optimizer, self.communicator, options)
        optimizer.before_engine = before

    def close(self) -> None:
        super().close()
        self._times.stop()
        self._readers.freeze()


def _reason(chosen: str, steps_s: Mapping[str, float], compute_s: float) -> str:
    """Returns the choice and its reason in one line."""
    names = sorted(steps_s, key=steps_s.__getitem__)
    each = ", ".join(f"{name} {1e3 * steps_s[name]:.3g} ms" for name in names)
    return (
        f"auto: continues with {chosen}; steps by the event model: {each}; without communication "
        f"{1e3 * compute_s:.3g} ms"
    )
