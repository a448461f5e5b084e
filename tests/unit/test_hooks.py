"""Tests of hooks: which modules read which parameters, and when gradients arrive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dear.training.hooks import ReaderMap
from dear.training.tuning import LayerTimes


class Slow(torch.autograd.Function):
    """Takes some seconds of a clock, forward and backward."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock[0] += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock[0] += ctx.backward_s
        return gradient, None, None, None


def test_gradients_arrive_as_in_the_faster_of_two_passes():
    first, unused = (nn.Linear(2, 2, bias=False) for _ in range(2))
    model, clock = nn.ModuleList([first, unused, nn.Linear(2, 2)]), [0.0]
    run = SimpleNamespace(clock=lambda: clock[0])

    def forward(speed):
        x = Slow.apply(first(torch.ones(1, 2)), clock, 1.0, 3.0 * speed)
        return Slow.apply(model[2](x), clock, 2.0, 5.0 * speed)

    model.forward = forward
    times = LayerTimes(model, list(model.parameters()), run)
    for speed in (2.0, 1.0):
        clock[0] += 100
        model(speed).sum().backward()
    profile = times.stop()
    # first, unused, last.weight, last.bias
    assert sorted(profile.order[:2]) == [2, 3]
    assert profile.order[2:] == [0, 1]
    assert profile.arrivals_s == pytest.approx([5, 5, 8, 8])
    assert (profile.forward_s, profile.backward_s) == pytest.approx((3, 8))


class Asking(nn.Sequential):
    """Looks at all its parameters, last first, before it runs them; reads values of one only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            assert layer.weight.requires_grad and layer.weight.shape == layer.weight.size()
            torch.empty_like(layer.weight)
        return super().forward(x + self[2].weight.data.sum())


def test_looking_at_a_parameter_is_not_reading_it():
    model = Asking(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    readers = ReaderMap(model, list(model.parameters()))
    model(torch.ones(1, 2))
    readers.set_groups([[param] for param in model.parameters()])
    readers.freeze()
    assert readers.groups_of(model) == {2}
    assert [readers.groups_of(layer) for layer in model] == [{0}, {1}, {2}, {3}]
    places = {param: i for i, param in enumerate(model.parameters())}
    assert [places[param] for param in readers.order()] == [2, 0, 1, 3]


class Judged(nn.Sequential):
    """Training runs the first layer only, evaluation both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x) if self.training else self[1](self[0](x))


def test_a_module_that_runs_in_an_evaluation_first_stands_for_itself_then():
    model = Judged(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    readers = ReaderMap(model, list(model.parameters()))
    model(torch.ones(1, 2))
    readers.set_groups([[param] for param in model.parameters()])
    readers.freeze()
    assert readers.groups_of(model) == {1}
    model.eval()
    assert readers.due(model[1], {0, 1}) == [0, 1], "what an evaluation reads is not known"
    assert (readers.groups_of(model), readers.groups_of(model[1])) == (set(), {1})
