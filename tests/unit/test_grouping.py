"""Which tensors travel together, and in which order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dear.algorithms.synchronous.dear import Dear
from dear.buckets.grouping import (
    RunOrder,
    by_count,
    by_ramp,
    by_threshold,
    by_wait,
    fuse,
    group,
    launch_order,
    layers,
)

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
def test_grouping_keeps_order_and_covers_every_item_once(sizes, threshold):
    groups = by_threshold(sizes, threshold)
    assert [index for group in groups for index in group] == list(range(len(sizes)))


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(0, 120))
def test_joined_groups_stay_below_the_threshold_and_none_could_take_more(sizes, threshold):
    groups = by_threshold(sizes, threshold)
    totals = [sum(sizes[index] for index in group) for group in groups]
    for members, total in zip(groups, totals, strict=True):
        assert len(members) == 1 or total < threshold
    for total, following in zip(totals, groups[1:], strict=False):
        assert total + sizes[following[0]] >= threshold


def test_layers_lists_trained_parameters_by_owner_in_registration_order():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 4, bias=False)))
    first, second = model[0], model[2][0]
    wanted = [[first.weight, first.bias], [second.weight]]
    assert same(layers(model, list(model.parameters())), wanted)


def test_layers_gives_a_shared_parameter_to_its_first_owner_only():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    wanted = [[model[0].weight, model[0].bias], [model[1].bias]]
    assert same(layers(model, list(model.parameters())), wanted)


def test_fuse_counts_bytes():
    units = [params(2), params(2), params(2)]  # 8 bytes each
    assert same(fuse(units, 17), [[units[0][0], units[1][0]], [units[2][0]]])
    assert same(fuse(units, 16), units)


def test_fuse_never_mixes_dtypes():
    single, double = params(1, 1), params(1, 1, dtype=torch.float64)
    units = [[single[0], double[0]], [double[1]], [single[1]]]
    groups = fuse(units, 1e9)
    assert same(groups, [[single[0]], double, [single[1]]])


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


def test_groups_follow_the_order_in_which_gradients_arrive():
    model = _layers(4)
    params = list(model.parameters())
    order = _order([2, 0, 3, 1], [1, 3, 0, 2])  # runs 2, 0, 3, 1; registered 0, 1, 2, 3
    groups = group(model, params, order, Dear.Options(fusion="nearby_layers", nearby_layers=2))
    assert _named(model, groups) == [[2, 0], [3, 1]]
    assert launch_order(groups, params, order) == [1, 0]


def test_parameters_without_a_gradient_hold_up_nobody():
    model = _layers(4)
    params = list(model.parameters())
    order = _order([0, 1, 2, 3], [3, 0])
    groups = group(model, params, order, Dear.Options(threshold_mb=1e3, first_mb=None))
    assert _named(model, groups) == [[0, 3], [1, 2]]
    assert launch_order(groups, params, order) == [0, 1]


def test_dtypes_are_never_mixed_and_do_not_cut_each_others_groups():
    model = nn.Sequential(*_layers(2), *_layers(2, torch.float64), *_layers(2))
    params = list(model.parameters())
    order = _order(list(range(6)), list(range(5, -1, -1)))
    groups = group(model, params, order, Dear.Options(threshold_mb=1e3, first_mb=None))
    assert _named(model, groups) == [[0, 1, 4, 5], [2, 3]]
