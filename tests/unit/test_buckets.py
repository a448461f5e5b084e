"""Buckets: which gradients travel together, in which order, and what flat memory notices."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dear.algorithms.synchronous.dear import Dear
from dear.buckets.flat import Bucket
from dear.buckets.grouping import (
    RunOrder,
    by_count,
    by_ramp,
    by_threshold,
    by_total,
    by_wait,
    ends,
    fuse,
    greedy,
    group,
    launch_order,
    layers,
    optimal,
)
from dear.cost.collectives import table_costs
from dear.cost.fit import AlphaBeta

SIZES = st.lists(st.integers(0, 50), max_size=30)


def params(*numels, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels]


def same(left, right):
    """The same parameter objects in the same groups; == would compare their values."""
    return [[id(p) for p in group] for group in left] == [[id(p) for p in g] for g in right]


def test_threshold_is_strict_as_in_the_worked_example():
    sizes = [10, 10, 4, 30, 2, 24, 1]
    assert by_threshold(sizes, 25) == [[0, 1, 2], [3], [4], [5], [6]]


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(0, 120))
def test_grouping_covers_every_item_once_in_order_and_no_group_could_take_more(sizes, threshold):
    groups = by_threshold(sizes, threshold)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in group) for group in groups]
    for members, total in zip(groups, totals, strict=True):
        assert len(members) == 1 or total < threshold
    for total, following in zip(totals, groups[1:], strict=False):
        assert total + sizes[following[0]] >= threshold


def test_layers_are_fused_by_their_bytes():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 4, bias=False)))
    first, second = model[0], model[2][0]
    units = layers(model, list(model.parameters()))  # of 36 and 48 bytes
    assert same(units, [[first.weight, first.bias], [second.weight]])
    assert same(fuse(units, 84), units)
    assert same(fuse(units, 85), [[first.weight, first.bias, second.weight]])


def test_nearby_layers_leave_the_rest_in_a_last_group():
    assert [len(members) for members in by_count(10, 3)] == [3, 3, 3, 1]
    assert by_count(4, -1) == [[0, 1, 2, 3]]
    assert by_count(0, 3) == by_count(0, -1) == []


def test_waiting_times_are_cut_into_cycles_as_in_the_worked_example():
    waits = [milliseconds / 1000 for milliseconds in (0, 3, 6, 9, 12, 16)]
    groups = by_wait(waits, 0.005)
    assert groups == [[0, 1], [2, 3], [4], [5]]
    starts = [index in [members[0] for members in groups] for index in range(6)]
    assert [int(start) for start in starts] == [1, 0, 1, 0, 1, 1]


def test_a_ramp_grows_from_both_ends():
    groups = by_ramp([1.0] * 64, threshold=16, first=1)
    sizes = [len(members) for members in groups]
    assert sizes[0] == sizes[-1] == 1
    assert max(sizes) < 16
    assert sizes[:3] == sorted(sizes[:3])


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 120), st.integers(1, 30))
def test_a_ramp_covers_every_item_once_and_never_exceeds_the_threshold(sizes, threshold, first):
    groups = by_ramp(sizes, threshold, first)
    assert [index for members in groups for index in members] == list(range(len(sizes)))
    for members in groups:
        assert len(members) == 1 or sum(sizes[i] for i in members) < threshold


def _layers(count: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2, bias=False, dtype=dtype) for _ in range(count)))


def _named(model: nn.Sequential, groups: list) -> list[list[int]]:
    places = {layer.weight: i for i, layer in enumerate(model)}
    return [[places[param] for param in members] for members in groups]


def _order(reads: list[int], arrivals: list[int]) -> RunOrder:
    return RunOrder(reads=reads, arrivals=arrivals, waits_s=[0.0] * len(arrivals))


BY_TWOS = {"fusion": "nearby_layers", "nearby_layers": 2}


@pytest.mark.parametrize(
    ("reads", "arrivals", "options", "wanted", "launched"),
    [
        # Runs 2, 0, 3, 1; registered 0, 1, 2, 3.
        ([2, 0, 3, 1], [1, 3, 0, 2], BY_TWOS, [[2, 0], [3, 1]], [1, 0]),
        # Parameters without a gradient hold up nobody.
        ([0, 1, 2, 3], [3, 0], {"threshold_mb": 1e3, "first_mb": 1e3}, [[0, 3], [1, 2]], [0, 1]),
    ],
)
def test_groups_follow_the_order_in_which_gradients_arrive(
    reads, arrivals, options, wanted, launched
):
    model, order = _layers(4), _order(reads, arrivals)
    params = list(model.parameters())
    groups = group(model, params, order, Dear.Options(**options))
    assert _named(model, groups) == wanted
    assert launch_order(groups, params, order) == launched


def test_dtypes_are_never_mixed_and_do_not_cut_each_others_groups():
    model = nn.Sequential(*_layers(2), *_layers(2, torch.float64), *_layers(2))
    params = list(model.parameters())
    order = _order(list(range(6)), list(range(5, -1, -1)))
    groups = group(model, params, order, Dear.Options(threshold_mb=1e3, first_mb=1e3))
    assert _named(model, groups) == [[0, 1, 4, 5], [2, 3]]


# Milliseconds and bytes, as in the references: 1 ms and 0.001 ms per byte.
COST = AlphaBeta(alpha_s=1.0, beta_s_per_byte=0.001)


def example(elements, backward):
    """Bytes and arrival times in the order of arrival; the arguments start at the input layer."""
    return [4 * n for n in reversed(elements)], list(accumulate(reversed(backward)))


def finish_time(plan, sizes, arrivals, cost):
    """Returns the end of the last message of `plan`, on the clock of `arrivals`."""
    end = 0.0
    for members in plan:
        end = max(end, max(arrivals[i] for i in members)) + cost(sum(sizes[i] for i in members))
    return end


def by_layer(plan, count):
    """The plan by layer numbers, 0 nearest to the input."""
    return [[count - 1 - index for index in members] for members in plan]


A = example([250, 250, 550, 250], [0.4, 4.5, 0.5, 1.0])
B = example([250] * 4, [0.5] * 4)
C = example([2500000, 100000, 1000000, 64], [2e-3, 6e-3, 3e-3, 1e-3])
ALONE = [[0], [1], [2], [3]]


def test_example_a_by_the_greedy_rule_and_without_merging():
    plan = greedy(*A, COST)
    assert by_layer(plan, 4) == [[3, 2], [1, 0]]
    assert finish_time(plan, *A, COST) == pytest.approx(9.4)
    assert ends(plan, *A, COST) == pytest.approx([5.7, 9.4])
    assert finish_time(plan, *A, COST) - A[1][-1] == pytest.approx(3.0)
    assert finish_time(ALONE, *A, COST) == pytest.approx(10.2)
    assert by_layer(greedy(*A, COST, wait=False), 4) == [[3], [2], [1], [0]]
    assert greedy([], [], COST) == optimal([], [], COST) == []


def test_example_b_greedy_is_not_optimal():
    plans = [greedy(*B, COST), greedy(*B, COST, wait=False), optimal(*B, COST)]
    assert by_layer(plans[0], 4) == [[3, 2, 1, 0]]
    assert by_layer(plans[1], 4) == [[3], [2, 1, 0]]
    finishes = [finish_time(plan, *B, COST) for plan in (*plans, ALONE)]
    assert finishes == pytest.approx([7.0, 6.5, 6.5, 8.5])


def test_example_c_small_messages_take_in_the_next():
    cost = table_costs("10gbe", 8)
    plain = greedy(*C, cost)
    joined = greedy(*C, cost, least=8192 * 4)
    assert by_layer(plain, 4) == [[3], [2], [1], [0]]
    assert by_layer(joined, 4) == [[3, 2], [1], [0]]
    assert [finish_time(p, *C, cost) for p in (plain, joined)] == pytest.approx(
        [21.0938e-3] * 2, abs=5e-8
    )


def test_total_closes_a_group_after_it_is_reached():
    sizes = [400, 500, 200, 50, 2000, 10]
    assert by_total(sizes, 1000) == [[0, 1, 2], [3, 4], [5]]
    assert by_total(sizes, 0) == [[0], [1], [2], [3], [4], [5]]
    assert by_total(sizes, 1e9) == [[0, 1, 2, 3, 4, 5]]
    assert by_total(sizes, 1e9, first=1) == [[0], [1, 2, 3, 4, 5]]
    assert by_total(sizes, 0, first=1e9) == [[0, 1, 2, 3, 4, 5]]
    assert by_total([], 1000) == []


def test_kinds_are_never_merged():
    sizes, arrivals, kinds = [4.0] * 4, [0.1] * 4, "aabb"
    for plan in (
        by_total(sizes, 1e9, kinds),
        greedy(sizes, arrivals, COST, kinds=kinds),
        greedy(sizes, arrivals, COST, kinds=kinds, least=1e9),
        optimal(sizes, arrivals, COST, kinds=kinds),
    ):
        assert plan == [[0, 1], [2, 3]]


TIMES = st.floats(0, 5, allow_subnormal=False)
GRADIENTS = st.lists(st.tuples(st.integers(0, 4000), TIMES), min_size=1, max_size=9)
COSTS = st.builds(
    AlphaBeta, alpha_s=st.floats(0, 3), beta_s_per_byte=st.floats(0, 0.003, allow_subnormal=False)
)


def unzip(gradients):
    return [size for size, _ in gradients], list(accumulate(time for _, time in gradients))


def every_plan(count):
    """All ways to cut `count` gradients into groups of neighbours."""
    for number in range(count):
        for cuts in combinations(range(1, count), number):
            edges = [0, *cuts, count]
            yield [list(range(a, b)) for a, b in pairwise(edges)]


def no_line(size):
    return 0.3 + 0.02 * size**0.5 + (size > 3000)


@settings(max_examples=200)
@given(GRADIENTS, COSTS | st.just(no_line))
def test_optimal_equals_brute_force(gradients, cost):
    sizes, arrivals = unzip(gradients)
    best = min(finish_time(plan, sizes, arrivals, cost) for plan in every_plan(len(sizes)))
    result = finish_time(optimal(sizes, arrivals, cost), sizes, arrivals, cost)
    assert result == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(GRADIENTS, COSTS, st.integers(0, 5000), st.text("ab", min_size=9, max_size=9))
def test_plans_cover_every_gradient_once_in_order(gradients, cost, least, kinds):
    sizes, arrivals = unzip(gradients)
    for plan in (
        by_total(sizes, least, kinds),
        greedy(sizes, arrivals, cost, least=least, kinds=kinds),
        greedy(sizes, arrivals, cost, wait=False, kinds=kinds),
        optimal(sizes, arrivals, cost, kinds=kinds),
    ):
        assert [index for members in plan for index in members] == list(range(len(sizes)))
        assert all(len({kinds[index] for index in members}) == 1 for members in plan)


def adopting(*numels):
    ours = params(*numels)
    total = sum(numels)
    return ours, Bucket(ours, values=torch.zeros(total), gradients=torch.zeros(total))


@pytest.mark.parametrize("flat", [True, False])
def test_it_notices_gradients_that_were_written_to_replaced_or_dropped(flat):
    ours, bucket = adopting(2, 3)
    if not flat:
        bucket = Bucket(ours)
    changes = (
        lambda param: param.grad.mul_(2),
        lambda param: setattr(param, "grad", param.grad.clone()),
        lambda param: setattr(param, "grad", None),
    )
    for change in changes:
        for param in ours:
            param.grad = torch.ones_like(param)
        if flat:
            bucket.adopt()
        bucket.note()
        assert bucket.changed() is None
        change(ours[1])
        assert bucket.changed() is not None
        bucket.forget()
        assert bucket.changed() is None


def test_it_notices_a_scale_that_version_counters_do_not_and_a_gradient_that_came_later():
    ours, bucket = adopting(2, 3)
    ours[0].grad = torch.ones(2)
    bucket.adopt()
    bucket.note()
    assert not bucket.scaled_in_place()
    ours[0].grad.data.mul_(0.5)
    assert bucket.changed() is None
    assert bucket.scaled_in_place()
    ours[1].grad = torch.ones(3)
    assert bucket.changed() is ours[1]
