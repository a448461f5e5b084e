"""Flat memory of parameters and gradients: what gets in and out, and what is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dear.buckets.flat import Bucket


def params(*numels, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels]


def adopting(*numels):
    own = params(*numels)
    total = sum(numels)
    return own, Bucket(own, values=torch.zeros(total), gradients=torch.zeros(total))


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
