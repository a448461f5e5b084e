"""Trace of a virtual rank: what its device computed, what it sent, and what each had to wait for.

A node is a computation or a transfer. Each thread of the rank knows the last nodes that it has
awaited: its last computation, and the transfers for which it has waited since. What the thread
starts next depends on them, on a cluster of any speed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

from dear.comm.handles import WorkTimes

STEPS = 3
"""Smallest number of traced steps: that of trials that run."""


class Timed(Protocol):
    """Transfer that tells its times once it has ended."""

    name: str
    nbytes: int

    def times(self) -> WorkTimes: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Computation:
    """Work of the device."""

    name: str
    """Module, or kind of the work."""
    start_s: float
    end_s: float
    after: tuple[Node, ...]
    """Nodes that had to end before; those before the trace are missing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sent:
    """Transfer with what had to end before it could start."""

    transfer: Timed
    ranks: tuple[int, ...] | None
    """Group of the collective; None: messages between single ranks."""
    channel: int
    priority: int
    after: tuple[Node, ...]


Node: TypeAlias = Computation | Sent


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Gradient of a parameter, when it was ready."""

    name: str
    nbytes: int
    ready_s: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Trace of some steps on the virtual clock."""

    phases_s: tuple[tuple[float, float, float, float], ...]
    """Start of each step, and the ends of its forward pass, backward pass and update."""
    nodes: tuple[Node, ...]
    """Nodes that started in the steps, each after those on which it depends."""
    waits_s: tuple[tuple[float, float], ...]
    """Start and end of each wait of the training for transfers."""
    gradients: tuple[tuple[Gradient, ...], ...]
    """Gradients of each step."""

    def to_json(self) -> dict[str, object]:
        """Returns the trace in the form of a rank of a trial that ran, with its computations."""
        return {
            "marks_s": [*(step[0] for step in self.phases_s), self.phases_s[-1][-1]],
            "phases_s": self.phases_s,
            "waits_s": self.waits_s,
            "gradients": [
                [{"name": g.name, "bytes": g.nbytes, "at_s": g.ready_s} for g in step]
                for step in self.gradients
            ],
            "collectives": [_collective(node) for node in self.nodes if isinstance(node, Sent)],
            "transfers": [],
            "computations": [
                {"name": node.name, "started_s": node.start_s, "finished_s": node.end_s}
                for node in self.nodes
                if isinstance(node, Computation)
            ],
        }


def _collective(sent: Sent) -> dict[str, object]:
    times = sent.transfer.times()
    return {
        "name": sent.transfer.name,
        "channel": sent.channel,
        "bytes": sent.transfer.nbytes,
        "enqueued_s": times.enqueued_s,
        "started_s": times.started_s,
        "finished_s": times.finished_s,
    }


class Recorder:
    """Records the nodes and the gradients of this rank."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.gradients: list[Gradient] = []
        self._thread = threading.local()
        self._sent: dict[Timed, Sent] = {}
        self._channels: dict[object, int] = {}

    @property
    def known(self) -> tuple[Node, ...]:
        """Nodes that this thread has awaited, on which depends what it starts next."""
        return getattr(self._thread, "known", ())

    def learn(self, nodes: Iterable[Node]) -> None:
        """Adds nodes that this thread has awaited."""
        self._thread.known = tuple(dict.fromkeys([*self.known, *nodes]))

    def computed(self, name: str, start_s: float, end_s: float) -> None:
        """Records work of the device."""
        node = Computation(name=name, start_s=start_s, end_s=end_s, after=self.known)
        self.nodes.append(node)
        self._thread.known = (node,)

    def sent(
        self, transfer: Timed, ranks: Sequence[int] | None, channel: object, priority: int
    ) -> None:
        """Records the start of a transfer."""
        node = Sent(
            transfer=transfer,
            ranks=None if ranks is None else tuple(ranks),
            channel=self._channels.setdefault(channel, len(self._channels)),
            priority=priority,
            after=self.known,
        )
        self._sent[transfer] = node
        self.nodes.append(node)

    def of(self, transfers: Iterable[Timed]) -> list[Node]:
        """Returns the nodes of transfers that started since the recorder was made."""
        return [self._sent[transfer] for transfer in transfers if transfer in self._sent]

    @contextlib.contextmanager
    def because_of(self, transfer: Timed) -> Iterator[None]:
        """Returns a context in which what starts depends on the end of `transfer` alone."""
        before = self.known
        self._thread.known = tuple(self.of([transfer])) or before
        try:
            yield
        finally:
            self._thread.known = before

    def trace(
        self,
        phases_s: Sequence[tuple[float, float, float, float]],
        waits_s: Sequence[tuple[float, float]],
    ) -> Trace:
        """Returns the trace of steps with these phases; all transfers must have ended."""
        ends_s = [phases[-1] for phases in phases_s]
        return Trace(
            phases_s=tuple(phases_s),
            nodes=tuple(self.nodes),
            waits_s=tuple(waits_s),
            gradients=tuple(
                tuple(g for g in self.gradients if start <= g.ready_s < end)
                for start, end in pairwise([phases_s[0][0], *ends_s])
            ),
        )
