"""Network of one rank among many equal ranks, on a virtual clock; and its transfers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from common.virtual.costs.parts import Shape
from common.virtual.world.trace import Recorder
from dear.comm.handles import WorkTimes
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import CHUNK_BYTES, Cost, Crowded, Link, Sending
from dear.errors import UserError

Place = Literal["inside", "between"]
"""Kind of link: inside a host, or between hosts."""
CostsOf = Callable[[int, int], Mapping[str, Cost]]
"""Function from the hosts of a group, and its ranks per host, to the cost of each operation."""


class Transfer:
    """Transfer that has started; has what `dear.comm.work.Work` and torch need of a handle."""

    def __init__(self, network: Network, name: str, nbytes: int, effect: Callable[[], Any]) -> None:
        self.name, self.nbytes = name, nbytes
        self.enqueued_s = network.events.now_s
        self.finished_s: float | None = None
        self._network, self._effect = network, effect
        self._callbacks: list[Callable[[], object]] = []
        self.sending: Sending | None = None

    def end(self) -> None:
        """Ends the transfer now, and calls what waits for it."""
        self.finished_s = self._network.events.now_s
        if self._effect is not _nothing:
            with torch.no_grad(), self._network.apart():
                self._effect()
            self._effect = _nothing
        recorder = self._network.recorder
        with contextlib.nullcontext() if recorder is None else recorder.because_of(self):
            for callback in self._callbacks:
                callback()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the transfer ends; at once if it has ended."""
        if self.finished_s is not None:
            callback()
        else:
            self._callbacks.append(callback)

    def wait(self, timeout: object = None) -> bool:
        """Lets the clock run until the transfer has ended; returns True."""
        self._network.wait([self])
        return True

    def is_completed(self) -> bool:
        """Returns True once the transfer has ended."""
        return self.finished_s is not None

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future that completes when the transfer ends."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.on_end(lambda: future.set_result(None))
        return future

    def times(self) -> WorkTimes:
        """Returns the times of a transfer that has ended."""
        assert self.finished_s is not None, "the transfer has not ended"
        began_s = self.sending.began_s if self.sending is not None else None
        started_s = self.enqueued_s if began_s is None else began_s
        return WorkTimes(
            enqueued_s=self.enqueued_s, started_s=started_s, finished_s=self.finished_s
        )


class Network:
    """Links of rank 0 of a cluster whose ranks all do the same at the same time.

    A link carries one message at a time, the most urgent first (`dear.cost.event_model.link`).

    Args:
        costs: cost of each operation in a group of some hosts and ranks per host.
        priorities: the engine lets urgent messages overtake others.
        engine: name of what sends (`comm_core`, `nccl`, ...), for algorithms that ask.
    """

    def __init__(
        self,
        shape: Shape,
        costs: CostsOf,
        *,
        engine: str,
        priorities: bool,
        chunk_bytes: float = CHUNK_BYTES,
    ) -> None:
        self.shape, self.engine, self.priorities = shape, engine, priorities
        self.events = Events()
        self.links: dict[Place, Link] = {
            "inside": Link(self.events, chunk_bytes),
            "between": Link(self.events, chunk_bytes),
        }
        self._costs = costs
        self._known: dict[tuple[int, int], Mapping[str, Cost]] = {}
        self.transfers: list[Transfer] = []
        """Transfers that have started since the list was emptied."""
        self.waits: list[tuple[float, float]] = []
        """Start and end of each wait of the device for transfers, since the list was emptied."""
        self.recorder: Recorder | None = None
        """Recorder of what this rank does; None: nothing is recorded."""
        self.windows: list[Any] = []
        """Windows of this rank (`common.virtual.world.core.Window`)."""
        self.apart: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Context of work that takes no time of the device; set by the device."""
        self.inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Context of every thread; set by the device."""
        self.unread: Callable[[torch.Tensor], bool] = lambda _: False
        """Function that returns True for tensors without values; set by the device."""

    def clock(self) -> float:
        """Returns the virtual time in seconds."""
        return self.events.now_s

    def pause(self, seconds: float) -> None:
        """Lets the clock run for `seconds`."""
        self.events.run_for(seconds)

    def cost(self, operation: str, shape: Shape) -> Cost:
        """Returns the cost of an operation in a group of this shape.

        If the group has only some ranks of its hosts, the others do the same over the same link.

        Raises:
            UserError: the engine's costs lack the operation.
        """
        key = (shape.hosts, shape.ranks_per_host)
        if key not in self._known:
            self._known[key] = self._costs(*key)
        if operation not in self._known[key]:
            known = ", ".join(sorted(self._known[key]))
            raise UserError(
                f"engine {self.engine} has no cost of {operation}; its costs are of {known}"
            )
        cost = self._known[key][operation]
        groups = self.shape.ranks_per_host // shape.ranks_per_host if shape.hosts > 1 else 1
        return Crowded(cost=cost, groups=groups) if groups > 1 else cost

    def start(
        self,
        operation: str,
        nbytes: int,
        effect: Callable[[], Any] = lambda: None,
        output: torch.Tensor | None = None,
        *,
        legs: Sequence[Shape] | None = None,
        ranks: Sequence[int] | None = None,
        channel: object = 0,
        priority: int = 0,
    ) -> Transfer:
        """Starts a transfer.

        Args:
            nbytes: bytes of the full buffer of each message.
            effect: called when the transfer ends.
            output: tensor that `effect` writes; if nobody reads its values, nothing is written.
            legs: hosts and ranks that take part in each of its messages; None: one message of all
                ranks. The transfer ends when all messages have ended.
            ranks: group of a collective; None: messages between single ranks.
            channel: queue, in which messages run one after another.
        """
        if output is not None and self.unread(output):
            effect = _nothing
        shapes = [leg for leg in legs or (self.shape,) if leg.ranks > 1]
        transfer = Transfer(self, operation, nbytes * len(shapes), effect)
        self.transfers.append(transfer)
        if self.recorder is not None and shapes:
            self.recorder.sent(transfer, ranks, channel, priority)
        left = len(shapes)

        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                transfer.end()

        for shape in shapes:
            link = self.links["between" if shape.hosts > 1 else "inside"]
            cost = self.cost(operation, shape)
            sending = link.send(cost, nbytes, channel=channel, priority=priority, then=ended)
            transfer.sending = transfer.sending or sending
        if not shapes:
            transfer.end()
        return transfer

    def thread(self, call: Callable[[], None]) -> None:
        """Runs `call` in another thread of this rank, which shares the clock."""

        def run() -> None:
            with self.inside():
                call()

        self.events.start(run)

    def pair(self, peer: int) -> Shape:
        """Returns the hosts and ranks that exchange with a peer like this rank with rank `peer`.

        All ranks exchange at the same time, so those of a host share its link.
        """
        if peer == 0:
            return Shape(hosts=1)
        if peer < self.shape.ranks_per_host:
            return Shape(hosts=1, ranks_per_host=self.shape.ranks_per_host)
        return self.shape

    def group(self, ranks: Sequence[int]) -> Shape:
        """Returns the hosts and ranks of a group.

        Raises:
            UserError: the group has different numbers of ranks on its hosts.
        """
        count = Counter(rank // self.shape.ranks_per_host for rank in ranks)
        if len(set(count.values())) > 1:
            raise UserError(
                f"a group of ranks {list(ranks)} has {sorted(set(count.values()))} ranks per host; "
                "predictions need groups with equally many ranks on each of their hosts"
            )
        return Shape(hosts=len(count), ranks_per_host=next(iter(count.values())))

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Lets the clock run until all `transfers` have ended."""
        began_s = self.events.now_s
        for transfer in transfers:
            self.events.run_until(transfer.is_completed, transfer.name)
        if self.events.now_s > began_s:
            self.waits.append((began_s, self.events.now_s))
        if self.recorder is not None:
            self.recorder.awaited(self.recorder.of(transfers), began_s, self.events.now_s)


def _nothing() -> None:
    return
