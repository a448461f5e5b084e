"""One rank of two, on a network whose transfers end when a test says so, and a log of what happens.

The other rank does the same as this one. There is no clock and no thread: time stands still but for
what passes and transfers are said to take. What a message carries is seen by its values: those of
each layer's parameters, and of its gradients, lie in ranges of their own (`PARAMETER`, `GRADIENT`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dear.algorithms.synchronous import bytescheduler, mgs, mgwfbp
from dear.comm import communicator as communicators
from dear.comm import peers, windows
from dear.comm.communicator import Communicator
from dear.cost.collectives import AlphaBeta
from dear.cost.overlap import Content
from dear.training.hooks import at_end_of_backward

SIZES = (64, 32, 128, 96)
"""Elements of the layers, in the order in which they run; no two are alike."""
PARAMETER = [2.0 ** (4 * i + 4) for i in range(len(SIZES))]
GRADIENT = [2.0 ** -(4 * i + 8) for i in range(len(SIZES))]
LEAST, MOST = 0.24, 3.8
"""A value may be halved on its way, or weighed, or be the sum of two passes."""

Place = tuple[str, int | None]
"""What the program is about: "model"; "layer" or "gradient" and its number; "backward", before the
first gradient; "pass"; "step"; "" is none of them."""


@dataclass(eq=False, kw_only=True)
class Message:
    """A transfer, from its start on."""

    operation: str
    layers: frozenset[int]
    carries: frozenset[Content]
    """Empty: it carries neither; a barrier of all ranks is such a message, too."""
    nbytes: int
    step: int
    place: Place
    priority: int = 0
    channel: int = 0
    ended: bool = False

    def __str__(self) -> str:
        what = " and ".join(sorted(self.carries)) or "neither gradients nor parameters"
        of = f" of layers {sorted(self.layers)}" if self.layers else ""
        return f"{self.operation} with {what}{of}"


@dataclass(frozen=True, kw_only=True)
class Event:
    """`start` of a message, `wait` for one that has not ended, its `end`, or an `update`."""

    what: str
    step: int
    place: Place
    layers: frozenset[int]
    message: Message | None = None


@dataclass(eq=False)
class Network:
    """What is under way, and what has happened.

    Args:
        alpha_s, beta_s: seconds of a message and of a byte, on the clock that algorithms see.
        layer_s: of a layer's pass.
    """

    native: bool = True
    alpha_s: float = 1e-4
    beta_s: float = 0.0
    layer_s: float = 1e-3
    ends_itself: bool = True
    """What somebody waits for ends; False: waiting for it is an error."""
    events: list[Event] = field(default_factory=list)
    under_way: list[Work] = field(default_factory=list)
    step: int = 0
    place: Place = ("", None)
    now_s: float = 0.0

    def start(
        self,
        operation: str,
        tensor: torch.Tensor,
        effect: Callable[[], Any] = lambda: None,
        behind: Work | None = None,
        **queue: int,
    ) -> Work:
        """`behind`: what ends before this, whatever happens."""
        layers, carries = content_of(tensor)
        message = Message(
            operation=operation,
            layers=layers,
            carries=carries,
            nbytes=tensor.nbytes,
            step=self.step,
            place=self.place,
            **queue,
        )
        self.note("start", message)
        work = Work(self, message, effect, behind)
        self.under_way.append(work)
        return work

    def note(
        self, what: str, message: Message | None, layers: frozenset[int] | None = None
    ) -> None:
        layers = message.layers if message is not None else layers or frozenset()
        self.events.append(
            Event(what=what, step=self.step, place=self.place, layers=layers, message=message)
        )

    def end(self, *works: Work) -> None:
        """Lets some transfers end, or all that are under way and what starts as they end."""
        if works:
            for work in works:
                work.end()
            return
        while self.under_way:
            self.under_way[0].end()

    def meet(self, name: str) -> None:
        """All ranks wait for each other."""
        work = self.start(name, torch.zeros(0))
        work.wait()

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        """Somebody looks again and again whether something has changed: what is oldest ends."""
        if not self.under_way:
            raise AssertionError("somebody waits for what nobody has sent")
        self.under_way[0].wait()


class Work:
    """A transfer as algorithms see it."""

    def __init__(
        self,
        network: Network,
        message: Message,
        effect: Callable[[], Any],
        behind: Work | None = None,
    ) -> None:
        self._network, self.message, self._effect, self._behind = network, message, effect, behind
        self._callbacks: list[Callable[[], None]] = []
        self.nbytes = message.nbytes
        self.awaited_by_torch = False

    def wait(self, timeout_s: float | None = None) -> None:
        if self.message.ended:
            return
        if self._behind is not None:
            self._behind.wait()
        self._network.note("wait", self.message)
        if not self._network.ends_itself:
            raise AssertionError(f"waits for {self.message}")
        self.end()

    def end(self) -> None:
        if self._behind is not None and not self._behind.message.ended:
            self._behind.end()
        network = self._network
        self.message.ended = True
        network.under_way.remove(self)
        network.now_s += network.alpha_s + network.beta_s * self.nbytes
        with torch.no_grad():
            self._effect()
        network.note("end", self.message)
        for callback in self._callbacks:
            callback()

    def done(self) -> bool:
        return self.message.ended

    is_completed = done

    def on_complete(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)


def content_of(tensor: torch.Tensor) -> tuple[frozenset[int], frozenset[Content]]:
    """The layers that a message has values of, and what kind of values; bytes count as floats."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().contiguous().reshape(-1)
    if flat.dtype == torch.uint8:
        flat = flat[: flat.numel() // 4 * 4].view(torch.float32)
    found: list[tuple[int, Content]] = []
    if not flat.is_floating_point():
        return frozenset(), frozenset()
    kinds: list[tuple[Content, list[float]]] = [("parameters", PARAMETER), ("gradients", GRADIENT)]
    for kind, codes in kinds:
        for layer, code in enumerate(codes):
            if bool(((flat > LEAST * code) & (flat < MOST * code)).any()):
                found.append((layer, kind))
    return frozenset(layer for layer, _ in found), frozenset(kind for _, kind in found)


class ByHand(Communicator):
    """Rank 0 of two that do the same, on a `Network`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.rank, self.size, self.timeout = 0, 2, None
        self.native, self.record_times = network.native, False
        self.backend = "comm_core" if network.native else "by hand"
        self.clock, self.pause = network.clock, network.pause
        self.blocked_s, self.bytes_sent = 0.0, 0
        self.channel_free_s: dict[int, float] = {}
        self.groups: list[Any] = [dist.group.WORLD]
        self._reduced: dict[int, torch.Tensor] = {}
        """By the number of elements, what was last given to be reduced."""

    def ensure_channels(self, count: int) -> None:
        self.groups += self.groups[:1] * (count - len(self.groups))

    def all_reduce(self, tensor: Any, *, op: str, **queue: int) -> Any:
        effect = functools.partial(tensor.mul_, 2) if op == "sum" else lambda: None
        return self.network.start("all_reduce", tensor, effect, **queue)

    def reduce_scatter(self, output: Any, input: Any, *, op: str, **queue: int) -> Any:
        half = input[: output.numel()] * (2 if op == "sum" else 1)
        self._reduced[input.numel()] = input.clone()
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
        self._reduced[tensor.numel()] = tensor.clone()
        return self.network.start("reduce", tensor, effect, **queue)

    def broadcast(self, tensor: Any, *, root: int, **queue: int) -> Any:
        return self.network.start("broadcast", self._whole(tensor), **queue)

    def _whole(self, tensor: Any) -> Any:
        """What all ranks together send: of means, this rank has its own part only."""
        _, carries = content_of(tensor)
        return tensor if "parameters" in carries else self._reduced.get(tensor.numel(), tensor)

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
    """Their names since torch 2.13."""

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

    def accumulate(self, memory: Any, place: int, slot: int) -> Work:
        sent, row = memory.clone(), self._rows[slot][: memory.numel()]
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

    def costs(*_: Any) -> AlphaBeta:
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
            mock.patch.object(communicators, "dist", job),
            mock.patch.object(peers, "dist", job),
            mock.patch.object(windows, "dist", job),
            mock.patch.object(module, "sgd", update),
            mock.patch.object(
                mgs, "measured_call", lambda *_: AlphaBeta(alpha_s=0.0, beta_s_per_byte=0.0)
            ),
            mock.patch.object(mgwfbp, "measured_costs", costs),
            mock.patch.object(bytescheduler, "measured_costs", costs),
        ):
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def _module(name: str, instead: Any) -> Iterator[None]:
    """Whoever imports `name` gets `instead`; what else is imported meanwhile stays."""
    before = sys.modules.get(name)
    sys.modules[name] = instead
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


class Layer(nn.Module):
    """One parameter, whose gradient is a constant, known one; it tells when it runs."""

    def __init__(self, network: Network, number: int) -> None:
        super().__init__()
        self._network, self._number = network, number
        self.weight = nn.Parameter(torch.full((SIZES[number],), PARAMETER[number]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        network, number = self._network, self._number
        network.now_s += network.layer_s
        scaled = self.weight * GRADIENT[number]
        if scaled.requires_grad:
            scaled.register_hook(self._gradient)
        # What comes from now on comes before the next layer.
        network.place = ("layer", number + 1) if number + 1 < len(SIZES) else ("", None)
        return x + scaled.sum()

    def _gradient(self, _: torch.Tensor) -> None:
        """Its gradient is about to be there; the hooks of algorithms come after this one."""
        network = self._network
        if network.place[0] != "gradient":
            at_end_of_backward(self._passed)
        network.now_s += network.layer_s
        network.place = ("gradient", self._number)

    def _passed(self) -> None:
        self._network.place = ("pass", None)
        # DDP waits next, where it cannot be seen.
        for work in [work for work in self._network.under_way if work.awaited_by_torch]:
            work.wait()


class Program:
    """A training script whose steps are logged in `network.events`, with their numbers."""

    def __init__(self, algorithm: Any, options: Any, network: Network) -> None:
        self.network = network
        self.model = nn.Sequential(*(Layer(network, i) for i in range(len(SIZES))))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.communicator = ByHand(network)
        algorithm.wrap(self.model, self.optimizer, self.communicator, options)

    def backward(self) -> None:
        network = self.network
        network.place = ("model", None)
        loss = self.model(torch.zeros(()))
        network.place = ("backward", None)
        loss.backward()
        network.place = ("", None)

    def update(self) -> None:
        network = self.network
        network.place = ("step", None)
        self.optimizer.step()
        network.place = ("", None)

    def train(self, steps: int, *, paused: bool = False, after: Callable[[], Any] = int) -> None:
        """Steps as scripts make them; `paused`: of two backward passes, the first in `no_sync()`.

        Args:
            after: called when a step has ended.
        """
        for _ in range(steps):
            self.optimizer.zero_grad()
            if paused:
                with self.optimizer.no_sync():
                    self.backward()
            self.backward()
            self.update()
            after()
            self.network.step += 1
