"""What a worker times and measures: which steps, until when, what each part took, and replicas."""

from __future__ import annotations

import json
import math

import pytest
import torch

from common.harness.record import Result, make_record
from common.harness.trial import BASELINE, MeasureConfig
from common.harness.worker import correctness, costs, plain
from common.harness.worker.correctness import Farthest
from common.harness.worker.measure import steps_of_all
from common.harness.worker.training import step_parts, typical, untimed_steps
from common.launch.job import Outcome
from common.models.workload import Workload
from common.results.records import Breakdown, Check
from dear.comm import runtime
from dear.cost.bounds import StepTimes
from dear.training.algorithm import algorithm_options
from tests.system.made import make_trial

SETTLING = [
    ("allreduce", {}, 0),
    ("dear", {}, 0),
    ("dear", {"fusion": "wait_time"}, 5),
    ("dear", {"fusion": "tuned"}, 52),
    ("dear", {"compression": "eftopk", "density_warmup_steps": 7}, 7),
    ("wfbp", {"compression": "topk", "density_warmup_steps": 9}, 9),
    ("mgwfbp", {}, 2),
    ("mgwfbp", {"profile_steps": 4}, 4),
    ("mgs", {"profile_steps": 3, "density_warmup_steps": 8}, 8),
    ("bytescheduler", {"profile_steps": 5}, 5),
    ("dadt", {"delay": 3}, 3),
]


@pytest.mark.parametrize(("algorithm", "options", "steps"), SETTLING)
def test_steps_in_which_an_algorithm_settles(algorithm, options, steps):
    assert algorithm_options(algorithm, options).settling_steps() == steps


@pytest.mark.parametrize(
    ("algorithm", "options", "warmup_steps", "untimed"),
    [
        (BASELINE, {}, 3, 3),
        ("ddp", {}, 3, 3),
        ("ddp", {}, 0, 0),
        # One step more: the first with the new groups is no fair sample.
        ("dear", {"fusion": "tuned"}, 3, 53),
        ("dear", {"fusion": "tuned"}, 60, 60),
        ("mgwfbp", {}, 2, 3),
    ],
)
def test_the_harness_times_none_of_them(algorithm, options, warmup_steps, untimed):
    measure = MeasureConfig(warmup_steps=warmup_steps)
    assert untimed_steps(make_trial(algorithm, options=options, measure=measure)) == untimed


@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        ([[0, 1, 2, 3], [0, 1.5, 2.0, 3.5]], [1.5, 0.5, 1.5]),
        ([[0, 2]], [2]),
        # They add up to the slowest rank's block, not to the slowest of each step.
        ([[0, 1, 4, 5, 8], [0, 3, 4, 7, 8], [0, 2, 4, 6, 8]], [3, 1, 3, 1]),
    ],
)
def test_a_step_ends_when_the_last_rank_has_done_it(ends, steps):
    assert steps_of_all(ends) == pytest.approx(steps)


def step(forward, backward, update, waiting):
    parts = {"forward_s": forward, "backward_s": backward, "update_s": update}
    total = forward + backward + update + (waiting or 0.0)
    return Breakdown(**parts, exposed_comm_s=waiting, step_s=total)


def test_waiting_is_taken_out_of_the_part_that_it_happened_in():
    # 1 s of waiting in the forward pass, none in the backward pass, 2 s in the update.
    parts = step_parts((10.0, 5.0), (13.0, 6.0), (17.0, 6.0), (20.0, 8.0))
    assert parts == step(2.0, 4.0, 1.0, 3.0)
    assert parts.step_s == 10.0


def test_a_straggler_does_not_count_and_the_parts_add_up():
    steps = [step(1.0, 2.0, 0.5, 0.5), step(1.0, 2.2, 0.5, 0.3), step(9.0, 9.0, 9.0, 9.0)]
    steps.append(step(0.1, 0.1, 0.1, 0.1))
    found = typical(steps, 2.0, waits_seen=True)
    assert vars(found) == pytest.approx(vars(step(0.5, 1.05, 0.25, 0.2)))
    assert typical(steps[:1], 1.0, waits_seen=True) == steps[0]
    # Waits that an algorithm hides are unknown and stay in the other parts.
    found = typical([step(1.0, 2.0, 0.5, 0.0)], 1.0, waits_seen=False)
    assert found == step(1.0, 2.0, 0.5, None)


def test_the_recorded_breakdown_is_that_of_the_repeat_in_the_middle():
    facts = {"iters": [[0.5]], "loss": 1.0, "check": Check(replicas_agree=True)}
    results = [
        Result(cpu_s_per_s=1.0, foreign_cpu_s_per_s=0.0, breakdown=step(s, 0, 0, 0), **facts)
        for s in (0.9, 0.4, 0.5)
    ]
    made = make_record(make_trial("dear"), results, Outcome(status="ok"), {"cores": 64}, "now", 1.0)
    assert made.breakdown.step_s == 0.5


def test_sizes_reach_the_models_gradients_within_reason():
    sizes = costs.sizes_up_to
    assert sizes(4) == [4096, 16384, 65536]
    assert sizes(3 << 20) == [4096, 16384, 65536, 262144, 1 << 20, 4 << 20]
    assert sizes(1 << 40)[-1] == 64 << 20
    assert sizes(4, burst_bytes=1 << 17)[-2:] == [1 << 20, 4 << 20], "large beside the burst"


def _measure(time_scale):
    communicator, device = runtime.communicator(), torch.device("cpu")
    first, again = (
        costs.time_collectives(communicator, device, 1 << 17, largest=largest)
        for largest in (False, True)
    )
    found = costs.CostSamples(time_scale=time_scale, first=first, again=again)
    return costs.fits(first, time_scale), found.check, json.dumps(found.to_json())


@pytest.mark.parametrize("ranks", [2, 3])
def test_costs_are_the_same_on_all_ranks(world, ranks):
    found = world(ranks).run(_measure, 1.0)  # of three, one has nobody to exchange with
    assert all(other == found[0] for other in found)
    first, check, samples = found[0]
    assert check.residual >= 0 and check.drift > -1
    kept = [(one["operation"], one["when"], one["nbytes"]) for one in json.loads(samples)]
    assert len(kept) == 8 and [nbytes for _, when, nbytes in kept if when == "end"]
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
    state, times = plain.plain_steps(task, optimizer, communicator, steps)
    # Each rank has times of its own; the first step of all does not count.
    rank = communicator.rank
    timed = [StepTimes(forward_s=f + rank, backward_s=b, update_s=u) for f, b, u in before]
    found = plain.slowest_rank(task, optimizer, communicator, timed or times)
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
    assert plain.ENOUGH <= calls - 1 <= plain.SHORT and moved
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


def test_the_farthest_tensor_counts_and_rounding_is_no_error():
    start = {"large": torch.zeros(10_000), "small": torch.zeros(2), "still": torch.ones(2)}
    wanted = {name: value + 1.0 for name, value in start.items()} | {"still": torch.ones(2)}

    def found(**changed):
        return correctness.farthest(wanted | changed, wanted, start, start, least=1e-3)

    assert found() == Farthest()
    assert found(small=torch.zeros(2)) == Farthest(error=1.0, tensor="small")
    # What has hardly moved is measured by its own size.
    assert found(still=torch.ones(2) + 1e-7).error == pytest.approx(1.2e-4, rel=0.05)
    assert found(still=torch.full((2,), math.nan)) == Farthest(error=math.inf, tensor="still")
