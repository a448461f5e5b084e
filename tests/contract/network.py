"""Network of the virtual cluster whose messages end when a test says so, and a log of them.

The clock stands still but for what passes and messages are said to take. What a message carries is
seen by its values: those of each layer's parameters, and of its gradients, lie in ranges of their
own (`PARAMETER`, `GRADIENT`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from common.virtual.costs.parts import Shape
from common.virtual.world import seat
from common.virtual.world.alike import Alike
from common.virtual.world.communicator import VirtualCommunicator
from common.virtual.world.marks import Parts, carried
from common.virtual.world.network import Effect, Group, Transfer, Values
from dear.algorithms.synchronous import mgs
from dear.comm.work import Work
from dear.cost.fit import AlphaBeta
from dear.cost.overlap import Content

SIZES = (64, 32, 128, 96)
"""Elements of the layers, in the order in which they run; no two are alike."""
PARAMETER = [2.0 ** (4 * i + 4) for i in range(len(SIZES))]
GRADIENT = [2.0 ** -(4 * i + 8) for i in range(len(SIZES))]
KINDS: tuple[Content, ...] = ("parameters", "gradients")
CODES = torch.tensor(PARAMETER + GRADIENT)
LEAST, MOST = 0.24, 3.8
"""A value may be halved on its way, or weighed, or be the sum of two passes."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "exchange")

Place = tuple[str, int | None]
"""Subject of an event: "model"; "layer" or "gradient" and its number; "backward", before the
first gradient; "pass"; "step"; "" is none of them."""


@dataclass(eq=False, kw_only=True)
class Message:
    """Message on the link of a `Network`, from its start on."""

    operation: str
    layers: frozenset[int]
    carries: frozenset[Content]
    """Empty: it carries neither; a meeting of all ranks is such a message, too."""
    nbytes: int
    step: int
    place: Place
    channel: Hashable
    priority: int
    seconds: float
    then: Callable[[], object]
    """Called when it ends."""
    began_s: float | None = None

    def __str__(self) -> str:
        what = " and ".join(sorted(self.carries)) or "neither gradients nor parameters"
        of = f" of layers {sorted(self.layers)}" if self.layers else ""
        return f"{self.operation} with {what}{of}"


@dataclass(frozen=True, kw_only=True)
class Event:
    """`start` of a message, `wait` for one that has not ended, or an `update`."""

    what: str
    step: int
    place: Place
    layers: frozenset[int]
    message: Message | None = None


class Network(Alike):
    """Network of rank 0 of two that do the same; it is its own link, and logs what happens.

    Args:
        native: the engine is the comm core, which has priorities.
        alpha_s, beta_s: seconds of a message and of a byte.
    """

    def __init__(self, *, native: bool = True, alpha_s: float = 1e-4, beta_s: float = 0.0) -> None:
        self.cost = AlphaBeta(alpha_s=alpha_s, beta_s_per_byte=beta_s)
        costs = dict.fromkeys(OPERATIONS, self.cost)
        engine = "comm_core" if native else "gloo"
        super().__init__(Shape(hosts=2), lambda *_: costs, engine=engine, priorities=native)
        self.links: Any = {"between": self}
        self.ends_itself = True
        """Waiting ends; where False, it is an error."""
        self.log: list[Event] = []
        self.under_way: list[Message] = []
        self.step = 0
        self.place: Place = ("", None)
        self.whole: torch.Tensor | None = None
        """Values that both ranks together send by the next message; None: both send the same."""
        self._next: tuple[str, frozenset[int], frozenset[Content]]
        """Operation and content of the next message."""

    def meet(
        self,
        operation: str,
        group: Group,
        nbytes: int,
        given: torch.Tensor,
        effect: Callable[[Parts], Any],
        *,
        priority: int = 0,
    ) -> Transfer:
        shared, self.whole = self.whole, None
        if operation == "broadcast":
            shared = given
        self._next = operation, *(content_of(given) if shared is None else self._content(shared))
        return super().meet(operation, group, nbytes, given, effect, priority=priority)

    def _content(self, shared: torch.Tensor) -> tuple[frozenset[int], frozenset[Content]]:
        """The content of what both ranks supply: of means, this rank has its own part only."""
        layers, carries = content_of(shared)
        for before in (e.message for e in reversed(self.log) if e.what == "start"):
            if "parameters" in carries:
                break
            # By layers of this rank's part, if any: marks may have made sums longer.
            same = layers <= before.layers if layers else before.nbytes == shared.nbytes
            if same and before.operation.startswith("reduce"):
                return before.layers, before.carries
        return layers, carries

    def swap(
        self,
        queue: Hashable,
        nbytes: int,
        given: Mapping[int, torch.Tensor],
        sources: Iterable[int],
        effect: Callable[[Mapping[int, torch.Tensor]], Any],
    ) -> Transfer:
        self._next = "exchange", *content_of(next(iter(given.values())))
        return super().swap(queue, nbytes, given, sources, effect)

    def reach(
        self, source: int, target: int, nbytes: int, values: Values, effect: Effect
    ) -> Transfer:
        self._next = "put" if source == self.rank else "get", *content_of(values())
        return super().reach(source, target, nbytes, values, effect)

    def agree(self, group: Group, value: Any, call: str) -> list[Any]:
        self._next = call, frozenset(), frozenset()
        self._await(self.send(self.cost, 0, channel=group.name, then=lambda: None))
        return super().agree(group, value, call)

    def send(
        self,
        cost: Callable[[float], float],
        nbytes: int,
        *,
        channel: Hashable,
        priority: int = 0,
        then: Callable[[], object],
    ) -> Message:
        """Starts a message, as a link does."""
        operation, layers, carries = self._next
        message = Message(
            operation=operation,
            layers=layers,
            carries=carries,
            nbytes=nbytes,
            step=self.step,
            place=self.place,
            channel=channel,
            priority=priority,
            seconds=cost(nbytes),
            then=then,
        )
        self.note("start", layers, message)
        self.under_way.append(message)
        return message

    def note(self, what: str, layers: frozenset[int], message: Message | None = None) -> None:
        self.log.append(
            Event(what=what, step=self.step, place=self.place, layers=layers, message=message)
        )

    def end(self, *messages: Message) -> None:
        """Lets some messages end, or all that are under way and what starts as they end."""
        for message in messages:
            for each in self._up_to(message):
                self.under_way.remove(each)
                super().pause(each.seconds)
                each.then()
        while self.under_way and not messages:
            self.end(self.under_way[0])

    def _up_to(self, message: Message) -> list[Message]:
        """`message`, and what ends before it whatever happens: one-sided messages are in order."""
        if message.channel != "windows":
            return [message]
        queue = [each for each in self.under_way if each.channel == message.channel]
        return queue[: queue.index(message) + 1]

    def wait(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if not transfer.ended():
                self._await(transfer.sending)
        super().wait(transfers)

    def _await(self, message: Any) -> None:
        for each in self._up_to(message):
            self.note("wait", each.layers, each)
            if not self.ends_itself:
                raise AssertionError(f"waits for {each}")
            self.end(each)

    def pause(self, seconds: float) -> None:
        """Somebody looks again and again whether something has changed: what is oldest ends."""
        if not self.under_way:
            raise AssertionError("somebody waits for what nobody has sent")
        self._await(self.under_way[0])


def content_of(tensor: torch.Tensor) -> tuple[frozenset[int], frozenset[Content]]:
    """The layers that a message has values of, and what kind of values; bytes count as floats."""
    with torch._C._DisableTorchDispatch():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().contiguous().reshape(-1, 1)
        if flat.dtype == torch.uint8:
            flat = flat[: len(flat) // 4 * 4].view(-1).view(torch.float32)[:, None]
        if not flat.is_floating_point():
            return frozenset(), frozenset()
        there = ((flat > LEAST * CODES) & (flat < MOST * CODES)).any(0).view(len(KINDS), -1)
        layers = frozenset(there.any(0).nonzero().flatten().tolist())
        return layers, frozenset(KINDS[kind] for kind in there.any(1).nonzero().flatten())


class _Communicator(VirtualCommunicator):
    """Communicator of rank 0. What the other rank would send to be gathered is here already."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, **queue: int) -> Work:
        if not output.is_floating_point():  # payloads, which are alike
            return super().all_gather(output, input, **queue)
        self.network.whole = carried(output, output)
        theirs = output.view(2, -1)[1]
        before = theirs.clone()
        work = super().all_gather(output, input, **queue)
        work.on_complete(lambda: theirs.copy_(before))
        return work


@contextlib.contextmanager
def on(network: Network) -> Iterator[None]:
    """Makes this process rank 0 of `network`, which logs updates by SGD."""
    module = sys.modules["torch.optim.sgd"]
    plain = module.sgd

    def update(params: Sequence[Any], *given: Any, **settings: Any) -> None:
        network.note("update", frozenset[int]().union(*(content_of(param)[0] for param in params)))
        plain(params, *given, **settings)

    free = AlphaBeta(alpha_s=0.0, beta_s_per_byte=0.0)
    with (
        mock.patch.object(module, "sgd", update),
        mock.patch.object(mgs, "measured_call", lambda *_: free),  # it would sort for seconds
        mock.patch.object(seat, "VirtualCommunicator", _Communicator),
        seat.kept(),
        seat.Seat(network, math.inf).joined(),
    ):
        yield
