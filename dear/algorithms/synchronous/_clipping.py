"""Clips by global norm where each rank has the mean gradient of its part only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dear.buckets.halves import AllReduced
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.algorithms.synchronous._dear_groups import Groups
    from dear.buckets.halves import Decoupled
    from dear.comm.communicator import Communicator


def clip_shards(
    groups: Groups,
    communicator: Communicator,
    unused: set[Parameter],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scales the shards so that all of them together have at most `max_norm`.

    Communicates one number, where `torch.nn.utils.clip_grad_norm_` would need whole gradients.

    Returns:
        The norm before, the same on all ranks.
    """
    for part in groups.parts:
        part.finish_reduce()
    update: Any = groups.update
    mine = [
        segment.gradient
        for part, segments in zip(groups.parts, update.update.segments, strict=True)
        for segment in segments
        if segment.param not in unused and _counts(part, communicator)
    ]
    device = groups.parts[0].shard.device
    norms = [torch.linalg.vector_norm(gradient, norm_type).to(device) for gradient in mine]
    own = torch.stack([norm.double() for norm in norms]) if norms else torch.zeros(1).double()
    own = torch.linalg.vector_norm(own, norm_type).to(device)
    if norm_type == math.inf:
        communicator.all_reduce(own, op="max").wait()
        total = own
    else:
        total = own.pow_(norm_type)
        communicator.all_reduce(total, op="sum").wait()
        total = total ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in groups.parts:
        part.shard.mul_(scale.to(part.shard.device, part.shard.real.dtype))
    return total.to(groups.parts[0].shard.real.dtype)


def _counts(part: Decoupled, communicator: Communicator) -> bool:
    # What all ranks have is counted by one of them.
    return communicator.rank == 0 or not isinstance(part, AllReduced)
