"""Which modules read which parameters."""

from __future__ import annotations

import torch
from torch import nn

from dear.training.hooks import ReaderMap


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
