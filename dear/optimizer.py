"""`DistributedOptimizer`: any algorithm behind the one call that Horovod users know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dear.algorithms.aliases import arguments
from dear.comm import runtime
from dear.errors import UserError
from dear.options import positive
from dear.training.algorithm import algorithm_class, algorithm_options
from dear.training.hooks import Hooks


def DistributedOptimizer(  # noqa: N802 (the name that users of Horovod and DeAR know)
    optimizer: Optimizer,
    model: torch.nn.Module | None = None,
    algorithm: str | None = None,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    norm_clip: float | None = None,
    **options: Any,
) -> Optimizer:
    """Makes `optimizer` and `model` train with `algorithm`; the training loop stays as it is.

    Args:
        optimizer: any torch optimizer over parameters of `model`; it is changed in place.
        model: the replica on this rank, on its device already; it is changed in place.
        algorithm: a name from `python benchmarks.py list`, those of the references included. None:
            `dear`, or `mgwfbp` where the model is told by `named_parameters`.
        named_parameters: in place of `model`, as scripts of MG-WFBP and Horovod call it:
            `model.named_parameters()` itself, for a list of it does not tell the model.
        norm_clip: each gradient of this rank is scaled down to a 2-norm of at most `norm_clip /
            sqrt(size())` before it travels, as in MG-WFBP.
        options: the algorithm's own options, e.g. `threshold_mb=25.0` for `dear`; the arguments of
            DeAR's first implementation are understood too (`dear.algorithms.aliases`).

    Returns:
        The same optimizer, with `synchronize()`, `no_sync()` and `close()` besides.

    Raises:
        UserError: an unknown algorithm or option, or a model it cannot train.
        Unavailable: a library that the algorithm needs is not installed.
    """
    if model is None:
        model, algorithm = _model_of(named_parameters), algorithm or "mgwfbp"
    halves = {param.dtype for param in model.parameters()} <= {torch.float16, torch.bfloat16}
    algorithm, options = arguments(algorithm or "dear", options, halves)
    chosen = algorithm_options(algorithm, options)
    communicator = runtime.communicator()
    clipping = None
    if norm_clip is not None:
        positive("norm_clip", norm_clip)
        # Before the algorithm's own hooks, which send what they find.
        clipping = _clip_each(model.parameters(), norm_clip / math.sqrt(communicator.size))
    try:
        wrapped = algorithm_class(algorithm)().wrap(model, optimizer, communicator, chosen)[1]
    except BaseException:
        if clipping is not None:
            clipping.remove()
        raise
    if clipping is not None:
        wrapped._engine.hooks.adopt(clipping)
    return wrapped


def _model_of(named_parameters: Any) -> torch.nn.Module:
    """The model whose `named_parameters()` this is, which has not been begun."""
    frame = getattr(named_parameters, "gi_frame", None)
    model = None if frame is None else frame.f_locals.get("self")
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            "DistributedOptimizer needs model=..., or named_parameters=model.named_parameters()"
        )
    return model


def _clip_each(params: Iterable[torch.nn.Parameter], max_norm: float) -> Hooks:
    """Scales each gradient down to this 2-norm as soon as a backward pass has it; MG-WFBP's way."""

    def clip(param: torch.nn.Parameter) -> None:
        norm = torch.linalg.vector_norm(param.grad)
        param.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))

    hooks = Hooks()
    hooks.on_gradient((param for param in params if param.requires_grad), clip)
    return hooks


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
