"""Training loop of a trial with its algorithm, with the time of each part of a step."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from common.harness.settings import OptimizerConfig
from common.harness.trial import BASELINE, Trial
from common.machine.cgroups import usable_cores
from common.models.registry import is_replay
from common.models.replay import pace
from common.models.replay.brake import Brake
from common.models.replay.model import Replay
from common.models.replay.pace import paced
from common.models.workload import Workload
from common.results.records import Breakdown
from dear.comm import runtime
from dear.training.algorithm import algorithm_class
from dear.training.engine import Engine, Replica

SHORT_STEP_S = 0.5
EXTRA_WARMUP_STEPS = 3
Mark = tuple[float, float]
"""Time, and the sum of the rank's waits for communication until then, in seconds. For a replayed
model, both are those of the emulated device."""


def make_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns the experiment's optimizer, for all parameters of `model`."""
    kind: type[Any] = torch.optim.AdamW if config.name == "adamw" else torch.optim.SGD
    if isinstance(model, Replay):
        kind = paced(kind, model.memory_bytes_per_s)
    momentum = {"momentum": config.momentum} if config.name == "sgd" else {}
    return kind(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, **momentum)


def untimed_steps(trial: Trial) -> int:
    """Returns the number of warm-up steps, of which the last one is typical of later steps."""
    settling = trial.options.settling_steps()
    return max(trial.measure.warmup_steps, settling + 1 if settling else 0)


class Training:
    """Ordinary training loop with the trial's algorithm.

    Attributes:
        optimizer: the trial's optimizer, wrapped by its algorithm.
        engine: engine of the algorithm (`dear.training.engine.Engine`).
        loss: loss of the last step.
        consistency: how equal replicas are (`dear.training.algorithm.Capabilities`).
    """

    def __init__(self, trial: Trial, workload: Workload) -> None:
        self._workload = workload
        self.device = torch.device(trial.device)
        self._communicator = runtime.communicator()
        self.optimizer = make_optimizer(trial.optimizer, workload.model)
        # Replayed models need no brake. Only virtual hosts, all on this machine, are slowed down.
        threads = trial.world_size * trial.threads_per_rank
        crowd = threads / usable_cores()
        self._replayed = is_replay(trial.model)
        self._brake = Brake(None if self._replayed else pace.current(), crowd)
        if self._brake.scaled:
            # These hooks run before the algorithm's: it gets gradients when a slow host has them.
            for param in filter(lambda p: p.requires_grad, workload.model.parameters()):
                param.register_post_accumulate_grad_hook(self._brake.catch_up)
        self.consistency = "synchronous"
        self.engine: Any
        if trial.algorithm == BASELINE:
            replica = Replica(workload.model, self.optimizer, self._communicator, trial.options)
            self.engine = Engine(replica)
        else:
            algorithm = algorithm_class(trial.algorithm)()
            # Times in options are seconds of the modelled cluster.
            options = trial.options.slowed(pace.current().time_scale)
            self.consistency = algorithm.capabilities.consistency
            workload.model, self.optimizer = algorithm.wrap(
                workload.model, self.optimizer, self._communicator, options
            )
            self.engine = self.optimizer
        self.loss = torch.zeros((), device=next(workload.model.parameters()).device)
        self._marks: list[tuple[Any, Any, Any, Any]] = []
        """Marks of every step: its start, and the ends of its three phases."""

    def run(self, steps: int) -> None:
        """Trains a number of steps."""
        for _ in range(steps):
            self.step()

    def warm_up(self, steps: int) -> float:
        """Trains at least `steps` steps; more if they are short, since the first are not typical.

        Returns:
            The duration of a step in real seconds.
        """
        self.run(steps - 1)
        step_s = self._mean_s(1)
        if self._communicator.broadcast_object(step_s < SHORT_STEP_S):
            step_s = self._mean_s(EXTRA_WARMUP_STEPS)
        return step_s

    def _mean_s(self, steps: int) -> float:
        began = finished_s(self.device)
        self.run(steps)
        return (finished_s(self.device) - began) / steps

    def step(self) -> None:
        """Trains a step; on a GPU it may return before the device has finished."""
        began = self._mark()
        self.optimizer.zero_grad()
        with self._brake:
            self.loss = self._workload.loss()
        forward = self._mark()
        with self._brake:
            self._workload.backward(self.loss)
        backward = self._mark()
        with self._brake:
            averages = self.consistency in ("synchronous", "delayed")
            if self._workload.scaler is not None and averages:
                self.engine.synchronize()  # a GradScaler reads the averages of gradients
            self._workload.update(self.optimizer)
        self._marks.append((began, forward, backward, self._mark()))

    def unmarked_step(self) -> None:
        """Trains a step that is not in the results of `parts` and `phases`."""
        self.step()
        self._marks.pop()

    def parts(self) -> list[Breakdown]:
        """Returns the parts of every step since `forget_parts`.

        On a GPU, they come from events, and contain the waits of a stream for other streams.
        """
        self.finish()
        if self.device.type == "cpu":
            return [step_parts(*marks) for marks in self._marks]
        times = [[(e[0].elapsed_time(event) / 1e3, 0.0) for event in e] for e in self._marks]
        return [dataclasses.replace(step_parts(*t), exposed_comm_s=None) for t in times]

    def phases(self) -> list[list[float]]:
        """Returns the phases of each step since `forget_parts`. On a GPU, call `finish` first.

        Each step has four times by the host's clock, in seconds: its start, and the ends of forward
        pass, backward pass and update.
        """
        if self.device.type != "cpu":
            at_s = self._communicator.device_clock(self.device).at_s
            return [[at_s(event) for event in marks] for marks in self._marks]
        return [[clock_s for clock_s, _ in marks] for marks in self._marks]

    def forget_parts(self) -> None:
        """Discards the marks of the steps so far."""
        self._marks.clear()

    def synchronize(self) -> None:
        """Waits until parameters are current and nothing is in flight, also on the device."""
        self.engine.synchronize()
        self.finish()

    def finish(self) -> None:
        """Waits until the device has finished the steps so far."""
        finished_s(self.device)

    @property
    def absorbed_s(self) -> float | None:
        """Returns the real seconds of waits for a core that did not lengthen this rank's compute.

        The time scale slows compute down, which leaves time for waits. None if compute is replayed.
        """
        return None if self._replayed else self._brake.absorbed_s

    def close(self) -> None:
        """Removes the algorithm from the model."""
        self.engine.close()

    def _mark(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        now = pace.current().clock()
        return now, pace.current().idle_s if self._replayed else self._communicator.blocked_s


def of_slowest_rank(ranks: Sequence[Breakdown]) -> Breakdown:
    """Returns the breakdown of the rank that waits least, for which the others wait."""
    busy_s = [rank.forward_s + rank.backward_s + rank.update_s for rank in ranks]
    slowest = busy_s.index(max(busy_s))
    return dataclasses.replace(ranks[slowest], rank=slowest)


def step_parts(began: Mark, forward: Mark, backward: Mark, end: Mark) -> Breakdown:
    """Returns the parts of a step on a CPU from its marks.

    An algorithm may wait for communication in any phase. These waits are the fourth part, and are
    not contained in the other three.
    """
    forward_s, backward_s, update_s = (
        later[0] - earlier[0] - (later[1] - earlier[1])
        for earlier, later in pairwise((began, forward, backward, end))
    )
    return Breakdown(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        exposed_comm_s=end[1] - began[1],
        step_s=end[0] - began[0],
    )


def typical(steps: Sequence[Breakdown], time_scale: float, *, waits_seen: bool) -> Breakdown:
    """Returns the mean of the middle half of steps by duration, in the modelled cluster's seconds.

    Args:
        waits_seen: False if the algorithm waits in code that does not report waits, so that the
            other parts contain them.
    """
    ordered = sorted(steps, key=lambda step: step.step_s)
    cut = (len(ordered) + 1) // 4
    middle = ordered[cut : len(ordered) - cut]
    values = {
        name: statistics.fmean(getattr(step, name) for step in middle) / time_scale
        for name, value in vars(middle[0]).items()
        if value is not None and (waits_seen or name != "exposed_comm_s")
    }
    return Breakdown(**values)


def finished_s(device: torch.device) -> float:
    """Waits until the device is idle; returns the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return pace.current().clock()
