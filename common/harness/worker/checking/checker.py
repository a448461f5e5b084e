"""Checker: does a trial train correctly, from its first step to the end of the timed steps?

1. Before the trial: plain training of the first steps, with the same start and data. Plain training
   averages each gradient by one collective, without the trial's algorithm.
2. First steps with the algorithm; all parameters are compared with plain training.
3. Warm-up and timed steps; a sample of each tensor's elements is recorded. One step is drawn at
   random (the watched step). Its inputs are kept, and its gradients are computed again later.
4. Two more steps; settings of the optimizer change between them.
5. Verdict of rank 0: a serial reference (all ranks in one process) repeats all steps from the
   recordings of all ranks, and must get the same parameters.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

import numpy as np

import dear
from common.harness.trial import Trial
from common.harness.worker.checking import deviation, serial, standard
from common.harness.worker.checking.forward_passes import ForwardPasses, unlike_plain
from common.harness.worker.checking.plain_training import PlainTraining
from common.harness.worker.checking.recompute import Recomputation, worst_gradient
from common.harness.worker.checking.recording import Recorder
from common.harness.worker.checking.repeatable import repeatable
from common.harness.worker.checking.serial import RecordedJob
from common.harness.worker.checking.standard import RankReport, Standard
from common.harness.worker.training import Training, untimed_steps
from common.models.workload import Workload
from common.results.records.trust import Check
from dear.comm import runtime

STEPS = 10
"""Number of checked exchanges if no steps are timed; on slow links, not all arrive in time."""


def check_training(trial: Trial, workload: Workload) -> Check:
    """Checks a training trial before its training; rank 0 returns the verdict.

    Args:
        workload: workload that no algorithm has wrapped yet; it cannot be trained afterwards.
    """
    communicator = runtime.communicator()
    checker = Checker(trial, workload, trial.measure.check_steps)
    training = Training(trial, workload)
    checker.train_first_steps(training)
    steps = max(untimed_steps(trial), STEPS * getattr(trial.options, "every", 1))
    before = communicator.bytes_sent
    watched = draw(range(1, steps)) if checker.recomputes else 0
    training.run(watched)
    if checker.recomputes:
        checker.train_watched_step(training)
    training.run(steps - watched)
    check = checker.finish(training, (communicator.bytes_sent - before) // steps)
    training.synchronize()  # FSDP's parameters are whole then
    agreement = deviation.agreement(workload.model, training.consistency, communicator)
    training.close()
    return deviation.with_agreement(checker.recompute(check), agreement)


def draw(places: range) -> int:
    """Draws a number of `places`, the same on all ranks, that does not depend on any seed.

    So an algorithm cannot know which step is watched.
    """
    return int(runtime.communicator().broadcast_object(secrets.choice(places)))


class Checker:
    """Check of one trial on this rank; all ranks must call each method together.

    Args:
        workload: workload that no algorithm has wrapped yet. It is trained plainly, then restored.
        steps: number of first steps.
    """

    def __init__(self, trial: Trial, workload: Workload, steps: int) -> None:
        self._workload = workload
        self._recomputation = Recomputation(workload)
        self._standard = Standard(trial, workload)
        self._tolerance = self._standard.tolerance(computed=True)
        self._plain = PlainTraining(trial, workload, steps, self._tolerance)
        self._plain_pass, self.compute = self._plain.forward_pass, self._plain.compute
        """Compute times of a step in real seconds."""
        self._recorder = Recorder(workload.model, trial.seed)
        self._trial = trial
        self.recomputes = self._standard.recomputes
        """True if one step after the first steps and before the last two must be watched."""
        if not self._standard.compares_first_steps:
            self._plain.forget()

    def train_first_steps(self, training: Training) -> None:
        """Trains the first steps with the algorithm."""
        communicator = runtime.communicator()
        self._sent = communicator.bytes_sent
        self._recorder.start(self._workload.model)
        self._passes = ForwardPasses(self._workload.model)
        self._plain.repeat(training)
        self._compared = self._recorder.steps
        self._sent_at_first = (communicator.bytes_sent - self._sent) / self._compared
        self._first = self._first_buffer = None
        if self._standard.compares_first_steps:
            self._first = self._plain.deviation()
            self._first_buffer = self._plain.buffer_deviation()
        self._plain.forget()
        self._passes.watch(self._recorder.watch_some())

    def train_watched_step(self, training: Training) -> None:
        """Trains one step and keeps its inputs for `recompute`.

        The caller chooses the step by `draw`.
        """
        self._recorder.watch_buffers()
        self._recomputation.watch(frozenset(self._plain_pass.shapes))
        with repeatable(self._recomputation.device):
            training.unmarked_step()
        self._watched = self._recorder.steps
        self._recomputation.unwatch()
        self._passes.watch(self._recorder.watch_some())

    def finish(self, training: Training, sent_per_step: int) -> Check:
        """Trains two more steps; rank 0 returns the verdict. Parameters are current afterwards.

        Args:
            sent_per_step: bytes per timed step that this rank gave to the communicator.
        """
        self._recorder.watch_all()
        training.step()
        # The second step must use the changed settings, as after a step of a scheduler.
        serial.change_settings(training.optimizer)
        changed = self._recorder.steps
        training.step()
        training.synchronize()
        communicator = runtime.communicator()
        sent_bytes = communicator.bytes_sent - self._sent
        communicator.barrier()  # messages of all ranks have arrived
        self._recording = self._recorder.finish(self._workload.model)
        report = RankReport(
            recording=self._recording,
            sent_bytes=sent_bytes,
            sent_per_step=sent_per_step,
            sent_at_first=self._sent_at_first,
            statistics=training.engine.statistics(),
            finding=unlike_plain(self._plain_pass, self._passes.finish(), self._compared),
        )
        reports = communicator.gather_objects(report)
        if dear.rank() != 0:
            return Check()
        recordings = [report.recording for report in reports]
        job = RecordedJob(self._trial, recordings, dear.local_size(), changed)
        check = self._standard.judge(job, reports, training.consistency, self._first)
        finding = _first_finding([report.finding for report in reports])
        if finding is None and self._first_buffer and self._first_buffer.error > self._tolerance:
            when = "after the first steps the buffer"
            finding = standard.off_by(when, self._first_buffer, self._tolerance)
        if finding is None:
            finding = standard.changed_buffers(recordings, changed)
        if finding is None:
            finding = self._standard.sent_too_little(job, reports, training.consistency)
        return _with_finding(check, finding)

    def recompute(self, check: Check) -> Check:
        """Recomputes the watched step's gradients; returns `check`, failed if they differ.

        All ranks call this after the algorithm has been removed. The model cannot be trained
        afterwards.
        """
        finding = None
        if self.recomputes and self._recomputation.complete:
            finding = self._unlike_recomputed()
        findings = runtime.communicator().gather_objects(finding)
        return _with_finding(check, _first_finding(findings))

    def _unlike_recomputed(self) -> str | None:
        recording, step, limit = self._recording, self._watched, self._tolerance
        gradients = self._recorder.gradients(self._recomputation.gradients())
        worst = worst_gradient(recording.tensors(recording.gradients[step - 1]), gradients)
        if worst.error > limit:
            return (
                f"in step {step} the gradient of {worst.tensor} is off by {worst.error:.2g} (at "
                f"most {limit:g}), relative to plain passes with the same parameters and samples"
            )
        if step - 1 in recording.buffers:
            begin, left = recording.buffers[step - 1]
            wanted = self._recorder.buffers()
            least = limit * np.abs(wanted - begin).max()
            if not np.allclose(left, wanted, rtol=limit, atol=least):
                return f"after the forward pass of step {step}, buffers differ from plain training"
        return None


def _with_finding(check: Check, finding: str | None) -> Check:
    if finding is None or check.matches_reference is False:
        return check
    return dataclasses.replace(check, matches_reference=False, finding=finding)


def _first_finding(findings: Sequence[str | None]) -> str | None:
    return next((f"rank {rank}: {text}" for rank, text in enumerate(findings) if text), None)
