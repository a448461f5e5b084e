"""DADT's own interface; `import dear.dadt as dadt` replaces `import dadt`.

    dadt.init()
    optimizer = dadt.DistributedOptimizer(optimizer)
    ...the ordinary training loop...
    dadt.shutdown()

Collectives have numbers: calls of the same kind and number on all ranks belong together, in any
order. Once per cycle a thread compares the requests of all ranks, and runs those that all ranks
have made; small all-reduces share a buffer. Tensors that are passed in are never written to, and
tensors that are returned belong to the caller.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from dear.algorithms.delayed.dadt import Dadt
from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.dadt.cycles import ALL_REDUCE, BROADCAST, COO_ALL_REDUCE
from dear.dadt.session import current, init, initialize, initialized, shutdown
from dear.optimizer import broadcast_parameters

__all__ = [
    "DistributedOptimizer",
    "all_reduce",
    "all_reduce_async",
    "barrier",
    "broad_cast",
    "coo_all_reduce",
    "coo_all_reduce_async",
    "flush",
    "init",
    "initialize",
    "initialized",
    "local_barrier",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

T = TypeVar("T")


def _in_session(fact: Callable[[], T]) -> Callable[[], T]:
    """Returns `fact`, which raises `UserError` outside of a session."""

    @functools.wraps(fact)
    def call() -> T:
        current()
        return fact()

    call.__module__ = __name__  # the module in which pickle looks for it
    return call


size = _in_session(runtime.size)
rank = _in_session(runtime.rank)
local_size = _in_session(runtime.local_size)
local_rank = _in_session(runtime.local_rank)


@_in_session
def barrier() -> None:
    """Returns once every rank has called it."""
    runtime.communicator().barrier()


def local_barrier() -> None:
    """Returns once every rank of this host has called it."""
    dist.barrier(group=current().local)


def broad_cast(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Waits for rank 0's tensor, and returns it as a new tensor.

    Args:
        id: the same on all ranks, as are shape and dtype.
        tensor: dense, any shape; its values count on rank 0 only.
    """
    return current().fetch(current().submit(BROADCAST, id, tensor))


def all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Waits for the sum over all ranks, and returns it as a new tensor; see `broad_cast`."""
    return current().fetch(current().submit(ALL_REDUCE, id, tensor))


def all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Starts a sum and returns that of the last call of this `id`; zeros in the first call.

    It waits for the sum of the last call only. `flush(id)` returns the sum of the final call.
    """
    before = current().exchange(ALL_REDUCE, id, tensor)
    return torch.zeros_like(tensor.detach()) if before is None else before


def coo_all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Waits for the sum over all ranks of sparse COO tensors, and returns it, coalesced.

    Args:
        id: the same on all ranks, as are shape, dtype and the number of sparse dimensions.
        tensor: need not be coalesced; ranks may have different entries.
    """
    return current().fetch(current().submit(COO_ALL_REDUCE, id, tensor))


def coo_all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Does what `all_reduce_async` does, for sparse tensors.

    The first result has zeros at the entries of `tensor`.
    """
    before = current().exchange(COO_ALL_REDUCE, id, tensor)
    if before is not None:
        return before
    like = tensor.detach().coalesce()
    zeros = torch.zeros_like(like.values())
    return torch.sparse_coo_tensor(like.indices().clone(), zeros, like.shape, is_coalesced=True)


def flush(id: int, *, coo: bool = False) -> torch.Tensor:
    """Waits for the sum of the last asynchronous call of this `id`, and returns it.

    The next call of the `id` is a first one again.

    Args:
        coo: take a call of `coo_all_reduce_async` instead of `all_reduce_async`.

    Raises:
        UserError: there was no call since the last flush.
    """
    return current().last(COO_ALL_REDUCE if coo else ALL_REDUCE, id)


def DistributedOptimizer(  # noqa: N802 (DADT's name)
    optimizer: torch.optim.Optimizer, avg: bool = True, *, delay: int = 1
) -> torch.optim.Optimizer:
    """Lets `optimizer` apply the averaged gradients of `delay` steps before; returns it.

    Copies rank 0's parameters to all ranks. (An optimizer does not know the model's buffers: call
    `dear.broadcast_parameters` for them.) `dear.algorithms.delayed.dadt` documents the algorithm,
    `dear.DistributedOptimizer` the methods that the optimizer gains.

    Args:
        optimizer: any torch optimizer except LBFGS; there may be several.
        avg: True: gradients are averaged; False: they are summed.
        delay: number of steps, at least 1.
    """
    session = current()
    settings, timeline = session.settings, None
    if settings.timeline is not None:
        path = Path(settings.timeline)
        name = f"{path.stem}-optimizer{len(session.optimizers)}{path.suffix or '.json'}"
        timeline = str(path.with_name(name))
    held = _Held(optimizer)
    options = Dadt.Options(
        delay=delay,
        buffer_mb=settings.all_reduce_buffer_size / MIB,
        cycle_time_ms=settings.cycle_duration_ms or None,
        average=avg,
        timeline=timeline,
    )
    _, wrapped = Dadt().wrap(held, optimizer, runtime.communicator(), options)
    broadcast_parameters((str(i), param) for i, param in enumerate(held.parameters()))
    session.optimizers.append(weakref.ref(wrapped))
    return wrapped


class _Held(torch.nn.Module):
    """Module of the optimizer's parameters, since DADT's interface does not pass the model."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        # A list, since attributes of a module would have to be of the type Parameter.
        self._all = [param for group in optimizer.param_groups for param in group["params"]]

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return iter(self._all)
