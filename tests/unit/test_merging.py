"""Which gradients are merged: the references' worked examples, and brute force."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dear.buckets.grouping import by_total, greedy, optimal
from dear.cost.collectives import AlphaBeta, table_costs

# Milliseconds and bytes, as in the references: 1 ms and 0.001 ms per byte.
COST = AlphaBeta(alpha_s=1.0, beta_s_per_byte=0.001)


def example(elements, backward):
    """Bytes and arrival times in the order of arrival; the arguments start at the input layer."""
    return [4 * n for n in reversed(elements)], list(accumulate(reversed(backward)))


def finish_time(plan, sizes, arrivals, cost):
    """When the last message of `plan` has ended, on the clock of `arrivals`."""
    end = 0.0
    for group in plan:
        end = max(end, max(arrivals[i] for i in group)) + cost(sum(sizes[i] for i in group))
    return end


def layers(plan, count):
    """The plan by layer numbers, 0 nearest to the input."""
    return [[count - 1 - index for index in group] for group in plan]


A = example([250, 250, 550, 250], [0.4, 4.5, 0.5, 1.0])
B = example([250] * 4, [0.5] * 4)
C = example([2500000, 100000, 1000000, 64], [2e-3, 6e-3, 3e-3, 1e-3])
ALONE = [[0], [1], [2], [3]]


def test_example_a_by_the_greedy_rule():
    plan = greedy(*A, COST)
    assert layers(plan, 4) == [[3, 2], [1, 0]]
    assert finish_time(plan, *A, COST) == pytest.approx(9.4)
    assert finish_time(plan, *A, COST) - A[1][-1] == pytest.approx(3.0)


def test_example_a_without_merging():
    assert finish_time(ALONE, *A, COST) == pytest.approx(10.2)
    assert layers(greedy(*A, COST, wait=False), 4) == [[3], [2], [1], [0]]


def test_example_b_greedy_is_not_optimal():
    plans = [greedy(*B, COST), greedy(*B, COST, wait=False), optimal(*B, COST)]
    assert layers(plans[0], 4) == [[3, 2, 1, 0]]
    assert layers(plans[1], 4) == [[3], [2, 1, 0]]
    finishes = [finish_time(plan, *B, COST) for plan in (*plans, ALONE)]
    assert finishes == pytest.approx([7.0, 6.5, 6.5, 8.5])


def test_example_c_small_messages_take_in_the_next():
    cost = table_costs("10gbe", 8)
    plain = greedy(*C, cost)
    joined = greedy(*C, cost, least=8192 * 4)
    assert layers(plain, 4) == [[3], [2], [1], [0]]
    assert layers(joined, 4) == [[3, 2], [1], [0]]
    assert [finish_time(p, *C, cost) for p in (plain, joined)] == pytest.approx(
        [21.0938e-3] * 2, abs=5e-8
    )


def test_total_closes_a_group_after_it_is_reached():
    sizes = [400, 500, 200, 50, 2000, 10]
    assert by_total(sizes, 1000) == [[0, 1, 2], [3, 4], [5]]
    assert by_total(sizes, 0) == [[0], [1], [2], [3], [4], [5]]
    assert by_total(sizes, 1e9) == [[0, 1, 2, 3, 4, 5]]
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


def test_nothing_to_merge():
    assert greedy([], [], COST) == optimal([], [], COST) == []
    assert greedy([1], [0], COST) == optimal([1], [0], COST) == [[0]]


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


@settings(max_examples=150, deadline=None)
@given(GRADIENTS, COSTS)
def test_optimal_equals_brute_force(gradients, cost):
    sizes, arrivals = unzip(gradients)
    best = min(finish_time(plan, sizes, arrivals, cost) for plan in every_plan(len(sizes)))
    found = finish_time(optimal(sizes, arrivals, cost), sizes, arrivals, cost)
    assert found == pytest.approx(best, rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(GRADIENTS)
def test_optimal_equals_brute_force_for_a_cost_that_is_no_line(gradients):
    sizes, arrivals = unzip(gradients)

    def cost(size):
        return 0.3 + 0.02 * size**0.5 + (size > 3000)

    best = min(finish_time(plan, sizes, arrivals, cost) for plan in every_plan(len(sizes)))
    found = finish_time(optimal(sizes, arrivals, cost), sizes, arrivals, cost)
    assert found == pytest.approx(best, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**7), TIMES), min_size=1, max_size=40), COSTS)
def test_optimal_is_never_later_than_the_rules(gradients, cost):
    sizes, arrivals = unzip(gradients)
    found = finish_time(optimal(sizes, arrivals, cost), sizes, arrivals, cost)
    for wait in (True, False):
        plan = greedy(sizes, arrivals, cost, wait=wait)
        assert found <= finish_time(plan, sizes, arrivals, cost) * (1 + 1e-9)


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
        assert [index for group in plan for index in group] == list(range(len(sizes)))
        assert all(len({kinds[index] for index in group}) == 1 for group in plan)
