"""Which layers travel together, in which order, and in which memory."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dear.buckets.grouping import by_count, by_ramp, by_threshold, by_wait
from dear.buckets.run_order import Fusion, RunOrder, group, launch_order
from dear.training.readers import ReaderMap

SIZES = st.lists(st.integers(0, 50), max_size=40)


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


def test_layers_of_one_cycle_stay_together_after_a_long_pause():
    assert by_wait([0.0, 0.023, 0.024], 0.005) == [[0], [1, 2]]


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


@given(SIZES, st.integers(1, 120))
def test_a_ramp_that_begins_at_the_threshold_is_none(sizes, threshold):
    assert by_ramp(sizes, threshold, threshold) == by_threshold(sizes, threshold)


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
    groups = group(model, params, order, Fusion(rule="nearby_layers", nearby=2))
    assert _named(model, groups) == [[2, 0], [3, 1]]
    assert launch_order(groups, params, order) == [1, 0]


def test_parameters_without_a_gradient_hold_up_nobody():
    model = _layers(4)
    params = list(model.parameters())
    order = _order([0, 1, 2, 3], [3, 0])
    groups = group(model, params, order, Fusion(rule="threshold", threshold=1e9))
    assert _named(model, groups) == [[0, 3], [1, 2]]
    assert launch_order(groups, params, order) == [0, 1]


def test_dtypes_are_never_mixed_and_do_not_cut_each_others_groups():
    model = nn.Sequential(*_layers(2), *_layers(2, torch.float64), *_layers(2))
    params = list(model.parameters())
    order = _order(list(range(6)), list(range(5, -1, -1)))
    groups = group(model, params, order, Fusion(rule="threshold", threshold=1e9))
    assert _named(model, groups) == [[0, 1, 4, 5], [2, 3]]


def test_without_fusion_every_tensor_is_a_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params = list(model.parameters())
    groups = group(model, params, _order([0, 1, 2, 3], [3, 2, 1, 0]), Fusion(rule="none"))
    assert [len(members) for members in groups] == [1, 1, 1, 1]


class Asking(nn.Sequential):
    """Looks at all its parameters, last first, before it runs them; reads values of one only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            assert layer.weight.requires_grad and layer.weight.shape == layer.weight.size()
            torch.empty_like(layer.weight)
        return super().forward(x + self[2].weight.data.sum())


def test_looking_at_a_parameter_is_not_reading_it():
    model = Asking(*_layers(4))
    readers = ReaderMap(model, list(model.parameters()))
    model(torch.ones(1, 2))
    readers.set_groups([[param] for param in model.parameters()])
    readers.freeze()
    assert readers.groups_of(model) == {2}
    assert [readers.groups_of(layer) for layer in model] == [{0}, {1}, {2}, {3}]
    places = {param: i for i, param in enumerate(model.parameters())}
    assert [places[param] for param in readers.order()] == [2, 0, 1, 3]
