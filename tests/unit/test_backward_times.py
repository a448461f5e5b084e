"""When gradients arrive, by the communicator's clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

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


class Broken(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("broken")


def test_a_pass_that_an_error_ended_does_not_count():
    model, _, times = watched()
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match="broken"):
        out = model.second(Broken.apply(model.first(x)))
        (model(x, 1.0) + out).sum().backward()
    one_pass(model)
    profile = times.stop()
    assert profile.backward_s == pytest.approx(8)
