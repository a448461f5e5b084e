"""Standard: the reference and the tolerances of a trial, and the verdict on its recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.harness.trial import BASELINE, Trial
from common.harness.worker.checking.deviation import Deviation
from common.harness.worker.checking.invariants import Statistics, check_invariants
from common.harness.worker.checking.recording import Recording
from common.harness.worker.checking.serial import Comparison, RecordedJob
from common.models.registry import is_replay
from common.models.workload import Workload
from common.results.records.trust import Check
from dear.algorithms import reference as references
from dear.training.algorithm import algorithm_class

TOLERANCE = {
    **{"float32": 1e-5, "float64": 1e-9, "bfloat16": 0.05},
    **{"amp-bf16": 1e-5, "amp-fp16": 1e-5},
}
"""Largest error of any tensor, relative to its movement. Correct algorithms in float32 have 2e-8 to
4e-7. Gradients that are sent in fp16 by mistake cause 4e-4, a lost step 1 / steps or more."""
COMPUTED_TOLERANCE = {
    **{"float32": 2e-3, "float64": 1e-7, "bfloat16": 0.2},
    **{"amp-bf16": 0.2, "amp-fp16": 0.2},
}
"""Largest error if both sides compute gradients, which magnify the rounding of parameters."""
WIRE_TOLERANCE = {"fp16": 5e-3, "bf16": 0.05}
"""Smallest tolerance if gradients are sent in a 16-bit dtype."""
MIXED = 10
"""Factor of the tolerances if parameters are averaged instead of gradients: each step then rounds
whole parameters, not only their changes."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Facts about one rank for the verdict."""

    recording: Recording
    sent_bytes: int
    """Bytes that the rank gave to the communicator since the first step."""
    sent_per_step: int
    """Bytes that the rank gave to the communicator per timed step."""
    sent_at_first: float
    """Bytes that the rank gave to the communicator per step in the first steps."""
    statistics: Statistics
    """Counters of the algorithm."""
    finding: str | None
    """Error in the rank's forward passes, as a text; None if there is none."""


class Standard:
    """Reference and tolerances of a trial.

    Args:
        workload: workload that no algorithm has wrapped yet.
    """

    def __init__(self, trial: Trial, workload: Workload) -> None:
        self._trial = trial
        self._scaled = workload.scaler is not None
        """True for a loss scaler: gradients are scaled, and steps may be skipped."""
        self.reference = None
        if not self._scaled:
            self.reference = (
                references.average
                if trial.algorithm == BASELINE
                else references.reference_of(trial.algorithm, trial.options)
            )
        # An algorithm that promises to train like one process is compared with one process, not
        # with a reference in its own file.
        self._claimed = None
        if self.reference is not None and _promises_average(trial, self.reference.__module__):
            self._claimed, self.reference = self.reference, references.average
        self._plain = self.reference in (references.average, references.delayed)
        options = trial.options
        self.compares_first_steps = self._plain and getattr(options, "average", True)
        """True if all elements are compared after the first steps."""
        # Algorithms that measure in the first steps may send unrounded gradients.
        if getattr(options, "wire", None) and options.settling_steps():
            self.compares_first_steps = False
        self.recomputes = self._plain and not is_replay(trial.model)
        """True if a step's gradients are computed again (a replayed model's are random numbers)."""
        self._sizes = {
            name: (param.nbytes, param.element_size())
            for name, param in workload.model.named_parameters()
            if param.requires_grad
        }
        """Bytes of each trained parameter, and of its elements."""

    def tolerance(self, *, computed: bool) -> float:
        """Returns the largest allowed error, relative to a tensor's movement.

        Args:
            computed: True if both sides have computed gradients; False: both use the same ones.
        """
        trial = self._trial
        computed = computed and not is_replay(trial.model)
        least = (COMPUTED_TOLERANCE if computed else TOLERANCE)[trial.dtype]
        return max(least, WIRE_TOLERANCE.get(getattr(trial.options, "compression", "none"), 0.0))

    def judge(
        self,
        job: RecordedJob,
        reports: Sequence[RankReport],
        consistency: str,
        first: Deviation | None,
    ) -> Check:
        """Returns the verdict on a trial.

        Args:
            consistency: consistency that the algorithm promises.
            first: deviation after the first steps, if these were compared.
        """
        trial = self._trial
        if self._scaled:
            return Check(
                judged_by="replicas",
                finding="only replicas were compared: a GradScaler may skip steps",
            )
        in_step = trial.world_size == 1 or trial.options.in_step()
        free = consistency == "asynchronous" and not in_step
        if free and algorithm_class(trial.algorithm).traffic(
            trial.options, trial.world_size, job.local_size
        ):
            sent = sum(report.sent_bytes for report in reports)
            size = sum(nbytes for nbytes, _ in self._sizes.values())
            statistics = [report.statistics for report in reports]
            return check_invariants(job, self.reference, sent, size, statistics)
        if self.reference in (None, references.error_feedback) or free:
            return Check(judged_by="replicas", finding=_why_unchecked(trial, consistency))
        return self._compared(job, first)

    def _compared(self, job: RecordedJob, first: Deviation | None) -> Check:
        limit = self.tolerance(computed=False) * (1 if self._plain else MIXED)
        compared = Comparison(job, self.reference, limit, mixed=not self._plain)
        finding, worst = self._unlike_claimed(job, limit), compared.end
        if first is not None:
            first_limit = self.tolerance(computed=True)
            if finding is None and first.error > first_limit:
                finding = off_by("after the first steps", first, first_limit)
            if first.error / first_limit > worst.error / limit:
                worst = first
        if finding is None and compared.end.error > limit:
            finding = off_by("at the end", compared.end, limit)
        if finding is None and compared.read.error > limit:
            worst = compared.read
            finding = (
                f"the forward pass of step {compared.read_in} read values of {worst.tensor} that "
                "the previous step should not have left"
            )
            if compared.read_in > job.steps:
                finding = (
                    f"the last step, after a change of the optimizer's settings, moved "
                    f"{worst.tensor} to other values than it should have, or its forward pass had "
                    "read older values"
                )
        return Check(
            judged_by="reference",
            matches_reference=finding is None,
            reference_error=None if first is None else first.error,
            end_error=compared.end.error,
            worst_tensor=worst.tensor,
            finding=finding,
        )

    def _unlike_claimed(self, job: RecordedJob, limit: float) -> str | None:
        if self._claimed is None:
            return None
        off = job.difference(self._claimed, references.average, limit)
        if off.error <= limit:
            return None
        return (
            "it promises to be synchronous, but its own reference is not the average of all ranks: "
            + off_by("at the end", off, limit)
        )

    def sent_too_little(
        self, job: RecordedJob, reports: Sequence[RankReport], consistency: str
    ) -> str | None:
        """Returns the text of an error if timed steps sent too few bytes to average gradients."""
        trial = self._trial
        if trial.world_size == 1 or consistency != "synchronous":
            return None
        if self.reference is not references.average:
            return None
        share = getattr(trial.options, "share", None)
        size = 0.0
        for name in job.always_used:
            nbytes, element_size = self._sizes[name]
            # Sent bytes per byte of the gradient.
            size += nbytes * (min(1.0, share(element_size)) if share else 1.0)
        # The first steps were right, perhaps with other messages than the communicator's (DDP).
        least = min((trial.world_size - 1) * size, sum(each.sent_at_first for each in reports))
        sent = sum(report.sent_per_step for report in reports)
        if sent >= least:
            return None
        return (
            f"in timed steps all ranks together sent {sent:,} bytes per step, but an average of "
            f"their gradients took {least:,.0f} at least"
        )


def changed_buffers(recordings: Sequence[Recording], changed: int) -> str | None:
    """Returns the text of an error if buffers changed outside forward passes in the last two steps.

    Only a copy of rank 0's buffers is allowed.

    Args:
        changed: index of the last step.
    """
    steps = (changed - 1, changed)
    if not all(step in recording.buffers for recording in recordings for step in steps):
        return None
    for rank, recording in enumerate(recordings):
        later = (recording.buffers[changed][0], recording.end_buffers)
        for step, held in zip(steps, later, strict=True):
            ends = (recording.buffers[step][1], recordings[0].buffers[step][1])
            if not any(np.array_equal(held, end, equal_nan=True) for end in ends):
                return f"rank {rank}'s buffers changed after the forward pass of step {step + 1}"
    return None


def off_by(when: str, worst: Deviation, limit: float) -> str:
    """Returns the text of an error about a tensor whose values are wrong."""
    share = f"{worst.error:.2g} of the distance that it moved"
    return f"{when} {worst.tensor} is off by {share} (at most {limit:g})"


def _promises_average(trial: Trial, module: str) -> bool:
    """Returns True if the algorithm is a plugin (in `module`) that promises to be synchronous."""
    if trial.algorithm == BASELINE or module == references.__name__:
        return False
    if getattr(trial.options, "compression", "none") not in ("none", *WIRE_TOLERANCE):
        return False
    return algorithm_class(trial.algorithm).capabilities.consistency == "synchronous"


def _why_unchecked(trial: Trial, consistency: str) -> str:
    compression = getattr(trial.options, "compression", "none")
    if compression != "none":
        return (
            f"only replicas were compared: what {compression} leaves out depends on what travels "
            "together"
        )
    missing = "serial reference" if consistency != "asynchronous" else "declared traffic"
    return f"only replicas were compared: {trial.algorithm} has no {missing}"
