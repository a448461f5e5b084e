"""DADT's job: joining and leaving it, and who takes part; the names of `dear.dadt`."""

from __future__ import annotations

import torch.distributed as dist

from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.dadt.session import EXECUTORS, Session, Settings
from dear.errors import UserError

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
