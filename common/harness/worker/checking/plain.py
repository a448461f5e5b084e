"""The training of a trial plainly: to compare with, and to time its compute.

Written-out gradient averaging from the same start with the same data. The steps also tell how long
one computes: forward, backward and update without communication between them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import torch

import dear
from common.harness.trial import Trial
from common.harness.worker.checking import correctness
from common.harness.worker.checking.correctness import Farthest
from common.harness.worker.checking.passes import Passes
from common.harness.worker.checking.serial import ORDERS, on_the_wire, summed_on_the_wire
from common.harness.worker.training import Training, done, make_optimizer
from common.models.replay import pace
from common.models.workload import Workload
from dear.comm import runtime
from dear.comm.communicator import Communicator
from dear.cost.bounds import StepTimes, compute_limit_s

LEAST, ENOUGH, ENOUGH_S = 2, 3, 1.0
"""Timed steps beyond the first, at least; and enough of them, in number or in seconds of this
machine."""
SHORT, SHORT_S = 20, 0.3
"""More where they are short, and the first few tell little of the rest: up to so many, within so
many seconds."""


class Reference:
    """Where plain training leads from the same start with the same data, and what it computes.

    The model is left as it was. Everything goes on all ranks at once. At least one step is trained
    and compared, of a delayed algorithm so many updates.

    Args:
        tolerance: of an error; what rounding may add up to is held to be no more.
    """

    def __init__(self, trial: Trial, workload: Workload, steps: int, tolerance: float) -> None:
        staleness = trial.options.staleness()
        self._trial, self._workload, self._steps = trial, workload, steps + staleness
        start = correctness.snapshot(workload.model)
        optimizer = make_optimizer(trial.optimizer, workload.model)
        self._seed()
        communicator = runtime.communicator()
        # The first step only: its time does not count.
        passes = Passes(workload.model, limit=1)
        # Gradients stay until all steps are timed: new memory for them would take longer.
        self._wanted, times = plain_steps(workload, optimizer, self._steps, staleness, self._mean)
        (self.given,) = passes.end()
        """What a forward pass is given."""
        updated = times[staleness:]
        self.compute = slowest_rank(workload, optimizer, communicator, updated)
        """Seconds of this machine that a step takes without communication."""
        optimizer.zero_grad()
        names = [name for name, _ in workload.model.named_parameters()]
        least = correctness.rounding(trial.dtype, self._steps) / tolerance
        self._ways = correctness.ways(self._wanted, start, names, least)
        buffers = [n for n, b in workload.model.named_buffers() if n in start and _counts(b)]
        self._buffer_ways = correctness.ways(self._wanted, start, buffers, least)
        workload.model.load_state_dict(start)
        if getattr(trial.options, "wire", None) is not None:
            self._allow_sums(start, staleness, tolerance)

    def _allow_sums(self, start: dict[str, torch.Tensor], staleness: int, tolerance: float) -> None:
        """Widens the allowed error of each tensor to what summing in the smaller type may cause.

        Optimizers such as Adam magnify the rounding of small gradients.
        """
        workload = self._workload
        optimizer = make_optimizer(self._trial.optimizer, workload.model)
        self._seed()
        summed, _ = plain_steps(workload, optimizer, self._steps, staleness, self._summed_mean)
        for name, way in self._ways.items():
            off = correctness.distance(summed[name], self._wanted[name])
            self._ways[name] = max(way, ORDERS * off / tolerance)
        for param in workload.model.parameters():
            param.grad = None
        workload.model.load_state_dict(start)

    def train(self, training: Training) -> None:
        """The same steps with the algorithm."""
        self._seed()
        training.run(self._steps)
        training.synchronize()

    def farthest(self) -> Farthest:
        """How far the model is from where plain training led, of the worst tensor of any rank."""
        # Not a copy: the memory check counts on it.
        reached = self._workload.model.state_dict()
        here = correctness.farthest(reached, self._wanted, self._ways)
        return max(runtime.communicator().gather_objects(here), key=lambda one: one.error)

    def farthest_buffer(self) -> Farthest:
        """The same of floating-point buffers, such as running statistics, of the worst rank.

        They are of a rank's own samples, and some algorithms hand out those of rank 0: what is no
        farther from this rank's than rank 0's are counts as right.
        """
        reached, communicator = self._workload.model.state_dict(), runtime.communicator()
        worst = Farthest()
        for name, way in self._buffer_ways.items():
            wanted = self._wanted[name]
            first = wanted.clone()
            communicator.broadcast(first, root=0).wait()
            apart = correctness.distance(first, wanted)
            off = correctness.distance(reached[name], wanted)
            error = max(off - apart, 0.0) / way if way else math.inf if off > apart else 0.0
            error = error if math.isfinite(off) else math.inf
            if error > worst.error:
                worst = Farthest(error=error, tensor=name)
        return max(communicator.gather_objects(worst), key=lambda one: one.error)

    def forget(self) -> None:
        """Lets go of the copy of the model."""
        self._wanted = {}

    def _mean(self, gradient: torch.Tensor) -> None:
        """Averages what travels of each rank's gradient, in place."""
        gradient.copy_(on_the_wire(gradient, self._trial))
        mean_of_ranks(gradient)

    def _summed_mean(self, gradient: torch.Tensor) -> None:
        """Averages in place, with the sum rounded to the type that travels."""
        communicator = runtime.communicator()
        rows = gradient.new_empty(communicator.size, gradient.numel())
        communicator.all_gather(rows.flatten(), gradient.flatten()).wait()
        gradient.copy_(summed_on_the_wire(rows, self._trial)[0].reshape(gradient.shape))

    def _seed(self) -> None:
        # Dropout then draws the same masks in both trainings; each rank has its own.
        torch.manual_seed(self._trial.seed * 1000 + dear.rank())


def _counts(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and buffer.numel() > 0


def mean_of_ranks(gradient: torch.Tensor) -> None:
    """Averages over all ranks, in place."""
    runtime.communicator().all_reduce(gradient, op="mean").wait()


def plain_steps(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    steps: int,
    staleness: int = 0,
    mean: Callable[[torch.Tensor], None] = mean_of_ranks,
) -> tuple[dict[str, torch.Tensor], list[StepTimes]]:
    """Trains `steps` steps with written-out gradient averaging; the last gradients stay.

    Args:
        staleness: each update applies the gradients of so many steps before; the first ones update
            nothing.
        mean: averages a gradient over the ranks, in place.

    Returns:
        The state that they lead to, and what each step computed on this rank, averaging left out.
    """

    params = list(workload.model.parameters())
    held: deque[list[torch.Tensor | None]] = deque([[None] * len(params)] * staleness)

    def average() -> None:
        for param in params:
            if param.grad is not None:
                mean(param.grad)
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
    forward = done(loss.device)
    workload.backward(loss)
    backward = done(loss.device)
    average()
    resumed = done(loss.device)
    workload.update(optimizer)
    return StepTimes(
        forward_s=forward - began,
        backward_s=backward - forward,
        update_s=done(loss.device) - resumed,
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
