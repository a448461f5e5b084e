"""What a bound is made of: compute timed on all ranks at once, and costs of the sweep's fabric."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common.harness import check, collective_costs, compute_times
from common.models.workload import Workload
from dear.comm import runtime
from dear.cost.bounds import StepTimes
from dear.cost.collectives import AlphaBeta
from tests.test_bound_records import make_trial

COSTS = {"all_reduce": {"alpha_s": 0.01, "beta_s_per_byte": 1e-9}}


def test_sizes_reach_the_models_gradients_within_reason():
    sizes = collective_costs.sizes_up_to
    assert sizes(4) == [4096, 16384, 65536]
    assert sizes(3 << 20) == [4096, 16384, 65536, 262144, 1 << 20, 4 << 20]
    assert sizes(1 << 40)[-1] == 64 << 20


def test_costs_survive_a_json_round_trip():
    costs = {"all_gather": AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.25)}
    assert collective_costs.from_json(collective_costs.to_json(costs)) == costs


def test_what_one_trial_has_measured_another_is_told(tmp_path):
    known = collective_costs.KnownCosts()
    wfbp = make_trial("wfbp")
    known.hand_over(wfbp, 1.0, tmp_path)
    assert collective_costs.load(tmp_path) is None
    known.keep(wfbp, 1.0, {"iters": []})  # a later repeat, which says nothing
    known.keep(wfbp, 1.0, {"costs": COSTS})
    known.hand_over(make_trial("dear"), 1.0, tmp_path)
    assert collective_costs.to_json(collective_costs.load(tmp_path)) == COSTS


@pytest.mark.parametrize(
    ("other", "time_scale"),
    [({"world_size": 2}, 1.0), ({"network": "1gbe"}, 1.0), ({"model": "alexnet"}, 1.0), ({}, 2.0)],
)
def test_other_fabrics_are_measured_anew(tmp_path, other, time_scale):
    known = collective_costs.KnownCosts()
    known.keep(make_trial("wfbp"), 1.0, {"costs": COSTS})
    known.hand_over(dataclasses.replace(make_trial("wfbp"), **other), time_scale, tmp_path)
    assert collective_costs.load(tmp_path) is None


def _measure(time_scale):
    return collective_costs.measure(
        runtime.communicator(), torch.device("cpu"), 1 << 17, time_scale
    )


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
    start = check.snapshot(model)
    state, times = check.plain_steps(task, optimizer, communicator, steps)
    # Each rank has times of its own; the first step of all does not count.
    rank = communicator.rank
    timed = [StepTimes(forward_s=f + rank, backward_s=b, update_s=u) for f, b, u in before]
    found = compute_times.slowest_rank(task, optimizer, communicator, timed or times)
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
    assert compute_times.ENOUGH <= calls - 1 <= compute_times.SHORT and moved
    # Two that took long are enough, and what disturbs only adds.
    timed = [(9.0, 9.0, 9.0), (2.0, 1.0, 2.0), (1.0, 3.0, 1.0)]
    found, calls, _ = world(2).run(_steps, 1, timed)[0]
    assert calls == 1 and found == StepTimes(forward_s=2.0, backward_s=1.0, update_s=1.0)
