"""DADT's session: the job, the thread that runs requests, and the optimizers."""

from __future__ import annotations

import itertools
import logging
import socket
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.comm.backends import prepare
from dear.comm.communicator import Communicator
from dear.dadt.cycles import NAMES, Cycles, Execution, Request
from dear.errors import Unavailable, UserError, unknown
from dear.options import at_least, positive
from dear.training.trace import Timeline

log = logging.getLogger("dear")

BUFFER_BYTES = 64 * MIB

EXECUTORS = {name: name for name in ("mpi", "nccl", "gloo", "comm_core")} | {"mpicuda": "nccl"}
"""DADT's name of an executor -> backend. `mpicuda` moved CUDA tensors in older versions of DADT."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `dear.dadt.init`, see there."""

    cycle_duration_ms: float
    executor: str | None
    broadcast_executor: str | None
    """None: the same as `executor`."""
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
                f"{torch.cuda.device_count()} GPUs; -1 takes the GPU of the local rank"
            )


class Session:
    """State between `initialize` and `shutdown`.

    The constructor joins the job if the script has not, and starts the thread. It is collective.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        executor = settings.broadcast_executor
        broadcaster = None if executor is None else prepare(EXECUTORS[executor])
        self._joined = not runtime.is_initialized()
        backend = EXECUTORS.get(settings.executor or "")
        if self._joined:
            runtime.init(backend=backend, timeout_s=settings.timeout_s)
        world = runtime.communicator()
        if backend is not None and backend not in world.backend:
            raise UserError(
                f"dadt.init: executor {settings.executor!r} needs the backend {backend}, but this "
                f"job already uses {world.backend}"
            )
        if settings.gpu_device_id >= 0:
            torch.cuda.set_device(settings.gpu_device_id)
        timeout = timedelta(seconds=settings.timeout_s)
        # The thread has its own process groups, so its calls and the script's need no common order.
        # NCCL is left to the script: two threads have no common order of NCCL calls on all ranks,
        # so ranks could wait for each other forever.
        aside = None
        if "nccl" in world.backend:
            try:
                aside = prepare("comm_core")
            except Unavailable:
                aside = "gloo"
        data = Communicator(dist.new_group(timeout=timeout, backend=aside))
        broadcasts = data
        if broadcaster is not None:
            broadcasts = Communicator(dist.new_group(timeout=timeout, backend=broadcaster))
        control = Communicator(dist.new_group(timeout=timeout, backend=aside))
        execution = Execution(data, broadcasts, settings.all_reduce_buffer_size)
        path = settings.timeline
        self.timeline = None if path is None else Timeline(path, world.rank)
        self._clock = world.clock
        self.local = self._host_group(world, timeout)
        self.cycles = Cycles(control, execution, settings.cycle_duration_ms / 1e3)
        self._delayed: dict[tuple[int, int], Request] = {}
        self._fetched_s: dict[Any, float] = {}
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        """Optimizers with gradients that `close` still has to apply."""
        self.open = True
        """True until `close`, or until `dear.shutdown()` in the script."""
        runtime.at_shutdown(self._drain)

    def submit(self, kind: int, number: int, tensor: torch.Tensor, form: str = "") -> Request:
        """Starts a request of a collective; raises the errors of `Request`."""
        request = Request((kind, number, form), tensor, self._clock)
        self.cycles.submit(request)
        return request

    def fetch(self, request: Request) -> torch.Tensor:
        """Waits for a request, and returns its result."""
        result = request.wait(self.settings.timeout_s)
        if self.timeline is not None:
            self._draw(self.timeline, request)
        return result

    def exchange(self, kind: int, number: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """Starts a request; returns the result of the previous one with this id, or None."""
        before = self._delayed.get((kind, number))
        self._delayed[kind, number] = self.submit(kind, number, tensor, "_async")
        return None if before is None else self.fetch(before)

    def last(self, kind: int, number: int) -> torch.Tensor:
        """Returns the result of the last `exchange`; the next `exchange` counts as the first."""
        request = self._delayed.pop((kind, number), None)
        if request is None:
            raise UserError(
                f"flush: there is no {NAMES[kind]}_async(id {number}) whose result is outstanding"
            )
        return self.fetch(request)

    def close(self) -> None:
        """Ends the session once all ranks call it; leaves the job if this session joined it."""
        if self._joined:
            runtime.shutdown()
        self._drain()

    def _drain(self) -> None:
        if not self.open:
            return
        self.open = False
        for optimizer in filter(None, (reference() for reference in self.optimizers)):
            if hasattr(optimizer, "_engine"):  # the script may have closed it
                distributed: Any = optimizer  # it has the engine's methods, too
                distributed.flush()
                distributed._engine.write_timeline()
        self.cycles.close()
        self._delayed.clear()
        if self.timeline is not None:
            self.timeline.write()
        if self.cycles.error is not None:
            raise self.cycles.error

    def _host_group(self, world: Communicator, timeout: timedelta) -> dist.ProcessGroup:
        """Makes one group per host for its ranks; returns this host's group. Collective."""
        facts = runtime.facts()
        host = "" if facts.one_host else socket.gethostname()
        hosts: dict[tuple[str, int], list[int]] = {}
        seen: Counter[tuple[str, int]] = Counter()
        for rank, place in enumerate(world.gather_objects((host, facts.local_rank))):
            # Hosts may share a name; on one host no two ranks have the same local rank.
            hosts.setdefault((place[0], seen[place]), []).append(rank)
            seen[place] += 1
        group: dist.ProcessGroup
        group, _ = dist.new_subgroups_by_enumeration(list(hosts.values()), timeout=timeout)
        return group

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
    """Joins the job as `dear.init` does, and starts the thread; a collective call.

    A second call does nothing, and must have the same arguments. After `shutdown`, a call starts
    again.

    Args:
        cycle_duration_ms: least time in milliseconds between two cycles. In each cycle, ranks agree
            on which requests are ready. Gradients that are ready in the same cycle share buffers.
        executor_type: backend: `mpi`, `gloo` or `comm_core` for CPU tensors, `nccl` (older name:
            `mpicuda`) for CUDA tensors; None: the choice of `dear.init`. With `nccl`, only
            gradients of optimizers use it; calls by id use comm_core or Gloo, since two threads
            cannot call NCCL in the same order on all ranks.
        all_reduce_buffer_size: bytes up to which all-reduces share a buffer; 0: each runs alone.
        gpu_device_id: index of this rank's GPU; -1: the GPU of its local rank.
        broad_cast_executor: backend of broadcasts (older versions); None: `executor_type`.
        all_reduce_executor: backend of all-reduces (older versions); None: `executor_type`.
        group_buffer_size: an argument of older versions without effect; the log warns.
        timeline: path of a file for chrome://tracing or Perfetto, which `shutdown` writes, with
            `-rankR` before its suffix. Each optimizer gets its own file beside it. None: no file.
        timeout_s: time limit of one collective in seconds.

    Raises:
        UserError: a bad or contradictory argument, or the job already uses another backend.
        Unavailable: this machine lacks the executor.
    """
    global _session
    if group_buffer_size is not None:
        log.warning("dadt.init: group_buffer_size has no effect (nor had it in DADT); leave it out")
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
            raise UserError(
                "dadt is already initialized, with other arguments; call dadt.shutdown() first"
            )
        return
    _session = Session(settings)


init = initialize


def _executors(
    executor_type: str | None, all_reduce_executor: str | None, broadcast_executor: str | None
) -> tuple[str | None, str | None]:
    named = {name for name in (executor_type, all_reduce_executor) if name is not None}
    if len({EXECUTORS.get(name, name) for name in named}) > 1:
        raise UserError(
            "dadt.init: executor_type and all_reduce_executor are the same setting, but got "
            f"{', '.join(sorted(named))}; give only one"
        )
    executor = min(named) if named else broadcast_executor
    if EXECUTORS.get(broadcast_executor or "") == EXECUTORS.get(executor or ""):
        return executor, None
    return executor, broadcast_executor


def shutdown() -> None:
    """Applies delayed gradients, ends the thread and leaves the job; a collective call.

    The last results of asynchronous calls are dropped; call `flush` before to get them. A second
    call does nothing.
    """
    global _session
    if _session is not None:
        ending, _session = _session, None
        ending.close()


def initialized() -> bool:
    """Returns True between `initialize` and `shutdown`."""
    return _session is not None and _session.open


def current() -> Session:
    """Returns the session; raises `UserError` if there is none."""
    if _session is None or not _session.open:
        raise UserError("dadt is not initialized, or was shut down: call dadt.init() first")
    return _session
