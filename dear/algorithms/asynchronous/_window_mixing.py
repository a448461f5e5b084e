"""Averaging with what neighbours have put into windows so far: nobody waits for anybody."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dear.comm.communicator import prepare
from dear.comm.farewell import Farewell
from dear.comm.window_peer import Packet, Peer, unpack
from dear.topology.graphs import in_neighbors, recv_weights
from dear.training.neighborhood import Neighborhood

if TYPE_CHECKING:
    import networkx as nx
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator

log = logging.getLogger("dear")

POLL_S = (0.0005, 0.02)
"""Shortest and longest pause between two looks at a neighbour that is too far behind, on the
communicator's clock."""
DEFAULT_PATIENCE_S = 120.0


class WindowMixing(Neighborhood):
    """`mix` takes what is in the slots, `share` puts into the neighbours' slots.

    A slot starts with this rank's own values. The weights are those of the graph; if a neighbour
    dies, those of the others and the own one take its share. A put whose predecessor to the same
    neighbour is still under way is left out and counted: the next one carries newer values.

    Args:
        graph: who sends to whom, with weights (`dear.topology.graphs`).
        max_staleness: before a step, wait for neighbours whose last values are more than so many
            steps behind, unless they have ended; puts then wait for their predecessors. None: never
            wait.
        finish_timeout_s: longest that `close` waits for ranks that are not done.

    Raises:
        Unavailable: the comm core is not built.
    """

    def __init__(
        self,
        communicator: Communicator,
        graph: nx.DiGraph,
        *,
        max_staleness: int | None = None,
        finish_timeout_s: float = 3600.0,
    ) -> None:
        super().__init__(communicator)
        prepare("comm_core")
        self._max_staleness = max_staleness
        self._finish_timeout_s = finish_timeout_s
        self._farewell = Farewell(communicator)
        self._own_weight, sources = recv_weights(graph, communicator.rank)
        self._peers: list[Peer] = []
        job = dist.get_process_group_ranks(communicator.groups[0])
        pairs = sorted({tuple(sorted(edge)) for edge in graph.edges if edge[0] != edge[1]})
        for pair in pairs:
            members = [job[rank] for rank in pair]
            group = dist.new_group(members, backend="comm_core", timeout=communicator.timeout)
            if communicator.rank in pair:
                other = pair[1] if communicator.rank == pair[0] else pair[0]
                sends = communicator.rank in in_neighbors(graph, other)
                self._peers.append(Peer(other, group, weight=sources.get(other), sends=sends))
        self._packets: list[list[Packet]] = []
        self._stale = False

    def lay_out(self, members: Sequence[Sequence[Parameter]]) -> None:
        super().lay_out(members)
        self._packets = [[] for _ in self.buckets]
        # In the order of the pairs' numbers on all ranks, or they might wait in a circle.
        for peer in self._peers:
            peer.open(self.buckets)
        self._start_slots()
        for peer in self._peers:
            peer.meet()

    def begin_step(self) -> None:
        super().begin_step()
        if self._stale:
            self._start_slots()
        if self._max_staleness is not None:
            for peer in self._peers:
                if peer.receives:
                    self._catch_up(peer, self.steps - 1 - self._max_staleness)

    def mix(self, index: int) -> None:
        bucket = self.buckets[index]
        received: list[tuple[float, torch.Tensor]] = []
        for peer in self._peers:
            row = peer.read(index) if peer.receives else None
            if row is not None:
                values, tag = unpack(row, bucket)
                peer.staleness.note(self.steps - 1 - int(tag.item()))
                received.append((peer.weight, values.to(bucket.values.device)))
            elif peer.receives:
                self._note_lost(peer)
        total = self._own_weight + sum(weight for weight, _ in received)
        if not received:
            return
        bucket.values.mul_(self._own_weight / total)
        for weight, values in received:
            bucket.values.add_(values, alpha=weight / total)
        bucket.push()

    def share(self, index: int) -> None:
        wait = self._max_staleness is not None
        targets = []
        for peer in self._peers:
            if not peer.sends:
                continue
            if peer.ready(index, wait=wait):
                targets.append(peer)
            elif peer.lost:
                self._note_lost(peer)
            else:
                peer.skipped += 1
        if not targets:
            return
        packet = self._packet(index)
        packet.fill(self.buckets[index].values, self.steps)
        for peer in targets:
            peer.put(index, packet)
            self.communicator.bytes_sent += self.buckets[index].values.nbytes

    def wait(self) -> None:
        for peer in self._peers:
            peer.wait()
            self._note_lost(peer)

    def forget(self) -> None:
        self._stale = self.laid_out

    def resume(self, steps: int) -> None:
        self.steps = steps
        self.forget()

    def statistics(self) -> dict[str, Any]:
        """`staleness` by neighbour (see `Staleness.summary`), puts `sent` and `skipped` (by the
        rank they went to), and the ranks `lost`."""
        return {
            "staleness": {str(p.rank): p.staleness.summary() for p in self._peers if p.receives},
            "sent": {str(p.rank): p.puts for p in self._peers if p.sends},
            "skipped": {str(p.rank): p.skipped for p in self._peers if p.sends},
            "lost": [peer.rank for peer in self._peers if peer.lost],
        }

    def close(self) -> None:
        """Waits until all ranks are done; the neighbours may go on writing until then."""
        self.release()
        self._farewell.done()
        self._farewell.wait(self._finish_timeout_s, self._look)
        for peer in self._peers:
            peer.close()
        self._peers = []

    def _start_slots(self) -> None:
        self._stale = False
        for index, bucket in enumerate(self.buckets):
            packet = self._packet(index)
            packet.fill(bucket.values, self.steps)
            for peer in self._peers:
                if peer.receives:
                    peer.write_own_slot(index, packet)

    def _packet(self, index: int) -> Packet:
        # At most one more than there are neighbours, since each has one put under way at most.
        packet = next((p for p in self._packets[index] if not p.busy()), None)
        if packet is None:
            bucket = self.buckets[index]
            packet = Packet(bucket, pinned=bucket.values.is_cuda)
            self._packets[index].append(packet)
        return packet

    def _catch_up(self, peer: Peer, least: int) -> None:
        """Waits until the last bucket from `peer` has at least so many steps in it."""
        last = len(self.buckets) - 1
        clock, pause = self.communicator.clock, POLL_S[0]
        began = clock()
        limit = self.communicator.timeout
        patience_s = DEFAULT_PATIENCE_S if limit is None else limit.total_seconds()
        while True:
            steps = peer.steps_in(last, self.buckets[last])
            if steps is None or steps >= least or self._farewell.gone(peer.rank):
                break
            if clock() - began > patience_s:
                raise RuntimeError(
                    f"rank {peer.rank} is {self.steps - 1 - steps} steps behind, more than "
                    f"max_staleness={self._max_staleness}, and has not moved on within "
                    f"{patience_s:g} s"
                )
            self.communicator.pause(pause)
            pause = min(2 * pause, POLL_S[1])
        self.communicator.blocked_s += clock() - began
        self._note_lost(peer)

    def _look(self) -> None:
        for peer in self._peers:
            peer.look()
            self._note_lost(peer)

    def _note_lost(self, peer: Peer) -> None:
        if peer.lost and not peer.reported:
            peer.reported = True
            log.warning("rank %d has died; training goes on without it", peer.rank)
            self._farewell.lost(peer.rank)
