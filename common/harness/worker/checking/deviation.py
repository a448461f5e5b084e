"""Deviation of tensors from their correct values, and of replicas from each other."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch

from common.models.registry import precision
from dear.comm.communicator import Communicator

State = Mapping[str, torch.Tensor]

APART = ("decentralized", "asynchronous")
"""Consistencies (promises of algorithms) that allow replicas to differ."""
CONSENSUS_LIMIT = 1.0
"""Allowed distance of a replica from the mean of all, relative to the norm of the mean."""
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Error of the worst tensor, relative to how far the tensor should have moved."""

    error: float = 0.0
    tensor: str | None = None


class Agreement(TypedDict, total=False):
    """Fields of `Check` that compare replicas."""

    replicas_agree: bool
    replica_spread: float
    consensus_distance: float | None


def worst_deviation(errors: Mapping[str, float], moved: Mapping[str, float]) -> Deviation:
    """Returns the tensor of `moved` with the largest ratio of error to movement."""
    worst = Deviation()
    for name, way in moved.items():
        off = errors[name]
        error = off / way if way else math.inf if off else 0.0
        error = error if math.isfinite(error) else math.inf
        if error > worst.error:
            worst = Deviation(error=error, tensor=name)
    return worst


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a copy of the model's state."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def rounding(dtype: str, steps: float | np.ndarray, *, mixed: bool = False) -> Any:
    """Returns a bound of the rounding error after some steps, relative to a tensor's norm.

    Errors have both signs, so they grow with the root of the number of steps.

    Args:
        mixed: True if parameters are averaged in each step. Each average rounds several times, and
            exact diffusion keeps all these errors, so they grow linearly with the steps.
    """
    eps = torch.finfo(precision(dtype)[0]).eps
    return 4 * eps * np.maximum(steps, 1) ** (1.0 if mixed else 0.5)


def movements(state: State, start: State, names: Iterable[str], least: float) -> dict[str, float]:
    """Returns the norm of each tensor's movement from `start` to `state`.

    Args:
        least: smallest movement that is returned, relative to the tensor's norm. Otherwise, the
            rounding of a tensor that hardly moves would be an error.
    """
    return {
        name: max(
            distance(state[name], start[name]),
            least * state[name].double().norm().item(),
        )
        for name in names
    }


def distances(state: State, wanted: State, names: Iterable[str]) -> dict[str, float]:
    """Returns the norm of each tensor's difference from its correct value, `wanted`."""
    return {name: distance(state[name], wanted[name]) for name in names}


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Returns the norm of the difference."""
    return _squared_distance(first, second) ** 0.5


def _squared_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    # A large parameter in float64 would need three times its memory, so it is converted in parts.
    pieces = zip(first.flatten().split(_PIECE), second.flatten().split(_PIECE), strict=True)
    return sum((a - b).double().norm().item() ** 2 for a, b in pieces)


def replica_spread(model: torch.nn.Module, communicator: Communicator) -> float:
    """Returns the largest difference of any parameter element between ranks.

    The result is infinite if a parameter is not finite. Ranks first compare digests; if these are
    equal, nothing else is sent.
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
    """Returns a digest of the bits of all parameters; None if one is not finite."""
    digest = hashlib.sha256()
    for param in model.parameters():
        value = param.detach()
        if not torch.isfinite(value).all():
            return None
        for piece in value.flatten().split(_PIECE):
            # FSDP resizes parameters, which torch refuses once numpy has seen their memory.
            copy = torch.empty_like(piece, device="cpu").copy_(piece)
            digest.update(copy.view(torch.uint8).numpy())
    return digest.digest()


def agreement(model: torch.nn.Module, consistency: str, communicator: Communicator) -> Agreement:
    """Compares replicas, and returns how far they agree with the promised consistency."""
    spread = replica_spread(model, communicator)
    agree, apart = spread == 0.0, None
    if consistency in APART:
        apart = consensus_distance(model, communicator)
        agree = apart <= CONSENSUS_LIMIT
    return {"replicas_agree": agree, "replica_spread": spread, "consensus_distance": apart}


def consensus_distance(model: torch.nn.Module, communicator: Communicator) -> float:
    """Returns the largest distance of a rank from the mean, relative to the norm of the mean.

    The result is infinite if a parameter is not finite.
    """
    off = norm = 0.0
    for param in model.parameters():
        mean = param.detach().clone()
        communicator.all_reduce(mean, op="mean").wait()
        off += _squared_distance(param.detach(), mean)
        norm += mean.double().norm().item() ** 2
    far = (off / norm) ** 0.5 if norm else 0.0
    return max(communicator.gather_objects(far if math.isfinite(far) else math.inf))
