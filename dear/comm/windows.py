"""One-sided exchange along a graph: each rank has a slot for every neighbour that sends to it.

When a rank writes, reads or adds, threads of the comm core serve the other rank, whose program
takes no part. CUDA tensors go through host memory. Each message carries the number of steps that
its sender had made, which tells the reader how stale the values are. If a window is weighted, each
message also carries p, the weight of push-sum methods, which divide the values by p.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dear.comm.neighbors import weighted_sum
from dear.comm.peers import Peers, Slots
from dear.errors import UserError
from dear.lazy import dist, torch

TAG_BYTES = 8
LINE_BYTES = 64
NEVER = -1
"""Number of steps that marks values as not published yet by their rank."""


class Row:
    """Message in contiguous host memory: values, the weight p, and the number of steps.

    With `pinned` memory, a GPU can copy to it directly.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, pinned: bool = False) -> None:
        start, size = self.layout(numel, dtype)
        self.memory = torch.zeros(size, dtype=dtype, pin_memory=pinned)
        self.values = self.memory[:numel]
        self.steps = self.memory[start : start + TAG_BYTES // dtype.itemsize].view(torch.int64)
        self.works: list[Any] = []
        """Operations that still read the row."""

    @staticmethod
    def layout(numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the offset of the steps and the length of the row, in elements.

        The length is a multiple of a cache line.
        """
        start = -(-(numel + 1) * dtype.itemsize // TAG_BYTES) * TAG_BYTES
        nbytes = -(-(start + TAG_BYTES) // LINE_BYTES) * LINE_BYTES
        return start // dtype.itemsize, nbytes // dtype.itemsize

    def busy(self) -> bool:
        """Returns True while an operation may still read the row."""
        self.works = [work for work in self.works if not work.is_completed()]
        return bool(self.works)


class NeighborWindow:
    """Tensor on every rank with one slot per in-neighbour, and one slot that others can read.

    The constructor and `free` are collective. Staleness is counted if both sender and reader give
    the `steps` of their values.

    Args:
        peers: neighbours that send and receive.
        like: has the shape, dtype and device of the values; its values are published first.
        zero_slots: True: slots start as zeros; False: as this rank's own values.
        weighted: values carry p, which starts as 1, and as 0 in the slots.
        steps: number of steps in the values of `like`.

    Raises:
        UserError: the values are not floating-point; or `weighted` with a 16-bit dtype, which is
            too coarse for p.
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
        """Share of the total weight that this rank holds."""
        self._numel = like.numel()
        self._steps_at, self._room = Row.layout(self._numel, self.dtype)
        self._rows: list[Row] = []
        self._lock = threading.Lock()
        self._under_way: dict[int, Any] = {}
        """Target -> its last message; removed when the message is known to be complete."""
        self._heard: dict[int, int] = {}
        """Source -> number of steps in its last message."""
        self.slots = Slots(peers, self._room, self.dtype)
        peers.windows.append(self)
        self.show(like, steps=steps)
        if not zero_slots:
            self.fill(like, steps=steps)
        # No rank may write to a slot before its owner has filled it.
        for group in [peer.group for peer in peers.near.values()] if peers.apart else [peers.group]:
            dist.barrier(group)

    def weigh(self, on: bool) -> None:
        """Turns p on or off for all later messages; all ranks must call it, between barriers."""
        if on and self.dtype not in (torch.float32, torch.float64):
            raise UserError("a weighted window needs float32 or float64 values")
        self.weighted = on

    def show(self, values: torch.Tensor, *, steps: int = 0) -> None:
        """Makes `values` and p readable for others; has no effect with `Peers(apart=True)`."""
        with self._message(values, 1.0, self.p, steps) as row:
            self.slots.show(row.memory)

    def fill(self, values: torch.Tensor, *, steps: int = 0) -> None:
        """Puts `values`, with a p of 0, into all slots of this rank; versions become 0."""
        with self._message(values, 1.0, 0.0, steps) as row:
            for source in self.sources:
                self.slots.write(source, row.memory)
        self.slots.read(self.sources)

    def absorb(self) -> None:
        """Empties this rank's slots; drops their values, but adds their p to this rank's p."""
        rows = self.slots.read(self.sources, clear=True)
        self.p += sum(row[self._numel].item() for row in rows.values())

    def idle(self, *, wait: bool) -> list[int]:
        """Returns the targets that have received their last message; counts the others as skipped.

        With `wait`, waits for all targets. Raises RuntimeError if a message has failed.
        """
        reachable = []
        for target in self.targets:
            peer, work = self.peers.near[target], self._under_way.get(target)
            if work is None or wait or work.is_completed():
                self._end(target)
                if not peer.lost:
                    reachable.append(target)
            else:
                peer.skipped += 1
        return reachable

    def wait(self) -> None:
        """Waits until each message has been applied, or its target is lost."""
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
        """Writes `weight * values` into this rank's slot at each target; returns the operations.

        The caller may change `values` immediately.
        Args:
            weights: target rank -> weight.
            add: add to the slot instead of replacing its content.
            p: p of the message if `weighted`; default: the current p.
            steps: number of steps in the values.
        """
        self._check(weights, self.targets, "send to", "receives from this rank")
        p = self.p if p is None else p
        works = []
        for weight in dict.fromkeys(weights.values()):
            with self._message(values, weight, p, steps) as row:
                for target in (to for to, factor in weights.items() if factor == weight):
                    message = row.memory[: self._numel + 1] if add else row.memory
                    work = self.slots.send(message, target, add=add)
                    if work is not None and add and steps:
                        # A separate write, since steps must not be added; it is applied in order.
                        tag = row.memory[self._steps_at :]
                        work = self.slots.send(tag, target, add=False, start=self._steps_at)
                    if work is None:
                        continue
                    row.works.append(work)
                    works.append(work)
                    self._under_way[target] = work
                    self.peers.near[target].sent += 1
                    self.peers.communicator.bytes_sent += self._payload()
        return works

    def fetch(self, sources: Iterable[int]) -> list[tuple[int, torch.Tensor, Any]]:
        """Starts to read what `sources` publish; returns `(rank, row, operation)` tuples.

        `store` takes these; `collect` takes the rows, once the operations have ended.
        """
        started, sources = [], list(sources)
        self._check(sources, self.sources, "read from", "sends to this rank")
        for source in sources:
            row = torch.empty(self._room, dtype=self.dtype)
            self.peers.communicator.bytes_sent += self._payload()  # counted on the reading rank
            started.append((source, row, self.slots.fetch(row, source)))
        return started

    def store(
        self, fetched: Iterable[tuple[int, torch.Tensor, Any]], weights: Mapping[int, float]
    ) -> None:
        """Waits for the reads of `fetch`, and puts `weight * row` into the sources' slots."""
        for source, row, work in fetched:
            work.wait()
            row[: self._numel + 1].mul_(weights[source])
            self.slots.write(source, row)

    def collect(
        self,
        values: torch.Tensor,
        self_weight: float,
        weights: Mapping[int, float],
        rows: Mapping[int, torch.Tensor] | None = None,
        *,
        reset: bool = False,
        with_p: bool = True,
        steps: int | None = None,
    ) -> None:
        """Computes `values <- self_weight * values + sum of weight * slot`; the same for p.

        Versions of the slots that are read become 0.
        Args:
            weights: source rank -> weight. With `Peers(apart=True)`, lost sources are left out,
                and the other weights are scaled to a sum of 1.
            rows: rows from `fetch` by source, used in place of the slots.
            reset: set these slots to zero afterwards.
            with_p: False leaves this rank's p as it is.
            steps: number of steps in `values`; staleness is counted if given.
        """
        self._check(weights, self.sources, "collect from", "sends to this rank")
        rows = self.slots.read(weights, reset) if rows is None else rows
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
        if self.weighted and with_p:
            self.p *= self_weight
            self.p += sum(w * rows[source][self._numel].item() for source, w in weights.items())
        if steps is not None:
            for source, row in rows.items():
                source_steps = int(self.tag(row).item())
                if source_steps or not self.weighted:  # else nothing arrived since the last reset
                    self._heard[source] = source_steps
                self.peers.near[source].staleness.note(steps - self._heard.get(source, 0))

    def tag(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the number of steps in a row from `fetch`: a view of one int64, to be changed."""
        end = self._steps_at + TAG_BYTES // row.element_size()
        return row[self._steps_at : end].view(torch.int64)

    def steps_in(self, source: int) -> int | None:
        """Returns the number of steps in the slot of `source`, or None if `source` is lost."""
        tag = torch.zeros(1, dtype=torch.int64)
        slot_data = self.slots.peek(source, tag.view(self.dtype), self._steps_at)
        return None if slot_data is None else int(tag.item())

    def p_arrived(self) -> float:
        """Returns the sum of p in this rank's slots that was not yet collected."""
        arrived = torch.zeros(len(self.sources), dtype=self.dtype)
        for index, source in enumerate(self.sources):
            self.slots.peek(source, arrived[index : index + 1], self._numel)
        return arrived.double().sum().item()

    def free(self) -> None:
        """Frees the memory; a collective call."""
        self.slots.free()
        self.peers.freed(self)

    @contextlib.contextmanager
    def _message(self, values: torch.Tensor, weight: float, p: float, steps: int) -> Iterator[Row]:
        """Yields a free row with the message; the `with` block sends it. Thread-safe."""
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

    def _check_kind(self, values: torch.Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise UserError(
                f"this window holds {self.dtype} values of shape {tuple(self.shape)}, got "
                f"{values.dtype} of shape {tuple(values.shape)}"
            )

    def _check(self, ranks: Iterable[int], allowed: list[int], doing: str, what: str) -> None:
        for rank in (rank for rank in ranks if rank not in allowed):
            raise UserError(
                f"rank {self.rank} cannot {doing} rank {rank}: in the topology of the window, "
                f"{allowed or 'no rank'} {what}"
            )
