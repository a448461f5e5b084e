"""Plain training: the standard for a trial's first steps, and the source of its compute times.

Plain training has the same start and data as the trial. It averages each gradient by a collective
between backward pass and update, so the passes and the update can be timed without communication.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

import torch

import dear
from common.harness.trial import Trial
from common.harness.worker.checking import deviation
from common.harness.worker.checking.deviation import Deviation, worst_deviation
from common.harness.worker.checking.forward_passes import ForwardPasses
from common.harness.worker.checking.repeatable import repeatable
from common.harness.worker.checking.serial import ORDERS, on_the_wire, summed_on_the_wire
from common.harness.worker.training import Training, finished_s, make_optimizer
from common.models.replay import pace
from common.models.workload import Workload
from dear.comm import runtime
from dear.comm.communicator import Communicator
from dear.cost.bounds import StepTimes, compute_limit_s

LEAST, ENOUGH, ENOUGH_S = 2, 3, 1.0
"""Timed steps after the first: smallest number; enough steps; real seconds that are enough, too."""
SHORT, SHORT_S = 20, 0.3
"""Timed steps, or real seconds, that are enough if steps are short: the first few are not
typical."""
Average = Callable[[torch.Tensor], None]
"""Function that averages a gradient over the ranks in place."""


class PlainTraining:
    """Result of plain training for some steps, and its compute times.

    The model is restored afterwards. All ranks must call each method together. At least one step
    (for a delayed algorithm: one update) is trained and compared.

    Args:
        tolerance: largest allowed relative error.
    """

    def __init__(self, trial: Trial, workload: Workload, steps: int, tolerance: float) -> None:
        self._trial, self._workload = trial, workload
        self._staleness = trial.options.staleness()
        self._steps = steps + self._staleness
        model = workload.model
        self._device = next(model.parameters()).device
        start = deviation.snapshot(model)
        # Only the first step does this: its time is not used.
        passes = ForwardPasses(model, limit=1)
        # Gradients stay until all steps are timed: new memory for them would take longer.
        optimizer, self._wanted, times = self._train(self._average)
        (self.forward_pass,) = passes.finish()
        # Repeatable kernels of a GPU may be slower than those of the timed steps.
        counted = [] if self._device.type == "cuda" else times[self._staleness + 1 :]
        self.compute = slowest_rank(workload, optimizer, runtime.communicator(), counted)
        """Real seconds that a step takes without communication."""
        optimizer.zero_grad()
        least = deviation.rounding(trial.dtype, self._steps) / tolerance
        names = [name for name, _ in model.named_parameters()]
        self._moved = deviation.movements(self._wanted, start, names, least)
        buffers = [n for n, b in model.named_buffers() if n in start and _counts(b)]
        self._buffers_moved = deviation.movements(self._wanted, start, buffers, least)
        model.load_state_dict(start)
        if getattr(trial.options, "wire", None) is not None:
            self._allow_sums(start, tolerance)

    def _train(
        self, average: Average
    ) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor], list[StepTimes]]:
        optimizer = make_optimizer(self._trial.optimizer, self._workload.model)
        self._seed()
        steps = self._steps, self._staleness
        with repeatable(self._device):
            return optimizer, *plain_steps(self._workload, optimizer, *steps, average)

    def _allow_sums(self, start: dict[str, torch.Tensor], tolerance: float) -> None:
        """Increases the allowed error of each tensor by the effect of sums in a 16-bit dtype.

        Optimizers such as Adam magnify the rounding of small gradients.
        """
        _, summed, _ = self._train(self._summed_average)
        for name, error in deviation.distances(summed, self._wanted, self._moved).items():
            self._moved[name] = max(self._moved[name], ORDERS * error / tolerance)
        for param in self._workload.model.parameters():
            param.grad = None
        self._workload.model.load_state_dict(start)

    def repeat(self, training: Training) -> None:
        """Trains the same steps with the algorithm."""
        self._seed()
        with repeatable(self._device):
            training.run(self._steps)
            training.synchronize()

    def deviation(self) -> Deviation:
        """Returns the model's deviation from plain training, for the worst tensor of any rank."""
        # No copy is made here: the trial's memory has no room for one.
        reached = self._workload.model.state_dict()
        errors = deviation.distances(reached, self._wanted, self._moved)
        return _of_worst_rank(worst_deviation(errors, self._moved))

    def buffer_deviation(self) -> Deviation:
        """Returns the deviation of floating-point buffers, such as running statistics.

        A rank's buffers depend on its samples, but some algorithms broadcast rank 0's. So a
        distance up to that of rank 0's buffers is allowed.
        """
        reached, communicator = self._workload.model.state_dict(), runtime.communicator()
        errors = {}
        for name in self._buffers_moved:
            wanted = self._wanted[name]
            first = wanted.clone()
            communicator.broadcast(first, root=0).wait()
            allowed = deviation.distance(first, wanted)
            errors[name] = max(deviation.distance(reached[name], wanted) - allowed, 0.0)
        return _of_worst_rank(worst_deviation(errors, self._buffers_moved))

    def forget(self) -> None:
        """Frees the copy of the model."""
        self._wanted = {}

    def _average(self, gradient: torch.Tensor) -> None:
        """Averages a gradient in place, rounded to the dtype in which the algorithm sends it."""
        gradient.copy_(on_the_wire(gradient, self._trial))
        average_over_ranks(gradient)

    def _summed_average(self, gradient: torch.Tensor) -> None:
        """Averages a gradient in place; the sum is rounded to the 16-bit dtype, too."""
        communicator = runtime.communicator()
        rows = gradient.new_empty(communicator.size, gradient.numel())
        communicator.all_gather(rows.flatten(), gradient.flatten()).wait()
        gradient.copy_(summed_on_the_wire(rows, self._trial)[0].reshape(gradient.shape))

    def _seed(self) -> None:
        # Dropout must draw the same masks in both trainings; ranks have different masks.
        torch.manual_seed(self._trial.seed * 1000 + dear.rank())


def _of_worst_rank(worst: Deviation) -> Deviation:
    return max(runtime.communicator().gather_objects(worst), key=lambda each: each.error)


def _counts(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and buffer.numel() > 0


def average_over_ranks(gradient: torch.Tensor) -> None:
    """Averages a gradient over all ranks, in place."""
    runtime.communicator().all_reduce(gradient, op="mean").wait()


def plain_steps(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    steps: int,
    staleness: int = 0,
    average: Average = average_over_ranks,
) -> tuple[dict[str, torch.Tensor], list[StepTimes]]:
    """Trains `steps` steps with plain averages of gradients; the last gradients are kept.

    Args:
        staleness: age of gradients, in steps, when they are applied; the first `staleness` steps
            do not update parameters.

    Returns:
        The state afterwards, and the compute times of each step on this rank.
    """
    params = list(workload.model.parameters())
    held: deque[list[torch.Tensor | None]] = deque([[None] * len(params)] * staleness)

    def exchange() -> None:
        for param in params:
            if param.grad is not None:
                average(param.grad)
        held.append([param.grad for param in params])
        for param, gradient in zip(params, held.popleft(), strict=True):
            param.grad = gradient

    times = [timed_step(workload, optimizer, exchange) for _ in range(steps)]
    return deviation.snapshot(workload.model), times


def timed_step(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    exchange: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Trains one step; returns its compute times on this rank, in real seconds.

    Args:
        exchange: called between backward pass and update; its time is not included.
    """
    began = pace.current().clock()
    optimizer.zero_grad()
    loss = workload.loss()
    forward = finished_s(loss.device)
    workload.backward(loss)
    backward = finished_s(loss.device)
    exchange()
    resumed = finished_s(loss.device)
    # A delayed algorithm has no gradients at first, and a GradScaler refuses to step without any.
    if any(param.grad is not None for param in workload.model.parameters()):
        workload.update(optimizer)
    return StepTimes(
        forward_s=forward - began,
        backward_s=backward - forward,
        update_s=finished_s(loss.device) - resumed,
    )


def slowest_rank(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    communicator: Communicator,
    steps: Sequence[StepTimes],
) -> StepTimes:
    """Returns the slowest rank's median compute times, measured while all ranks compute.

    Trains further steps without averages until there are enough. The caller restores parameters,
    optimizer state, gradients and random state.

    Args:
        steps: times of this rank's steps so far, without the first, which allocates memory.
    """
    counted = list(steps)
    # One rank decides, so that all ranks compute at the same time.
    while communicator.broadcast_object(_too_few(counted)):
        communicator.barrier()
        counted.append(timed_step(workload, optimizer))
    # Of two medians the lower one is used, because other load only adds time.
    medians = {n: statistics.median_low(getattr(s, n) for s in counted) for n in vars(counted[0])}
    return max(communicator.gather_objects(StepTimes(**medians)), key=compute_limit_s)


def _too_few(counted: Sequence[StepTimes]) -> bool:
    spent = sum(compute_limit_s(step) for step in counted)
    if len(counted) < ENOUGH:
        return len(counted) < LEAST or spent < ENOUGH_S
    return len(counted) < SHORT and spent < SHORT_S
