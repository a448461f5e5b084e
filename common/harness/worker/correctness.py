"""Is it still the right training: a plain reference to compare with, and agreement of replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from dear.comm.communicator import Communicator

# Largest difference to plain training, relative to how far training moved the parameters. A lost
# or doubled step gives about 1; rounding, magnified by a few steps, stays far below.
TOLERANCE = {"float32": 0.02, "float64": 1e-6, "bfloat16": 0.2}
# The same for the mean of replicas that are meant to differ. Their gradients are those of other
# points, and stale in asynchronous training: this only says that it moved to about where plain
# training went, rather than not at all, which is 1. Tests compare the algorithms with their
# equations.
MEAN_TOLERANCE = {"decentralized": 0.75, "asynchronous": 0.95}
# Largest distance of a replica to the mean of all, relative to the norm of the mean.
CONSENSUS_LIMIT = 1.0
_PIECE = 1 << 20


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the model's state."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def distance(
    state: Mapping[str, torch.Tensor] | Means,
    wanted: dict[str, torch.Tensor],
    start: dict[str, torch.Tensor],
    names: list[str],
) -> float:
    """Norm of `state - wanted` over norm of `wanted - start`, over the parameters `names`."""
    off = sum(_squared_distance(state[name], wanted[name]) for name in names)
    moved = sum(_squared_distance(wanted[name], start[name]) for name in names)
    return (off / moved) ** 0.5 if moved else float("inf") if off else 0.0


def _squared_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    # In pieces: in float64 a large parameter would take three times its memory.
    pieces = zip(one.flatten().split(_PIECE), other.flatten().split(_PIECE), strict=True)
    return sum((a - b).double().norm().item() ** 2 for a, b in pieces)


def replica_spread(model: torch.nn.Module, communicator: Communicator) -> float:
    """Largest difference of any parameter element between ranks; 0 if they agree.

    Infinite if a parameter is not finite: training has diverged, and nothing can be compared.
    """
    spread = 0.0
    for param in model.parameters():
        highest, lowest = param.detach().clone(), param.detach().clone()
        works = [
            communicator.all_reduce(highest, op="max"),
            communicator.all_reduce(lowest, op="min"),
        ]
        for work in works:
            work.wait()
        difference = (highest - lowest).abs().max().item()
        spread = max(spread, difference if math.isfinite(difference) else math.inf)
    return spread


class Means:
    """The tensors of a state averaged over the ranks, by name; all ranks ask for the same ones.

    Each is made when it is asked for: all together would be one more copy of the model.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], communicator: Communicator) -> None:
        self._state = state
        self._communicator = communicator

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._state[name].detach().clone()
        self._communicator.all_reduce(value, op="mean").wait()
        return value


def consensus_distance(model: torch.nn.Module, communicator: Communicator) -> float:
    """Of the rank that is farthest off: norm of its difference to the mean over norm of the mean.

    Infinite if a parameter is not finite.
    """
    off = norm = 0.0
    for name, param in model.named_parameters():
        mean = Means({name: param}, communicator)[name]
        off += _squared_distance(param.detach(), mean)
        norm += mean.double().norm().item() ** 2
    far = (off / norm) ** 0.5 if norm else 0.0
    return max(communicator.gather_objects(far if math.isfinite(far) else math.inf))
