"""A link as collectives see it: queues, of which one may overtake another in mid-flight.

A message costs a start-up, which those behind it in a queue overlap, and the occupancy of the link,
which nothing overlaps. A message alone takes both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from common.virtual.events import Events

CHUNK_BYTES = 128 * 1024
"""What a more urgent message waits for: the comm core moves a buffer in pieces of this size."""

Cost = Callable[[float], float]
"""Seconds of one collective alone, by the bytes of its full buffer."""


@runtime_checkable
class Occupying(Protocol):
    """A cost that knows which part of it queued messages cannot overlap."""

    def occupancy_s(self, nbytes: float) -> float: ...


def occupancy_s(cost: Cost, nbytes: float) -> float:
    """Seconds for which the link is busy: all of them, where the cost does not tell."""
    return cost.occupancy_s(nbytes) if isinstance(cost, Occupying) else cost(nbytes)


@dataclass(frozen=True, kw_only=True)
class Pairwise:
    """A cost that was measured for one message, and for two equal messages that start together."""

    alone: Cost
    pair: Cost
    """Seconds of both messages, by their total bytes."""

    def __call__(self, nbytes: float) -> float:
        return self.alone(nbytes)

    def occupancy_s(self, nbytes: float) -> float:
        """Seconds between the ends of two equal messages: how long one keeps the link busy."""
        return min(self.alone(nbytes), max(0.0, self.pair(2 * nbytes) - self.alone(nbytes)))


@dataclass(eq=False)
class Sending:
    """A message on its way."""

    channel: int
    priority: float
    nbytes: float
    left_s: float
    """Of its occupancy."""
    start_up_s: float
    order: int
    """Among all that were sent."""
    then: Callable[[], None] | None = None
    ended: bool = False
    chunk_s: float = 0.0


class Link:
    """Serves the heads of its channels, each a queue; the most urgent head first, then the oldest.

    Args:
        events: the clock.
        chunk_bytes: between so many bytes a more urgent head takes over.
    """

    def __init__(self, events: Events, chunk_bytes: float = CHUNK_BYTES) -> None:
        self._events = events
        self._chunk_bytes = chunk_bytes
        self._channels: dict[int, deque[Sending]] = {}
        self._count = 0
        self._served: Sending | None = None
        self._since_s = 0.0
        self._turn = 0
        """Of what is served; an end that was planned for an earlier turn is void."""
        self.busy_s = 0.0

    def send(
        self,
        cost: Cost,
        nbytes: float,
        *,
        channel: int = 0,
        priority: float = 0.0,
        then: Callable[[], None] | None = None,
    ) -> Sending:
        """Queues a collective over `nbytes` now; large `priority` is urgent.

        Args:
            then: called when it ends.
        """
        occupied_s, alone_s = occupancy_s(cost, nbytes), cost(nbytes)
        sending = Sending(
            channel=channel,
            priority=priority,
            nbytes=nbytes,
            left_s=occupied_s,
            start_up_s=max(0.0, alone_s - occupied_s),
            order=self._count,
            then=then,
            chunk_s=occupied_s * min(1.0, self._chunk_bytes / nbytes) if nbytes else 0.0,
        )
        self._count += 1
        self._channels.setdefault(channel, deque()).append(sending)
        if self._served is None:
            self._serve()
        elif self._head() is not self._served:
            self._yield()
        return sending

    def _head(self) -> Sending | None:
        heads = [queue[0] for queue in self._channels.values() if queue]
        return max(heads, key=lambda one: (one.priority, -one.order)) if heads else None

    def _serve(self) -> None:
        self._served = self._head()
        self._turn += 1
        if self._served is not None:
            self._since_s = self._events.now_s
            self._plan(self._since_s + self._served.left_s)

    def _plan(self, end_s: float) -> None:
        turn = self._turn

        def end() -> None:
            if turn == self._turn:
                self._stop()

        self._events.at(end_s, end)

    def _yield(self) -> None:
        """What is served goes on to the end of its chunk."""
        served = self._served
        gone_s = self._events.now_s - self._since_s
        chunks = math.ceil(gone_s / served.chunk_s - 1e-9) if served.chunk_s else 1
        end_s = chunks * served.chunk_s
        if end_s < served.left_s:
            self._turn += 1
            self._plan(self._since_s + end_s)

    def _stop(self) -> None:
        served = self._served
        gone_s = self._events.now_s - self._since_s
        self.busy_s += gone_s
        served.left_s -= gone_s
        if served.left_s <= 1e-12:
            self._channels[served.channel].popleft()
            self._events.at(self._events.now_s + served.start_up_s, lambda: self._end(served))
        self._serve()

    def _end(self, sending: Sending) -> None:
        sending.ended = True
        if sending.then is not None:
            sending.then()
