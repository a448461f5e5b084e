"""A training script of four layers, whose moments and values a `Network` knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dear.comm import runtime
from dear.training.hooks import at_end_of_backward
from tests.contract.network import GRADIENT, PARAMETER, SIZES, Network

LAYER_S = 1e-3
"""Seconds of a layer's pass."""


class Layer(nn.Module):
    """One parameter, whose gradient is a constant, known one; it tells when it runs."""

    def __init__(self, network: Network, number: int) -> None:
        super().__init__()
        self._network, self._number = network, number
        self.weight = nn.Parameter(torch.full((SIZES[number],), PARAMETER[number]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        network, number = self._network, self._number
        network.compute(LAYER_S)
        scaled = self.weight * GRADIENT[number]
        if scaled.requires_grad:
            scaled.register_hook(self._gradient)
        # What comes from now on comes before the next layer.
        network.place = ("layer", number + 1) if number + 1 < len(SIZES) else ("", None)
        return x + scaled.sum()

    def _gradient(self, _: torch.Tensor) -> None:
        """Logs that the gradient comes next; the hooks of algorithms run after this one."""
        network = self._network
        if network.place[0] != "gradient":
            at_end_of_backward(self._passed)
        network.compute(LAYER_S)
        network.place = ("gradient", self._number)

    def _passed(self) -> None:
        self._network.place = ("pass", None)


class Program:
    """A training script whose steps are logged in `network.log`, with their numbers."""

    def __init__(self, algorithm: Any, options: Any, network: Network) -> None:
        self.network = network
        self.model = nn.Sequential(*(Layer(network, i) for i in range(len(SIZES))))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        algorithm.wrap(self.model, self.optimizer, runtime.communicator(), options)

    def backward(self) -> None:
        network = self.network
        network.place = ("model", None)
        loss = self.model(torch.zeros(()))
        network.place = ("backward", None)
        loss.backward()
        network.place = ("", None)

    def update(self) -> None:
        network = self.network
        network.place = ("step", None)
        self.optimizer.step()
        network.place = ("", None)

    def train(self, steps: int, *, paused: bool = False, after: Callable[[], Any] = int) -> None:
        """Steps as scripts make them; `paused`: of two backward passes, the first in `no_sync()`.

        Args:
            after: called when a step has ended.
        """
        for _ in range(steps):
            self.optimizer.zero_grad()
            if paused:
                with self.optimizer.no_sync():
                    self.backward()
            self.backward()
            self.update()
            after()
            self.network.step += 1
