"""DADT's own interface: `import dear.dadt as dadt` where a script said `import dadt`.

    dadt.init()
    optimizer = dadt.DistributedOptimizer(optimizer)
    ...the ordinary training loop...
    dadt.shutdown()

Collectives are asked for by number: calls of the same kind and number on all ranks belong together,
whatever else the ranks ask for in between. A thread finds out once per cycle what all ranks have
asked for, and runs it; small all-reduces share a buffer. Tensors given are never written to, and
tensors returned are the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dear.algorithms.delayed.dadt import Dadt
from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.dadt.session import (
    all_reduce,
    all_reduce_async,
    barrier,
    broad_cast,
    coo_all_reduce,
    coo_all_reduce_async,
    current,
    flush,
    init,
    initialize,
    initialized,
    local_barrier,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
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


def DistributedOptimizer(  # noqa: N802 (DADT's name)
    optimizer: torch.optim.Optimizer, avg: bool = True, *, delay: int = 1
) -> torch.optim.Optimizer:
    """Makes `optimizer` apply the gradients of `delay` steps before, averaged over all ranks.

    Sends rank 0's parameters to everybody. (Buffers of the model, which an optimizer does not know,
    are for `dear.broadcast_parameters`.) The optimizer is the same object; see
    `dear.algorithms.delayed.dadt` for what it does, `dear.DistributedOptimizer` for what it has
    besides.

    Args:
        optimizer: any torch optimizer but LBFGS; several may be made.
        avg: False: gradients are summed.
        delay: in steps, at least 1.
    """
    session = current()
    settings = session.settings
    held = _Held(optimizer)
    options = Dadt.Options(
        delay=delay,
        buffer_mb=settings.all_reduce_buffer_size / MIB,
        cycle_time_ms=settings.cycle_duration_ms or None,
        average=avg,
        timeline=session.timeline_of_optimizer(),
    )
    _, wrapped = Dadt().wrap(held, optimizer, runtime.communicator(), options)
    broadcast_parameters((str(i), param) for i, param in enumerate(held.parameters()))
    session.add_optimizer(wrapped)
    return wrapped


class _Held(torch.nn.Module):
    """Stands for the model, which DADT's optimizer is not given: what the optimizer holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        # Not as attributes of a module, which would have to be of the type Parameter.
        self._all = [param for group in optimizer.param_groups for param in group["params"]]

    def parameters(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return iter(self._all)
