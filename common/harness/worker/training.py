"""The training of a trial with its algorithm, timed.

The parts of a step tell where its time goes: computing, or held up by communication.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from common.harness.settings import OptimizerConfig
from common.harness.trial import BASELINE, Trial
from common.models.registry import is_replay
from common.models.replay import pace
from common.models.replay.brake import Brake
from common.models.replay.model import Replay
from common.models.replay.pace import paced
from common.models.workload import Workload
from common.results.records import Breakdown
from dear.comm import runtime
from dear.cost.foreign import Sender
from dear.training.algorithm import algorithm_class

SHORT_STEP_S = 0.5
EXTRA_WARMUP_STEPS = 3
Mark = tuple[float, float]
"""A moment, and how long the rank had been held up by communication until then; seconds. Of a
replayed model both are its device's: its clock, and how long it was idle."""


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


class Training:
    """The ordinary training loop with the trial's algorithm, timed in parts.

    Attributes:
        optimizer: the trial's; with an algorithm it has more methods.
        loss: of the last step.
        consistency: what the algorithm promises (`dear.training.algorithm.Capabilities`).
    """

    def __init__(self, trial: Trial, workload: Workload) -> None:
        self._workload = workload
        self._device = torch.device(trial.device)
        self._communicator = runtime.communicator()
        self.optimizer = make_optimizer(trial.optimizer, workload.model)
        # A replayed model slows down by itself. Hosts that can be slowed are all on this machine.
        threads = trial.world_size * trial.threads_per_rank
        crowd = threads / len(os.sched_getaffinity(0))
        self._replayed = is_replay(trial.model)
        self._brake = Brake(None if self._replayed else pace.current(), crowd)
        if self._brake.scaled:
            # Before the algorithm's: a gradient leaves when the slower host would have it.
            for param in filter(lambda one: one.requires_grad, workload.model.parameters()):
                param.register_post_accumulate_grad_hook(self._brake.catch_up)
        self._distributed = trial.algorithm != BASELINE
        self.consistency = "synchronous"
        if self._distributed:
            algorithm = algorithm_class(trial.algorithm)()
            # Options that are times are of what the fabric stands for.
            options = trial.options.slowed(pace.current().time_scale)
            self.consistency = algorithm.capabilities.consistency
            workload.model, self.optimizer = algorithm.wrap(
                workload.model, self.optimizer, self._communicator, options
            )
        self.loss = torch.zeros(())
        self._marks: list[tuple[Any, Any, Any, Any]] = []
        """Of every step: at its beginning and at the end of each of its three calls."""

    def run(self, steps: int) -> None:
        """Trains so many steps."""
        for _ in range(steps):
            self.step()

    def warm_up(self, steps: int) -> float:
        """At least `steps`; more if they are short, since the first few tell little of the rest.

        Returns:
            About how long a step takes, in seconds of this machine.
        """
        self.run(steps - 1)
        step_s = self._mean_s(1)
        if self._communicator.broadcast_object(step_s < SHORT_STEP_S):
            step_s = self._mean_s(EXTRA_WARMUP_STEPS)
        return step_s

    def _mean_s(self, steps: int) -> float:
        began = done(self._device)
        self.run(steps)
        return (done(self._device) - began) / steps

    def step(self) -> None:
        """One step; on a GPU it may return before the device has finished it."""
        began = self._mark()
        self.optimizer.zero_grad()
        with self._brake:
            self.loss = self._workload.loss()
        forward = self._mark()
        with self._brake:
            self._workload.backward(self.loss)
        backward = self._mark()
        with self._brake:
            self._workload.update(self.optimizer)
        self._marks.append((began, forward, backward, self._mark()))

    def unmarked_step(self) -> None:
        """One step that `parts` and `phases` leave out."""
        self.step()
        self._marks.pop()

    def parts(self) -> list[Breakdown]:
        """Where the time went in every step since `forget_parts`. On a GPU, where the host runs
        ahead, by the device's events; its parts contain what a stream has waited for others."""
        done(self._device)
        convert = step_parts if self._device.type == "cpu" else device_parts
        return [convert(*marks) for marks in self._marks]

    def phases(self) -> list[list[float]]:
        """When every step since `forget_parts` began, and ended its forward pass, its backward pass
        and its update, in seconds of the host's clock; none on a GPU, where the host runs ahead."""
        if self._device.type != "cpu":
            return []
        return [[clock_s for clock_s, _ in marks] for marks in self._marks]

    def forget_parts(self) -> None:
        """Those of the steps so far do not count."""
        self._marks.clear()

    def synchronize(self) -> None:
        """Parameters are current afterwards, and nothing is in flight, on the device neither."""
        if self._distributed:
            self.optimizer.synchronize()
        self.finish()

    def finish(self) -> None:
        """Returns when the device has done the steps so far."""
        done(self._device)

    @property
    def absorbed_s(self) -> float | None:
        """Seconds of this machine that the rank has waited for a core without computing longer by
        them, as its compute is slowed down anyway; None where compute is replayed.
        """
        return None if self._replayed else self._brake.absorbed_s

    def statistics(self) -> dict[str, Any]:
        """What the algorithm has counted on this rank; `{}` if nothing."""
        return self.optimizer.statistics() if self._distributed else {}

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """What travels together at present (`dear.training.engine.Engine.groups`)."""
        return self.optimizer.groups() if self._distributed else []

    def some_groups(self) -> frozenset[int] | None:
        """Which of them have transfers that others lack (`Engine.some_groups`)."""
        return self.optimizer.some_groups() if self._distributed else None

    def sender(self) -> Sender | None:
        """What sends in place of the communicator (`dear.training.engine.Engine.sender`)."""
        return self.optimizer.sender() if self._distributed else None

    def findings(self) -> dict[str, Any]:
        """What the algorithm has decided by itself (`dear.training.engine.Engine.findings`)."""
        return self.optimizer.findings() if self._distributed else {}

    def close(self) -> None:
        """Takes the algorithm out of the model again."""
        if self._distributed:
            self.optimizer.close()

    def _mark(self) -> Any:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        now = pace.current().clock()
        return now, pace.current().idle_s if self._replayed else self._communicator.blocked_s


def of_slowest_rank(ranks: Sequence[Breakdown]) -> Breakdown:
    """That of the rank which is held up least, for which the others wait."""
    busy_s = [one.forward_s + one.backward_s + one.update_s for one in ranks]
    slowest = busy_s.index(max(busy_s))
    return dataclasses.replace(ranks[slowest], rank=slowest)


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


def device_parts(began: Any, forward: Any, backward: Any, end: Any) -> Breakdown:
    """Of one step, from CUDA events that the device has passed."""
    return Breakdown(
        forward_s=began.elapsed_time(forward) / 1e3,
        backward_s=forward.elapsed_time(backward) / 1e3,
        update_s=backward.elapsed_time(end) / 1e3,
        step_s=began.elapsed_time(end) / 1e3,
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
    names = [name for name, value in vars(middle[0]).items() if value is not None]
    values = {
        name: statistics.fmean(getattr(step, name) for step in middle) / time_scale
        for name in names
    }
    return Breakdown(**values | ({} if waits_seen else {"exposed_comm_s": None}))


def done(device: torch.device) -> float:
    """The time when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return pace.current().clock()
