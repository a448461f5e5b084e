"""The neighbours that one-sided windows reach: how old their values are, who died, who has left."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dear.comm.communicator import Communicator
from dear.comm.neighbors import core_module
from dear.lazy import dist, nx
from dear.topology import check_nodes, in_neighbors, out_neighbors

log = logging.getLogger("dear")

LOOK_S = 0.5
_numbers = itertools.count()


@dataclass
class Staleness:
    """Of what one neighbour sent: own steps minus the steps that it had in it, at each use.

    0: the neighbour is level; above: it is behind, or its values are slow to come; below: it is
    ahead.
    """

    uses: int = 0
    total: int = 0
    highest: int | None = None
    last: int | None = None

    def note(self, behind: int) -> None:
        """One use of values that are so many steps behind."""
        self.uses, self.total, self.last = self.uses + 1, self.total + behind, behind
        self.highest = behind if self.highest is None else max(self.highest, behind)

    def summary(self) -> dict[str, Any]:
        """`uses`, and `mean`, `max`, `last` in steps (None before the first use)."""
        mean = self.total / self.uses if self.uses else None
        return {"uses": self.uses, "mean": mean, "max": self.highest, "last": self.last}


@dataclass(eq=False)
class Peer:
    """A neighbour, and what has passed between it and this rank."""

    rank: int
    group: Any
    """The process group in which windows reach it."""
    place: int
    """Its rank there."""
    here: int
    """This rank's own rank there."""
    slot: int | None
    """Where its values come in here; None: it sends nothing to this rank."""
    slot_there: int | None
    """Where this rank's values go; None: this rank sends nothing to it."""
    staleness: Staleness = field(default_factory=Staleness)
    sent: int = 0
    skipped: int = 0
    """Messages left out, since the one before to it was still under way."""
    lost: bool = False


class Peers:
    """The neighbours of this rank in a graph. Making and closing it is a collective call.

    Args:
        graph: who sends to whom; must be the same on all ranks. Weights do not count here.
        apart: each pair of neighbours has a process group of its own. If one dies, nobody else's
            windows fail: it counts as lost, and what would pass between it and this rank is left
            out. Without it, operations of all fail. What others show cannot be read `apart`.

    Raises:
        UserError: the graph is not one of all ranks.
        Unavailable: the comm core is not built.
    """

    def __init__(
        self, communicator: Communicator, graph: nx.DiGraph, *, apart: bool = False
    ) -> None:
        check_nodes(graph, communicator.size)
        core_module()
        self.communicator = communicator
        self.apart = apart
        self.rank = communicator.rank
        self.sources = in_neighbors(graph, self.rank)
        """Ranks that may put here, ascending."""
        self.targets = out_neighbors(graph, self.rank)
        """Ranks that this one may put to, ascending."""
        self.windows: list[Any] = []
        self._made: list[Any] = []
        self.departures = Departures(communicator) if apart else None
        """Who is done or lost; of peers that are `apart` only."""
        self.near: dict[int, Peer] = {}
        """By rank; `apart` in an order that is no circle of ranks that wait for each other."""
        self.group = communicator.groups[0]
        """The group of all ranks that serves windows, unless they are `apart`."""
        if apart:
            self._reach_apart(graph)
            return
        if dist.get_backend(self.group) != "comm_core":
            self.group = self._new_group(dist.get_process_group_ranks(self.group))
        for other in sorted({*self.sources, *self.targets}):
            slot = 1 + self.sources.index(other) if other in self.sources else None
            there = None
            if other in self.targets:
                there = 1 + in_neighbors(graph, other).index(self.rank)
            self.near[other] = Peer(other, self.group, other, self.rank, slot, there)

    def _reach_apart(self, graph: nx.DiGraph) -> None:
        """A group for each pair of neighbours, with one slot each way."""
        job = dist.get_process_group_ranks(self.group)
        for pair in sorted({tuple(sorted(edge)) for edge in graph.edges if edge[0] != edge[1]}):
            group = self._new_group([job[rank] for rank in pair], mine=self.rank in pair)
            if self.rank in pair:
                here = pair.index(self.rank)
                other = pair[1 - here]
                slots = (0 if other in known else None for known in (self.sources, self.targets))
                self.near[other] = Peer(other, group, 1 - here, here, *slots)

    def _new_group(self, ranks: list[int], *, mine: bool = True) -> Any:
        group = dist.new_group(ranks, timeout=self.communicator.timeout, backend="comm_core")
        if mine:
            self._made.append(group)
        return group

    def attempt(self, peer: Peer, call: Callable[..., Any], *args: Any) -> Any:
        """`call(*args)`; None if `peer` is lost, now or before. Raises if it is not `apart`."""
        if not self.apart:
            return call(*args)
        if peer.lost:
            return None
        try:
            return call(*args)
        except RuntimeError:
            # A failed operation leaves the group of the two, and only that, useless.
            peer.lost = True
            log.warning("rank %d has died; training goes on without it", peer.rank)
            self.departures.done(peer.rank)
            return None

    def leave(self, timeout_s: float) -> None:
        """Waits until all ranks have left or are lost; neighbours may go on writing until then.

        For peers that are `apart`. Raises RuntimeError if some do not leave within `timeout_s`.
        """
        self.departures.done()
        self.departures.wait(timeout_s, lambda: [window.look() for window in self.windows[:1]])

    def statistics(self) -> dict[str, Any]:
        """`staleness` by neighbour (see `Staleness.summary`), messages `sent` and `skipped` (by the
        rank they went to), and the ranks `lost`."""
        near = self.near.values()
        targets = [peer for peer in near if peer.slot_there is not None]
        return {
            "staleness": {str(p.rank): p.staleness.summary() for p in near if p.slot is not None},
            "sent": {str(peer.rank): peer.sent for peer in targets},
            "skipped": {str(peer.rank): peer.skipped for peer in targets},
            "lost": [peer.rank for peer in near if peer.lost],
        }

    def freed(self, window: Any) -> None:
        """A window is gone; with the last one the process groups go, too."""
        self.windows.remove(window)
        if not self.windows:
            for group in self._made:
                dist.destroy_process_group(group)
            self._made.clear()

    def close(self) -> None:
        """Frees the windows that there are."""
        for window in list(self.windows):
            window.free()


class Departures:
    """Notes in the job's store who is done and who is lost.

    Made in the same order on all ranks. A barrier would do the same, but within the time limit of
    a collective, which a rank several times slower than the others does not keep.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self._clock = communicator.clock
        name = f"departures.{communicator.groups[0].group_name}.{next(_numbers)}"
        # A private function of torch; the group's own store would be one, too.
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())

    def done(self, rank: int | None = None) -> None:
        """This rank makes no further steps; or `rank`, which is lost."""
        self._store.set(str(self._rank if rank is None else rank), "")

    def gone(self, rank: int) -> bool:
        """True if rank `rank` is done or lost."""
        return self._store.check([str(rank)])

    def wait(self, timeout_s: float, look: Callable[[], None]) -> None:
        """Returns when all ranks are done or lost; RuntimeError names those that are not in time.

        Args:
            look: called now and then; may say that somebody is lost.
        """
        deadline = self._clock() + timeout_s
        waiting = list(range(self._size))
        while waiting := [rank for rank in waiting if not self.gone(rank)]:
            if self._clock() > deadline:
                names = ", ".join(map(str, waiting))
                raise RuntimeError(
                    f"rank {self._rank} is done, but after {timeout_s:g} s rank {names} is not"
                )
            try:
                self._store.wait([str(waiting[0])], timedelta(seconds=LOOK_S))
            except RuntimeError as error:  # a FileStore has no kind of error of its own for it
                if "timeout" not in str(error).lower():
                    raise
                look()
