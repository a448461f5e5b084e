"""What workers measure of compute and collectives, and how they compare replicas."""

from __future__ import annotations

import math

import pytest
import torch

from common.harness.worker import correctness, measure, training
from common.models.workload import Workload
from dear.comm import runtime
from dear.cost.bounds import StepTimes


def test_sizes_reach_the_models_gradients_within_reason():
    sizes = measure.sizes_up_to
    assert sizes(4) == [4096, 16384, 65536]
    assert sizes(3 << 20) == [4096, 16384, 65536, 262144, 1 << 20, 4 << 20]
    assert sizes(1 << 40)[-1] == 64 << 20


def _measure(time_scale):
    return measure.measure_costs(runtime.communicator(), torch.device("cpu"), 1 << 17, time_scale)


@pytest.mark.parametrize("ranks", [2, 3])
def test_costs_are_the_same_on_all_ranks(world, ranks):
    first, *others = world(ranks).run(_measure, 1.0)  # of three, one has nobody to exchange with
    assert all(other == first for other in others)
    assert first.keys() == {"all_reduce", "reduce_scatter", "all_gather", "exchange"}
    assert all(fit(1 << 20) > 0 for fit in first.values())


class _Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


def _steps(steps, before):
    model = _Counting()
    task = Workload(model=model, inputs=(torch.ones(2, 4),), targets=(), criterion=torch.mean)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    communicator = runtime.communicator()
    start = correctness.snapshot(model)
    state, times = training.plain_steps(task, optimizer, communicator, steps)
    # Each rank has times of its own; the first step of all does not count.
    rank = communicator.rank
    timed = [StepTimes(forward_s=f + rank, backward_s=b, update_s=u) for f, b, u in before]
    found = training.slowest_rank(task, optimizer, communicator, timed or times)
    moved = any(not torch.equal(start[name], state[name]) for name in state)
    return found, model.calls, moved


def test_steps_that_were_timed_already_are_enough(world):
    # Medians of (1, 5, 3), (2, 2, 6) and (3, 4, 5); rank 1 takes a second longer in each forward.
    timed = [(99.0, 99.0, 99.0), (1.0, 2.0, 3.0), (5.0, 2.0, 4.0), (3.0, 6.0, 5.0)]
    results = world(2).run(_steps, 1, timed)
    assert [found for found, _, _ in results] == [
        StepTimes(forward_s=4.0, backward_s=2.0, update_s=4.0)
    ] * 2
    assert [calls for _, calls, _ in results] == [1, 1]


def test_more_steps_are_timed_where_there_are_too_few(world):
    results = world(2).run(_steps, 1, [])
    (first, calls, moved), (second, _, _) = results
    assert first == second and min(vars(first).values()) > 0
    assert training.ENOUGH <= calls - 1 <= training.SHORT and moved
    # Two that took long are enough, and what disturbs only adds.
    timed = [(9.0, 9.0, 9.0), (2.0, 1.0, 2.0), (1.0, 3.0, 1.0)]
    found, calls, _ = world(2).run(_steps, 1, timed)[0]
    assert calls == 1 and found == StepTimes(forward_s=2.0, backward_s=1.0, update_s=1.0)


def _spread_of(values: list[float]) -> float:
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
        model.weight[0, 0] += runtime.rank() * 0.5
    return correctness.replica_spread(model, runtime.communicator())


def test_the_spread_is_the_largest_difference_and_infinite_for_nan(world):
    assert world(2).run(_spread_of, [1.0, 2.0, 3.0]) == [0.5, 0.5]
    assert world(2).run(_spread_of, [1.0, math.nan, 3.0]) == [math.inf, math.inf]


def test_a_mean_that_has_not_moved_does_not_pass():
    start, wanted = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    off = correctness.distance(start, wanted, start, ["w"])
    assert all(off > tolerance for tolerance in correctness.MEAN_TOLERANCE.values())
