"""What `dear.dadt` holds between `init` and `shutdown`."""

from __future__ import annotations

import itertools
import socket
import weakref
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dear.comm import runtime
from dear.comm.communicator import Communicator, prepare
from dear.dadt.cycles import NAMES, Cycles, Execution, Request
from dear.errors import Unavailable, UserError, unknown
from dear.options import at_least, positive
from dear.training.trace import Timeline

EXECUTORS = {
    "mpi": "mpi",
    "nccl": "nccl",
    "mpicuda": "nccl",
    "gloo": "gloo",
    "comm_core": "comm_core",
}
"""What moves the bytes, by the names of DADT; the backend here. `mpicuda`, of its older versions,
moved CUDA tensors."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `dear.dadt.init`, which documents them."""

    cycle_duration_ms: float
    executor: str | None
    all_reduce_buffer_size: int
    gpu_device_id: int
    timeline: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        at_least("dadt.init: cycle_duration_ms", self.cycle_duration_ms, 0)
        at_least("dadt.init: all_reduce_buffer_size", self.all_reduce_buffer_size, 0)
        positive("dadt.init: timeout_s", self.timeout_s)
        if self.executor is not None and self.executor not in EXECUTORS:
            raise unknown("executor", self.executor, EXECUTORS)
        if self.gpu_device_id != -1 and not (0 <= self.gpu_device_id < torch.cuda.device_count()):
            raise UserError(
                f"dadt.init: gpu_device_id={self.gpu_device_id}: this host has "
                f"{torch.cuda.device_count()} GPUs, and -1 takes that of the local rank"
            )


class Session:
    """Joins the job if the script has not, and starts the thread; a collective call."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._joined = not runtime.is_initialized()
        backend = None if settings.executor is None else EXECUTORS[settings.executor]
        if self._joined:
            runtime.init(backend=backend, timeout_s=settings.timeout_s)
        world = runtime.communicator()
        if backend is not None and world.backend != backend:
            raise UserError(
                f"dadt.init: executor {settings.executor!r} moves bytes by {backend}, but this job "
                f"uses {world.backend} already"
            )
        if settings.gpu_device_id >= 0:
            torch.cuda.set_device(settings.gpu_device_id)
        timeout = timedelta(seconds=settings.timeout_s)
        # The thread's own, so that its calls and the script's need not be in one order.
        data = Communicator(dist.new_group(timeout=timeout))
        host_backend = _host_backend() if world.backend == "nccl" else None
        control = Communicator(dist.new_group(timeout=timeout, backend=host_backend))
        execution = Execution(data, settings.all_reduce_buffer_size)
        self.timeline: Timeline | None = None
        if settings.timeline is not None:
            self.timeline = Timeline(settings.timeline, world.rank)
        self._clock = world.clock
        self.local = self._host_group(world, timeout)
        self.cycles = Cycles(control, execution, settings.cycle_duration_ms / 1e3)
        self._delayed: dict[tuple[int, int], Request] = {}
        self._fetched_s: dict[Any, float] = {}
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
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

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """`shutdown` applies what it holds back."""
        self._optimizers.append(weakref.ref(optimizer))

    def timeline_of_optimizer(self) -> str | None:
        """The file for the next optimizer's own timeline."""
        if self.settings.timeline is None:
            return None
        path = Path(self.settings.timeline)
        name = f"{path.stem}-optimizer{len(self._optimizers)}{path.suffix or '.json'}"
        return str(path.with_name(name))

    def close(self) -> None:
        """Ends when all ranks have called it; leaves the job if this has joined it."""
        if self._joined:
            runtime.shutdown()
        self._drain()

    def _drain(self) -> None:
        if not self.open:
            return
        self.open = False
        for optimizer in filter(None, (known() for known in self._optimizers)):
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
        hosts: list[tuple[str, dict[int, int]]] = []
        for rank, (name, local_rank) in enumerate(world.gather_objects((host, facts.local_rank))):
            # Hosts may share a name; on one host no two ranks have the same place.
            fitting = (ranks for n, ranks in hosts if n == name and local_rank not in ranks)
            if (ranks := next(fitting, None)) is None:
                hosts.append((name, ranks := {}))
            ranks[local_rank] = rank
        made = [dist.new_group(sorted(ranks.values()), timeout=timeout) for _, ranks in hosts]
        return next(group for group in made if dist.get_rank(group) >= 0)

    def _draw(self, timeline: Timeline, request: Request) -> None:
        moments, tensor = request.moments, request.tensor
        nbytes = (tensor._values() if tensor.is_sparse else tensor).nbytes
        left = self._fetched_s.get(request.key)
        if left is not None:
            timeline.add(request.name, "InTraining", left, max(left, moments[0][1]))
        for (phase, began), (_, ended) in itertools.pairwise(moments):
            timeline.add(request.name, phase, began, ended, bytes=nbytes)
        self._fetched_s[request.key] = moments[-1][1]


def _host_backend() -> str:
    """For small things beside NCCL."""
    try:
        return prepare("comm_core")
    except Unavailable:
        return "gloo"
