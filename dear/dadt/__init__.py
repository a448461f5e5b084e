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
import torch.distributed as dist

from dear.algorithms.delayed.dadt import Dadt
from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.dadt.cycles import ALL_REDUCE, BROADCAST, COO_ALL_REDUCE
from dear.dadt.session import EXECUTORS, Session, Settings
from dear.errors import UserError
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

BUFFER_BYTES = 64 * MIB

_session: Session | None = None


def initialize(
    cycle_duration_ms: float = 5,
    executor_type: str | None = None,
    all_reduce_buffer_size: int = BUFFER_BYTES,
    gpu_device_id: int = -1,
    *,
    broad_cast_executor: str | None = None,
    all_reduce_executor: str | None = None,
    group_buffer_size: int | None = None,
    timeline: str | None = None,
    timeout_s: float = runtime.DEFAULT_TIMEOUT_S,
) -> None:
    """Joins the job, as `dear.init` does, and starts the thread; all ranks call it.

    Between `initialize` and `shutdown` a further call must have the same arguments, and then does
    nothing. After `shutdown` it may be called again.

    Args:
        cycle_duration_ms: least time between two rounds of finding out what is ready everywhere, in
            milliseconds. Gradients that are ready in the same cycle share buffers.
        executor_type: `mpi`, `gloo` or `comm_core` for CPU tensors, `nccl` for CUDA tensors
            (`mpicuda`, the older name, means the same); None: what `dear.init` chooses.
        all_reduce_buffer_size: bytes up to which all-reduces share a buffer; 0: each runs alone.
        gpu_device_id: the GPU of this rank; -1: that of its local rank.
        broad_cast_executor: the older versions' way to say `executor_type`; must not differ from
        all_reduce_executor: which is the same for all-reduces.
        group_buffer_size: refused: it never had an effect.
        timeline: a file to write in `shutdown`, `-rankR` put before its suffix, for
            chrome://tracing or Perfetto; beside it one for each optimizer. None: none.
        timeout_s: the longest that one collective may take.

    Raises:
        UserError: a bad or contradictory argument, or the job runs already on another backend.
        Unavailable: the executor is not on this machine.
    """
    global _session
    if group_buffer_size is not None:
        raise UserError(
            "dadt.init: group_buffer_size never had an effect in DADT and has none here: leave it "
            "out"
        )
    named = {executor_type, broad_cast_executor, all_reduce_executor} - {None}
    if len({EXECUTORS.get(name, name) for name in named}) > 1:
        raise UserError(f"dadt.init: one executor does everything, got {', '.join(sorted(named))}")
    settings = Settings(
        cycle_duration_ms=cycle_duration_ms,
        executor=min(named, default=None),
        all_reduce_buffer_size=all_reduce_buffer_size,
        gpu_device_id=gpu_device_id,
        timeline=timeline,
        timeout_s=timeout_s,
    )
    if initialized():
        if settings != current().settings:
            raise UserError("dadt is initialized with other arguments; shutdown() first")
        return
    _session = Session(settings)


init = initialize


def shutdown() -> None:
    """Applies what optimizers hold back, ends the thread and leaves the job; all ranks call it.

    The last results of asynchronous calls are dropped: `flush` fetches them. A second call does
    nothing.
    """
    global _session
    if _session is not None:
        ending, _session = _session, None
        ending.close()


def initialized() -> bool:
    """True between `initialize` and `shutdown`."""
    return _session is not None and _session.open


def current() -> Session:
    """What is held between `initialize` and `shutdown`; raises `UserError` outside."""
    if not initialized():
        raise UserError("call dadt.init() first")
    assert _session is not None
    return _session


def size() -> int:
    """Number of processes in the job."""
    current()
    return runtime.size()


def rank() -> int:
    """This process's number in the job, 0 .. size()-1."""
    current()
    return runtime.rank()


def local_size() -> int:
    """Number of the job's processes on this host."""
    current()
    return runtime.local_size()


def local_rank() -> int:
    """This process's number among those of its host."""
    current()
    return runtime.local_rank()


def barrier() -> None:
    """Returns once every rank has called it."""
    current()
    runtime.communicator().barrier()


def local_barrier() -> None:
    """Returns once every rank of this host has called it."""
    dist.barrier(group=current().local)


def broad_cast(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor, as a new one; waits.

    Args:
        id: the same on all ranks, as are shape and dtype.
        tensor: dense, any shape; on other ranks than 0 its values do not matter.
    """
    return current().fetch(current().submit(BROADCAST, id, tensor))


def all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, as a new tensor; waits. Arguments as of `broad_cast`."""
    return current().fetch(current().submit(ALL_REDUCE, id, tensor))


def all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the tensors of the call of this `id` before; zeros like `tensor` in the first.

    Waits for that sum only, which has had all the time since. `flush(id)` fetches the last one.
    """
    before = current().exchange(ALL_REDUCE, id, tensor)
    return torch.zeros_like(tensor.detach()) if before is None else before


def coo_all_reduce(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks of sparse COO tensors, coalesced; waits.

    Args:
        id: the same on all ranks, as are shape, dtype and the number of sparse dimensions.
        tensor: need not be coalesced; ranks may have any entries, and any number of them.
    """
    return current().fetch(current().submit(COO_ALL_REDUCE, id, tensor))


def coo_all_reduce_async(id: int, tensor: torch.Tensor) -> torch.Tensor:
    """As `all_reduce_async`, for sparse tensors; the first result has `tensor`'s entries, zero."""
    before = current().exchange(COO_ALL_REDUCE, id, tensor)
    if before is not None:
        return before
    own = tensor.detach().coalesce()
    zeros = torch.zeros_like(own.values())
    return torch.sparse_coo_tensor(own.indices().clone(), zeros, own.shape, is_coalesced=True)


def flush(id: int, *, coo: bool = False) -> torch.Tensor:
    """The sum of the tensors of the last asynchronous call of this `id`; waits.

    The next call of the `id` is a first one again.

    Args:
        coo: of `coo_all_reduce_async` instead of `all_reduce_async`.

    Raises:
        UserError: there was no such call since the last flush.
    """
    return current().last(COO_ALL_REDUCE if coo else ALL_REDUCE, id)


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
