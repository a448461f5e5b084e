"""Flat memory of parameters and gradients: what gets in and out, and what is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dear.buckets.flat import Bucket, packed_bucket


def params(*numels, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels]


def adopting(*numels):
    own = params(*numels)
    total = sum(numels)
    return own, Bucket(own, values=torch.zeros(total), gradients=torch.zeros(total))


def test_packed_bucket_returns_what_was_packed():
    one, two, three = nn.Parameter(torch.zeros(2, 3)), *params(4, 1)
    one.grad, three.grad = torch.arange(6.0).view(2, 3), torch.tensor([7.0])
    bucket = packed_bucket([one, two, three], world_size=4)
    bucket.pack()
    means = bucket.means()
    assert torch.equal(means[one], one.grad)
    assert means[two] is None
    assert torch.equal(means[three], three.grad)


def test_packed_bucket_is_gradients_then_marks_then_zeros():
    one, two = params(2, 3)
    one.grad = torch.tensor([5.0, 6.0])
    bucket = packed_bucket([one, two], world_size=4)
    bucket.pack()
    assert bucket.gradients.tolist() == [5, 6, 0, 0, 0, 1, 0, 0]


def test_packed_bucket_forgets_the_gradients_of_the_last_step():
    one, two = params(2, 2)
    one.grad, two.grad = torch.ones(2), torch.ones(2)
    bucket = packed_bucket([one, two], world_size=1)
    bucket.pack()
    one.grad = None
    bucket.pack()
    assert bucket.gradients.tolist() == [0, 0, 1, 1, 0, 1]
    assert bucket.means()[one] is None


def test_packed_bucket_counts_a_gradient_that_any_rank_has():
    def packed(grad):
        (param,) = params(2)
        param.grad = grad
        bucket = packed_bucket([param], world_size=2)
        bucket.pack()
        return bucket

    ours, theirs = packed(None), packed(torch.tensor([2.0, 4.0]))
    ours.gradients.add_(theirs.gradients).div_(2)  # what a mean over two ranks leaves on each
    assert ours.means()[ours.params[0]].tolist() == [1.0, 2.0]


def test_packed_bucket_keeps_the_dtype():
    (param,) = params(3, dtype=torch.bfloat16)
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    bucket = packed_bucket([param], world_size=2)
    bucket.pack()
    assert bucket.gradients.dtype == torch.bfloat16
    assert bucket.means()[param].tolist() == [1, 1, 1]


def test_what_is_packed_may_be_divided():
    (param,) = params(2)
    param.grad = torch.tensor([3.0, 6.0])
    bucket = packed_bucket([param], world_size=1)
    bucket.pack(3)
    assert bucket.gradients.tolist() == [1, 2, 1]
    assert param.grad.tolist() == [3, 6]


def test_values_and_gradients_are_views_in_the_memory_order_of_the_parameter():
    param = nn.Parameter(torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last))
    param.grad = torch.rand_like(param)
    values, gradient = param.detach().clone(), param.grad.clone()
    bucket = Bucket([param], values=torch.zeros(24), gradients=torch.zeros(24))
    assert torch.equal(param, values) and torch.equal(param.grad, gradient)
    assert param.stride() == param.grad.stride() == values.stride()
    bucket.values.zero_()
    bucket.gradients.zero_()
    assert not param.any() and not param.grad.any()


def test_released_parameters_have_memory_of_their_own():
    (one, two), bucket = adopting(2, 3)
    one.grad = torch.ones(2)
    bucket.adopt()
    bucket.release()
    bucket.values.fill_(9)
    bucket.gradients.fill_(9)
    assert one.grad.tolist() == [1, 1]
    assert two.tolist() == [0, 0, 0]


@pytest.mark.parametrize("flat", [True, False])
def test_it_notices_gradients_that_were_written_to_replaced_or_dropped(flat):
    own, bucket = adopting(2, 3)
    if not flat:
        bucket = Bucket(own)
    changes = (
        lambda param: param.grad.mul_(2),
        lambda param: setattr(param, "grad", param.grad.clone()),
        lambda param: setattr(param, "grad", None),
    )
    for change in changes:
        for param in own:
            param.grad = torch.ones_like(param)
        if flat:
            bucket.adopt()
        bucket.note()
        assert bucket.changed() is None
        change(own[1])
        assert bucket.changed() is not None
        bucket.forget()
        assert bucket.changed() is None


def test_it_notices_a_gradient_that_came_later():
    own, bucket = adopting(2, 3)
    own[0].grad = torch.ones(2)
    bucket.adopt()
    bucket.note()
    own[1].grad = torch.ones(3)
    assert bucket.changed() is own[1]


def test_it_notices_a_scale_that_version_counters_do_not():
    (param,), bucket = adopting(4)
    param.grad = torch.ones(4)
    bucket.adopt()
    bucket.note()
    assert not bucket.scaled_in_place()
    param.grad.data.mul_(0.5)
    assert bucket.changed() is None
    assert bucket.scaled_in_place()


def test_parameters_are_taken_back_unless_they_are_of_another_kind():
    (param,), bucket = adopting(3)
    assert bucket.reclaim()
    param.data = torch.tensor([1.0, 2.0, 3.0])
    assert bucket.reclaim()
    assert bucket.values.tolist() == [1, 2, 3]
    param.data = param.data.double()
    assert not bucket.reclaim()


@pytest.mark.parametrize("viewed", [True, False])
def test_parameters_become_what_others_sent(viewed):
    own = params(2, 1)
    bucket = Bucket(own, values=torch.zeros(3), spare=torch.zeros(3), viewed=viewed)
    bucket.spare.copy_(torch.tensor([1.0, 2.0, 3.0]))
    with torch.no_grad():
        bucket.take_spare()
    assert [param.tolist() for param in own] == [[1, 2], [3]]
    assert bucket.spare.tolist() == [0, 0, 0]
    with torch.no_grad():
        own[0].fill_(7)
        bucket.pull()
    assert bucket.values.tolist() == [7, 7, 3]
