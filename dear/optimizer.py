"""`DistributedOptimizer`: any algorithm behind the one call that Horovod users know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dear.comm import runtime
from dear.errors import UserError
from dear.references import resolved
from dear.training.algorithm import algorithm_class, algorithm_options


def DistributedOptimizer(  # noqa: N802 (the name that users of Horovod and DeAR know)
    optimizer: Optimizer,
    model: torch.nn.Module,
    algorithm: str = "dear",
    **options: Any,
) -> Optimizer:
    """Makes `optimizer` and `model` train with `algorithm`; the training loop stays as it is.

    Args:
        optimizer: any torch optimizer over parameters of `model`; it is changed in place.
        model: the replica on this rank, on its device already; it is changed in place.
        algorithm: a name from `python benchmarks.py list`, or one of `dear.references.ALIASES`.
        options: the algorithm's own options, e.g. `threshold_mb=25.0` for `dear`. The names that
            DeAR's first implementation had are understood too: `threshold` (MB of 2^20 bytes; None
            for fusion by layers), `num_nearby_layers`, and texts for `exclude_parts`.

    Returns:
        The same optimizer, with `synchronize()`, `no_sync()` and `close()` besides.

    Raises:
        UserError: an unknown algorithm or option, or a model it cannot train.
        Unavailable: a library that the algorithm needs is not installed.
    """
    algorithm, options = resolved(algorithm, _translated(options))
    chosen = algorithm_options(algorithm, options)
    wrapped = algorithm_class(algorithm)().wrap(model, optimizer, runtime.communicator(), chosen)
    return wrapped[1]


def _translated(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of DeAR's first implementation by the names that they have here."""
    result = dict(options)
    if "threshold" in result:
        threshold = result.pop("threshold")
        if "threshold_mb" in result:
            raise UserError("give threshold or threshold_mb, which mean the same, not both")
        if threshold is not None:
            result["threshold_mb"] = threshold
        else:
            result.setdefault("fusion", "nearby_layers")
    if "num_nearby_layers" in result:
        if "threshold_mb" in result or "nearby_layers" in result:
            raise UserError(
                "num_nearby_layers goes with threshold=None, and not with nearby_layers, which "
                "means the same"
            )
        result["nearby_layers"] = result.pop("num_nearby_layers")
        result.setdefault("fusion", "nearby_layers")
    if isinstance(result.get("exclude_parts"), str):
        parts = result["exclude_parts"].replace(",", " ")
        result["exclude_parts"] = tuple(parts.split())
    return result


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Copies rank `root_rank`'s tensors into everybody's, in place.

    Args:
        params: `model.state_dict()`, or `model.named_parameters()`.
    """
    communicator = runtime.communicator()
    items = params.items() if isinstance(params, Mapping) else params
    tensors = [value for _, value in items if torch.is_tensor(value)]
    with torch.no_grad():
        works = [
            communicator.broadcast(tensor.data, root=root_rank)
            for tensor in tensors
            if tensor.numel()
        ]
    for work in works:
        work.wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Gives everybody rank `root_rank`'s optimizer state and hyper-parameters."""
    communicator = runtime.communicator()
    state = optimizer.state_dict()
    optimizer.load_state_dict(communicator.broadcast_object(state, root=root_rank))


def allreduce(tensor: torch.Tensor, average: bool = True) -> torch.Tensor:
    """The mean (or sum) of `tensor` over all ranks, as a new tensor; blocking."""
    result = tensor.detach().clone()
    runtime.communicator().all_reduce(result, op="mean" if average else "sum").wait()
    return result
