"""Grouping of tensors, and the flat buffers of the groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dear.buckets.grouping import FlatBuffer, by_threshold, fuse, layers, padded

SIZES = st.lists(st.integers(0, 50), max_size=30)


def params(*numels, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels]


def same(left, right):
    """The same parameter objects in the same groups; == would compare their values."""
    return [[id(p) for p in group] for group in left] == [[id(p) for p in g] for g in right]


def test_threshold_is_strict_as_in_the_worked_example():
    sizes = [10, 10, 4, 30, 2, 24, 1]
    assert by_threshold(sizes, 25) == [[0, 1, 2], [3], [4], [5], [6]]


def test_a_group_takes_its_first_item_whatever_its_size():
    assert by_threshold([99, 1], 10) == [[0], [1]]
    assert by_threshold([1, 1], 0) == [[0], [1]]
    assert by_threshold([], 10) == []


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
    for group, total in zip(groups, totals, strict=True):
        assert len(group) == 1 or total < threshold
    for total, following in zip(totals, groups[1:], strict=False):
        assert total + sizes[following[0]] >= threshold


@pytest.mark.parametrize(("numel", "wanted"), [(15, 16), (16, 16), (17, 20), (0, 0), (1, 4)])
def test_padding_to_four_ranks(numel, wanted):
    assert padded(numel, 4) == wanted


@given(st.integers(0, 10**9), st.integers(1, 1000))
def test_padding_is_the_least_multiple_that_holds_all(numel, world_size):
    size = padded(numel, world_size)
    assert size % world_size == 0
    assert numel <= size < numel + world_size


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


def test_layers_leaves_out_what_is_not_trained():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    wanted = [[model[1].weight], [model[2].weight, model[2].bias]]
    assert same(layers(model, trained), wanted)


def test_fuse_counts_bytes():
    units = [params(2), params(2), params(2)]  # 8 bytes each
    assert same(fuse(units, 17), [[units[0][0], units[1][0]], [units[2][0]]])
    assert same(fuse(units, 16), units)


def test_fuse_does_not_split_a_unit():
    unit = params(10, 10)
    assert same(fuse([unit], 8), [unit])


def test_fuse_never_mixes_dtypes():
    single, double = params(1, 1), params(1, 1, dtype=torch.float64)
    units = [[single[0], double[0]], [double[1]], [single[1]]]
    groups = fuse(units, 1e9)
    assert same(groups, [[single[0]], double, [single[1]]])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=1, max_size=3)))
def test_fuse_covers_every_parameter_once_and_one_dtype_per_group(kinds):
    units = [[params(1, dtype=kind)[0] for kind in unit] for unit in kinds]
    groups = fuse(units, 9)
    assert all(len({param.dtype for param in group}) == 1 for group in groups)
    found = sorted(id(param) for group in groups for param in group)
    assert found == sorted(id(param) for unit in units for param in unit)


def test_flat_buffer_returns_what_was_packed():
    one, two, three = nn.Parameter(torch.zeros(2, 3)), *params(4, 1)
    one.grad, three.grad = torch.arange(6.0).view(2, 3), torch.tensor([7.0])
    buffer = FlatBuffer([one, two, three], world_size=4)
    buffer.pack()
    (first, got_one), (_, got_two), (_, got_three) = buffer.gradients()
    assert first is one
    assert torch.equal(got_one, one.grad)
    assert got_two is None
    assert torch.equal(got_three, three.grad)


def test_flat_buffer_is_gradients_then_marks_then_zeros():
    one, two = params(2, 3)
    one.grad = torch.tensor([5.0, 6.0])
    buffer = FlatBuffer([one, two], world_size=4)
    buffer.pack()
    assert buffer.data.tolist() == [5, 6, 0, 0, 0, 1, 0, 0]


def test_flat_buffer_forgets_the_gradients_of_the_last_step():
    one, two = params(2, 2)
    one.grad, two.grad = torch.ones(2), torch.ones(2)
    buffer = FlatBuffer([one, two], world_size=1)
    buffer.pack()
    one.grad = None
    buffer.pack()
    assert buffer.data.tolist() == [0, 0, 1, 1, 0, 1]
    assert buffer.gradients()[0][1] is None


def test_flat_buffer_counts_a_gradient_that_any_rank_has():
    def packed(grad):
        (param,) = params(2)
        param.grad = grad
        buffer = FlatBuffer([param], world_size=2)
        buffer.pack()
        return buffer

    ours, theirs = packed(None), packed(torch.tensor([2.0, 4.0]))
    ours.data.add_(theirs.data).div_(2)  # what a mean over two ranks leaves on each
    assert ours.gradients()[0][1].tolist() == [1.0, 2.0]


def test_flat_buffer_keeps_the_dtype():
    (param,) = params(3, dtype=torch.bfloat16)
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    buffer = FlatBuffer([param], world_size=2)
    buffer.pack()
    assert buffer.data.dtype == torch.bfloat16
    assert buffer.gradients()[0][1].tolist() == [1, 1, 1]
