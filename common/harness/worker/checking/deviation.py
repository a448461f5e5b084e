"""Deviation of tensors from their correct values, and of replicas from each other."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from common.models.registry import precision
from common.results.records.trust import Check
from dear.comm.communicator import Communicator

State = Mapping[str, torch.Tensor]
Digests = Mapping[str, bytes | None]
"""Digest of each tensor by its kind and name; None: it is not finite."""

APART = ("decentralized", "asynchronous")
"""Consistencies (promises of algorithms) that allow replicas to differ."""
CONSENSUS_LIMIT = 1.0
"""Allowed distance of a replica from the mean of all, relative to the norm of the mean."""
_PIECE = 1 << 20
_PARAMETER = "parameter "


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
    finding: str | None
    """Tensor that is not equal on all ranks; None if all are."""


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
    return _spread(model, communicator, communicator.gather_objects(_digests(model)))


def _spread(
    model: torch.nn.Module, communicator: Communicator, digests: Sequence[Digests]
) -> float:
    spread = 0.0
    for name, param in model.named_parameters():
        seen = {rank[_PARAMETER + name] for rank in digests}
        if None in seen:
            return math.inf
        if len(seen) == 1:
            continue
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


def _digests(model: torch.nn.Module) -> Digests:
    """Returns a digest of the bits of each tensor that must be equal on all ranks.

    These are the parameters and, of batch norm, the number of batches and the statistics if all
    ranks compute them together (`SyncBatchNorm`) or none does (in evaluation mode).
    """
    digests = {_PARAMETER + name: _digest(param) for name, param in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            shared = isinstance(module, torch.nn.SyncBatchNorm) or not module.training
            for name, value in module.named_buffers(path, recurse=False):
                if shared or not value.is_floating_point():
                    digests[f"buffer {name}"] = _digest(value)
    return digests


def _digest(tensor: torch.Tensor) -> bytes | None:
    """Returns a digest of the tensor's bits; None if it is not finite."""
    value, digest = tensor.detach(), hashlib.sha256()
    if not torch.isfinite(value).all():
        return None
    for piece in value.flatten().split(_PIECE):
        # FSDP resizes parameters, which torch refuses once numpy has seen their memory.
        copy = torch.empty_like(piece, device="cpu").copy_(piece)
        digest.update(copy.view(torch.uint8).numpy())
    return digest.digest()[:16]


def _unlike(digests: Sequence[Digests]) -> str | None:
    """Returns which tensor is not equal on which rank, or not finite; None if all are equal."""
    wrong = []
    for name in digests[0]:
        values = [rank[name] for rank in digests]
        infinite = [rank for rank, value in enumerate(values) if value is None]
        usual, count = Counter(values).most_common(1)[0]
        others = ", ".join(str(rank) for rank, value in enumerate(values) if value != usual)
        if infinite:
            wrong.append(f"{name} is not finite on rank {', '.join(map(str, infinite))}")
        elif others and 2 * count > len(values):
            wrong.append(f"{name} of rank {others} differs from that of the other ranks")
        elif others:
            wrong.append(f"{name} differs between ranks")
    more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
    return wrong[0] + more if wrong else None


def agreement(model: torch.nn.Module, consistency: str, communicator: Communicator) -> Agreement:
    """Compares replicas, and returns how far they agree with the promised consistency."""
    digests = communicator.gather_objects(_digests(model))
    spread, apart, unlike = _spread(model, communicator, digests), None, None
    if consistency in APART:
        apart = consensus_distance(model, communicator)
        agree = apart <= CONSENSUS_LIMIT
    else:
        unlike = _unlike(digests)
        agree = unlike is None
    return {
        "replicas_agree": agree,
        "replica_spread": spread,
        "consensus_distance": apart,
        "finding": unlike,
    }


def with_agreement(check: Check, agreement: Agreement) -> Check:
    """Returns the check with the comparison of replicas; an error found before stays its text."""
    finding = agreement["finding"] or check.finding
    if check.matches_reference is False:
        finding = check.finding or finding
    return dataclasses.replace(check, **{**agreement, "finding": finding})


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
