"""The training of a trial: once plainly, to compare with, and with the trial's algorithm, timed."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import dear
from common.harness import check, compute_times
from common.harness.step_parts import Mark, StepParts
from common.harness.trial import BASELINE, OptimizerConfig, Trial
from common.models import pace
from common.models.pace import Brake
from common.models.registry import is_replay
from common.models.workload import Workload
from dear.comm import runtime
from dear.training.algorithm import algorithm_class, algorithm_options

SHORT_STEP_S = 0.5
EXTRA_WARMUP_STEPS = 3


def make_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The experiment's optimizer, for all parameters of `model`."""
    if config.name == "adamw":
        return torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay
    )


def untimed_steps(trial: Trial) -> int:
    """Steps before the first timed one, of which the last is typical of those to come."""
    if trial.algorithm == BASELINE:
        return trial.measure.warmup_steps
    settling = algorithm_options(trial.algorithm, trial.options).settling_steps()
    return max(trial.measure.warmup_steps, settling + 1 if settling else 0)


class Reference:
    """Where plain training leads from the same start with the same data, and what it computes.

    The model is left as it was. Everything goes on all ranks at once.

    Args:
        steps: to train and to compare; at least one. Of a delayed algorithm so many updates.
    """

    def __init__(self, trial: Trial, workload: Workload, steps: int) -> None:
        self._trial, self._workload, self._steps = trial, workload, steps + trial.staleness
        self._start = check.snapshot(workload.model)
        optimizer = make_optimizer(trial.optimizer, workload.model)
        self._seed()
        communicator = runtime.communicator()
        # Gradients stay until all steps are timed: new memory for them would take longer.
        self._wanted, times = check.plain_steps(
            workload, optimizer, communicator, self._steps, trial.staleness
        )
        updated = times[trial.staleness :]
        self.compute = compute_times.slowest_rank(workload, optimizer, communicator, updated)
        """Seconds of this machine that a step takes without communication."""
        optimizer.zero_grad()
        workload.model.load_state_dict(self._start)

    def compare(self, training: Training) -> dict[str, Any]:
        """Trains the same steps with the algorithm and says how far it ended from there."""
        self._seed()
        training.run(self._steps)
        training.synchronize()
        names = [name for name, _ in self._workload.model.named_parameters()]
        # Not a copy: the memory check counts on it.
        reached = self._workload.model.state_dict()
        tolerance = check.TOLERANCE[self._trial.dtype]
        if training.consistency in check.MEAN_TOLERANCE:
            # Replicas differ; only their mean goes where plain training does, roughly.
            reached = check.Means(reached, runtime.communicator())
            tolerance = check.MEAN_TOLERANCE[training.consistency]
        off = check.distance(reached, self._wanted, self._start, names)
        matches = off <= tolerance
        return {"reference_error": off, "matches_reference": matches}

    def _seed(self) -> None:
        # Dropout then draws the same masks in both trainings; each rank has its own.
        torch.manual_seed(self._trial.seed * 1000 + dear.rank())


class Training:
    """The ordinary training loop with the trial's algorithm, timed in parts.

    Attributes:
        loss: of the last step.
        last_step_s: its duration, in seconds of this machine.
        parts: of every step so far.
        consistency: what the algorithm promises (`dear.training.algorithm.Capabilities`).
    """

    def __init__(self, trial: Trial, workload: Workload) -> None:
        self._workload = workload
        self._cuda = trial.device == "cuda"
        self._communicator = runtime.communicator()
        self._optimizer = make_optimizer(trial.optimizer, workload.model)
        # A replayed model slows down by itself. Hosts that can be slowed are all on this machine.
        threads = trial.world_size * trial.threads_per_rank
        crowd = threads / len(os.sched_getaffinity(0))
        self._brake = Brake(None if is_replay(trial.model) else pace.current(), crowd)
        self._distributed = trial.algorithm != BASELINE
        self.consistency = "synchronous"
        if self._distributed:
            algorithm = algorithm_class(trial.algorithm)()
            self.consistency = algorithm.capabilities.consistency
            options = algorithm_options(trial.algorithm, trial.options)
            workload.model, self._optimizer = algorithm.wrap(
                workload.model, self._optimizer, self._communicator, options
            )
        self.loss = torch.zeros(())
        self.last_step_s = 0.0
        self.parts: list[StepParts] = []

    def run(self, steps: int) -> None:
        """Trains so many steps."""
        for _ in range(steps):
            self.step()

    def warm_up(self, steps: int) -> None:
        """At least `steps`; more if they are short, since the first few tell little of the rest."""
        self.run(steps)
        more = self._communicator.broadcast_object(self.last_step_s < SHORT_STEP_S)
        self.run(EXTRA_WARMUP_STEPS if more else 0)

    def step(self) -> None:
        """One step; returns when the device has finished it."""
        began = self._mark()
        self._optimizer.zero_grad()
        with self._brake:
            self.loss = self._workload.loss()
        forward = self._mark()
        with self._brake:
            self.loss.backward()
        backward = self._mark()
        self._optimizer.step()
        if self._cuda:
            torch.cuda.synchronize()
        end = self._mark()
        self.last_step_s = end[0] - began[0]
        self.parts.append(StepParts.between(began, forward, backward, end))

    def synchronize(self) -> None:
        """Parameters are current afterwards, and nothing is in flight."""
        if self._distributed:
            self._optimizer.synchronize()

    def statistics(self) -> dict[str, Any]:
        """What the algorithm has counted on this rank; `{}` if nothing."""
        return self._optimizer.statistics() if self._distributed else {}

    def close(self) -> None:
        """Takes the algorithm out of the model again."""
        if self._distributed:
            self._optimizer.close()

    def _mark(self) -> Mark:
        return time.perf_counter(), self._communicator.blocked_s
