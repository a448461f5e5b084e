"""Neighbours whose memory a rank can write (one-sided windows): their state, and their memory."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from dear.comm.communicator import Communicator
from dear.lazy import dist, nx, torch
from dear.topology import check_nodes, in_neighbors, out_neighbors

T = TypeVar("T")
log = logging.getLogger("dear")

OWN = 0
"""Slot in which a rank publishes its values; the slots of its in-neighbours follow, by rank."""
LOOK_S = 0.5
_numbers = itertools.count()


@dataclass
class Staleness:
    """Statistics of how old one neighbour's values are, in steps, whenever they are used.

    The age is the number of this rank's steps minus the number of the sender's steps. It is 0 if
    both ranks are level, above 0 if the neighbour is behind or its values arrive late, and below 0
    if the neighbour is ahead.
    """

    uses: int = 0
    total: int = 0
    highest: int | None = None
    last: int | None = None

    def note(self, behind: int) -> None:
        """Counts one use of values with an age of `behind` steps."""
        self.uses, self.total, self.last = self.uses + 1, self.total + behind, behind
        self.highest = behind if self.highest is None else max(self.highest, behind)

    def summary(self) -> dict[str, Any]:
        """Returns `uses`, and `mean`, `max`, `last` age in steps (None before the first use)."""
        mean = self.total / self.uses if self.uses else None
        return {"uses": self.uses, "mean": mean, "max": self.highest, "last": self.last}


@dataclass(eq=False)
class Peer:
    """Neighbour, and the state of its transfers with this rank."""

    rank: int
    group: Any
    """Process group in which windows reach this neighbour."""
    place: int
    """The neighbour's rank in `group`."""
    here: int
    """Rank of this process in `group`."""
    slot: int | None
    """Slot on this rank for this neighbour's values; None: it sends nothing to this rank."""
    slot_there: int | None
    """Slot on this neighbour for this rank's values; None: this rank sends nothing to it."""
    staleness: Staleness = field(default_factory=Staleness)
    sent: int = 0
    skipped: int = 0
    """Messages left out because the previous message to this neighbour had not ended."""
    lost: bool = False


class Peers:
    """Neighbours of this rank in a graph; construction and closing are collective calls.

    Args:
        graph: edges from sender to receiver, the same on all ranks; weights are ignored.
        apart: True gives each pair of neighbours its own process group. If a rank dies, only its
            own transfers fail. The rank then counts as lost, and its transfers are left out. With
            False, one failure breaks the operations of all ranks. With True, a rank cannot read the
            values that another rank publishes.
    Raises:
        UserError: the nodes of the graph are not the ranks.
        Unavailable: the comm core is not built.
    """

    def __init__(
        self, communicator: Communicator, graph: nx.DiGraph, *, apart: bool = False
    ) -> None:
        check_nodes(graph, communicator.size)
        communicator.core()
        self.communicator = communicator
        self.apart = apart
        self.rank = communicator.rank
        self.sources = in_neighbors(graph, self.rank)
        """Ranks that may write to this rank's slots, ascending."""
        self.targets = out_neighbors(graph, self.rank)
        """Ranks whose slots this rank may write to, ascending."""
        self.windows: list[Any] = []
        self._made: list[Any] = []
        self.departures = Departures(communicator)
        """Register of the ranks that are done or lost."""
        self.near: dict[int, Peer] = {}
        """Neighbours by rank; with `apart`, their order prevents circular waits between ranks."""
        self.group = communicator.groups[0]
        """Process group of all ranks for the windows; not used with `apart`."""
        if apart:
            self._reach_apart(graph)
            return
        if dist.get_backend(self.group) != communicator.window_backend:
            self.group = self._new_group(dist.get_process_group_ranks(self.group))
        for other in sorted({*self.sources, *self.targets}):
            slot = 1 + self.sources.index(other) if other in self.sources else None
            target_slot = None
            if other in self.targets:
                target_slot = 1 + in_neighbors(graph, other).index(self.rank)
            self.near[other] = Peer(other, self.group, other, self.rank, slot, target_slot)

    def _reach_apart(self, graph: nx.DiGraph) -> None:
        """Makes a process group for each pair of neighbours, with one slot per direction."""
        job = dist.get_process_group_ranks(self.group)
        for pair in sorted({tuple(sorted(edge)) for edge in graph.edges if edge[0] != edge[1]}):
            group = self._new_group([job[rank] for rank in pair], mine=self.rank in pair)
            if self.rank in pair:
                here = pair.index(self.rank)
                other = pair[1 - here]
                slot = 0 if other in self.sources else None
                target_slot = 0 if other in self.targets else None
                self.near[other] = Peer(other, group, 1 - here, here, slot, target_slot)

    def _new_group(self, ranks: list[int], *, mine: bool = True) -> Any:
        backend = self.communicator.window_backend
        try:
            group = dist.new_group(ranks, timeout=self.communicator.timeout, backend=backend)
        except dist.DistStoreError as error:
            others = " or ".join(self._label(rank) for rank in ranks if rank != self.rank)
            names = ", ".join(map(str, ranks))
            raise RuntimeError(
                f"{others} has not joined the group of ranks {names}: {error}"
            ) from None
        if mine:
            self._made.append(group)
        return group

    def _label(self, rank: int) -> str:
        """Returns a rank's number, with its host and address if the job's backend knows them."""
        backend = self.group._get_backend(torch.device("cpu"))
        return backend.label(rank) if hasattr(backend, "label") else f"rank {rank}"

    def attempt(self, peer: Peer, call: Callable[..., T], *args: Any) -> T | None:
        """Returns `call(*args)`; with `apart`, returns None if `peer` is lost or the call fails.

        Without `apart`, a failed call raises its RuntimeError.
        """
        if not self.apart:
            return call(*args)
        if peer.lost:
            return None
        try:
            return call(*args)
        except RuntimeError:
            # A failed operation makes only the group of this pair unusable.
            peer.lost = True
            log.warning("rank %d has died; training continues without it", peer.rank)
            self.departures.done(peer.rank)
            return None

    def leave(self, timeout_s: float) -> None:
        """Waits until all ranks have left or are lost; neighbours may still write until then.

        Raises RuntimeError if some have not left after `timeout_s` seconds; without `apart`, also
        if one has died.
        """

        def look() -> None:
            for window in self.windows[:1]:  # every window would notice the same
                window.slots.look()

        self.departures.done()
        self.departures.wait(timeout_s, look)

    def statistics(self) -> dict[str, Any]:
        """Returns `staleness` by source (see `Staleness.summary`), the numbers of messages `sent`
        and `skipped` by target, and the `lost` ranks."""
        peers = self.near.values()
        targets = [peer for peer in peers if peer.slot_there is not None]
        return {
            "staleness": {str(p.rank): p.staleness.summary() for p in peers if p.slot is not None},
            "sent": {str(peer.rank): peer.sent for peer in targets},
            "skipped": {str(peer.rank): peer.skipped for peer in targets},
            "lost": [peer.rank for peer in peers if peer.lost],
        }

    def freed(self, window: Any) -> None:
        """Removes a freed window; destroys the process groups with the last window."""
        self.windows.remove(window)
        if not self.windows:
            for group in self._made:
                dist.destroy_process_group(group)
            self._made.clear()

    def close(self) -> None:
        """Frees all windows."""
        for window in list(self.windows):
            window.free()


class Departures:
    """Register of the ranks that are done or lost, in the job's store.

    All ranks must construct it in the same order. A barrier would not do: it has a collective's
    time limit, which a rank that is several times slower than the others can exceed.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self._clock = communicator.clock
        name = f"departures.{communicator.groups[0].group_name}.{next(_numbers)}"
        # Private in torch; and torch exports `PrefixStore` without a declaration.
        default = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(name, default)  # type: ignore[attr-defined]

    def done(self, rank: int | None = None) -> None:
        """Records that this rank makes no more steps, or that `rank` is done or lost."""
        self._store.set(str(self._rank if rank is None else rank), "")

    def gone(self, rank: int) -> bool:
        """Returns True if rank `rank` is done or lost."""
        return self._store.check([str(rank)])

    def wait(self, timeout_s: float, look: Callable[[], object]) -> None:
        """Waits until all ranks are done or lost; meanwhile calls `look`, which may record losses.

        Raises RuntimeError, with the ranks that are neither, after `timeout_s` seconds.
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
            except RuntimeError as error:  # a FileStore raises no specific error on a timeout
                if "timeout" not in str(error).lower():
                    raise
                look()


class Slots:
    """Memory of a window on this rank and its neighbours, divided into slots of one row each.

    Args:
        room: length of a slot in elements.
    """

    def __init__(self, peers: Peers, room: int, dtype: torch.dtype) -> None:
        window = peers.communicator.core().Window
        self._peers, self._dtype = peers, dtype
        self._whole: Any = None
        """Window of all ranks; None with `apart`, where each neighbour has its own window."""
        if peers.apart:
            self._cores: dict[int, Any] = {
                peer.rank: window(int(peer.slot is not None), room, dtype, peer.group)
                for peer in peers.near.values()
            }
        else:
            self._whole = window(1 + len(peers.sources), room, dtype, peers.group)
            self._cores = dict.fromkeys(peers.near, self._whole)

    def send(self, message: torch.Tensor, target: int, *, add: bool, start: int = 0) -> Any:
        """Starts a write to this rank's slot at `target`; returns the operation (None: it died)."""
        peer, core = self._peers.near[target], self._cores[target]
        call = core.accumulate if add else core.put
        return self._peers.attempt(peer, call, message, peer.place, peer.slot_there, start)

    def show(self, message: torch.Tensor) -> None:
        """Writes the slot of this rank that others read; has no effect with `apart` peers."""
        if self._whole is not None:
            self._whole.put(message, self._peers.rank, OWN).wait()

    def fetch(self, row: torch.Tensor, source: int) -> Any:
        """Starts to read the slot that `source` publishes; returns the operation."""
        return self._whole.get(row, source, OWN)

    def write(self, source: int, message: torch.Tensor) -> None:
        """Writes to the slot on this rank that belongs to `source`."""
        peer, core = self._peers.near[source], self._cores[source]
        self._peers.attempt(peer, lambda: core.put(message, peer.here, peer.slot).wait())

    def read(self, wanted: Iterable[int], clear: bool = False) -> dict[int, torch.Tensor]:
        """Returns copies of the slots of `wanted` sources that are not lost; versions become 0."""
        wanted = list(wanted)
        if self._whole is not None and wanted and wanted == self._peers.sources:
            slots = self._whole.read(1, len(wanted), reset_versions=True, clear=clear)
            return dict(zip(wanted, slots, strict=True))
        result = {}
        for source in wanted:
            peer, read = self._peers.near[source], self._cores[source].read
            rows = self._peers.attempt(peer, read, peer.slot, 1, True, clear)
            if rows is not None:
                result[source] = rows[0]
        return result

    def peek(self, source: int, part: torch.Tensor, start: int) -> torch.Tensor | None:
        """Returns a copy of elements of a slot on this rank, or None if `source` is lost."""
        peer = self._peers.near[source]

        def read() -> torch.Tensor:
            self._cores[source].get(part, peer.here, peer.slot, start).wait()
            return part

        return self._peers.attempt(peer, read)

    def versions(self) -> dict[int, int]:
        """Returns, per source, the writes to its slot since the last read; not with `apart`."""
        return dict(zip(self._peers.sources, self._whole.versions()[1:], strict=True))

    def look(self) -> None:
        """Marks the neighbours that have died as lost; without `apart`, raises RuntimeError if a
        rank has died."""
        # Once a rank has died, all operations of its group fail, also those within a rank.
        if self._whole is not None:
            self.fetch(torch.empty(1, dtype=self._dtype), self._peers.rank).wait()
            return

        def operate(peer: Peer) -> None:
            with self._cores[peer.rank].mutex(peer.here):
                pass

        for peer in self._peers.near.values():
            self._peers.attempt(peer, operate, peer)

    @contextlib.contextmanager
    def mutex(self, ranks: Iterable[int]) -> Iterator[None]:
        """Holds the locks of the windows of `ranks`; all ranks lock in ascending order."""
        with contextlib.ExitStack() as locks:
            for rank in sorted(set(ranks)):
                locks.enter_context(self._whole.mutex(rank))
            yield

    def free(self) -> None:
        """Frees the memory; a collective call."""
        if self._whole is not None:
            self._whole.free()
        else:
            for peer in self._peers.near.values():
                self._peers.attempt(peer, self._cores[peer.rank].free)
