"""Communicator of a virtual cluster: the real one, whose transfers start on a `Network`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.virtual.world import core
from common.virtual.world.group import NAME, VirtualGroup, group_of
from common.virtual.world.marks import carried, large
from common.virtual.world.network import Network
from common.virtual.world.trace import Node
from dear.comm.communicator import Communicator, Op
from dear.comm.work import Work

T = TypeVar("T")

OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
}
"""Operation of each call of torch."""


class VirtualCommunicator(Communicator):
    """Communicator of a rank of a virtual cluster.

    Objects that ranks agree on cost nothing: this happens only before the measured steps.
    """

    window_backend = NAME

    def __init__(self, network: Network, group: dist.ProcessGroup) -> None:
        self.network = network
        super().__init__(group)
        self.backend = network.engine
        self.native = frozenset({"cpu"} if network.priorities else {})
        self.streamed = frozenset({"cpu"} if network.engine == "nccl" else {})
        self.clock, self.pause = network.read, network.pause

    def ensure_channels(self, count: int) -> None:
        ranks = list(range(self.size))
        while len(self.groups) < count:
            self.groups.append(dist.new_group(ranks, timeout=self.timeout))

    def core(self) -> Any:
        """Returns what stands for the comm core: neighbour collectives and windows."""
        return SimpleNamespace(
            Communicator=lambda streams, group, _: core.Neighbors(self.network, group),
            Window=lambda *args: core.Window(self.network, *args),
        )

    def allocate(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=like.dtype)

    def connect(self, device: torch.device, channel: int = 0) -> None:
        """Does nothing: every group can be used at once."""

    def regimes(self, operation: str, device: torch.device) -> tuple[tuple[str, int], ...] | None:
        """Returns the regimes of a measured cost as its engine reported them; None: no regimes."""
        if self.size == 1:
            return None
        return self.network.regimes(operation, group_of(self.groups[0]))

    def note_all_awaited(self) -> None:
        """Does nothing: the network sees every wait."""

    def broadcast_object(self, value: T, *, root: int = 0) -> T:
        return self._agree(value, "broadcast_object")[root]

    def gather_objects(self, value: T) -> list[T]:
        return self._agree(value, "gather_objects")

    def _agree(self, value: T, call: str) -> list[T]:
        return self.network.agree(group_of(self.groups[0]), value, call)

    def worker(self, name: str) -> Any:
        return _Worker(self.network)

    def barrier(self) -> None:
        """Waits until all ranks have come; the messages cost nothing."""
        self._agree(None, "barrier")

    def exchange(
        self, recv: torch.Tensor, send: torch.Tensor, *, peer: int, channel: int = 0
    ) -> Work:
        self._queue(channel, 0, send)
        group = self.groups[channel]
        members = group_of(group)
        other, target = members.ranks[peer], carried(recv, send)
        handle = self.network.swap(
            members,
            send.nbytes,
            {other: carried(send, send)},
            [other],
            lambda parts: target.copy_(parts[other]),
        )
        return self._work("exchange", handle, channel, group, recv, send)

    def _summand(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        # The comm core divides on the CPU, which takes no time of the device.
        return tensor if self.native and large(tensor) else super()._summand(tensor, op)

    def _start(
        self, queue: tuple[int, int], call: Callable[..., Any], *tensors: torch.Tensor, **extra: Any
    ) -> Work:
        channel, priority = queue
        group = self.groups[channel]
        assert isinstance(group, VirtualGroup)
        operation, options = OPERATIONS[call.__name__], extra.get("options")
        op = extra.get("op") if options is None else options.reduceOp
        output, given = tensors[0], tensors[-1]
        if operation == "all_gather":
            handle = group.gathered(output, given, priority)
        elif operation == "broadcast":
            handle = group.sent(output, group.members.ranks.index(extra["src"]), priority)
        else:
            handle = group.reduced(output, given, operation, op, priority)
        return self._work(operation, handle, channel, group, *tensors)


class _Later:
    """Result of a call that a `_Worker` runs."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.values: list[Any] = []
        recorder = network.recorder
        self.after: tuple[Node, ...] = () if recorder is None else recorder.known
        """Nodes of the trace after which the call starts, and later those after which it ends."""

    def run(self, call: Callable[[], object]) -> None:
        recorder = self._network.recorder
        if recorder is not None:
            recorder.learn(self.after)
        self.values.append(call())
        self.after = () if recorder is None else recorder.known

    def done(self) -> bool:
        return bool(self.values)

    def result(self) -> Any:
        began_s = self._network.clock()
        self._network.events.run_until(self.done, "a call of another thread")
        self._network.waited(began_s)
        if self._network.recorder is not None:
            self._network.recorder.learn(self.after)
        return self.values[0]


class _Worker:
    """Stands for a pool of one thread, which runs calls one after another on the virtual clock."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._calls: deque[tuple[Callable[[], Any], _Later]] = deque()
        self._running = False

    def submit(self, call: Callable[..., Any], *args: Any) -> _Later:
        later = _Later(self._network)
        self._calls.append((partial(call, *args), later))
        if not self._running:
            self._running = True
            self._network.thread(self._run)
        return later

    def _run(self) -> None:
        while self._calls:
            call, later = self._calls.popleft()
            later.run(call)
        self._running = False

    def shutdown(self, wait: bool = True) -> None:
        """Does nothing: all calls of a virtual cluster end by themselves."""
