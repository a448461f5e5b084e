"""What hooks see of a model: which modules read which parameters, and when gradients arrive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dear.training.hooks import ReaderMap
from dear.training.tuning import LayerTimes


class Clock:
    """Shows what it has been told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    """Takes some seconds of the clock, forward and backward."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward_s
        return gradient, None, None, None


class Model(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.first = nn.Linear(2, 2, bias=False)
        self.unused = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, speed: float) -> torch.Tensor:
        x = Slow.apply(self.first(x), self.clock, 1.0, 3.0 * speed)
        return Slow.apply(self.second(x), self.clock, 2.0, 5.0 * speed)


def watched():
    clock = Clock()
    model = Model(clock)
    params = list(model.parameters())
    return model, clock, LayerTimes(model, params, SimpleNamespace(clock=clock))


def one_pass(model, speed=1.0):
    model(torch.ones(1, 2), speed).sum().backward()


def test_times_are_of_the_faster_of_two_passes():
    model, clock, times = watched()
    one_pass(model, speed=2.0)
    clock.now += 100
    one_pass(model)
    profile = times.stop()
    # first, unused, second.weight, second.bias
    assert sorted(profile.order[:2]) == [2, 3]
    assert profile.order[2:] == [0, 1]
    assert profile.arrivals_s == pytest.approx([5, 5, 8, 8])
    assert profile.forward_s == pytest.approx(3)
    assert profile.backward_s == pytest.approx(8)


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
