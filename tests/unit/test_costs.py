"""Tests of the costs of communication: fits, tables, measurements, bounds, bytes between ranks."""

from __future__ import annotations

import math
import random
from typing import get_args
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dear
from dear.comm import runtime
from dear.comm.hierarchy import blocks_of
from dear.cost import collectives
from dear.cost.bounds import (
    Bound,
    CommTimes,
    GroupMean,
    Load,
    Message,
    StepTimes,
    Traffic,
    comm_times,
    compute_limit_s,
    exchange_times,
    exchange_wire_limit_s,
    step_bound_s,
    wire_limit_s,
)
from dear.cost.collectives import (
    TABLES,
    measure_collective,
    measured_call,
    measured_costs,
    start_up_bytes,
    table_costs,
)
from dear.cost.fit import AlphaBeta, fit_alpha_beta
from dear.cost.measurement import MEASURABLE, OPERATIONS, Measurement, carried
from dear.errors import UserError
from dear.training.algorithm import algorithm_class, algorithm_options
from tests.contract.pairs import one_in

SIZES = [2**power for power in range(12, 25, 2)]


def times(alpha, beta, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [(alpha + beta * n) * (1 + rng.uniform(-noise, noise)) for n in SIZES]


def test_exact_measurements_give_the_exact_line():
    fit = fit_alpha_beta(SIZES, times(1e-4, 1e-9))
    assert fit.alpha_s == pytest.approx(1e-4, rel=1e-6)
    assert fit.beta_s_per_byte == pytest.approx(1e-9, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-8), st.integers(0, 10**6))
def test_noisy_measurements_give_nearly_the_line(alpha, beta, seed):
    fit = fit_alpha_beta(SIZES, times(alpha, beta, noise=0.05, seed=seed))
    for n, exact in zip(SIZES, times(alpha, beta), strict=True):
        assert fit(n) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("disturbed", range(len(SIZES)))
def test_one_disturbed_measurement_hardly_counts(disturbed):
    seconds = times(1e-4, 1e-9, noise=0.02)
    seconds[disturbed] *= 8
    fit = fit_alpha_beta(SIZES, seconds)
    assert fit.alpha_s == pytest.approx(1e-4, rel=0.15)
    assert fit.beta_s_per_byte == pytest.approx(1e-9, rel=0.15)


def test_neither_coefficient_is_negative():
    falling = fit_alpha_beta([1000, 2000, 4000], [3.0, 2.0, 1.0])
    assert falling.beta_s_per_byte == 0
    assert falling.alpha_s > 0
    steep = fit_alpha_beta([1000, 2000, 4000], [0.5, 1.5, 3.6])
    assert steep.alpha_s == 0
    assert steep.beta_s_per_byte > 0
    assert fit_alpha_beta([1000, 2000], [1.0, 2.0], beta_s_per_byte=0.01).alpha_s == 0.0


@pytest.mark.parametrize(("nbytes", "seconds"), [([], []), ([5, 5], [1, 2]), ([1, 2], [0.0, 1.0])])
def test_what_cannot_be_fitted_is_refused(nbytes, seconds):
    with pytest.raises(UserError, match="a fit needs"):
        fit_alpha_beta(nbytes, seconds)


def test_cost_of_nothing_and_of_many_messages():
    cost = AlphaBeta(alpha_s=2.0, beta_s_per_byte=0.5)
    assert (cost(0), cost(4)) == (0, 4)


@pytest.mark.parametrize("network", TABLES)
def test_tables_hold_for_any_number_of_workers(network):
    for world_size, (alpha, beta) in TABLES[network].items():
        entry = table_costs(network, world_size)
        assert (entry.alpha_s, entry.beta_s_per_byte) == pytest.approx((alpha, beta))
    for world_size in (1, 3, 6, 24, 40, 65, 1000, 16384):
        low = table_costs(network, world_size)
        assert low.alpha_s <= table_costs(network, world_size + 1).alpha_s
    assert table_costs(network, 1)(10**6) == 0
    between = [
        (two + four) / 2 for two, four in zip(TABLES[network][2], TABLES[network][4], strict=True)
    ]
    three = table_costs(network, 3)
    assert [three.alpha_s, three.beta_s_per_byte] == pytest.approx(between)
    # Beyond the table a ring has more steps, and each rank sends nearly the same bytes.
    last = max(TABLES[network])
    alpha, beta = TABLES[network][last]
    large = table_costs(network, 4 * last)
    assert large.alpha_s == pytest.approx(alpha * (4 * last - 1) / (last - 1))
    growth = (1 - 1 / (4 * last)) / (1 - 1 / last)
    assert large.beta_s_per_byte == pytest.approx(beta * growth)


CPU = torch.device("cpu")


def _measure(operation):
    sizes = [1, 2, 4096, 65536]
    result = measure_collective(runtime.communicator(), operation, CPU, sizes=sizes, repeats=2)
    return result.nbytes, result.seconds


@pytest.mark.parametrize("operation", one_in(2, MEASURABLE))
def test_measurements_are_the_same_on_all_ranks(world, operation):
    results = world(3).run(_measure, operation)
    assert results[0] == results[1] == results[2]
    nbytes, seconds = results[0]
    assert nbytes == [12, 4104 // 12 * 12, 65544]
    assert all(len(repeats) == 2 and min(repeats) > 0 for repeats in seconds)


BURST, RATE = 131072, 10e9 / 8
FRAMED = 1514 / 1448
"""Bytes that a link counts for each byte of payload."""


def over_buckets(operation, nbytes, world, alpha_s=60e-6, noise=0.0, seed=0):
    """Seconds of a ring over links that each pass a burst at once and then go on at their rate."""
    carried = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0}.get(operation)
    share = 1.0 if carried is None else carried * (world - 1) / world
    wire_s = max(0.0, nbytes * share * FRAMED - BURST) / RATE
    luck = random.Random(f"{seed} {nbytes}").gauss(0, noise)
    return (alpha_s + wire_s) * math.exp(abs(luck))  # what disturbs only adds


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_no_fit_is_below_what_a_byte_costs_its_link(operation, world, noise):
    sizes = [4096 << 2 * power for power in range(8)]
    seconds = [
        [over_buckets(operation, size, world, noise=noise, seed=repeat) for repeat in range(3)]
        for size in sizes
    ]
    free = BURST / FRAMED / carried(operation, world)
    built = Measurement(operation=operation, nbytes=sizes, seconds=seconds, free_bytes=free)
    least = over_buckets(operation, 1e12, world, alpha_s=0.0) / 1e12
    fit = built.fit()
    assert least * 0.997 <= fit.beta_s_per_byte <= least * (1.003 + 2 * noise)
    assert fit.alpha_s == pytest.approx(60e-6, rel=0.01 + 2 * noise)
    assert max(map(abs, built.residuals())) < 0.05 + 3 * noise
    naive = fit_alpha_beta(sizes, built.typical_s)
    assert naive.beta_s_per_byte < 0.97 * least, "without the burst it would be too low"


def test_sizes_whose_repeats_agree_say_what_a_byte_costs():
    sizes = [1000, 2000, 4000, 1_000_000, 2_000_000, 4_000_000]
    seconds = [[1e-4 + 1e-9 * size] * 3 for size in sizes]
    for small in seconds[:3]:  # of which only the fastest repeat is undisturbed
        small[1:] = [3 * small[0], 3 * small[0]]
    built = Measurement(operation="all_reduce", nbytes=sizes, seconds=seconds)
    assert built.fit().beta_s_per_byte == pytest.approx(1e-9, rel=0.01)
    assert built.fit().alpha_s == pytest.approx(1e-4, rel=0.2)


def test_a_disturbed_time_of_a_size_whose_repeats_agree_counts_little():
    sizes = list(range(1, 11))
    seconds = [(1.0 + size) * (1.0 + 0.02 * (-1) ** size) for size in sizes]
    spreads = [0.1] * len(sizes)
    seconds[4], spreads[4] = 1.5 * 6.0, 0.05
    fit = fit_alpha_beta(sizes, seconds, spreads)
    assert [fit(size) for size in sizes] == pytest.approx([1.0 + size for size in sizes], rel=0.05)


class _Ticking:
    """A communicator of one rank, on whose clock a call takes what it is told."""

    now = 0.0

    def clock(self):
        return self.now

    def broadcast_object(self, value):
        return value


def test_a_call_is_timed_with_as_many_bytes_as_asked():
    alone, asked = _Ticking(), []

    def call(tensor):
        asked.append((tensor.numel() * tensor.element_size(), tensor.dtype))
        alone.now += 1e-5 + 1e-9 * asked[-1][0]

    fit = measured_call(alone, call, CPU, [4096, 8192, 65536])
    assert (fit.alpha_s, fit.beta_s_per_byte) == pytest.approx((1e-5, 1e-9))
    assert sorted(set(asked)) == [(size, torch.float32) for size in (4096, 8192, 65536)]


def test_a_call_that_takes_long_is_not_timed_with_more_bytes():
    alone, asked = _Ticking(), set()

    def call(tensor):
        asked.add(tensor.numel() * 4)
        alone.now += 1.0 * len(asked)

    measured_call(alone, call, CPU, [4096, 8192, 65536])
    assert asked == {4096, 8192}


def _bursting() -> tuple[float, list[int]]:
    communicator = runtime.communicator()
    with mock.patch.object(communicator, "burst_bytes", 1 << 14):  # other tests use it, too
        sizes = [4096, 1 << 20]
        built = measure_collective(communicator, "all_reduce", CPU, sizes=sizes, repeats=1)
    return built.free_bytes, built.nbytes


def test_a_measurement_knows_what_links_pass_at_once(world):
    assert world(2).run(_bursting) == [(1 << 14, [4096, 1 << 20])] * 2


def test_the_size_whose_bytes_take_as_long_as_a_start_up():
    """Times of an all-reduce on 2 hosts with 2.5 GbE and on 4 with 10 GbE; and at the ends."""
    costs = [(1.36e-4, 3.49e-9), (2.45e-4, 1.31e-9), (0.0, 1e-9), (0.0, 0.0), (1e-4, 0.0)]
    result = [start_up_bytes(AlphaBeta(alpha_s=a, beta_s_per_byte=b)) for a, b in costs]
    assert result == [64 << 10, 256 << 10, 1, 1, 2.0**64]


def test_larger_messages_with_more_latencies_are_not_taken_for_bytes():
    """Sites that are 20 ms apart: small messages take one latency, larger ones two or three."""

    def cost(nbytes: float) -> float:
        latencies = 1 + (nbytes > 32 << 10) + (nbytes > 256 << 10)
        return latencies * 0.02 + 12e-9 * nbytes

    assert start_up_bytes(cost) == 8 << 20


def _sizes(burst_bytes: int) -> list[int]:
    communicator = runtime.communicator()
    kept = mock.patch.object(collectives, "_fits", WeakKeyDictionary())
    burst = mock.patch.object(communicator, "burst_bytes", burst_bytes)
    with kept, burst, mock.patch.object(collectives, "measure_collective") as measure:
        measured_costs(communicator, "all_reduce", CPU, 1 << 20)
    return list(measure.call_args.kwargs["sizes"])


@pytest.mark.parametrize("burst_bytes", [0, 1 << 18])
def test_only_messages_up_to_what_is_asked_for_are_measured_unless_links_burst(world, burst_bytes):
    sizes = world(2).run(_sizes, burst_bytes)[0]
    assert sizes[-1] == 1 << (24 if burst_bytes else 20)
    assert sizes[-2] > 4 * burst_bytes


def _fit() -> AlphaBeta:
    return measured_costs(runtime.communicator(), "all_reduce", CPU)


def test_one_rank_pays_nothing(world):
    (fit,) = world(1).run(_fit)
    assert fit(2**20) == 0


KINDS = get_args(Bound)
COMPUTE = StepTimes(forward_s=1.0, backward_s=2.0, update_s=0.5)
COMM = CommTimes(all_reduce_s=4.0, reduce_scatter_s=3.0, all_gather_s=1.5, exchange_s=(6.0, 3.0))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("sequential", 1 + 2 + 4 + 4.5 + 0.5),
        ("wfbp", 1 + 4 + 0.5),
        ("legs", 1 + 4.5 + 0.5),
        ("cross_iteration", 4),  # hides the update, too
        ("delayed", 4),
        ("dear", 1.5 + 3),
        ("sharded", 1.5 + 4.5 + 0.5 / 5),
        ("decentralized", 4.5),  # 3.5 of compute; 6 and 3 s of exchange in turn
        ("beside_passes", (6 + 3) / 2 + 0.5),
        ("after_update", (6 + 3) / 2 + 2),
        ("asynchronous", 3.5),
    ],
)
def test_formulas(kind, wanted):
    assert step_bound_s(kind, COMPUTE, COMM, world_size=5) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_without_communication_every_bound_is_the_compute_limit_and_updates_may_be_shared(kind):
    assert step_bound_s(kind, COMPUTE, CommTimes()) == compute_limit_s(COMPUTE) == 3.5

    # Communication is shorter than any pass: 1 + 2, and the update by one or by four ranks.
    short = CommTimes(reduce_scatter_s=0.1, all_gather_s=0.1)
    update_s = 0.5 / 4 if kind in ("dear", "sharded") else 0.5
    assert step_bound_s(kind, COMPUTE, short, world_size=4) == pytest.approx(1 + 2 + update_s)


def test_of_means_over_steps_each_step_waits_for_its_own_exchange():
    # Of two steps one exchange is longer than what it runs beside, and its rest is not made up for.
    uneven = CommTimes(exchange_s=(7.0, 0.5))
    assert step_bound_s("beside_passes", COMPUTE, uneven) == pytest.approx((7.0 + 3.0) / 2 + 0.5)
    assert step_bound_s("after_update", COMPUTE, uneven) == pytest.approx((7.0 + 1.5) / 2 + 2.0)
    assert step_bound_s("decentralized", COMPUTE, uneven) == pytest.approx(3.75)


SECONDS = st.floats(0, 100)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_bounds_are_ordered_if_the_halves_make_an_all_reduce(forward, backward, scatter, gather):
    compute = StepTimes(forward_s=forward, backward_s=backward)
    comm = CommTimes(all_reduce_s=scatter + gather, reduce_scatter_s=scatter, all_gather_s=gather)
    bound = {kind: step_bound_s(kind, compute, comm) for kind in KINDS}
    slack = 1e-9
    assert bound["cross_iteration"] <= bound["dear"] + slack
    assert bound["dear"] <= bound["sequential"] + slack
    assert bound["wfbp"] <= bound["sequential"] + slack
    assert bound["dear"] <= bound["sharded"] + slack
    assert min(bound.values()) >= compute_limit_s(compute) - slack


def test_communication_by_its_fits_and_by_the_wire():
    fit = AlphaBeta(alpha_s=0.1, beta_s_per_byte=0.01)
    assert comm_times(100, {"all_gather": fit}) == CommTimes(all_gather_s=1.1)
    assert wire_limit_s(1000, 4, 100) == pytest.approx(15)
    assert wire_limit_s(1000, 1, 100) == 0


def traffic(name: str, world_size: int, local_size: int = 1, **options) -> Traffic:
    return algorithm_class(name).traffic(algorithm_options(name, options), world_size, local_size)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("alpha_s", lambda: AlphaBeta(alpha_s=-1.0, beta_s_per_byte=0.0)),
        ("did you mean '10gbe'", lambda: table_costs("10gb", 4)),
        ("forward_s", lambda: StepTimes(forward_s=-1.0, backward_s=0.0)),
        ("exchange_s", lambda: CommTimes(exchange_s=(1.0, -1.0))),
        ("did you mean 'wfbp'", lambda: step_bound_s("wfb", COMPUTE, COMM)),
        ("world_size", lambda: step_bound_s("wfbp", COMPUTE, COMM, world_size=0)),
        ("bytes_per_s", lambda: wire_limit_s(1, 2, 0)),
        ("cannot be split into blocks", lambda: traffic("hierarchical", 3, 2)),
        ("cannot be split into blocks", lambda: blocks_of(4, 0)),
        ("cannot be split into blocks", lambda: blocks_of(4, 3)),
        ("even number of ranks", lambda: traffic("decentralized", 3, topology="ring")),
        ("ranks_per_host", lambda: traffic("neighbor", 2).loads(0)),
        ("count", lambda: traffic("neighbor", 2).every(0)),
    ],
)
def test_bad_input_is_named(words, call):
    with pytest.raises(UserError, match=words):
        call()


def swapped(*pairs: tuple[int, int]) -> set[Message]:
    both = [*pairs, *((b, a) for a, b in pairs)]
    return {Message(source=source, target=target) for source, target in both}


def test_one_peer_exp_is_one_message_each_way_per_step():
    result = traffic("decentralized", 4, topology="one-peer-exp").steps
    assert [set(step) for step in result] == [swapped((0, 1), (2, 3)), swapped((0, 2), (1, 3))]
    loads = traffic("decentralized", 8, topology="one-peer-exp").loads()
    assert loads == [[Load(sent=1, received=1)] * 3] * 8


def test_of_two_nodes_of_two_each_other_step_is_within_the_node():
    result = traffic("decentralized", 4, 2, topology="alternating-exp-ring")
    inside, between = result.steps
    assert set(inside) == swapped((0, 1), (2, 3))
    assert between == (GroupMean(ranks=(0, 1, 2, 3)),)
    assert result.loads(2) == [[Load(), Load(reduced=1)]] * 2
    # With four nodes the pairs take turns: 2 (2-1)/2 of the buffer each way, every other step.
    four = traffic("decentralized", 8, topology="alternating-exp-ring", ranks_per_node=2).loads(2)
    assert [[load.sent for load in host] for host in four] == [
        [0, 1, 0, 1],
        [0, 1, 1, 0],
        [1, 0, 0, 1],
        [1, 0, 1, 0],
    ]


def test_b9_b12_dynamic_schedules_repeat_after_their_period():
    for world, local, name in ((8, 1, "one-peer-exp"), (6, 3, "inner-outer-ring")):
        result = traffic("neighbor", world, local, dynamic=name)
        assert len(result.steps) == 3
        assert all(len(step) == world for step in result.steps)
    # Rank 0 sends to 3, 2, 1 and hears 3, 2, 1 (B-12): between hosts in the first step only.
    assert [load.sent for load in result.loads(3)[0]] == [1, 1, 1]
    assert {(m.source, m.target) for m in result.steps[0]} >= {(0, 3), (3, 0)}
    exp2 = traffic("neighbor", 16, 4, dynamic="inner-outer-exp2")
    assert len(exp2.steps) == 4 and all(len(step) == 16 for step in exp2.steps)


def test_hierarchical_averaging_sends_each_place_its_share():
    result = traffic("neighbor", 4, 2, hierarchical=True, topology="ring")
    inside = {GroupMean(ranks=(0, 1)), GroupMean(ranks=(2, 3))}
    half = {Message(source=m.source, target=m.target, share=0.5) for m in swapped((0, 2), (1, 3))}
    assert set(result.steps[0]) == inside | half
    assert result.loads(2) == [[Load(sent=1, received=1)]] * 2
    # One machine: a mean of all, and no link carries any of it.
    alone = traffic("neighbor", 2, 2, hierarchical=True).loads(2)
    assert alone == [[Load(reduced=1)]] and exchange_wire_limit_s(1, alone, 1) == 0


def test_hierarchical_all_reduce_loads_the_links_of_a_machine_as_few_ranks_do():
    result = traffic("hierarchical", 4, 2)
    (step,) = result.steps
    assert set(step) == {
        *(GroupMean(ranks=ranks) for ranks in ((0, 1), (2, 3))),
        *(GroupMean(ranks=ranks, share=0.5) for ranks in ((0, 2), (1, 3))),
    }
    # Two machines of two ranks: 2 (2-1)/2 of the buffer, as two ranks would, not 2 (4-1)/4.
    assert result.loads(2) == [[Load(sent=1, received=1)]] * 2
    # Four hosts of a rank each: the legs inside the blocks are on the links, too.
    hierarchical = algorithm_class("hierarchical")
    apart = hierarchical.traffic(hierarchical.Options(local_size=2), 4, 1).loads(1)
    assert apart == [[Load(sent=1.5, received=1.5)]] * 4
    # With one block, or blocks of one rank, it is one all-reduce of all ranks.
    assert traffic("hierarchical", 4, 4) is None and traffic("hierarchical", 4, 1) is None
    exchanged = CommTimes(exchange_s=(0.5,))
    compute = StepTimes(forward_s=0.1, backward_s=0.2, update_s=0.05)
    assert step_bound_s("legs", compute, exchanged) == pytest.approx(0.65)
    alone = CommTimes(all_reduce_s=0.4)
    assert step_bound_s("legs", compute, alone) == step_bound_s("wfbp", compute, alone)


CHUNKS = 200


def scheduled_s(found: Traffic, compute: StepTimes, exchange_s: float) -> float:
    """Seconds per step of the schedule of `decentralized`, written out piece by piece.

    Every rank's parameters are so many equal pieces. A piece is updated in the backward pass, once
    what its group sent after the step before is there; then both ends of a pair send it, in turn
    with their other pieces.
    """
    ranks, periods = range(found.world_size), 12
    peers = [{m.source: m.target for m in step} for step in found.steps]
    wire = exchange_s / CHUNKS
    now = [0.0 for _ in ranks]
    free = [0.0 for _ in ranks]
    arrived = [[0.0] * CHUNKS for _ in ranks]
    half = 0.0
    for step in range(periods * len(peers)):
        peer = peers[step % len(peers)]
        if step == periods // 2 * len(peers):
            half = max(now)
        now = [end + compute.forward_s for end in now]
        after = [[0.0] * CHUNKS for _ in ranks]
        for piece in range(CHUNKS):
            for rank in ranks:
                now[rank] = max(now[rank] + compute.backward_s / CHUNKS, arrived[rank][piece])
                now[rank] += compute.update_s / CHUNKS
            for rank, other in peer.items():
                begins = max(now[rank], now[other], free[rank], free[other])
                after[rank][piece] = begins + wire
            for rank in peer:
                free[rank] = after[rank][piece]
        arrived = after
    return (max(now) - half) / (periods // 2 * len(peers))


@pytest.mark.parametrize("topology", ["ring", "one-peer-exp", "alternating-exp-ring"])
@pytest.mark.parametrize("exchange_s", [0.1, 0.9, 1.4, 3.0])
def test_the_bound_is_what_the_written_out_schedule_takes(topology, exchange_s):
    result = traffic("decentralized", 8, topology=topology)
    compute = StepTimes(forward_s=0.3, backward_s=0.6, update_s=0.1)
    fit = AlphaBeta(alpha_s=0.0, beta_s_per_byte=exchange_s)
    each = exchange_times(1, result.loads(), {"exchange": fit})
    bound = max(step_bound_s("decentralized", compute, comm) for comm in each)
    taken = scheduled_s(result, compute, exchange_s)
    assert bound <= taken * (1 + 1e-9)
    # What is longer than a step and its backward pass cannot all be worked off in quiet steps.
    late = topology == "alternating-exp-ring" and exchange_s > 1.6
    assert taken <= bound * (1.2 if late else 1.02)


COUNTED = [
    ("decentralized", {"topology": "one-peer-exp"}),
    ("decentralized", {"topology": "ring"}),
    ("decentralized", {"topology": "complete"}),
    ("decentralized", {"topology": "alternating-exp-ring", "ranks_per_node": 1}),
    ("neighbor", {"topology": "exp2"}),
    ("neighbor", {"topology": "star", "combine": "atc"}),
    ("neighbor", {"dynamic": "one-peer-exp", "every": 2}),
    ("gradient-tracking", {"topology": "ring"}),
    ("exact-diffusion", {"topology": "ring"}),
    ("push-diging", {"topology": "ring-left"}),
    ("win-put", {"topology": "ring", "barrier": True}),
    ("push-sum", {"topology": "exp2", "barrier": True}),
    ("asyncddp", {"topology": "ring", "max_staleness": 0}),
]


def _sent(name: str, options: dict, steps: int) -> float:
    """Bytes that a rank hands over per step, in units of all parameters."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model, algorithm=name, **options
    )
    nbytes = sum(param.nbytes for param in model.parameters())

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 30)).sum().backward()
            optimizer.step()

    train(2)
    optimizer.synchronize()
    communicator = runtime.communicator()
    before = communicator.bytes_sent
    train(steps)
    optimizer.synchronize()
    sent = (communicator.bytes_sent - before) / steps / nbytes
    optimizer.close()
    return sent


@pytest.mark.parametrize(("name", "options"), COUNTED)
def test_programs_send_what_their_algorithms_say(world, name, options):
    stated = traffic(name, 4, **options)
    period = len(stated.steps)
    counted = world(4).run(_sent, name, options, 2 * period)
    for rank, (host, result) in enumerate(zip(stated.loads(), counted, strict=True)):
        wanted = sum(load.sent + load.reduced for load in host) / period
        # Push-sum's weight, and the number of steps that a put carries, come on top.
        assert result == pytest.approx(wanted, rel=0.01), rank


def test_hierarchical_averaging_hands_over_all_and_a_share_for_each_message(world):
    options = {"hierarchical": True, "local_size": 2, "topology": "ring"}
    counted = world(4).run(_sent, "neighbor", options, 2)
    # All for the reduce-scatter, and a half each for the all-gather and the neighbour machine.
    assert counted == pytest.approx([2.0] * 4, rel=0.01)
