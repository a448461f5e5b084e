"""`DistributedOptimizer`: every algorithm behind one call, as in Horovod."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from dear.algorithms.aliases import arguments
from dear.buckets.agreement import Tensor, described, tables
from dear.comm import runtime
from dear.errors import UserError
from dear.options import positive, true_or_false
from dear.training.algorithm import algorithm_class, algorithm_options
from dear.training.engine import Distributed, in_parts
from dear.training.gradients import gradient_of
from dear.training.hooks import Hooks
from dear.training.parameters.engine import for_all_ranks


def DistributedOptimizer(  # noqa: N802 (the name that users of Horovod and DeAR know)
    optimizer: Optimizer,
    model: torch.nn.Module | None = None,
    algorithm: str | None = None,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    norm_clip: float | None = None,
    **options: object,
) -> Distributed:
    """Makes `optimizer` and `model` train with `algorithm`; the training loop does not change.

    Args:
        optimizer: any torch optimizer over parameters of `model`; it is changed in place.
        model: the replica on this rank, already on its device; it is changed in place.
        algorithm: a name from `python benchmarks.py list`, or a name that the reference suites use.
            `auto` measures the first steps and then chooses one. None: `dear`, or `mgwfbp` if
            `named_parameters` is given in place of `model`.
        named_parameters: the generator `model.named_parameters()`, in place of `model`, as in
            scripts of MG-WFBP and Horovod. A list does not work: the model is read from the
            generator.
        norm_clip: limit of each gradient's 2-norm on this rank, times `sqrt(size())`: a gradient
            above `norm_clip / sqrt(size())` is scaled down before it is sent, as in MG-WFBP.
        options: the algorithm's own options, e.g. `threshold_mb=25.0` for `dear`. The arguments of
            DeAR's first implementation are accepted, too (`dear.algorithms.aliases`).

    Returns:
        The same optimizer, with additional methods, e.g. `synchronize()`, `no_sync()`, `close()`.

    Raises:
        UserError: an unknown algorithm or option, or a model that the algorithm cannot train.
        Unavailable: a library that the algorithm needs is not installed.
    """
    if not hasattr(optimizer, "param_groups"):
        raise UserError(f"optimizer: must be a torch optimizer, got {type(optimizer).__name__}")
    if model is None:
        model, algorithm = _model_of(named_parameters), algorithm or "mgwfbp"
    elif not isinstance(model, torch.nn.Module):
        raise UserError(f"model: must be a torch.nn.Module, got {type(model).__name__}")
    elif named_parameters is not None:
        _check_names(named_parameters, model)
    halves = {param.dtype for param in model.parameters()} <= {torch.float16, torch.bfloat16}
    algorithm, given = arguments(algorithm or "dear", options, halves)
    chosen = algorithm_options(algorithm, given)
    communicator = runtime.communicator()
    clipping = None
    if norm_clip is not None:
        positive("norm_clip", norm_clip)
        # Registered first: the algorithm's own hooks send the gradient as they find it.
        clipping = _clip_each(model.parameters(), norm_clip / math.sqrt(communicator.size))
    try:
        wrapped = algorithm_class(algorithm)().wrap(model, optimizer, communicator, chosen)[1]
    except BaseException:
        if clipping is not None:
            clipping.remove()
        raise
    wrapped.before_engine = clipping
    return wrapped


def _check_names(named_parameters: object, model: torch.nn.Module) -> None:
    """Raises `UserError` unless these are pairs of names and parameters of the model."""
    if not isinstance(named_parameters, Iterable):
        raise UserError(
            f"named_parameters: must be model.named_parameters(), got {named_parameters!r}"
        )
    known = set(map(id, model.parameters()))
    if any(id(param) not in known for _, param in named_parameters):
        raise UserError("named_parameters: of another model than `model`; leave it out")


def _model_of(named_parameters: object) -> torch.nn.Module:
    """Returns the model of the generator `named_parameters`, which must not be consumed yet."""
    frame = getattr(named_parameters, "gi_frame", None)
    model = None if frame is None else frame.f_locals.get("self")
    if not isinstance(model, torch.nn.Module):
        raise UserError(
            "DistributedOptimizer needs model=..., or named_parameters=model.named_parameters()"
        )
    return model


def _clip_each(params: Iterable[torch.nn.Parameter], max_norm: float) -> Hooks:
    """Returns hooks that scale each gradient down to a 2-norm of `max_norm` when it is ready.

    MG-WFBP clips in this way.
    """

    def clip(param: torch.nn.Parameter) -> None:
        gradient = gradient_of(param)
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))

    hooks = Hooks()
    hooks.on_gradient((param for param in params if param.requires_grad), clip)
    return hooks


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Copies the tensors of rank `root_rank` to all ranks, in place; collective and blocking.

    Args:
        params: `model.state_dict()`, or `model.named_parameters()`. Ranks may have them in
            different orders and memory formats. Sharded parameters (of `fsdp`) stay as they are. If
            an algorithm is sending the parameters, its next step raises `UserError`.

    Raises:
        UserError: on all ranks, if a rank lacks a name or has another shape or dtype for it; or a
            tensor has gaps in its memory.
    """
    communicator = runtime.communicator()
    named = [(name, value) for name, value in _pairs(params) if torch.is_tensor(value)]
    named = [(name, value) for name, value in named if not in_parts(value)]
    for name, value in named:
        if value.layout is torch.strided and not torch.ops.aten.is_non_overlapping_and_dense(value):
            raise UserError(
                f"broadcast_parameters: {name!r} (shape {tuple(value.shape)}, strides "
                f"{value.stride()}) is a view with gaps in memory; replace it by its contiguous() "
                "copy before you make the optimizer"
            )
    everyone = tables(described(named), communicator)
    with torch.no_grad():
        if everyone:
            _broadcast_by_name(everyone, dict(named), root_rank)
        else:
            works = [
                communicator.broadcast(tensor.data, root=root_rank)
                for _, tensor in named
                if tensor.numel()
            ]
            for work in works:
                work.wait()
    # Writes to `data` change no version counter, by which algorithms find what has changed.
    torch.autograd.graph.increment_version(value for _, value in named)


def _pairs(params: object) -> list[tuple[str, object]]:
    """Returns names and values; raises `UserError` for what would not be sent."""
    form = "give model.state_dict() or model.named_parameters()"
    if isinstance(params, torch.nn.Module | torch.Tensor) or not isinstance(params, Iterable):
        raise UserError(f"broadcast_parameters: got a {type(params).__name__}; {form}")
    result = []
    for item in params.items() if isinstance(params, Mapping) else params:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"broadcast_parameters: got no pairs of names and tensors; {form}")
        name, value = item
        # Extra state of modules is no parameter. Other tensors in mappings would be lost.
        nested = isinstance(value, Mapping) and not str(name).endswith("_extra_state")
        if nested and any(map(torch.is_tensor, tree_leaves(value))):
            raise UserError(
                f"broadcast_parameters: {name!r} is a {type(value).__name__} with tensors in it, "
                f"which would not be sent; {form} (optimizers: broadcast_optimizer_state)"
            )
        result.append((name, value))
    return result


def _broadcast_by_name(
    everyone: Sequence[Sequence[Tensor] | str], named: Mapping[str, torch.Tensor], root_rank: int
) -> None:
    """Copies tensors whose order or memory format differs between ranks."""
    alike = [
        {(t.name, t.dtype, t.shape) for t in table if isinstance(t, Tensor)} for table in everyone
    ]
    for rank, table in enumerate(alike):
        for name, dtype, shape in sorted(table ^ alike[root_rank]):
            raise UserError(
                f"broadcast_parameters: {name!r} ({dtype}, shape {shape}) is not the same on rank "
                f"{root_rank} and rank {rank}; make the same model on every rank"
            )
    communicator = runtime.communicator()
    for name in sorted(named):
        tensor = named[name]
        if tensor.numel():
            copy = tensor.data.contiguous()
            communicator.broadcast(copy, root=root_rank).wait()
            tensor.data.copy_(copy)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Copies the optimizer state and hyper-parameters of rank `root_rank` to all ranks.

    Algorithms that keep sums over all ranks (`gradient-tracking`, `push-diging`, `exact-diffusion`)
    begin them anew, on rank `root_rank` too: the sums of one rank are of no use to another.
    """
    communicator = runtime.communicator()
    # A tensor of a GPU would arrive on the root's GPU, with a context of every rank there.
    state = tree_map(_on_host, for_all_ranks(optimizer.state_dict()))
    optimizer.load_state_dict(communicator.broadcast_object(state, root=root_rank))


def _on_host(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = True,
    name: str | None = None,
    *,
    symmetric: bool = False,
) -> torch.Tensor:
    """Returns the mean (or sum) of `tensor` over all ranks as a new tensor; blocking.

    Args:
        average: True or None: the mean, as in Horovod; False: the sum.
        name: accepted for scripts of Horovod and DeAR. Here, calls need no names: all ranks make
            them in the same order.
        symmetric: `tensor` is a symmetric matrix `[n, n]`; only its upper triangle is read, and
            travels.

    Raises:
        UserError: `symmetric`, and `tensor` is no square matrix.
    """
    if average is not None:
        true_or_false("allreduce: average", average)
    true_or_false("allreduce: symmetric", symmetric)
    if name is not None and not isinstance(name, str):
        raise UserError(f"allreduce: name must be a text, got {name!r}; write symmetric={name!r}")
    result = tensor.detach().clone()
    sent = result
    if symmetric:
        if result.dim() != 2 or result.shape[0] != result.shape[1]:
            raise UserError(f"symmetric: must be a matrix [n, n], got {list(result.shape)}")
        rows, columns = torch.triu_indices(*result.shape, device=result.device)
        sent = result[rows, columns]
    runtime.communicator().all_reduce(
        sent, op="mean" if average is None or average else "sum"
    ).wait()
    if symmetric:
        result[rows, columns] = result[columns, rows] = sent
    return result
