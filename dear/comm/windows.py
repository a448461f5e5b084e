"""One-sided exchange along a graph: each rank has a slot for every neighbour that sends to it.

A rank's process takes no part in what others put, read or add; the comm core's threads serve it.
CUDA tensors are staged through host memory. With the values of a message travels the number of
steps that its sender had made, so that the reader knows how stale they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dear.comm.neighbors import core_module, weighted_sum
from dear.comm.peers import Peers
from dear.errors import UserError
from dear.lazy import dist, torch

OWN = 0
"""The slot in which a rank shows its own value to those who read; neighbours follow, ascending."""
TAG_BYTES = 8
LINE_BYTES = 64


class Row:
    """A message in host memory: values, p where it fits, and the steps in them, in one piece.

    A GPU copies to memory that is `pinned` directly.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, pinned: bool = False) -> None:
        place, size = self.layout(numel, dtype)
        self.memory = torch.zeros(size, dtype=dtype, pin_memory=pinned)
        self.values = self.memory[:numel]
        self.steps = self.memory[place : place + TAG_BYTES // dtype.itemsize].view(torch.int64)
        self.works: list[Any] = []
        """Operations that read it."""

    @staticmethod
    def layout(numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """Where the number of steps is, and the length, in elements; whole cache lines."""
        place = -(-(numel + 1) * dtype.itemsize // TAG_BYTES) * TAG_BYTES
        nbytes = -(-(place + TAG_BYTES) // LINE_BYTES) * LINE_BYTES
        return place // dtype.itemsize, nbytes // dtype.itemsize

    def busy(self) -> bool:
        """True while an operation may still read it."""
        self.works = [work for work in self.works if not work.is_completed()]
        return bool(self.works)


class NeighborWindow:
    """Slots of a tensor on every rank, one for each in-neighbour, and the own value others read.

    Making and freeing one is a collective call. While `weighted`, a number `p` travels with the
    values, in the same message: push-sum methods divide by it. Where the `steps` that values hold
    are given on both sides, the staleness of the peers is counted.

    Args:
        peers: who sends to whom.
        like: shape, dtype and device of the values; its values are what the rank shows at first.
        zero_slots: slots start as zeros; otherwise as this rank's own values.
        weighted: values carry `p`. It starts as 1, and as 0 in the slots.

    Raises:
        UserError: the values are no floating-point ones, or `weighted` with a dtype in which p
            would be coarse.
    """

    def __init__(
        self,
        peers: Peers,
        like: torch.Tensor,
        *,
        zero_slots: bool = False,
        weighted: bool = False,
        steps: int = 0,
    ) -> None:
        if not like.dtype.is_floating_point:
            raise UserError(f"a window needs floating-point values, got {like.dtype}")
        self.shape, self.dtype, self._pinned = like.shape, like.dtype, like.is_cuda
        self.weigh(weighted)
        self.peers = peers
        self.rank, self.sources, self.targets = peers.rank, peers.sources, peers.targets
        self.p = 1.0
        """This rank's share of the total weight."""
        self._numel = like.numel()
        self._steps_at, self._room = Row.layout(self._numel, self.dtype)
        self._rows: list[Row] = []
        self._lock = threading.Lock()
        self._under_way: dict[int, Any] = {}
        """Target -> its last message, until that is seen to be there."""
        self._heard: dict[int, int] = {}
        """Source -> steps in what came last."""
        window = core_module().Window
        self._whole: Any = None
        if peers.apart:
            self._core: dict[int, Any] = {
                peer.rank: window(int(peer.slot is not None), self._room, self.dtype, peer.group)
                for peer in peers.near.values()
            }
        else:
            self._whole = window(1 + len(self.sources), self._room, self.dtype, peers.group)
            self._core = dict.fromkeys(peers.near, self._whole)
        peers.windows.append(self)
        self.show(like, steps=steps)
        if not zero_slots:
            self.fill(like, steps=steps)
        # Until everybody's slots are filled nobody may write to them.
        for group in [peer.group for peer in peers.near.values()] if peers.apart else [peers.group]:
            dist.barrier(group)

    def weigh(self, on: bool) -> None:
        """Whether p travels with the values from now on; all ranks call it, between barriers."""
        if on and self.dtype not in (torch.float32, torch.float64):
            raise UserError("a weighted window needs float32 or float64 values")
        self.weighted = on

    def show(self, values: torch.Tensor, *, steps: int = 0) -> None:
        """Lets others read `values` (and p) from now on, where peers are not `apart`."""
        if self._whole is not None:
            with self._message(values, 1.0, self.p, steps) as row:
                self._whole.put(row.memory, self.rank, OWN).wait()

    def fill(self, values: torch.Tensor, *, steps: int = 0) -> None:
        """Puts `values`, with a p of 0, into every slot of this rank's own window.

        This does not count as a write: versions are 0 afterwards.
        """
        with self._message(values, 1.0, 0.0, steps) as row:
            for source in self.sources:
                self._own(source, row.memory)
        self._read(self.sources)

    def clear(self) -> None:
        """Leaves zeros in this rank's slots, their p included."""
        self._read(self.sources, clear=True)

    def idle(self, *, wait: bool) -> list[int]:
        """Targets that have taken the last message of this window; the others count as skipped.

        Waits for all of them with `wait`; raises RuntimeError if a message has failed.
        """
        found = []
        for target in self.targets:
            peer, work = self.peers.near[target], self._under_way.get(target)
            if work is None or wait or work.is_completed():
                self._end(target)
                if not peer.lost:
                    found.append(target)
            else:
                peer.skipped += 1
        return found

    def wait(self) -> None:
        """Returns when all messages have been applied, or their targets are lost."""
        for target in list(self._under_way):
            self._end(target)

    def _end(self, target: int) -> None:
        work = self._under_way.pop(target, None)
        if work is not None:
            self.peers.attempt(self.peers.near[target], work.wait)

    def put(
        self,
        values: torch.Tensor,
        weights: Mapping[int, float],
        *,
        add: bool = False,
        p: float | None = None,
        steps: int = 0,
    ) -> list[Any]:
        """Writes `weight * values` into this rank's slot at each target; returns the works.

        `values` may be changed at once.

        Args:
            weights: target rank -> weight.
            add: to what is in the slot, in place of it.
            p: what goes with the values while `weighted`; default: the present p.
            steps: in the values.
        """
        self._check(weights, self.targets, "send to", "receives from this rank")
        p = self.p if p is None else p
        works = []
        for weight in dict.fromkeys(weights.values()):
            with self._message(values, weight, p, steps) as row:
                for target in (to for to, factor in weights.items() if factor == weight):
                    peer, core = self.peers.near[target], self._core[target]
                    call = core.accumulate if add else core.put
                    message = row.memory[: self._numel + 1] if add else row.memory
                    work = self.peers.attempt(peer, call, message, peer.place, peer.slot_there)
                    if work is None:
                        continue
                    if add and steps:
                        # Steps do not add up; applied after the values, as all is in order.
                        tag = row.memory[self._steps_at :]
                        work = core.put(tag, peer.place, peer.slot_there, self._steps_at)
                    row.works.append(work)
                    works.append(work)
                    self._under_way[target] = work
                    peer.sent += 1
                    self.peers.communicator.bytes_sent += self._payload()
        return works

    def fetch(self, sources: Iterable[int]) -> list[tuple[int, torch.Tensor, Any]]:
        """Starts to read what each source shows: `(rank, row, work)` for `store` or `collect`."""
        started, sources = [], list(sources)
        self._check(sources, self.sources, "read from", "sends to this rank")
        for source in sources:
            row = torch.empty(self._room, dtype=self.dtype)
            self.peers.communicator.bytes_sent += self._payload()  # counted where it is read
            started.append((source, row, self._whole.get(row, source, OWN)))
        return started

    def store(
        self, fetched: Iterable[tuple[int, torch.Tensor, Any]], weights: Mapping[int, float]
    ) -> None:
        """Waits for what `fetch` started, and puts `weight *` it into the slots of the sources."""
        for source, row, work in fetched:
            work.wait()
            row[: self._numel + 1].mul_(weights[source])
            self._own(source, row)

    def collect(
        self,
        values: torch.Tensor,
        self_weight: float,
        weights: Mapping[int, float],
        rows: Mapping[int, torch.Tensor] | None = None,
        *,
        reset: bool = False,
        steps: int | None = None,
    ) -> None:
        """`values <- self_weight * values + sum of weight * slot`; the same for p.

        Versions of the slots that are read start again at 0.

        Args:
            weights: source rank -> weight. Of peers that are `apart` those that are lost are left
                out, and the others take their share.
            rows: what was fetched, by source, in place of the slots.
            reset: leave zeros in these slots.
            steps: that `values` hold; counts staleness.
        """
        self._check(weights, self.sources, "collect from", "sends to this rank")
        rows = self._read(weights, reset) if rows is None else rows
        self._check_kind(values)
        if self.peers.apart:
            if not rows:
                return
            total = self_weight + sum(weights[source] for source in rows)
            self_weight /= total
            weights = {source: weights[source] / total for source in rows}
        with torch.no_grad():
            terms = [
                (weight, rows[source][: self._numel].view(self.shape).to(values.device))
                for source, weight in weights.items()
            ]
            weighted_sum(values, self_weight, terms)
        if self.weighted:
            self.p *= self_weight
            self.p += sum(w * rows[source][self._numel].item() for source, w in weights.items())
        if steps is not None:
            for source, row in rows.items():
                held = int(row[self._steps_at :].view(torch.int64)[0].item())
                if held or not self.weighted:  # else nothing has come since it was emptied
                    self._heard[source] = held
                self.peers.near[source].staleness.note(steps - self._heard.get(source, 0))

    def steps_in(self, source: int) -> int | None:
        """Steps in the values of `source` that came last; None if it is lost."""
        tag = torch.zeros(1, dtype=torch.int64)
        read = self._peek(source, tag.view(self.dtype), self._steps_at)
        return None if read is None else int(tag.item())

    def p_arrived(self) -> float:
        """The sum of what of p lies in this rank's slots, and was not collected yet."""
        found = torch.zeros(len(self.sources), dtype=self.dtype)
        for source, place in zip(self.sources, found.split(1), strict=True):
            self._peek(source, place, self._numel)
        return found.double().sum().item()

    def _peek(self, source: int, some: torch.Tensor, start: int) -> torch.Tensor | None:
        """Reads elements of a slot of this rank and leaves them there; None if `source` is lost."""
        peer = self.peers.near[source]

        def read() -> torch.Tensor:
            self._core[source].get(some, peer.here, peer.slot, start).wait()
            return some

        return self.peers.attempt(peer, read)

    def versions(self) -> dict[int, int]:
        """Source rank -> writes to its slot since it was last collected; not of peers `apart`."""
        return dict(zip(self.sources, self._whole.versions()[1:], strict=True))

    def look(self) -> None:
        """Notices which peers have died."""
        for peer in self.peers.near.values():
            self.peers.attempt(peer, self._core[peer.rank].versions)

    @contextlib.contextmanager
    def mutex(self, ranks: Iterable[int]) -> Iterator[None]:
        """Holds the locks of the windows of `ranks`; taken in ascending order by everybody."""
        with contextlib.ExitStack() as locks:
            for rank in sorted(set(ranks)):
                locks.enter_context(self._whole.mutex(rank))
            yield

    def free(self) -> None:
        """Gives the memory back when all ranks have called it."""
        if self._whole is not None:
            self._whole.free()
        else:
            for peer in self.peers.near.values():
                self.peers.attempt(peer, self._core[peer.rank].free)
        self.peers.freed(self)

    @contextlib.contextmanager
    def _message(self, values: torch.Tensor, weight: float, p: float, steps: int) -> Iterator[Row]:
        """A message that no operation reads, to be sent in the `with` block; in any thread."""
        self._check_kind(values)
        with self._lock:
            row = next((row for row in self._rows if not row.busy()), None)
            if row is not None:
                self._rows.remove(row)
        if row is None:
            row = Row(self._numel, self.dtype, pinned=self._pinned)
        row.values.copy_(values.detach().reshape(-1))
        if weight != 1:
            row.values.mul_(weight)
        row.memory[self._numel] = p * weight if self.weighted else 0.0
        row.steps.fill_(steps)
        yield row
        with self._lock:
            self._rows.append(row)

    def _payload(self) -> int:
        return (self._numel + int(self.weighted)) * self.dtype.itemsize

    def _own(self, source: int, message: torch.Tensor) -> None:
        peer = self.peers.near[source]
        put = self._core[source].put
        self.peers.attempt(peer, lambda: put(message, peer.here, peer.slot).wait())

    def _read(self, wanted: Iterable[int], clear: bool = False) -> dict[int, torch.Tensor]:
        """Copies of what is in the slots of those `wanted` that are not lost."""
        wanted = list(wanted)
        if self._whole is not None and wanted and wanted == self.sources:
            slots = self._whole.read(1, len(wanted), reset_versions=True, clear=clear)
            return dict(zip(wanted, slots, strict=True))
        found = {}
        for source in wanted:
            peer, read = self.peers.near[source], self._core[source].read
            rows = self.peers.attempt(peer, read, peer.slot, 1, True, clear)
            if rows is not None:
                found[source] = rows[0]
        return found

    def _check_kind(self, values: torch.Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise UserError(
                f"this window is of {tuple(self.shape)} {self.dtype}, the tensor is of "
                f"{tuple(values.shape)} {values.dtype}"
            )

    def _check(self, ranks: Iterable[int], known: list[int], doing: str, what: str) -> None:
        for rank in (rank for rank in ranks if rank not in known):
            raise UserError(
                f"rank {self.rank} cannot {doing} rank {rank}: in the window's topology "
                f"{known or 'nobody'} {what}"
            )
