"""Is it still the right training: a plain reference to compare with, and agreement of replicas."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.models.registry import precision
from dear.comm.communicator import Communicator


@dataclass(frozen=True, kw_only=True)
class Farthest:
    """The tensor that is farthest off, relative to how far it should have moved."""

    error: float = 0.0
    tensor: str | None = None


APART = ("decentralized", "asynchronous")
"""Promises under which replicas differ."""
# Largest distance of a replica to the mean of all, relative to the norm of the mean.
CONSENSUS_LIMIT = 1.0
_PIECE = 1 << 20


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the model's state."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def rounding(dtype: str, steps: Any, *, mixed: bool = False) -> Any:
    """Relative to a tensor's norm, what its rounding may add up to in so many steps (or arrays of
    them): errors of both signs, to the root of their number.

    Args:
        mixed: parameters are averaged in each step. That rounds several times, and in exact
            diffusion nothing forgets it: up to their number.
    """
    count = np.maximum(steps, 1)
    return 4 * torch.finfo(precision(dtype)[0]).eps * (count if mixed else np.sqrt(count))


def ways(
    state: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
    names: Iterable[str],
    least: float,
) -> dict[str, float]:
    """How far each of the tensors `names` has moved: the norm of its difference.

    Args:
        least: at least so many times its own norm. A tensor that hardly moves differs by rounding,
            which is no error.
    """
    return {
        name: max(
            distance(state[name], start[name]),
            least * state[name].double().norm().item(),
        )
        for name in names
    }


def farthest(
    state: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    ways: Mapping[str, float],
) -> Farthest:
    """The worst of the tensors of `ways`: norm of `state - wanted` relative to its way."""
    worst = Farthest()
    for name, way in ways.items():
        off = distance(state[name], wanted[name])
        error = off / way if way else float("inf") if off else 0.0
        error = error if math.isfinite(error) else math.inf
        if error > worst.error:
            worst = Farthest(error=error, tensor=name)
    return worst


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference."""
    return _squared_distance(one, other) ** 0.5


def _squared_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    # In pieces: in float64 a large parameter would take three times its memory.
    pieces = zip(one.flatten().split(_PIECE), other.flatten().split(_PIECE), strict=True)
    return sum((a - b).double().norm().item() ** 2 for a, b in pieces)


def replica_spread(model: torch.nn.Module, communicator: Communicator) -> float:
    """Largest difference of any parameter element between ranks; 0 if they agree.

    Infinite if a parameter is not finite: training has diverged, and nothing can be compared. Most
    replicas agree to the bit: then their digests tell, and nothing large travels.
    """
    digests = communicator.gather_objects(_digest(model))
    if None not in digests and len(set(digests)) == 1:
        return 0.0
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


def _digest(model: torch.nn.Module) -> bytes | None:
    """Of the bits of all parameters; None where one is not finite."""
    digest = hashlib.sha256()
    for param in model.parameters():
        value = param.detach()
        if not torch.isfinite(value).all():
            return None
        for piece in value.flatten().split(_PIECE):
            # A copy: what numpy has seen can no longer be resized, which FSDP does.
            copy = torch.empty_like(piece, device="cpu").copy_(piece)
            digest.update(copy.view(torch.uint8).numpy())
    return digest.digest()


def agreement(
    model: torch.nn.Module, consistency: str, communicator: Communicator
) -> dict[str, Any]:
    """Whether replicas are as near to each other as the algorithm promises: fields of `Check`."""
    spread = replica_spread(model, communicator)
    agree, apart = spread == 0.0, None
    if consistency in APART:
        apart = consensus_distance(model, communicator)
        agree = apart <= CONSENSUS_LIMIT
    return {"replicas_agree": agree, "replica_spread": spread, "consensus_distance": apart}


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
