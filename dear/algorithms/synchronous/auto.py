"""Choice of an exact algorithm by a model of the step."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from dear.algorithms.planning import foreseen, measured_pass, passes_of
from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.buckets.compressors import HalfOptions
from dear.buckets.flat import Bucket
from dear.cost.bounds import Bound
from dear.cost.event_model.passes import UnmodelledError
from dear.cost.fit import OnWire
from dear.cost.measurement import Operation
from dear.cost.overlap import Unstated
from dear.errors import UserError
from dear.lazy import torch
from dear.options import Options, at_least
from dear.training.algorithm import Algorithm, Capabilities, algorithm_class, algorithm_options
from dear.training.engine import Distributed, Replica, Update
from dear.training.hooks import ReaderMap
from dear.training.tuning import LayerTimes, cost_of_gradients

log = logging.getLogger("dear")

Candidate: TypeAlias = Literal["wfbp", "mgwfbp", "bytescheduler", "dear"]
LATER = ("bytescheduler", "dear")
"""Candidates whose gradients are averages only after `synchronize()`."""
SHOWN = 6
"""Number of expected steps in the log."""
COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")


class Auto(Algorithm["Auto.Options"]):
    """Trains with the algorithm that a model of the step expects to be the fastest.

    The first steps send one all-reduce per tensor after the backward pass, and measure the passes.
    Then the costs of collectives are measured, and `dear.cost.event_model` predicts a step of each
    candidate from the order of transfers that it declares. All ranks go on with rank 0's choice.
    Invariant: after each step, all replicas equal serial training.
    Bytes move: as with `allreduce` at first, then as with the chosen algorithm.
    Cost per step and rank: that of `allreduce` at first, then that of the chosen algorithm.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """Candidates, their compression, and the length of the measurement."""

        candidates: tuple[Candidate, ...] = get_args(Candidate)
        """Algorithms to choose from, with their defaults and with the options that each of them
        names as worth a try (`Algorithm.candidates`)."""
        profile_steps: int = 5
        """Number of steps whose passes are measured before the choice."""

        def __post_init__(self) -> None:
            at_least("auto option 'profile_steps'", self.profile_steps, 1)
            if not self.candidates:
                raise UserError("auto option 'candidates' must name an algorithm, got none")

        def settling_steps(self) -> int:
            variants = self.variants().values()
            return self.profile_steps + max(options.settling_steps() for _, options in variants)

        def variants(self) -> dict[str, tuple[str, Options]]:
            """Returns the algorithm and its options of each variant, by a label for messages."""
            variants: dict[str, tuple[str, Options]] = {}
            for name in self.candidates:
                for given in ({}, *(algorithm_class(name).candidates or ())):
                    words = [name, *(f"{key}={value}" for key, value in given.items())]
                    options = algorithm_options(name, {**given, "compression": self.compression})
                    variants[" ".join(words)] = name, options
            return variants

    capabilities = Capabilities(consistency="synchronous")
    candidates = None
    overlap = Unstated("it is the order of the chosen algorithm")

    @classmethod
    def bound_of(cls, options: Options) -> Bound:
        """Returns the bound of `dear`, usually the lowest, or else of the other candidates."""
        candidates = options.candidates
        others: Bound = "cross_iteration" if "bytescheduler" in candidates else "wfbp"
        return "dear" if "dear" in candidates else others

    def refuse(self, replica: Replica[Options]) -> None:
        if not _accepted(replica):
            raise UserError(
                f"auto option 'candidates': none of {', '.join(replica.options.candidates)} can "
                "train this model with this optimizer; name other candidates, or use "
                "algorithm='allreduce'"
            )

    def engine(self, replica: Replica[Options]) -> AutoEngine:
        return AutoEngine(replica)


def _accepted(replica: Replica[Auto.Options]) -> dict[str, tuple[str, Options]]:
    """Returns the variants that can train this rank's replica."""
    accepted: dict[str, tuple[str, Options]] = {}
    for label, (name, options) in replica.options.variants().items():
        try:
            algorithm_class(name)()._refuse(replica.with_options(options))
        except UserError:
            continue
        # Without priorities, its messages cannot overtake each other, as the model assumes.
        if name != "bytescheduler" or replica.params[0].device.type in replica.communicator.native:
            accepted[label] = name, options
    return accepted


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Chosen algorithm, and the steps that were expected."""

    label: str
    """Label of the variant."""
    steps_s: Mapping[str, float]
    """Seconds of a step with each variant, by the model; shortest first."""
    compute_s: float
    """Seconds of a step without communication."""

    @classmethod
    def of(
        cls,
        ranks: Sequence[tuple[Mapping[str, float], bool]],
        later: Collection[str],
        compute_s: float,
    ) -> Choice:
        """Returns the candidate with rank 0's shortest step, of those that every rank can use.

        Args:
            ranks: for each rank, the steps of its candidates, and whether its script changes
                gradients before `step()` without `synchronize()`.
            later: candidates whose gradients are averages only after `synchronize()`.

        Raises:
            UserError: no candidate is left.
        """
        expected = ranks[0][0]
        names = [name for name in expected if all(name in steps_s for steps_s, _ in ranks)]
        if not names:
            raise UserError(
                "algorithm='auto': no candidate can train the model on every rank; use "
                "algorithm='allreduce'"
            )
        touched = any(at for _, at in ranks)
        left = [name for name in names if not (touched and name in later)]
        if not left:
            raise UserError(
                "algorithm='auto': the script changes gradients between backward() and step(), but "
                f"the gradients of {' and '.join(LATER)} are averages only after "
                "optimizer.synchronize(); call it before, or add wfbp or mgwfbp to 'candidates'"
            )
        left.sort(key=lambda name: float(f"{expected[name]:.3g}"))  # equals: the first one
        steps_s = {name: expected[name] for name in left}
        return cls(label=left[0], steps_s=steps_s, compute_s=compute_s)

    def findings(self) -> dict[str, object]:
        """Returns the choice as JSON."""
        steps = {name: {"step_s": step_s} for name, step_s in self.steps_s.items()}
        return {"choice": self.label, "expected": steps, "compute_s": self.compute_s}

    def __str__(self) -> str:
        each = [f"{1e3 * step_s:.3g} ms {name}" for name, step_s in self.steps_s.items()]
        shown = ", ".join(each[:SHOWN]) + (", ..." if len(each) > SHOWN else "")
        return (
            f"auto: continues with {self.label}, whose step should be the shortest: {shown}; "
            f"without communication {1e3 * self.compute_s:.3g} ms"
        )


class AutoEngine(AveragingEngine):
    """Engine of the first steps; it replaces itself by the engine of the chosen algorithm."""

    options: Auto.Options

    def __init__(self, replica: Replica[Auto.Options]) -> None:
        self._accepted = _accepted(replica)
        self._readers = ReaderMap(replica.model, replica.params)
        self._times = LayerTimes(replica.model, replica.params, replica.communicator, self._readers)
        self._updates_s: list[float] = []
        self._left = replica.options.profile_steps
        self._watch = Bucket(replica.params)
        self._synchronized = False
        """True if the script has synchronized since the last step."""
        self._touches = False
        """True if the script changes gradients before the step, and does not synchronize."""
        super().__init__(replica, replica.params, overlap=False)

    def passed(self) -> None:
        super().passed()
        self._watch.note()

    def synchronize(self) -> None:
        super().synchronize()
        self._synchronized = True

    def forget(self) -> None:
        super().forget()
        self._watch.forget()

    def step(self, update: Update) -> object:
        if not self._synchronized and not self.schedule.unsent:
            changed = self._watch.changed() is not None or self._watch.scaled_in_place()
            self._touches |= changed
        self._synchronized = False
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

    def _choose(self) -> Choice:
        """Returns the choice by rank 0's measurements; a collective call."""
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
        for label, (name, options) in self._accepted.items():
            kind = algorithm_class(name)
            try:
                prediction = foreseen(kind, options, arrived, passes, costs, communicator.size)
            except UnmodelledError:
                continue
            steps_s[label] = prediction.step_s
        compute_s = profile.forward_s + passes.backward_s + update_s
        later = {label for label, (name, _) in self._accepted.items() if name in LATER}
        ranks = communicator.gather_objects((steps_s, self._touches))
        return Choice.of(ranks, later, compute_s)

    def _replace(self, choice: Choice) -> None:
        if self.communicator.rank == 0:
            log.info("%s", choice)
        optimizer, (name, options) = self.optimizer, self._accepted[choice.label]
        assert isinstance(optimizer, Distributed), "a step runs"
        attributes = vars(optimizer)
        before, step = attributes.pop("before_engine", None), attributes.get("step")
        optimizer.close()
        algorithm_class(name)().wrap(self.model, optimizer, self.communicator, options)
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            attributes["step"] = step  # the script's own, which would be lost
        optimizer.before_engine, optimizer.former_findings = before, {"auto": choice.findings()}

    def close(self) -> None:
        super().close()
        self._times.stop()
        self._readers.freeze()
