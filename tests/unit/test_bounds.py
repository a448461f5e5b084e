"""How short a step can be."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dear.cost.bounds import (
    Bound,
    CommTimes,
    StepTimes,
    comm_times,
    compute_limit_s,
    half_wire_limit_s,
    reached,
    step_bound_s,
    wire_limit_s,
)
from dear.cost.collectives import AlphaBeta
from dear.errors import UserError
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options

KINDS = get_args(Bound)
COMPUTE = StepTimes(forward_s=1.0, backward_s=2.0, update_s=0.5)
COMM = CommTimes(all_reduce_s=4.0, reduce_scatter_s=3.0, all_gather_s=1.5, exchange_s=(6.0, 3.0))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("sequential", 1 + 2 + 4 + 4.5 + 0.5),
        ("wfbp", 1 + 4 + 0.5),
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
def test_without_communication_every_bound_is_the_compute_limit(kind):
    assert step_bound_s(kind, COMPUTE, CommTimes()) == compute_limit_s(COMPUTE) == 3.5


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


def test_communication_by_its_fits():
    fit = AlphaBeta(alpha_s=0.1, beta_s_per_byte=0.01)
    assert comm_times(100, {"all_gather": fit}) == CommTimes(all_gather_s=1.1)
    assert comm_times(100, {"all_reduce": fit}, messages=3).all_reduce_s == pytest.approx(1.3)


def test_wire_limits():
    assert wire_limit_s(1000, 4, 100) == pytest.approx(15)
    assert half_wire_limit_s(1000, 4, 100) == pytest.approx(7.5)
    assert wire_limit_s(1000, 1, 100) == 0


def test_share_of_the_bound():
    assert reached(1.0, 2.0) == 0.5
    with pytest.raises(UserError, match="measured_s"):
        reached(1.0, 0.0)


def test_bad_input_is_named():
    with pytest.raises(UserError, match="forward_s"):
        StepTimes(forward_s=-1.0, backward_s=0.0)
    with pytest.raises(UserError, match="exchange_s"):
        CommTimes(exchange_s=(1.0, -1.0))
    with pytest.raises(UserError, match="did you mean 'wfbp'"):
        step_bound_s("wfb", COMPUTE, COMM)
    with pytest.raises(UserError, match="world_size"):
        step_bound_s("wfbp", COMPUTE, COMM, world_size=0)
    with pytest.raises(UserError, match="bytes_per_s"):
        wire_limit_s(1, 2, 0)


def test_algorithms_name_bounds_that_exist():
    for name in algorithm_names():
        assert algorithm_class(name).bound in (None, *KINDS), name
        assert algorithm_class(name).bound_of(algorithm_options(name, {})) in KINDS, name
