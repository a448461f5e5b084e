"""DADT's own interface; `import dear.dadt as dadt` replaces `import dadt`.

    dadt.init()
    optimizer = dadt.DistributedOptimizer(optimizer)
    ...the ordinary training loop...
    dadt.shutdown()

Collectives have ids. Calls of the same kind with the same id on all ranks belong together, in any
order. Once per cycle a thread compares the calls of all ranks, and runs those that all ranks have
made; small all-reduces share a buffer. Tensors that are passed in are never written to. Returned
tensors belong to the caller.
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
from dear.options import true_or_false, whole

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
    """Returns a function that calls `fact`, and raises `UserError` outside of a session."""

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
    """Returns rank 0's tensor as a new tensor; blocks.

    Args:
        id: the same on all ranks; so are the tensor's shape and dtype.
        tensor: dense, any shape; on other ranks than 0 its values do not matter.
    """
    return current().fetch(current().submit(BROADCAST, id, tensor))


def all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum over all ranks as a new tensor; blocks. Arguments as for `broad_cast`."""
    return current().fetch(current().submit(ALL_REDUCE, id, tensor))


def all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Starts a sum over all ranks; returns the sum of the previous call of this `id`.

    The first call returns zeros. A call waits only for the previous sum. After the last call,
    `flush(id)` returns its sum.
    """
    before = current().exchange(ALL_REDUCE, id, tensor)
    return torch.zeros_like(tensor.detach()) if before is None else before


def coo_all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum over all ranks of sparse COO tensors, coalesced; blocks.

    Args:
        id: the same on all ranks; so are shape, dtype and number of sparse dimensions.
        tensor: need not be coalesced; ranks may have different entries.
    """
    return current().fetch(current().submit(COO_ALL_REDUCE, id, tensor))


def coo_all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Does the same as `all_reduce_async`, for sparse COO tensors.

    The first call returns zeros at the entries of `tensor`.
    """
    before = current().exchange(COO_ALL_REDUCE, id, tensor)
    if before is not None:
        return before
    like = tensor.detach().coalesce()
    zeros = torch.zeros_like(like.values())
    return torch.sparse_coo_tensor(like.indices().clone(), zeros, like.shape, is_coalesced=True)


def flush(id: int, *, coo: bool = False) -> torch.Tensor:
    """Waits for the sum of the last asynchronous call of this `id`, and returns it.

    The next call of this `id` then counts as its first.

    Args:
        coo: True for `coo_all_reduce_async`; False for `all_reduce_async`.

    Raises:
        UserError: there was no such call since the last flush.
    """
    return current().last(COO_ALL_REDUCE if coo else ALL_REDUCE, id)


def DistributedOptimizer(  # noqa: N802 (DADT's name)
    optimizer: torch.optim.Optimizer, avg: bool = True, *, delay: int = 1
) -> torch.optim.Optimizer:
    """Makes `optimizer` apply averaged gradients that are `delay` steps old; returns it.

    Copies rank 0's parameters to all ranks. An optimizer does not know the model's buffers, so call
    `dear.broadcast_parameters` for these. `dear.algorithms.delayed.dadt` documents the algorithm.
    `dear.DistributedOptimizer` documents the methods that the optimizer gains.

    Args:
        optimizer: any torch optimizer except LBFGS; there may be several.
        avg: True: gradients are averaged; False: they are summed.
        delay: age of the gradients in steps, at least 1.
    """
    session = current()
    settings, timeline = session.settings, None
    if settings.timeline is not None:
        path = Path(settings.timeline)
        name = f"{path.stem}-optimizer{len(session.optimizers)}{path.suffix or '.json'}"
        timeline = str(path.with_name(name))
    held = _Held(optimizer)
    true_or_false("avg", avg)
    whole("delay", delay)
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
    """Module with the optimizer's parameters, since DADT's interface does not pass the model."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        # A list, since a module would register attributes that are parameters.
        self._all = [param for group in optimizer.param_groups for param in group["params"]]

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return iter(self._all)
