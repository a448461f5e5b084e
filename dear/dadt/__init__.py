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

import functools
import itertools
import logging
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dear.algorithms.delayed.dadt import Dadt
from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.comm.backends import prepare
from dear.comm.communicator import Communicator
from dear.dadt.cycles import (
    ALL_REDUCE,
    BROADCAST,
    COO_ALL_REDUCE,
    NAMES,
    Cycles,
    Execution,
    Request,
)
from dear.errors import Unavailable, UserError, unknown
from dear.optimizer import broadcast_parameters
from dear.options import at_least, positive
from dear.training.trace import Timeline

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

log = logging.getLogger("dear")

BUFFER_BYTES = 64 * MIB
T = TypeVar("T")

EXECUTORS = {name: name for name in ("mpi", "nccl", "gloo", "comm_core")} | {"mpicuda": "nccl"}
"""What moves the bytes, by the names of DADT; the backend here. `mpicuda`, of its older versions,
moved CUDA tensors."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `dear.dadt.init`, which documents them."""

    cycle_duration_ms: float
    executor: str | None
    broadcast_executor: str | None
    """None: as `executor`."""
    all_reduce_buffer_size: int
    gpu_device_id: int
    timeline: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        at_least("dadt.init: cycle_duration_ms", self.cycle_duration_ms, 0)
        at_least("dadt.init: all_reduce_buffer_size", self.all_reduce_buffer_size, 0)
        positive("dadt.init: timeout_s", self.timeout_s)
        for name in (self.executor, self.broadcast_executor):
            if name is not None and name not in EXECUTORS:
                raise unknown("executor", name, EXECUTORS)
        if self.gpu_device_id != -1 and not (0 <= self.gpu_device_id < torch.cuda.device_count()):
            raise UserError(
                f"dadt.init: gpu_device_id={self.gpu_device_id}: this host has "
                f"{torch.cuda.device_count()} GPUs, and -1 takes that of the local rank"
            )


class Session:
    """What is held between `initialize` and `shutdown`; made by all ranks.

    Joins the job if the script has not, and starts the thread.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._joined = not runtime.is_initialized()
        backend = EXECUTORS.get(settings.executor)
        if self._joined:
            runtime.init(backend=backend, timeout_s=settings.timeout_s)
        world = runtime.communicator()
        if backend is not None and backend not in world.backend:
            raise UserError(
                f"dadt.init: executor {settings.executor!r} moves bytes by {backend}, but this job "
                f"uses {world.backend} already"
            )
        if settings.gpu_device_id >= 0:
            torch.cuda.set_device(settings.gpu_device_id)
        timeout = timedelta(seconds=settings.timeout_s)
        # The thread's own, so that its calls and the script's need not be in one order.
        data = Communicator(dist.new_group(timeout=timeout))
        broadcasts = data
        if settings.broadcast_executor is not None:
            own = prepare(EXECUTORS[settings.broadcast_executor])
            broadcasts = Communicator(dist.new_group(timeout=timeout, backend=own))
        small = None
        if "nccl" in world.backend:
            try:
                small = prepare("comm_core")
            except Unavailable:
                small = "gloo"
        control = Communicator(dist.new_group(timeout=timeout, backend=small))
        execution = Execution(data, broadcasts, settings.all_reduce_buffer_size)
        path = settings.timeline
        self.timeline = None if path is None else Timeline(path, world.rank)
        self._clock = world.clock
        self.local = self._host_group(world, timeout)
        self.cycles = Cycles(control, execution, settings.cycle_duration_ms / 1e3)
        self._delayed: dict[tuple[int, int], Request] = {}
        self._fetched_s: dict[Any, float] = {}
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        """`close` applies what they hold back."""
        self.open = True
        """Until `close`, or until the script leaves the job by `dear.shutdown()`."""
        runtime.at_shutdown(self._drain)

    def submit(self, kind: int, number: int, tensor: torch.Tensor, form: str = "") -> Request:
        """Asks for a collective; raises as `Request`."""
        request = Request((kind, number, form), tensor, self._clock)
        self.cycles.submit(request)
        return request

    def fetch(self, request: Request) -> torch.Tensor:
        """The answer to it; waits."""
        result = request.wait(self.settings.timeout_s)
        if self.timeline is not None:
            self._draw(self.timeline, request)
        return result

    def exchange(self, kind: int, number: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """Asks, and returns the answer to the call of the same id before; None: the first."""
        before = self._delayed.get((kind, number))
        self._delayed[kind, number] = self.submit(kind, number, tensor, "_async")
        return None if before is None else self.fetch(before)

    def last(self, kind: int, number: int) -> torch.Tensor:
        """The answer to the last `exchange`, after which the next one is the first."""
        request = self._delayed.pop((kind, number), None)
        if request is None:
            raise UserError(
                f"flush: there is no {NAMES[kind]}_async(id {number}) whose result is outstanding"
            )
        return self.fetch(request)

    def close(self) -> None:
        """Ends when all ranks have called it; leaves the job if this has joined it."""
        if self._joined:
            runtime.shutdown()
        self._drain()

    def _drain(self) -> None:
        if not self.open:
            return
        self.open = False
        for optimizer in filter(None, (known() for known in self.optimizers)):
            if hasattr(optimizer, "_engine"):  # it may have been closed
                optimizer.flush()
                optimizer._engine.write_timeline()
        self.cycles.close()
        self._delayed.clear()
        if self.timeline is not None:
            self.timeline.write()
        if self.cycles.error is not None:
            raise self.cycles.error

    def _host_group(self, world: Communicator, timeout: timedelta) -> dist.ProcessGroup:
        """The ranks of this host; a collective call, in which groups are made for every host."""
        facts = runtime.facts()
        host = "" if facts.one_host else socket.gethostname()
        hosts: dict[tuple[str, int], list[int]] = {}
        seen: Counter[tuple[str, int]] = Counter()
        for rank, place in enumerate(world.gather_objects((host, facts.local_rank))):
            # Hosts may share a name; on one host no two ranks have the same place.
            hosts.setdefault((place[0], seen[place]), []).append(rank)
            seen[place] += 1
        return dist.new_subgroups_by_enumeration(list(hosts.values()), timeout=timeout)[0]

    def _draw(self, timeline: Timeline, request: Request) -> None:
        moments, tensor = request.moments, request.tensor
        nbytes = (tensor._values() if tensor.is_sparse else tensor).nbytes
        left = self._fetched_s.get(request.key)
        if left is not None:
            timeline.add(request.name, "InTraining", left, max(left, moments[0][1]))
        for (phase, began), (_, ended) in itertools.pairwise(moments):
            timeline.add(request.name, phase, began, ended, bytes=nbytes)
        self._fetched_s[request.key] = moments[-1][1]


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
        cycle_duration_ms: least time between two rounds in which ranks agree on ready requests, in
            milliseconds. Gradients that are ready in the same cycle share buffers.
        executor_type: `mpi`, `gloo` or `comm_core` for CPU tensors, `nccl` for CUDA tensors
            (`mpicuda`, the older name, means the same); None: the choice of `dear.init`.
        all_reduce_buffer_size: bytes up to which all-reduces share a buffer; 0: each runs alone.
        gpu_device_id: the GPU of this rank; -1: that of its local rank.
        broad_cast_executor: backend of broadcasts (older versions); None: `executor_type`.
        all_reduce_executor: backend of the rest (older versions); None: `executor_type`.
        group_buffer_size: an argument of older versions without effect; the log warns.
        timeline: file that `shutdown` writes, with `-rankR` before its suffix, for chrome://tracing
            or Perfetto; each optimizer gets one beside it. None: no file.
        timeout_s: time limit of one collective.

    Raises:
        UserError: a bad or contradictory argument, or the job runs already on another backend.
        Unavailable: the executor is not on this machine.
    """
    global _session
    if group_buffer_size is not None:
        log.warning("dadt.init: group_buffer_size never had an effect in DADT and has none here")
    executor, broadcast_executor = _executors(
        executor_type, all_reduce_executor, broad_cast_executor
    )
    settings = Settings(
        cycle_duration_ms=cycle_duration_ms,
        executor=executor,
        broadcast_executor=broadcast_executor,
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


def _executors(
    executor_type: str | None, all_reduce_executor: str | None, broadcast_executor: str | None
) -> tuple[str | None, str | None]:
    """Returns the executor, and that of broadcasts; None: the same."""
    named = {executor_type, all_reduce_executor} - {None}
    if len({EXECUTORS.get(name, name) for name in named}) > 1:
        raise UserError(
            "dadt.init: executor_type and all_reduce_executor mean the same, got "
            f"{', '.join(sorted(named))}"
        )
    executor = min(named, default=broadcast_executor)
    if EXECUTORS.get(broadcast_executor) == EXECUTORS.get(executor):
        return executor, None
    return executor, broadcast_executor


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
    if _session is None or not _session.open:
        raise UserError("call dadt.init() first")
    return _session


def _in_session(fact: Callable[[], T]) -> Callable[[], T]:
    """The same between `initialize` and `shutdown`; raises `UserError` outside."""

    @functools.wraps(fact)
    def call() -> T:
        current()
        return fact()

    call.__module__ = __name__  # where pickle finds it
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

    The next call of the `id` is a first one again. Raises `UserError` if there was none since the
    last flush.

    Args:
        coo: of `coo_all_reduce_async` instead of `all_reduce_async`.
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
    """Stands for the model, which DADT's optimizer is not given: what the optimizer holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        # Not as attributes of a module, which would have to be of the type Parameter.
        self._all = [param for group in optimizer.param_groups for param in group["params"]]

    def parameters(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return iter(self._all)
