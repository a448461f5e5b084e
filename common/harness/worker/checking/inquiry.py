"""Whether a trial trains rightly: its first steps, and all steps to the end of the timed ones."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

import dear
from common.harness.trial import BASELINE, Trial
from common.harness.worker.checking import afresh, correctness, passes, serial
from common.harness.worker.checking.afresh import Afresh
from common.harness.worker.checking.correctness import Farthest
from common.harness.worker.checking.invariants import hold
from common.harness.worker.checking.passes import Passes
from common.harness.worker.checking.plain import Reference
from common.harness.worker.checking.witness import Testimony, Witness
from common.harness.worker.training import Training, untimed_steps
from common.models.registry import is_replay
from common.models.workload import Workload
from common.results.records.trust import Check
from dear.algorithms import reference as references
from dear.comm import runtime
from dear.training.algorithm import algorithm_class

# Largest error of any tensor, relative to how far it moved. Of right programs in float32 it is 2e-8
# to 4e-7; gradients that travel in fp16 without saying so make 4e-4. A step that is lost is an
# error of 1 / steps at least.
TOLERANCE = {
    **{"float32": 1e-5, "float64": 1e-9, "bfloat16": 0.05},
    **{"amp-bf16": 1e-5, "amp-fp16": 1e-5},
}
# The same after some steps of a model that computes: what rounding changes in the parameters, the
# next gradients magnify.
COMPUTED_TOLERANCE = {
    **{"float32": 2e-3, "float64": 1e-7, "bfloat16": 0.2},
    **{"amp-bf16": 0.2, "amp-fp16": 0.2},
}
# At least, where gradients travel in a smaller type.
WIRE_TOLERANCE = {"fp16": 5e-3, "bf16": 0.05}

# Times these where parameters are averaged instead of gradients: rounding of all of a tensor, not
# of a step, is what each step adds.
MIXED = 10

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
    steps = max(untimed_steps(trial), STEPS * getattr(trial.options, "every", 1))
    before = runtime.communicator().bytes_sent
    unannounced = draw(range(1, steps)) if inquiry.remakes else 0
    training.run(unannounced)
    if inquiry.remakes:
        inquiry.watch_a_step(training)
    training.run(steps - unannounced)
    check = inquiry.end(training, (runtime.communicator().bytes_sent - before) // steps)
    agreement = correctness.agreement(workload.model, training.consistency, runtime.communicator())
    training.close()
    return dataclasses.replace(inquiry.confirm(check), **agreement)


def draw(places: range) -> int:
    """Draws one of the places, the same on all ranks. It does not depend on the trial's seed, so a
    program cannot know it."""
    return int(runtime.communicator().broadcast_object(secrets.choice(places)))


class Inquiry:
    """Of one trial on this rank; everything goes on all ranks at once.

    Args:
        workload: as it is before an algorithm wraps it. It is trained plainly, and left as it was.
        steps: the first ones, which are compared in whole tensors, where plain training is what the
            algorithm promises.
    """

    def __init__(self, trial: Trial, workload: Workload, steps: int) -> None:
        self._trial, self._workload = trial, workload
        self._afresh = Afresh(workload)
        self._plain = Reference(trial, workload, steps, self._tolerance(computed=True))
        self.compute = self._plain.compute
        """Seconds of this machine that a step takes without communication."""
        self._witness = Witness(workload.model, trial.seed)
        self._passes: Passes | None = None
        self._scaled = workload.scaler is not None
        """Gradients are not those of the loss, and steps may be skipped."""
        self._reference = None
        if not self._scaled:
            self._reference = (
                references.average
                if trial.algorithm == BASELINE
                else references.reference_of(trial.algorithm, trial.options)
            )
        # Who promises to train as one process would is held to that, whatever its own file says.
        self._claimed = None
        if self._reference is not None and _promises_average(trial, self._reference):
            self._claimed, self._reference = self._reference, references.average
        # It is for whole tensors; what is judged otherwise needs the memory more.
        self._plainly = self._reference in (references.average, references.delayed) and getattr(
            trial.options, "average", True
        )
        # Who still measures may send gradients as they are: then samples alone are compared.
        if getattr(trial.options, "wire", None) and trial.options.settling_steps():
            self._plainly = False
        if not self._plainly:
            self._plain.forget()

    def first_steps(self, training: Training) -> None:
        """Trains them, plainly trained before, with the algorithm."""
        self._sent = runtime.communicator().bytes_sent
        self._witness.attend(self._workload.model)
        self._passes = Passes(self._workload.model)
        self._plain.train(training)
        self._early_bytes = runtime.communicator().bytes_sent - self._sent
        self._known = self._witness.steps
        self._first = self._first_buffer = None
        if self._plainly:
            self._first, self._first_buffer = self._plain.farthest(), self._plain.farthest_buffer()
        self._plain.forget()

    def look_away(self) -> None:
        """Lets timed steps be as undisturbed as may be."""
        self._passes.look(self._witness.look_away())

    def watch_a_step(self, training: Training) -> None:
        """Trains one step and keeps what it read; `confirm` repeats it without the algorithm.

        The caller draws the place of the step: a program that counts its steps must not know it.
        """
        self._witness.look_at_buffers()
        self._afresh.watch(frozenset(self._plain.given.shapes))
        training.unmarked_step()
        self._watched = self._witness.steps
        self._afresh.unwatch()
        self.look_away()

    def end(self, training: Training, sent_per_step: int) -> Check:
        """Two more steps; rank 0 says what was found. Parameters are current afterwards.

        Args:
            sent_per_step: bytes that this rank handed to the communicator in the steps before.
        """
        self._witness.look()
        training.step()
        # As a scheduler does between two steps: the second one must follow.
        serial.change_settings(training.optimizer)
        self._changed = self._witness.steps
        training.step()
        training.synchronize()
        communicator = runtime.communicator()
        sent = communicator.bytes_sent - self._sent
        communicator.barrier()  # messages of all have arrived
        strange = passes.strange(self._plain.given, self._passes.end(), self._known)
        self._testimony = testimony = self._witness.end(self._workload.model)
        told = testimony, sent, training.statistics(), strange, sent_per_step
        gathered = communicator.gather_objects(told)
        if dear.rank() != 0:
            return Check()
        seen, sizes, counted, oddities, per_step = zip(*gathered, strict=True)
        check = self._judged(training.consistency, seen, sum(sizes), counted)
        finding = (
            _first_of(oddities)
            or self._unlike_buffers(seen)
            or self._too_little(training.consistency, seen, sum(per_step))
        )
        if finding is None or check.matches_reference is False:
            return check
        return dataclasses.replace(check, matches_reference=False, finding=finding)

    def confirm(self, check: Check) -> Check:
        """What was found, and whether plain passes of one step give the same gradients.

        To be called on all ranks when the algorithm is closed; the model is used up.
        """
        finding = None
        if self.remakes and self._afresh.complete:
            finding = self._unlike_afresh()
        finding = _first_of(runtime.communicator().gather_objects(finding))
        if finding is None or check.matches_reference is False:
            return check
        return dataclasses.replace(check, matches_reference=False, finding=finding)

    @property
    def remakes(self) -> bool:
        """Whether passes of one step are made again: a replayed model's have no meaning, and
        where plain training is not what is promised, the memory is needed more."""
        plain = self._reference in (references.average, references.delayed)
        return plain and not is_replay(self._trial.model)

    def _unlike_afresh(self) -> str | None:
        testimony, limit = self._testimony, self._tolerance(computed=True)
        gradients = self._witness.of_gradients(self._afresh.passes())
        starts = (0, *testimony.ends[:-1])
        step = self._watched
        seen = {
            name: testimony.gradients[step - 1][start:end]
            for name, start, end in zip(testimony.names, starts, testimony.ends, strict=True)
        }
        worst = afresh.farthest(seen, gradients)
        if worst.error > limit:
            return (
                f"in step {step} the gradient of {worst.tensor} is off by {worst.error:.2g} of "
                f"what plain passes with the same parameters and samples give (at most {limit:g})"
            )
        if step - 1 in testimony.buffers:
            begun, left = testimony.buffers[step - 1]
            wanted = self._witness.of_buffers()
            if not np.allclose(left, wanted, rtol=limit, atol=limit * np.abs(wanted - begun).max()):
                return f"in step {step} the forward pass left other buffers than a plain one does"
        return None

    def _unlike_buffers(self, seen: Sequence[Testimony]) -> str | None:
        """What is wrong with buffers, after the first steps and from the last but one on.

        A rank's are those that its own forward pass has left, or rank 0's.
        """
        limit = self._tolerance(computed=True)
        if self._first_buffer is not None and self._first_buffer.error > limit:
            return _off("after the first steps the buffer", self._first_buffer, limit)
        steps = (self._changed - 1, self._changed)
        if not all(step in one.buffers for one in seen for step in steps):
            return None
        for rank, one in enumerate(seen):
            later = (one.buffers[self._changed][0], one.left)
            for step, held in zip(steps, later, strict=True):
                ends = (one.buffers[step][1], seen[0].buffers[step][1])
                if not any(np.array_equal(held, end, equal_nan=True) for end in ends):
                    return (
                        f"rank {rank}'s buffers were changed behind the forward pass of step "
                        f"{step + 1}"
                    )
        return None

    def _too_little(self, consistency: str, seen: Sequence[Testimony], sent: int) -> str | None:
        """Where less was sent than an average takes.

        What others do not know of P - 1 ranks' gradients they cannot average. Who sends past the
        communicator, as DDP does in code of its own, is not judged.
        """
        trial = self._trial
        if trial.world_size == 1 or consistency != "synchronous" or not self._early_bytes:
            return None
        if self._reference is not references.average:
            return None
        used = serial.always_used(seen)
        params = dict(self._workload.model.named_parameters())
        size = sum(
            params[name].nbytes * min(1.0, _share(trial, params[name].element_size()))
            for name in seen[0].names
            if name in used
        )
        least = (trial.world_size - 1) * size
        if sent >= least:
            return None
        return (
            f"in timed steps all ranks together sent {sent:,} bytes per step, and an average of "
            f"their gradients takes {least:,.0f} at least"
        )

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
            held = hold(
                trial, self._reference, seen, local_size, sent_bytes, size, counted, self._changed
            )
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
        mixed = self._reference not in (references.average, references.delayed)
        limit *= MIXED if mixed else 1
        found = serial.compare(
            self._trial,
            self._reference,
            seen,
            local_size,
            limit,
            self._changed,
            mixed=mixed,
        )
        finding, worst = self._other_than_claimed(seen, local_size, limit), found.end
        if self._first is not None:
            first_limit = self._tolerance(computed=True)
            if finding is None and self._first.error > first_limit:
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
            if found.read_in > len(seen[0].gradients):
                finding = (
                    f"the last step, with settings of the optimizer that were changed before it, "
                    f"moved {found.read.tensor} otherwise than it should have, or its forward pass "
                    "had read older values"
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

    def _other_than_claimed(
        self, seen: Sequence[Testimony], local_size: int, limit: float
    ) -> str | None:
        if self._claimed is None:
            return None
        off = serial.difference(
            self._trial, self._claimed, references.average, seen, local_size, limit
        )
        if off.error <= limit:
            return None
        return (
            "it promises to be synchronous, but its own reference is not the average of all ranks: "
            + _off("at the end", off, limit)
        )


def _promises_average(trial: Trial, reference: Any) -> bool:
    """Whether `reference` is of a plug-in's own file that promises what `average` does."""
    if trial.algorithm == BASELINE or reference.__module__ == references.__name__:
        return False
    if getattr(trial.options, "compression", "none") not in ("none", *WIRE_TOLERANCE):
        return False
    return algorithm_class(trial.algorithm).capabilities.consistency == "synchronous"


def _share(trial: Trial, element_size: int) -> float:
    """Bytes that travel per byte of a gradient."""
    share = getattr(trial.options, "share", None)
    return 1.0 if share is None else share(element_size)


def _first_of(oddities: Sequence[str | None]) -> str | None:
    """With the rank that has it."""
    return next((f"rank {r}: {odd}" for r, odd in enumerate(oddities) if odd), None)


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
