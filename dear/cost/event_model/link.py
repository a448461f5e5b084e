"""Link as collectives use it: several queues (channels), with preemption by urgent messages.

The time of a message is its start-up plus its occupancy of the link. Later messages of the queue
overlap the start-up; no message overlaps the occupancy.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dear.cost.event_model.events import Events
from dear.cost.fit import Cost, occupancy_s

CHUNK_BYTES = 128 * 1024
"""Unit of preemption: the comm core sends a buffer in pieces of this size."""


@dataclass(frozen=True, kw_only=True)
class Pairwise:
    """Cost measured for one message, and for two equal messages that start together."""

    alone: Cost
    pair: Cost
    """Function from the total bytes of both messages to their seconds."""

    def __call__(self, nbytes: float) -> float:
        return self.alone(nbytes)

    def occupancy_s(self, nbytes: float) -> float:
        """Returns the seconds between the ends of two equal messages."""
        return min(self.alone(nbytes), max(0.0, self.pair(2 * nbytes) - self.alone(nbytes)))


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Cost times a factor."""

    cost: Cost
    factor: float

    def __call__(self, nbytes: float) -> float:
        return self.factor * self.cost(nbytes)

    def occupancy_s(self, nbytes: float) -> float:
        """Returns the seconds for which a message occupies the link."""
        return self.factor * occupancy_s(self.cost, nbytes)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Cost of a message on a link that carries several equal ones at the same time."""

    cost: Cost
    messages: int

    def __call__(self, nbytes: float) -> float:
        return self.cost(nbytes) + (self.messages - 1) * occupancy_s(self.cost, nbytes)

    def occupancy_s(self, nbytes: float) -> float:
        """Returns the seconds for which the messages occupy the link."""
        return self.messages * occupancy_s(self.cost, nbytes)


@dataclass(eq=False)
class Sending:
    """Message in a queue or in flight."""

    channel: object
    priority: float
    nbytes: float
    left_s: float
    """Remaining occupancy in seconds."""
    start_up_s: float
    order: int
    """Index among all messages of the link."""
    then: Callable[[], None] | None = None
    served: bool = False
    """True if its occupancy is over."""
    ended: bool = False
    chunk_s: float = 0.0
    began_s: float | None = None
    """Time at which the link began to serve the message; None before."""


class Link:
    """Link that serves the first message of each channel: the most urgent first, then the oldest.

    Args:
        events: the virtual clock.
        chunk_bytes: bytes after which a more urgent message may preempt the current one.
    """

    def __init__(self, events: Events, chunk_bytes: float = CHUNK_BYTES) -> None:
        self._events = events
        self._chunk_bytes = chunk_bytes
        self._channels: dict[object, deque[Sending]] = {}
        self._heads: list[tuple[float, int, Sending]] = []
        """Heap of the first message of each channel, with some that have been served."""
        self._count = 0
        self._served: Sending | None = None
        self._since_s = 0.0
        self._turn = 0
        """Number of the current turn; the end that an earlier turn has scheduled is ignored."""
        self.busy_s = 0.0

    def send(
        self,
        cost: Cost,
        nbytes: float,
        *,
        channel: object = 0,
        priority: float = 0.0,
        then: Callable[[], None] | None = None,
    ) -> Sending:
        """Queues a collective of `nbytes` now; a higher `priority` is more urgent.

        Args:
            then: called when the collective ends.
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
        queue = self._channels.setdefault(channel, deque())
        queue.append(sending)
        if len(queue) == 1:
            self._lead(sending)
        if self._served is None:
            self._serve()
        elif self._head() is not self._served:
            self._yield()
        return sending

    def _lead(self, sending: Sending) -> None:
        heapq.heappush(self._heads, (-sending.priority, sending.order, sending))

    def _head(self) -> Sending | None:
        while self._heads and self._heads[0][2].served:
            heapq.heappop(self._heads)
        return self._heads[0][2] if self._heads else None

    def _serve(self) -> None:
        self._served = self._head()
        self._turn += 1
        if self._served is not None:
            self._since_s = self._events.now_s
            if self._served.began_s is None:
                self._served.began_s = self._since_s
            self._plan(self._since_s + self._served.left_s)

    def _plan(self, end_s: float) -> None:
        turn = self._turn

        def end() -> None:
            if turn == self._turn:
                self._stop()

        self._events.at(end_s, end)

    def _yield(self) -> None:
        """Stops the current message at the end of its current chunk."""
        served = self._served
        assert served is not None, "a message is served"
        gone_s = self._events.now_s - self._since_s
        chunks = math.ceil(gone_s / served.chunk_s - 1e-9) if served.chunk_s else 1
        end_s = chunks * served.chunk_s
        if end_s < served.left_s:
            self._turn += 1
            self._plan(self._since_s + end_s)

    def _stop(self) -> None:
        served = self._served
        assert served is not None, "a message is served"
        gone_s = self._events.now_s - self._since_s
        self.busy_s += gone_s
        served.left_s -= gone_s
        if served.left_s <= 1e-12:
            served.served = True
            queue = self._channels[served.channel]
            queue.popleft()
            if queue:
                self._lead(queue[0])
            self._events.at(self._events.now_s + served.start_up_s, lambda: self._end(served))
        self._serve()

    def _end(self, sending: Sending) -> None:
        sending.ended = True
        then, sending.then = sending.then, None  # which may refer to the message
        if then is not None:
            then()
