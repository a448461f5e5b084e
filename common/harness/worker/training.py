"""The training of a trial: once plainly, to compare with, and with the trial's algorithm, timed.

The plain steps also tell how long a step computes: forward, backward and update without
communication between them. The timed ones tell where a step's time goes: computing in each part,
or held up by communication.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dear
from common.harness.trial import BASELINE, OptimizerConfig, Trial
from common.harness.worker import correctness
from common.models import pace
from common.models.pace import Brake
from common.models.registry import is_replay
from common.models.replay import Replay
from common.models.updates import paced
from common.models.workload import Workload
from common.results.records import Breakdown, Check
from dear.comm import runtime
from dear.comm.communicator import Communicator
from dear.cost.bounds import StepTimes, compute_limit_s
from dear.training.algorithm import algorithm_class

SHORT_STEP_S = 0.5
EXTRA_WARMUP_STEPS = 3
LEAST, ENOUGH, ENOUGH_S = 2, 3, 1.0
"""Timed steps beyond the first, at least; and enough of them, in number or in seconds of this
machine."""
SHORT, SHORT_S = 20, 0.3
"""More where they are short, and the first few tell little of the rest: up to so many, within so
many seconds."""
Mark = tuple[float, float]
"""A moment, and how long the rank had been held up by communication until then; seconds."""


def make_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The experiment's optimizer, for all parameters of `model`."""
    kind: Any = torch.optim.AdamW if config.name == "adamw" else torch.optim.SGD
    if isinstance(model, Replay):
        kind = paced(kind, model.memory_bytes_per_s)
    given = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name != "adamw":
        given["momentum"] = config.momentum
    return kind(model.parameters(), **given)


def untimed_steps(trial: Trial) -> int:
    """Steps before the first timed one, of which the last is typical of those to come."""
    settling = trial.options.settling_steps()
    return max(trial.measure.warmup_steps, settling + 1 if settling else 0)


class Reference:
    """Where plain training leads from the same start with the same data, and what it computes.

    The model is left as it was. Everything goes on all ranks at once. At least one step is trained
    and compared, of a delayed algorithm so many updates.
    """

    def __init__(self, trial: Trial, workload: Workload, steps: int) -> None:
        staleness = trial.options.staleness()
        self._trial, self._workload, self._steps = trial, workload, steps + staleness
        self._start = correctness.snapshot(workload.model)
        optimizer = make_optimizer(trial.optimizer, workload.model)
        self._seed()
        communicator = runtime.communicator()
        # Gradients stay until all steps are timed: new memory for them would take longer.
        self._wanted, times = plain_steps(workload, optimizer, communicator, self._steps, staleness)
        updated = times[staleness:]
        self.compute = slowest_rank(workload, optimizer, communicator, updated)
        """Seconds of this machine that a step takes without communication."""
        optimizer.zero_grad()
        workload.model.load_state_dict(self._start)

    def compare(self, training: Training) -> Check:
        """Trains the same steps with the algorithm and says how far it ended from there."""
        self._seed()
        training.run(self._steps)
        training.synchronize()
        names = [name for name, _ in self._workload.model.named_parameters()]
        # Not a copy: the memory check counts on it.
        reached = self._workload.model.state_dict()
        tolerance = correctness.TOLERANCE[self._trial.dtype]
        if training.consistency in correctness.MEAN_TOLERANCE:
            # Replicas differ; only their mean goes where plain training does, roughly.
            reached = correctness.Means(reached, runtime.communicator())
            tolerance = correctness.MEAN_TOLERANCE[training.consistency]
        off = correctness.distance(reached, self._wanted, self._start, names)
        return Check(reference_error=off, matches_reference=off <= tolerance)

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
            workload.model, self._optimizer = algorithm.wrap(
                workload.model, self._optimizer, self._communicator, trial.options
            )
        self.loss = torch.zeros(())
        self.last_step_s = 0.0
        self.parts: list[Breakdown] = []

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
        self.parts.append(step_parts(began, forward, backward, end))

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
        return pace.current().clock(), self._communicator.blocked_s


def plain_steps(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    communicator: Communicator,
    steps: int,
    staleness: int = 0,
) -> tuple[dict[str, torch.Tensor], list[StepTimes]]:
    """Trains `steps` steps with written-out gradient averaging; the last gradients stay.

    Args:
        staleness: each update applies the gradients of so many steps before; the first ones update
            nothing.

    Returns:
        The state that they lead to, and what each step computed on this rank, averaging left out.
    """

    params = list(workload.model.parameters())
    held: deque[list[torch.Tensor | None]] = deque([[None] * len(params)] * staleness)

    def average() -> None:
        for param in params:
            if param.grad is not None:
                communicator.all_reduce(param.grad, op="mean").wait()
        held.append([param.grad for param in params])
        for param, gradient in zip(params, held.popleft(), strict=True):
            param.grad = gradient

    times = [timed_step(workload, optimizer, average) for _ in range(steps)]
    return correctness.snapshot(workload.model), times


def timed_step(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    average: Callable[[], None] = lambda: None,
) -> StepTimes:
    """One plain training step; what it takes on this rank, in seconds of this machine.

    Args:
        average: run between the backward pass and the update; its time is left out.
    """
    began = pace.current().clock()
    optimizer.zero_grad()
    loss = workload.loss()
    forward = _done(loss.device)
    loss.backward()
    backward = _done(loss.device)
    average()
    resumed = _done(loss.device)
    optimizer.step()
    return StepTimes(
        forward_s=forward - began,
        backward_s=backward - forward,
        update_s=_done(loss.device) - resumed,
    )


def slowest_rank(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    communicator: Communicator,
    steps: Sequence[StepTimes],
) -> StepTimes:
    """The medians of the rank that computes longest, with all ranks at work at once.

    Trains on without averaging until there are enough steps: parameters, optimizer state, gradients
    and random state are the caller's to restore.

    Args:
        steps: those that this rank has timed before; the first, which touches much memory for the
            first time, does not count.
    """
    counted = list(steps[1:])
    # One rank decides, or some would compute while others rest.
    while communicator.broadcast_object(_too_few(counted)):
        communicator.barrier()
        counted.append(timed_step(workload, optimizer))
    # Of two the lower: what disturbs only adds.
    low = {n: statistics.median_low(getattr(one, n) for one in counted) for n in vars(counted[0])}
    return max(communicator.gather_objects(StepTimes(**low)), key=compute_limit_s)


def _too_few(counted: Sequence[StepTimes]) -> bool:
    spent = sum(compute_limit_s(step) for step in counted)
    if len(counted) < ENOUGH:
        return len(counted) < LEAST or spent < ENOUGH_S
    return len(counted) < SHORT and spent < SHORT_S


def _done(device: torch.device) -> float:
    """The time when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return pace.current().clock()


def step_parts(began: Mark, forward: Mark, backward: Mark, end: Mark) -> Breakdown:
    """Of one step, from the marks at its beginning and at the end of each of its three calls.

    Only where the host waits for each part to end (CPU). An algorithm may communicate, and update,
    within any of the calls: the parts leave out what was spent waiting for communication, so that
    all four add up.
    """
    return Breakdown(
        forward_s=_unblocked_s(began, forward),
        backward_s=_unblocked_s(forward, backward),
        update_s=_unblocked_s(backward, end),
        exposed_comm_s=end[1] - began[1],
        step_s=end[0] - began[0],
    )


def _unblocked_s(start: Mark, end: Mark) -> float:
    return end[0] - start[0] - (end[1] - start[1])


def typical(steps: Sequence[Breakdown], time_scale: float, *, waits_seen: bool) -> Breakdown:
    """The mean of the middle half by duration, in seconds of what the fabric stands for.

    Its parts add up, and no straggler counts. Where an algorithm waits in code of its own, which is
    not seen, the other parts contain that.
    """
    ordered = sorted(steps, key=lambda step: step.step_s)
    cut = (len(ordered) + 1) // 4
    middle = ordered[cut : len(ordered) - cut]
    values = {
        name: statistics.fmean(getattr(step, name) for step in middle) / time_scale
        for name in vars(middle[0])
    }
    return Breakdown(**values | ({} if waits_seen else {"exposed_comm_s": None}))
