"""Tests of what a worker times and measures: which steps, until when, each part, and replicas."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

import dear
from common.harness.running.record import make_record
from common.harness.settings import MeasureConfig
from common.harness.trial import BASELINE
from common.harness.worker import throughput, training
from common.harness.worker.checking import deviation, plain_training, recording, standard
from common.harness.worker.checking.deviation import Deviation
from common.harness.worker.checking.forward_passes import ForwardPass, unlike_plain
from common.harness.worker.checking.recompute import Recomputation
from common.harness.worker.timing import costs, measure
from common.harness.worker.timing.measure import measure_steps, steps_of_all, untimed_in_block
from common.harness.worker.timing.stopwatch import DeviceStopwatch
from common.harness.worker.timing.strain import Gauge
from common.harness.worker.training import of_slowest_rank, step_parts, typical, untimed_steps
from common.launch.job import Outcome
from common.models.workload import Workload
from common.results.records import Breakdown, Result
from common.results.records.trust import Check
from common.results.validity import flag_text
from dear.algorithms import reference as references
from dear.comm import runtime
from dear.cost.bounds import StepTimes
from dear.cost.measurement import Measurement
from dear.training.algorithm import algorithm_class, algorithm_options
from tests.system.made import make_trial
from tests.system.processes import finished


@pytest.mark.parametrize(("options", "untimed"), [({}, 3), ({"delay": 3}, 5)])
def test_as_many_steps_fill_the_pipeline_as_it_is_long(options, untimed):
    assert untimed_in_block(algorithm_options("dadt", options).staleness()) == untimed


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
@pytest.mark.parametrize("one_clock", [True, False])
def test_a_step_ends_when_the_last_rank_has_done_it(ends, steps, one_clock):
    assert steps_of_all(ends, one_clock) == pytest.approx(steps)


def test_ranks_that_are_out_of_phase_do_not_lengthen_a_block_on_one_clock():
    # Two ranks that wait for nobody make a step per second, the second of them half a second later,
    # and the last step of the first takes half a second more: it ends as the other's does.
    ends = [[10.0, 11.0, 12.5], [10.5, 11.5, 12.5]]
    assert sum(steps_of_all(ends, True)) == 2.0
    assert sum(steps_of_all(ends, False)) == 2.5
    # Other machines have clocks of their own, which mean nothing to each other.
    elsewhere = [ends[0], [moment + 5000.0 for moment in ends[1]]]
    assert sum(steps_of_all(elsewhere, False)) == 2.5


class _Alone:
    """A communicator of one rank."""

    size, bytes_sent, blocked_s = 1, 0, 0.0

    def __init__(self) -> None:
        self.calls = []

    def barrier(self):
        self.calls.append("barrier")

    def gather_objects(self, value):
        return [value]

    def broadcast_object(self, value):
        return value


def test_the_canary_stands_right_before_and_right_behind_the_blocks():
    communicator = _Alone()
    calls = communicator.calls
    communicator.gather_objects = lambda value: calls.append("gather") or [value]

    def canary():
        calls.append("canary")
        return float(len(calls))

    result = measure_steps(
        lambda: calls.append("step"), communicator, blocks=2, steps=2, untimed=1, canary=canary
    )
    block = ["barrier", "step", "step", "step"]
    assert calls == ["canary", *block, *block, "canary", "gather"]
    assert result.canary_s == [1.0, 10.0]


def test_what_goes_on_between_blocks_is_not_timed():
    alone = _Alone()

    def between(block):
        alone.calls.append(f"before block {block}")

    given = {"blocks": 3, "steps": 1, "untimed": 1, "between": between}
    measure_steps(lambda: alone.calls.append("step"), alone, **given)
    block = ["barrier", "step", "step"]
    assert alone.calls == [*block, "before block 1", *block, "before block 2", *block]


@pytest.mark.parametrize(
    ("given", "halved"),
    [
        ({"num_iters": 3, "min_steps": 5}, {"num_iters": 3, "min_steps": 5}),
        ({}, {"num_iters": 2, "min_steps": 2, "min_iter_s": 0.5}),
        ({"steps_per_iter": 5}, {"num_iters": 2, "steps_per_iter": 3, "min_steps": 2}),
    ],
)
def test_one_block_becomes_two_of_half_its_steps(given, halved):
    assert vars(measure.in_two(MeasureConfig(**given))).items() >= halved.items()


@pytest.mark.parametrize(
    ("config", "period", "step_s", "steps"),
    [
        ({"min_iter_s": 1.0, "min_steps": 3}, 1, 0.1, 10),
        ({"min_iter_s": 1.0, "min_steps": 3}, 1, 2.0, 3),
        ({"min_iter_s": 1.0, "min_steps": 3}, 4, 0.1, 12),
        ({"min_iter_s": 1.0, "min_steps": 3}, 4, 2.0, 8),  # two periods at least
        ({"steps_per_iter": 10}, 4, 2.0, 12),
        ({"steps_per_iter": 1}, 1, 2.0, 2),
        ({"min_iter_s": 1e9}, 7, 0.1, 1001),
    ],
)
def test_blocks_are_whole_periods_of_the_schedule(config, period, step_s, steps):
    result = measure.block_steps(MeasureConfig(**config), period, step_s, _Alone())
    assert result == steps


@pytest.mark.parametrize(
    ("algorithm", "options", "world", "period"),
    [
        ("ddp", {}, 4, 1),
        ("neighbor", {"every": 4}, 4, 4),
        ("neighbor", {"dynamic": "one-peer-exp"}, 8, 3),
        ("neighbor", {"dynamic": "one-peer-exp", "every": 2}, 8, 6),
        ("win-put", {"every": 3}, 4, 3),
        ("decentralized", {"topology": "alternating-exp-ring"}, 4, 4),
    ],
)
def test_the_period_of_an_algorithm_is_that_of_what_it_exchanges(algorithm, options, world, period):
    options = algorithm_options(algorithm, options)
    assert algorithm_class(algorithm).period(options, world, 1) == period


class _Ticks:
    """A stopwatch by which each step takes as long as its number."""

    def start(self):
        self.now, self.marks = 0.0, []

    def mark(self):
        self.marks.append(self.now)

    def read(self):
        return self.marks


def test_untimed_steps_stand_behind_each_barrier_and_are_kept():
    alone, watch = _Alone(), _Ticks()

    def step():
        alone.calls.append("step")
        alone.bytes_sent += 10
        watch.now += len(alone.calls)

    result = measure_steps(step, alone, blocks=2, steps=3, untimed=2, watch=watch)
    assert alone.calls == (["barrier"] + ["step"] * 5) * 2
    assert result.untimed == [[2, 3], [8, 9]] and result.iters == [[4, 5, 6], [10, 11, 12]]
    assert result.marks == [[[0, 2, 5, 5, 9, 14, 20], [0, 8, 17, 17, 27, 38, 50]]]
    assert result.bytes_sent == 10


def test_what_a_rank_has_absorbed_adds_up_over_blocks():
    absorbed_s = iter([1.0, 1.5, 4.0, 4.25])
    for gauge, wanted in ((Gauge(absorbed_s=lambda: next(absorbed_s)), 0.75), (Gauge(), None)):
        result = measure_steps(print, _Alone(), blocks=2, steps=2, untimed=0, gauge=gauge)
        assert [item.absorbed_s for item in result.pressure] == [wanted]


@pytest.fixture
def cuda(monkeypatch):
    """The log of a device that gets on by 1, 2, 3, ... s from one event to the next."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")
            self.ms = 1000.0 * sum(range(log.count("record")))

        def elapsed_time(self, later):
            assert log[-1] == "synchronize"
            return later.ms - self.ms

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return log


def test_the_device_is_waited_for_before_and_after_a_block_only(cuda):
    watch = DeviceStopwatch()
    result = measure_steps(lambda: None, _Alone(), blocks=1, steps=3, untimed=2, watch=watch)
    around = ["synchronize", "record", "synchronize"]
    assert cuda == [*around, *["record"] * 7, "synchronize"]
    # Of the 7 the first is the barrier, and one more the begin of the block.
    assert result.untimed == [pytest.approx([2.0, 3.0])]
    assert result.iters == [pytest.approx([5.0, 6.0, 7.0])]


def test_before_the_first_step_the_loss_is_where_the_model_is(monkeypatch):
    """Losses are added up from there: a sum on a CPU takes no loss of a GPU."""
    model = torch.nn.Linear(2, 1, device="meta")
    workload = Workload(model=model, inputs=(), targets=(), criterion=torch.sum)
    monkeypatch.setattr(training.runtime, "communicator", _Alone)
    assert training.Training(make_trial(BASELINE, world=1), workload).loss.device.type == "meta"


def test_a_step_on_a_gpu_does_not_wait_for_it(monkeypatch, cuda):
    trial = make_trial(BASELINE, world=1, device="cuda")
    model = torch.nn.Linear(2, 1)
    workload = Workload(model=model, inputs=(torch.ones(1, 2),), targets=(), criterion=torch.sum)
    monkeypatch.setattr(training.runtime, "communicator", _Alone)
    trained = training.Training(trial, workload)
    trained.run(2)
    trained.unmarked_step()
    assert set(cuda) == {"record"}, "nobody waits for the events"
    first, second = trained.parts()
    assert cuda.count("synchronize") == 1
    assert (first.forward_s, first.backward_s, first.update_s) == (1, 2, 3)
    assert (second.forward_s, second.step_s) == (5, 18)
    assert first.exposed_comm_s is None, "streams wait, which nobody sees"
    result = training.typical([first, second], 1.0, waits_seen=True)
    assert (result.exposed_comm_s, result.step_s) == (None, pytest.approx(12))
    trained.forget_parts()
    assert trained.parts() == []
    trained.warm_up(1)  # what a step takes there can only be said of finished ones
    assert cuda.count("synchronize") == 6
    trained.finish()
    assert cuda.count("synchronize") == 7


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
    result = typical(steps, 2.0, waits_seen=True)
    assert vars(result) == pytest.approx(vars(step(0.5, 1.05, 0.25, 0.2)))
    assert typical(steps[:1], 1.0, waits_seen=True) == steps[0]
    # Waits that an algorithm hides are unknown and stay in the other parts.
    result = typical([step(1.0, 2.0, 0.5, 0.0)], 1.0, waits_seen=False)
    assert result == step(1.0, 2.0, 0.5, None)


@pytest.mark.parametrize(
    ("count", "middle"),
    [
        *((1, [0]), (2, [0, 1]), (3, [1]), (4, [1, 2])),
        *((5, [1, 2, 3]), (7, [2, 3, 4]), (8, [2, 3, 4, 5])),
    ],
)
def test_the_middle_half_counts_however_many_there_are(count, middle):
    steps = [step(2.0**number, 0.0, 0.0, 0.0) for number in range(count)]
    result = typical(steps[::-1], 1.0, waits_seen=True)
    assert result.step_s == pytest.approx(sum(2.0**number for number in middle) / len(middle))


def test_the_breakdown_is_that_of_the_rank_which_the_others_wait_for():
    ranks = [step(1.0, 2.0, 0.1, 0.9), step(1.2, 2.5, 0.1, 0.2), step(1.0, 2.0, 0.2, 0.8)]
    assert of_slowest_rank(ranks) == dataclasses.replace(ranks[1], rank=1)


@pytest.mark.parametrize(
    ("model", "waited", "sent", "exposed"),
    [
        ("resnet50", 0.4, 0, 0.4),
        ("resnet50", 0.0, 100, 0.0),
        ("resnet50", 0.0, 0, None),
        ("resnet50@rtx2080ti-modelled", 0.0, 0, 0.0),
    ],
)
def test_waits_count_where_they_are_seen_whoever_sends(model, waited, sent, exposed):
    """Horovod sends past the communicator, and tells when it waits; DDP does not, but a replayed
    device is seen to be idle."""
    run = SimpleNamespace(
        _measured=SimpleNamespace(iters=[[1.0]], bytes_sent=sent),
        _trial=SimpleNamespace(world_size=2, model=model),
        _untimed=0,
        _scale=1.0,
    )
    result = throughput._Repeat._breakdown(run, [[step(1.0, 2.0, 0.5, waited)]] * 2)
    assert result == dataclasses.replace(
        step(1.0, 2.0, 0.5, waited), exposed_comm_s=exposed, rank=0
    )


def test_the_recorded_breakdown_is_that_of_the_repeat_in_the_middle():
    facts = {"iters": [[0.5]], "loss": 1.0, "check": Check(replicas_agree=True)}
    for times, middle in (((0.9, 0.4, 0.5), 0.5), ((0.9, 0.4), 0.4), ((4, 3, 2, 1), 2), ((7,), 7)):
        results = [Result(cpu_s_per_s=1.0, breakdown=step(s, 0, 0, 0), **facts) for s in times]
        outcome, machine = Outcome(status="ok"), {"cores": 64}
        built = make_record(make_trial("dear"), results, outcome, machine, "now", 1.0)
        assert built.breakdown.step_s == middle


def test_sizes_reach_the_models_gradients_within_reason():
    sizes = costs.sizes_up_to
    assert sizes(4) == [4096, 8192, 16384]
    assert sizes(3 << 20) == [4096 << power for power in range(10)]
    assert sizes(1 << 40)[-1] == 64 << 20
    assert sizes(4, burst_bytes=1 << 17)[-2:] == [1 << 20, 2 << 20], "large beside the burst"
    assert sizes(4, growth=4) == [4096, 16384, 65536], "a fit needs three"
    assert sizes(14 << 20, growth=4)[3:] == [256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20]


def _measure(time_scale):
    communicator, device = runtime.communicator(), torch.device("cpu")
    first = costs.time_collectives(communicator, device, 1 << 17)
    # A link so slow that the largest message was never sent.
    first[0] = dataclasses.replace(
        first[0], nbytes=first[0].nbytes[:-1], seconds=first[0].seconds[:-1]
    )
    again = costs.time_collectives(communicator, device, 1 << 17, first)
    samples = costs.to_json(first, time_scale, when="begin")
    samples += costs.to_json(again, time_scale, when="end")
    return costs.fits(first, time_scale), costs.check(first, again), json.dumps(samples)


@pytest.mark.parametrize("ranks", [2, 3])
def test_costs_are_the_same_on_all_ranks(world, ranks):
    result = world(ranks).run(_measure, 1.0)  # of three, one has nobody to exchange with
    assert all(other == result[0] for other in result)
    first, check, samples = result[0]
    assert check.residual >= 0 and check.drift > -1
    kept = [(item["operation"], item["when"], item["nbytes"]) for item in json.loads(samples)]
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
    start = deviation.snapshot(model)
    state, times = plain_training.plain_steps(task, optimizer, steps)
    # Each rank has times of its own; the first step of all does not count.
    rank = communicator.rank
    timed = [StepTimes(forward_s=f + rank, backward_s=b, update_s=u) for f, b, u in before]
    result = plain_training.slowest_rank(task, optimizer, communicator, (timed or times)[1:])
    moved = any(not torch.equal(start[name], state[name]) for name in state)
    return result, model.calls, moved


def test_steps_that_were_timed_already_are_enough(world):
    # Medians of (1, 5, 3), (2, 2, 6) and (3, 4, 5); rank 1 takes a second longer in each forward.
    timed = [(99.0, 99.0, 99.0), (1.0, 2.0, 3.0), (5.0, 2.0, 4.0), (3.0, 6.0, 5.0)]
    results = world(2).run(_steps, 1, timed)
    assert [result for result, _, _ in results] == [
        StepTimes(forward_s=4.0, backward_s=2.0, update_s=4.0)
    ] * 2
    assert [calls for _, calls, _ in results] == [1, 1]


def test_more_steps_are_timed_where_there_are_too_few(world):
    results = world(2).run(_steps, 1, [])
    (first, calls, moved), (second, _, _) = results
    assert first == second and min(vars(first).values()) > 0
    assert plain_training.ENOUGH <= calls - 1 <= plain_training.SHORT and moved
    # Two that took long are enough, and what disturbs only adds.
    timed = [(9.0, 9.0, 9.0), (2.0, 1.0, 2.0), (1.0, 3.0, 1.0)]
    result, calls, _ = world(2).run(_steps, 1, timed)[0]
    assert calls == 1 and result == StepTimes(forward_s=2.0, backward_s=1.0, update_s=1.0)


def _spread_of(values: list[float], bias: bool = False) -> float:
    """The last value, or the bias, is larger by a half on rank 1."""
    model = torch.nn.Linear(3, 1, bias=bias)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
        (model.bias.zero_()[:] if bias else model.weight[0, :1]).add_(runtime.rank() * 0.5)
    return deviation.replica_spread(model, runtime.communicator())


def _spread_without_collectives() -> float:
    torch.manual_seed(1)
    communicator = runtime.communicator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "all_reduce", None)
        return deviation.replica_spread(torch.nn.Linear(1, 1), communicator)


def test_the_spread_is_the_largest_difference_and_infinite_for_nan(world):
    assert world(2).run(_spread_of, [1.0, 2.0, 3.0]) == [0.5, 0.5]
    assert world(2).run(_spread_of, [1.0, math.nan, 3.0]) == [math.inf, math.inf]
    assert world(2).run(_spread_of, [1.0, 1.0, 1.0], True) == [0.5, 0.5], "in the last alone"
    assert world(2).run(_spread_without_collectives) == [0.0, 0.0], "equal bits are not sent"


def _trains_but(what: str) -> tuple[bool, str | None]:
    """Three steps, of which rank 1's second one is not right."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(plain, model, algorithm="wfbp")
    for step in range(3):
        wrong = runtime.rank() == 1 and step == 1
        optimizer.zero_grad()
        inputs = torch.randn(6, 4) + runtime.rank()
        loss = model(inputs).square().sum()
        loss.backward()
        skipped = wrong and what == "skips the update"
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if skipped else 0.1
        optimizer.step()
        with torch.no_grad():
            if wrong and what == "flips a bit":
                model[0].weight.view(torch.int32)[2, 1] ^= 1
            if wrong and what == "spoils a value":
                model[1].bias[3] = math.inf
            if wrong and what == "reads one batch more":
                model(inputs)
            if what == "changes frozen statistics":
                model[1].eval()
                model[1].running_mean[:] = 0.0
                model[1].running_var[:] = 1.0 + (runtime.rank() == 1)
    optimizer.close()
    agreement = deviation.agreement(model, "synchronous", runtime.communicator())
    return agreement["replicas_agree"], agreement["finding"]


OF_RANK_1 = "of rank 1 differs from that of the other ranks"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", None),
        ("flips a bit", f"parameter 0.weight {OF_RANK_1}"),
        ("skips the update", f"parameter 0.weight {OF_RANK_1} (and "),
        ("spoils a value", "parameter 0.weight is not finite on rank 0, 1, 2 (and "),
        ("reads one batch more", f"buffer 1.num_batches_tracked {OF_RANK_1}"),
        ("changes frozen statistics", f"buffer 1.running_var {OF_RANK_1}"),
    ],
)
def test_a_silent_error_of_one_rank_is_named_with_its_tensor(world, what, expected):
    for agree, text in world(3).run(_trains_but, what):
        assert agree == (expected is None)
        assert text == expected if expected is None else text.startswith(expected), text


def test_the_flag_names_what_differed_after_a_later_repeat():
    right = Check(replicas_agree=True, matches_reference=True)
    apart = {"replicas_agree": False, "replica_spread": 1e-3, "finding": "parameter w of rank 1"}
    later = deviation.with_agreement(Check(), apart)
    results = [Result(iters=[[0.5]], cpu_s_per_s=1.0, loss=1.0, check=c) for c in (right, later)]
    outcome, machine = Outcome(status="ok"), {"cores": 64}
    built = make_record(make_trial("dear"), results, outcome, machine, "now", 1.0)
    assert flag_text(built) == "incorrect: parameter w of rank 1"
    wrong = dataclasses.replace(right, matches_reference=False, finding="first")
    assert deviation.with_agreement(wrong, apart).finding == "first"


def test_the_farthest_tensor_counts_and_rounding_is_no_error():
    start = {"large": torch.zeros(10_000), "small": torch.zeros(2), "still": torch.ones(2)}
    wanted = {name: value + 1.0 for name, value in start.items()} | {"still": torch.ones(2)}
    moved = deviation.movements(wanted, start, start, least=1e-3)

    def found(**changed):
        errors = deviation.distances(wanted | changed, wanted, moved)
        return deviation.worst_deviation(errors, moved)

    assert found() == Deviation()
    assert found(small=torch.zeros(2)) == Deviation(error=1.0, tensor="small")
    # What has hardly moved is measured by its own size.
    assert found(still=torch.ones(2) + 1e-7).error == pytest.approx(1.2e-4, rel=0.05)
    assert found(still=torch.full((2,), math.nan)) == Deviation(error=math.inf, tensor="still")


def test_a_drift_is_that_of_the_largest_message_that_both_have():
    def made(**seconds):
        sizes = [int(name[1:]) for name in seconds]
        return Measurement(
            operation="all_reduce", nbytes=sizes, seconds=[[s] for s in seconds.values()]
        )

    first = made(n10=1.0, n20=4.0, n30=5.0)
    assert costs._drift(first, made(n10=7.0, n20=5.0)) == pytest.approx(0.25)
    assert costs._drift(first, made(n20=2.0)) == pytest.approx(-0.5)


def test_other_samples_than_in_the_first_steps_are_an_error():
    def passes(*values):
        return [ForwardPass(training=1, first="fc", values=torch.tensor([v])) for v in values]

    plain = ForwardPass(training=1)
    finding = unlike_plain(plain, passes(1.0, 1.0, 2.0), 2)
    assert finding == "in step 3 layer fc got other samples than in the first steps"
    for values in ((1.0, 1.0, 1.0), (1.0, 2.0, 3.0)):
        assert unlike_plain(plain, passes(*values), 2) is None


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_the_ends_and_two_layers_between_are_watched(count):
    layers = [torch.nn.Identity() for _ in range(count)]
    chosen = recording._choice(layers, torch.Generator())
    assert chosen[:2] == [layers[0], layers[-1]][:count]
    assert len(set(chosen)) == len(chosen) == min(count, 4)


def test_the_first_of_two_passes_in_a_step_is_made_afresh():
    layers = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)
    model, inputs = torch.nn.Sequential(*layers), torch.arange(32.0).view(8, 4)
    workload = Workload(model=model, inputs=(inputs,), targets=(), criterion=torch.mean)
    recomputation = Recomputation(workload)
    recomputation.watch(frozenset({"", "0", "1", "2"}))
    wanted = torch.autograd.grad(workload.loss(), list(model.parameters()))
    running_mean = model[0].running_mean.clone()
    workload.loss()  # draws anew what is dropped, and changes the buffers again
    recomputation.unwatch()
    for got, want in zip(recomputation.gradients().values(), wanted, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(model[0].running_mean, running_mean)


def test_a_rank_that_a_signal_kills_leaves_its_stack(tmp_path):
    make_trial("ddp").save(tmp_path)
    text = (
        "import os, signal; from pathlib import Path; from common.harness.worker import rank\n"
        "def crashes(*given): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "rank.Briefing.load = lambda folder: None\n"
        f"rank.main(Path({str(tmp_path)!r}), 0, crashes)\n"
    )
    done = finished([sys.executable, "-c", text])
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in crashes" in done.stderr


@pytest.mark.parametrize(
    ("at_first", "timed", "right"),
    [
        (100.0, 100, True),
        (100.0, 99, False),
        (0.0, 0, True),  # torch's DDP sends without the communicator
        (4.0, 4, True),  # FSDP sends only what it cannot cut
        (4.0, 0, False),
        (500.0, 100, True),  # more was sent while the algorithm measured
    ],
)
def test_timed_steps_must_send_an_average_or_what_the_first_steps_sent(at_first, timed, right):
    judge = object.__new__(standard.Standard)
    judge._trial = SimpleNamespace(world_size=2, options=SimpleNamespace())
    judge.reference, judge._sizes = references.average, {"weight": (200, 4)}
    reports = [SimpleNamespace(sent_per_step=timed, sent_at_first=at_first)] * 2
    job = SimpleNamespace(always_used={"weight"})
    assert (judge.sent_too_little(job, reports, "synchronous") is None) == right
