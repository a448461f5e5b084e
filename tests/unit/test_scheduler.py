"""Partitions, priorities and credit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dear.buckets.parts import OrderedIssuer, lengths, planned_order
from dear.cost.fit import AlphaBeta

COST = AlphaBeta(alpha_s=0.0, beta_s_per_byte=1.0)


def test_partitions_of_the_worked_example():
    assert lengths(10, 4) == [3, 3, 4]
    assert lengths(4_000_001, 4_000_000) == [2_000_000, 2_000_001]
    assert lengths(4_000_000, 4_000_000) == [4_000_000]
    assert lengths(0, 5) == [0]


@given(st.integers(0, 10**7), st.integers(1, 10**6))
def test_partitions_are_few_even_and_complete(numel, limit):
    numel = min(numel, limit * 50)
    sizes = lengths(numel, limit)
    assert sum(sizes) == numel
    assert max(sizes) <= limit
    assert len(sizes) == max(1, -(-numel // limit))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)


def test_credit_of_the_worked_example():
    # Three tasks start on 10, the last overdraws by 6: the fourth waits for both of the first, and
    # is overtaken by what is urgent and ready by then.
    order = planned_order([0, 0, 0, 0, 5], [2, 0, 1, 4, 3], [8, 4, 4, 1, 1], credit=10, cost=COST)
    assert order == [1, 2, 0, 4, 3]
    assert planned_order([0, 0, 0], [1, 1, 1], [1, 1, 1], credit=100, cost=COST) == [0, 1, 2]

    # Task 2 is under way when 0 becomes ready, and 1 waits for credit.
    order = planned_order([3, 1, 0], [0, 1, 2], [2, 2, 10], credit=1, cost=COST)
    assert order == [2, 0, 1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=20
    ),
    st.floats(0.5, 30),
)
def test_planned_order_starts_every_task_once(tasks, credit):
    arrivals, priorities, sizes = (list(column) for column in zip(*tasks, strict=True))
    order = planned_order(arrivals, priorities, sizes, credit=credit, cost=COST)
    assert sorted(order) == list(range(len(tasks)))


def test_issuer_gives_errors_of_other_threads_to_who_waits():
    def issue(task: int) -> None:
        if task == 1:
            raise ValueError("the wire is cut")

    issuer: OrderedIssuer[int] = OrderedIssuer(issue, credit=1)
    issuer.begin([0, 1, 2], dict.fromkeys(range(3), 1.0))
    issuer.ready(0)
    issuer.ready(1)
    issuer.finished(1)
    issuer.wait_started(0)
    for task in (1, 2):
        with pytest.raises(ValueError, match="the wire is cut"):
            issuer.wait_started(task)


def test_issuer_keeps_the_order_and_the_credit():
    started: list[int] = []
    issuer, sizes = OrderedIssuer(started.append, 10), {0: 8.0, 1: 8.0, 2: 1.0}
    issuer.begin([0, 1, 2], sizes)
    issuer.ready(1)
    assert started == []
    issuer.ready(0)
    assert started == [0, 1]  # the second overdraws
    issuer.ready(2)
    assert started == [0, 1]
    issuer.finished(8)
    assert started == [0, 1, 2]
    issuer.begin([1, 0], sizes)
    with pytest.raises(RuntimeError, match="2 tasks were never started"):
        issuer.begin([0], sizes)
    issuer.drop()
    issuer.begin([], {})


def test_what_a_dropped_pass_has_started_depends_on_what_is_ready_alone():
    """Two ranks, on one of which a task ends before the pass is dropped."""
    started: list[list[int]] = [[], []]
    for rank in range(2):
        issuer: OrderedIssuer[int] = OrderedIssuer(started[rank].append, credit=1)
        issuer.begin([0, 1, 2, 3, 4], dict.fromkeys(range(5), 1.0))
        for task in (0, 1, 2, 4):
            issuer.ready(task)
        if rank == 1:
            issuer.finished(1)
        assert started[rank] == [0, 1][: rank + 1]
        issuer.drop()
    assert started == [[0, 1, 2]] * 2
