"""Rank r of two has the gradient (3, r + 1); prints what Horovod's Adasum and its mean make of it.

`mpirun -np 2 python -m tests.contract.adasum_program`: Horovod has it over MPI only.
"""

from __future__ import annotations

import json

import torch
from torch import nn

import dear


class Given(nn.Module):
    """Function whose gradient is its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def averaged(adasum: bool) -> list[float]:
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"controller": "mpi", "adasum": adasum}
    dear.DistributedOptimizer(optimizer, model, algorithm="horovod", **settings)
    model(torch.tensor([3.0, dear.rank() + 1.0])).backward()
    optimizer.step()
    return model.weight.neg().tolist()


def main() -> None:
    dear.init()
    results = {"adasum": averaged(True), "mean": averaged(False)}
    if dear.rank() == 0:
        print(json.dumps(results))
    dear.shutdown()


if __name__ == "__main__":
    main()
