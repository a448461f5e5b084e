"""Calls of all ranks: reductions, gathers, broadcasts, and what is built of them.

`_nonblocking` forms return a handle for `poll` and `synchronize`; tensors must stay as they are
until then. Names of operations are accepted as BlueFog has them and appear in timelines only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dear import optimizer as plain
from dear.bluefog import handles
from dear.bluefog.job import job
from dear.bluefog.timeline import noted
from dear.errors import UserError
from dear.topology.graphs import from_matrix, matrix, uniform

if TYPE_CHECKING:
    import numpy as np
    from torch.optim import Optimizer


@handles.not_suspended
def barrier() -> None:
    """Returns once every rank has called it."""
    job().communicator.barrier()


@handles.queueable
def allreduce_nonblocking_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> int:
    """Starts `allreduce_`."""
    ranks = job().machines.local if is_hierarchical_local else job().communicator
    work = ranks.all_reduce(tensor.detach(), op="mean" if average else "sum")
    return handles.new(work.done, noted("allreduce", name, lambda: (work.wait(), tensor)[1]))


@handles.queueable
def allreduce_nonblocking(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> int:
    """Starts `allreduce`."""
    return allreduce_nonblocking_(tensor.detach().clone(), average, is_hierarchical_local, name)


@handles.not_suspended
def allreduce_(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> torch.Tensor:
    """`allreduce` in place."""
    return handles.wait(allreduce_nonblocking_(tensor, average, is_hierarchical_local, name))


@handles.not_suspended
def allreduce(
    tensor: torch.Tensor,
    average: bool = True,
    is_hierarchical_local: bool = False,
    name: str | None = None,
) -> torch.Tensor:
    """The mean (or sum) of `tensor` over all ranks, or those of this machine."""
    return handles.wait(allreduce_nonblocking(tensor, average, is_hierarchical_local, name))


@handles.queueable
def allgather_nonblocking(tensor: torch.Tensor, name: str | None = None) -> int:
    """Starts `allgather`; blocks for the exchange of the sizes."""
    from dear.bluefog.neighbor import gathered

    everybody = [other for other in range(job().size) if other != job().rank]
    return gathered(tensor, everybody, everybody, check=False, with_own=True, name=name)


@handles.not_suspended
def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All ranks' tensors, joined along the first dimension, in which they may differ in size."""
    return handles.wait(allgather_nonblocking(tensor, name))


@handles.queueable
def broadcast_nonblocking_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Starts `broadcast_`."""
    work = job().communicator.broadcast(tensor.detach(), root=root_rank)
    return handles.new(work.done, noted("broadcast", name, lambda: (work.wait(), tensor)[1]))


@handles.queueable
def broadcast_nonblocking(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Starts `broadcast`."""
    return broadcast_nonblocking_(tensor.detach().clone(), root_rank, name)


@handles.not_suspended
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Copies the tensor of `root_rank` into everybody's."""
    return handles.wait(broadcast_nonblocking_(tensor, root_rank, name))


@handles.not_suspended
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of `root_rank`, as a new one; `tensor` must be like it."""
    return handles.wait(broadcast_nonblocking(tensor, root_rank, name))


@handles.not_suspended
def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any], root_rank: int
) -> None:
    """Copies rank `root_rank`'s tensors into everybody's: a state dict, or (named) parameters."""
    plain.broadcast_parameters(_named(params), root_rank)


@handles.not_suspended
def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Gives everybody rank `root_rank`'s optimizer state and hyper-parameters."""
    plain.broadcast_optimizer_state(optimizer, root_rank)


@handles.not_suspended
def allreduce_parameters(params: Mapping[str, torch.Tensor] | Iterable[Any]) -> None:
    """Replaces floating-point tensors by their means over all ranks: exact consensus."""
    tensors = [value for _, value in _named(params) if value.is_floating_point()]
    for handle in [allreduce_nonblocking_(tensor.detach()) for tensor in tensors]:
        handles.wait(handle)


def _named(params: Mapping[str, torch.Tensor] | Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    items = params.items() if isinstance(params, Mapping) else params
    return [item if isinstance(item, tuple) else ("", item) for item in items]


@handles.not_suspended
def InferSourceFromDestinationRanks(  # noqa: N802 (BlueFog's name)
    dst_ranks: list[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], np.ndarray]:
    """Which ranks name this one in their `dst_ranks`; a blocking collective call.

    Args:
        construct_adjacency_matrix: return also the weights `[n, n]` (row: sender, column: receiver)
            by which every rank weighs itself and its sources equally.
    """
    lists = _peers(dst_ranks)
    edges = {(source, to) for source, targets in enumerate(lists) for to in targets}
    sources = sorted(source for source, to in edges if to == job().rank)
    return (sources, _weights(edges)) if construct_adjacency_matrix else sources


@handles.not_suspended
def InferDestinationFromSourceRanks(  # noqa: N802 (BlueFog's name)
    src_ranks: list[int], construct_adjacency_matrix: bool = False
) -> list[int] | tuple[list[int], np.ndarray]:
    """Which ranks name this one in their `src_ranks`; otherwise as the other."""
    lists = _peers(src_ranks)
    edges = {(source, to) for to, sources in enumerate(lists) for source in sources}
    targets = sorted(to for source, to in edges if source == job().rank)
    return (targets, _weights(edges)) if construct_adjacency_matrix else targets


def _peers(ranks: list[int]) -> list[list[int]]:
    size, rank = job().size, job().rank
    wrong = [other for other in ranks if not 0 <= other < size or other == rank]
    lists = job().communicator.gather_objects([] if wrong else list(ranks))
    if wrong:
        raise UserError(f"rank {wrong[0]} is no other rank of a world of {size}")
    return lists


def _weights(edges: set[tuple[int, int]]) -> np.ndarray:
    import numpy as np

    ones = np.eye(job().size)
    for source, to in edges:
        ones[source, to] = 1
    return matrix(uniform(from_matrix(ones)))
