"""Whether a trial trains rightly: its first steps, and all steps to the end of the timed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import dear
from common.harness.trial import BASELINE, Trial
from common.harness.worker.checking import correctness, serial
from common.harness.worker.checking.correctness import Farthest
from common.harness.worker.checking.invariants import hold
from common.harness.worker.checking.plain import Reference
from common.harness.worker.checking.witness import Testimony, Witness
from common.harness.worker.training import Training, untimed_steps
from common.models.registry import is_replay
from common.models.workload import Workload
from common.results.records.trust import Check
from dear.algorithms import reference as references
from dear.comm import runtime
from dear.training.algorithm import algorithm_class

# Largest error of any tensor, relative to how far it moved. Rounding alone stays far below; a step
# that is lost is an error of 1 / steps at least.
TOLERANCE = {
    **{"float32": 1e-4, "float64": 1e-9, "bfloat16": 0.05},
    **{"amp-bf16": 1e-4, "amp-fp16": 1e-4},
}
# The same after some steps of a model that computes: what rounding changes in the parameters, the
# next gradients magnify.
COMPUTED_TOLERANCE = {
    **{"float32": 2e-3, "float64": 1e-7, "bfloat16": 0.2},
    **{"amp-bf16": 0.2, "amp-fp16": 0.2},
}
# At least, where gradients travel in a smaller type.
WIRE_TOLERANCE = {"fp16": 5e-3, "bf16": 0.05}

# Where no steps are timed: so many for each exchange; slow links bring only some of the messages.
STEPS = 10


def inquire(trial: Trial, workload: Workload) -> Check:
    """All of it before a training that is not watched; rank 0 says what was found.

    Args:
        workload: as it is before an algorithm wraps it; it is used up.
    """
    inquiry = Inquiry(trial, workload, trial.measure.check_steps)
    training = Training(trial, workload)
    inquiry.first_steps(training)
    inquiry.look_away()
    training.run(max(untimed_steps(trial), STEPS * getattr(trial.options, "every", 1)))
    check = inquiry.end(training)
    agreement = correctness.agreement(workload.model, training.consistency, runtime.communicator())
    training.close()
    return dataclasses.replace(check, **agreement)


class Inquiry:
    """Of one trial on this rank; everything goes on all ranks at once.

    Args:
        workload: as it is before an algorithm wraps it. It is trained plainly, and left as it was.
        steps: the first ones, which are compared in whole tensors, where plain training is what the
            algorithm promises.
    """

    def __init__(self, trial: Trial, workload: Workload, steps: int) -> None:
        self._trial, self._workload = trial, workload
        self._plain = Reference(trial, workload, steps, self._tolerance(computed=True))
        self.compute = self._plain.compute
        """Seconds of this machine that a step takes without communication."""
        self._witness = Witness(workload.model, trial.seed)
        self._scaled = workload.scaler is not None
        """Gradients are not those of the loss, and steps may be skipped."""
        self._reference = None
        if not self._scaled:
            self._reference = (
                references.average
                if trial.algorithm == BASELINE
                else references.reference_of(trial.algorithm, trial.options)
            )
        # It is for whole tensors; what is judged otherwise needs the memory more.
        self._plainly = self._reference in (references.average, references.delayed) and getattr(
            trial.options, "average", True
        )
        if not self._plainly:
            self._plain.forget()

    def first_steps(self, training: Training) -> None:
        """Trains them, plainly trained before, with the algorithm."""
        self._sent = runtime.communicator().bytes_sent
        self._witness.attend(self._workload.model)
        self._plain.train(training)
        self._first = self._plain.farthest() if self._plainly else None
        self._plain.forget()

    def look_away(self) -> None:
        """Lets timed steps be as undisturbed as may be."""
        self._witness.look_away()

    def end(self, training: Training) -> Check:
        """One more step; rank 0 says what was found. Parameters are current afterwards."""
        self._witness.look()
        training.step()
        training.synchronize()
        communicator = runtime.communicator()
        sent = communicator.bytes_sent - self._sent
        communicator.barrier()  # messages of all have arrived
        told = self._witness.end(self._workload.model), sent, training.statistics()
        gathered = communicator.gather_objects(told)
        if dear.rank() != 0:
            return Check()
        seen, sizes, counted = zip(*gathered, strict=True)
        return self._judged(training.consistency, seen, sum(sizes), counted)

    def _tolerance(self, computed: bool) -> float:
        trial = self._trial
        computed = computed and not is_replay(trial.model)
        least = (COMPUTED_TOLERANCE if computed else TOLERANCE)[trial.dtype]
        return max(least, WIRE_TOLERANCE.get(getattr(trial.options, "compression", "none"), 0.0))

    def _judged(
        self,
        consistency: str,
        seen: Sequence[Testimony],
        sent_bytes: int,
        counted: Sequence[dict[str, Any]],
    ) -> Check:
        trial, local_size = self._trial, dear.local_size()
        if self._scaled:
            return Check(
                judged_by="replicas",
                finding="only replicas were compared: a GradScaler may skip steps",
            )
        together = trial.world_size == 1 or trial.options.in_step()
        free = consistency == "asynchronous" and not together
        if free and algorithm_class(trial.algorithm).traffic(
            trial.options, trial.world_size, local_size
        ):
            size = sum(p.nbytes for p in self._workload.model.parameters() if p.requires_grad)
            held = hold(trial, self._reference, seen, local_size, sent_bytes, size, counted)
            return Check(
                judged_by="invariants",
                matches_reference=held.right,
                finding=held.finding,
                worst_tensor=held.drift.tensor,
                end_error=held.drift.error,
            )
        if self._reference in (None, references.error_feedback) or free:
            return Check(judged_by="replicas", finding=_why(trial, consistency))
        return self._compared(seen, local_size)

    def _compared(self, seen: Sequence[Testimony], local_size: int) -> Check:
        limit = self._tolerance(computed=False)
        found = serial.compare(self._trial, self._reference, seen, local_size, limit)
        finding, worst = None, found.end
        if self._first is not None:
            first_limit = self._tolerance(computed=True)
            if self._first.error > first_limit:
                finding = _off("after the first steps", self._first, first_limit)
            if self._first.error / first_limit > worst.error / limit:
                worst = self._first
        if finding is None and found.end.error > limit:
            finding = _off("at the end", found.end, limit)
        if finding is None and found.read.error > limit:
            finding = (
                f"the forward pass of step {found.read_in} read other values of "
                f"{found.read.tensor} than the step before should have left"
            )
            worst = found.read
        return Check(
            judged_by="reference",
            matches_reference=finding is None,
            reference_error=None if self._first is None else self._first.error,
            end_error=found.end.error,
            worst_tensor=worst.tensor,
            finding=finding,
        )


def _off(when: str, worst: Farthest, limit: float) -> str:
    return f"{when} {worst.tensor} is off by {worst.error:.2g} of its way (at most {limit:g})"


def _why(trial: Trial, consistency: str) -> str:
    compression = getattr(trial.options, "compression", "none")
    if compression != "none":
        return (
            f"only replicas were compared: what {compression} leaves out depends on what travels "
            "together"
        )
    missing = "serial reference" if consistency != "asynchronous" else "traffic that it declares"
    return f"only replicas were compared: {trial.algorithm} has no {missing}"
