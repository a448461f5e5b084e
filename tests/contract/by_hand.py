"""One rank of two on a `Network`, and what algorithms send by; the other rank does the same.

`ByHand` is the communicator; torch's process groups and the comm core have stand-ins, too (`on`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dear.algorithms.synchronous import bytescheduler, mgs
from dear.comm import communicator as communicators
from dear.comm import peers, runtime, windows
from dear.comm.communicator import Communicator
from dear.cost.fit import AlphaBeta
from dear.training import tuning
from tests.contract.network import Message, Network, Work, content_of


class ByHand(Communicator):
    """Rank 0 of two that do the same, on a `Network`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.rank, self.size, self.timeout = 0, 2, None
        self.native = frozenset({"cpu"} if network.native else {})
        self.streamed: frozenset[str] = frozenset()
        self.record_times = False
        self.backend = "comm_core" if network.native else "by hand"
        self.clock, self.pause = network.clock, network.pause
        self.blocked_s, self.bytes_sent = 0.0, 0
        self.groups: list[Any] = [dist.group.WORLD]
        self._reduced: list[torch.Tensor] = []
        """Tensors that were given to be reduced, the last one last."""

    def note_all_awaited(self) -> None:
        """Nothing is replayed here."""

    def ensure_channels(self, count: int) -> None:
        self.groups += self.groups[:1] * (count - len(self.groups))

    def all_reduce(self, tensor: Any, *, op: str, **queue: int) -> Any:
        effect = functools.partial(tensor.mul_, 2) if op == "sum" else lambda: None
        return self.network.start("all_reduce", tensor, effect, **queue)

    def reduce_scatter(self, output: Any, input: Any, *, op: str, **queue: int) -> Any:
        half = input[: output.numel()] * (2 if op == "sum" else 1)
        self._reduced.append(input.clone())
        return self.network.start("reduce_scatter", input, lambda: output.copy_(half), **queue)

    def all_gather(self, output: Any, input: Any, **queue: int) -> Any:
        def effect() -> None:
            output.view(2, -1)[0] = input.view(-1)
            if input.dtype == torch.uint8:  # payloads; of other things this rank has both parts
                output.view(2, -1)[1] = input.view(-1)

        whole = input if input.dtype == torch.uint8 else self._whole(output)
        return self.network.start("all_gather", whole, effect, **queue)

    def reduce(self, tensor: Any, *, root: int, op: str, **queue: int) -> Any:
        effect = functools.partial(tensor.mul_, 2) if op == "sum" else lambda: None
        self._reduced.append(tensor.clone())
        return self.network.start("reduce", tensor, effect, **queue)

    def broadcast(self, tensor: Any, *, root: int, **queue: int) -> Any:
        return self.network.start("broadcast", self._whole(tensor), **queue)

    def _whole(self, tensor: Any) -> Any:
        """Bytes that all ranks together send: of means, this rank has its own part only."""
        layers, carries = content_of(tensor)
        if "parameters" in carries:
            return tensor

        def reduced(before: torch.Tensor) -> bool:
            """Compares by layers of this rank's part, if any: marks may have made sums longer."""
            if layers:
                return layers <= content_of(before)[0]
            return before.numel() == tensor.numel()

        return next(filter(reduced, reversed(self._reduced)), tensor)

    def exchange(self, recv: Any, send: Any, *, peer: int, channel: int = 0) -> Any:
        sent = send.clone()
        return self.network.start("exchange", send, lambda: recv.copy_(sent), channel=channel)

    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        self.network.meet("broadcast_object")
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        self.network.meet("gather_objects")
        return [value] * 2

    def barrier(self) -> None:
        self.network.meet("barrier")


class _TorchWork(dist.Work):
    """A transfer as torch's own algorithms see it, which wait for a future of it, in C++."""

    def __init__(self, work: Work, result: Any) -> None:
        super().__init__()
        self._work = work
        self._future: Any = torch.futures.Future()
        work.on_complete(lambda: self._future.set_result(result))

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work.done()

    def get_future(self) -> Any:
        self._work.awaited_by_torch = True
        return self._future


class _TorchGroup(dist.ProcessGroup):
    """A group for torch's own algorithms, DDP and FSDP, on the network of the moment."""

    network: Network

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "by_hand"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return _TorchWork(self.network.start("all_reduce", tensors[0]), tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return _TorchWork(self.network.start("broadcast", tensors[0]), tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        def effect() -> None:
            for output in outputs[0]:
                output.copy_(inputs[0])

        return _TorchWork(self.network.start("all_gather", inputs[0], effect), outputs)

    def _allgather_base(self, output: Any, part: Any, options: Any = None) -> Any:
        def effect() -> None:
            output.view(2, -1)[:] = part.view(-1)

        return _TorchWork(self.network.start("all_gather", part, effect), output)

    def _reduce_scatter_base(self, output: Any, whole: Any, options: Any = None) -> Any:
        half = whole[: output.numel()]
        work = self.network.start("reduce_scatter", whole, lambda: output.copy_(half))
        return _TorchWork(work, output)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    """Names since torch 2.13."""

    def barrier(self, options: Any = None) -> Any:
        return _TorchWork(self.network.start("barrier", torch.zeros(0)), [])


@contextlib.contextmanager
def _job(network: Network) -> Iterator[None]:
    _TorchGroup.network = network
    if "by_hand" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "by_hand", lambda store, rank, size, timeout: _TorchGroup(rank, size), devices=["cpu"]
        )
    dist.init_process_group("by_hand", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Neighbors:
    """`comm_core.Communicator`: collectives along a graph."""

    def __init__(self, network: Network, *_: Any) -> None:
        self._network = network

    def neighbor_all_gather(
        self, values: Any, received: Sequence[Any], sources: Any, targets: Any, check: bool
    ) -> Work:
        sent = values.clone()

        def effect() -> None:
            for row in received:
                row.copy_(sent)

        return self._network.start("neighbor_all_gather", values, effect)

    def neighbor_all_reduce(
        self,
        values: Any,
        sources: Mapping[int, float],
        targets: Mapping[int, float],
        *,
        self_weight: float,
        out: Any,
        check: bool,
    ) -> Work:
        share = self_weight + sum(sources.values()) * next(iter(targets.values()))
        mixed = values * share
        return self._network.start("neighbor_all_reduce", values, lambda: out.copy_(mixed))

    def sync_stream(self, work: Work) -> None:
        work.wait()

    def done(self, work: Work) -> bool:
        return work.done()

    def destroy(self) -> None:
        return


class _Window:
    """`comm_core.Window`. What this rank puts at its neighbour the neighbour puts here, too."""

    def __init__(self, network: Network, slots: int, room: int, dtype: Any, group: Any) -> None:
        self._network = network
        self._rows = torch.zeros(slots, room, dtype=dtype)
        self._last: Work | None = None
        """Messages are applied in their order."""

    def put(self, memory: Any, place: int, slot: int, offset: int = 0) -> Work:
        sent, row = memory.clone(), self._rows[slot][offset:][: memory.numel()]
        if place == 0:  # here
            row.copy_(sent)
            return _nothing(self._network)
        return self._started("put", memory, lambda: row.copy_(sent))

    def accumulate(self, memory: Any, place: int, slot: int, offset: int = 0) -> Work:
        sent, row = memory.clone(), self._rows[slot][offset:][: memory.numel()]
        return self._started("accumulate", memory, lambda: row.add_(sent))

    def _started(self, name: str, memory: Any, effect: Callable[[], Any]) -> Work:
        self._last = self._network.start(name, memory, effect, self._last)
        return self._last

    def get(self, row: Any, place: int, slot: int, offset: int = 0) -> Work:
        shown = self._rows[slot][offset:][: row.numel()].clone()
        if place == 0:
            row.copy_(shown)
            return _nothing(self._network)
        return self._network.start("get", shown, lambda: row.copy_(shown))

    def read(
        self, first: int, count: int, reset_versions: bool = False, clear: bool = False
    ) -> list[Any]:
        rows = [row.clone() for row in self._rows[first : first + count]]
        if clear:
            self._rows[first : first + count] = 0
        return rows

    def versions(self) -> list[int]:
        return [0] * len(self._rows)

    def free(self) -> None:
        return


def _nothing(network: Network) -> Work:
    message = Message(
        operation="", layers=frozenset(), carries=frozenset(), nbytes=0, step=0, place=("", None)
    )
    message.ended = True
    return Work(network, message, lambda: None)


@contextlib.contextmanager
def on(network: Network) -> Iterator[None]:
    """The comm core, the job's process groups and updates by SGD are those of `network`."""
    core = SimpleNamespace(
        Communicator=functools.partial(_Neighbors, network),
        Window=functools.partial(_Window, network),
        empty=lambda numel, dtype: torch.zeros(numel, dtype=dtype),
        __spec__=importlib.util.find_spec("comm_core"),
    )
    group = SimpleNamespace(group_name="by hand")
    job = SimpleNamespace(
        get_backend=lambda group: "comm_core",
        get_process_group_ranks=lambda group: [0, 1],
        new_group=lambda ranks, **_: group,
        barrier=lambda group=None: network.meet("barrier"),
        destroy_process_group=lambda group: None,
        PrefixStore=lambda name, store: SimpleNamespace(check=lambda names: False),
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: None),
    )

    machine_of_its_own = SimpleNamespace(local_rank=0, local_world_size=1)

    def costs(*_: Any, **__: Any) -> AlphaBeta:
        return AlphaBeta(alpha_s=network.alpha_s, beta_s_per_byte=network.beta_s)

    module = sys.modules["torch.optim.sgd"]
    plain = module.sgd

    def update(params: Sequence[Any], *given: Any, **settings: Any) -> None:
        layers = frozenset[int]().union(*(content_of(param)[0] for param in params))
        network.note("update", None, layers)
        plain(params, *given, **settings)

    with contextlib.ExitStack() as stack:
        for patch in (
            _job(network),
            _module("comm_core", core),
            mock.patch.object(communicators, "comm_core", core),
            mock.patch.object(runtime, "facts", lambda: machine_of_its_own),
            mock.patch.object(communicators, "dist", job),
            mock.patch.object(peers, "dist", job),
            mock.patch.object(windows, "dist", job),
            mock.patch.object(module, "sgd", update),
            mock.patch.object(
                mgs, "measured_call", lambda *_: AlphaBeta(alpha_s=0.0, beta_s_per_byte=0.0)
            ),
            mock.patch.object(tuning, "measured_costs", costs),
            mock.patch.object(bytescheduler, "measured_costs", costs),
        ):
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def _module(name: str, instead: Any) -> Iterator[None]:
    """Modules that import `name` get `instead`; what else is imported meanwhile stays."""
    before = sys.modules.get(name)
    sys.modules[name] = instead
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
