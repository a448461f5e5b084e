"""Averaging in the groups of a schedule, one step behind: transfers run beside the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.lazy import torch
from dear.options import at_least
from dear.topology.schedules import Edge, Topology
from dear.training.neighborhood import Neighborhood

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator, Work

CHANNEL = 1
"""Of its own, so that what the training script communicates does not queue behind models."""


@dataclass(frozen=True)
class _UnderWay:
    edge: Edge
    work: Work


class GroupMixing(Neighborhood):
    """`share` starts to send to the group of this step, `mix` of the next step brings it in.

    A group all-reduces its values; where the result is the mean itself, parameters become views of
    it. Two ranks may as well exchange them and mix by themselves, which takes no process group of
    their own. As many bytes are sent. But on the comm core, where one rank comes later than the
    other, large messages between two pass one after the other, not at the same time; there pairs
    all-reduce, too, which also adds up beside the training.

    Args:
        topology: group t of it serves the values after step t, counted from 1.
    """

    def __init__(
        self, communicator: Communicator, topology: Topology, *, views: bool = True
    ) -> None:
        super().__init__(communicator, views=views)
        self.topology = topology
        self.factor = 1.0
        """How much of the average is taken, 0 .. 1: `(1 - factor) * own + factor * average`."""
        self._under_way: dict[int, _UnderWay] = {}
        self._stale = False
        communicator.ensure_channels(CHANNEL + 1)
        if "nccl" in communicator.backend:
            # NCCL's first call on a group must be one of all its ranks; an exchange is not.
            torch.distributed.barrier(communicator.groups[CHANNEL])
        from dear.comm.subgroups import sub_communicators  # needs torch

        steps = range(topology.period)
        larger = [
            edge.ranks
            for step in steps
            for edge in topology.edges_at(step)
            if 1 < len(edge.ranks) < communicator.size and not self._swaps(edge)
        ]
        self._groups = sub_communicators(communicator, larger)

    def set_factor(self, factor: float) -> None:
        """Changes `factor`; raises `UserError` unless it is in 0 .. 1."""
        at_least("adaptive factor", factor, 0)
        at_least("1 - adaptive factor", 1 - factor, 0)
        self.factor = factor

    @property
    def pending(self) -> bool:
        """True if values have been sent that no step has mixed in yet."""
        return bool(self._under_way)

    def upcoming(self, index: int) -> Edge | None:
        """The group whose average the next `mix` of a bucket takes; None if there is none."""
        under_way = self._under_way.get(index)
        if under_way is None:
            return None
        return Edge(under_way.edge.ranks, under_way.edge.weight, self._group(under_way.edge))

    def begin_step(self) -> None:
        if self._stale:
            # A state was loaded: what had been under way when it was saved is sent again.
            self.resend()
        super().begin_step()

    def mix(self, index: int) -> None:
        under_way = self._under_way.pop(index, None)
        if under_way is None:
            return
        under_way.work.wait()
        bucket, edge = self.buckets[index], under_way.edge
        if self._swaps(edge):
            bucket.values.lerp_(bucket.spare, self.factor * (1 - edge.weight))
            bucket.push()
            return
        own = edge.weight - _share(edge)
        if self.factor == 1 and own == 0:
            bucket.take_spare()
            return
        bucket.values.mul_(1 - self.factor + self.factor * own)
        bucket.values.add_(bucket.spare, alpha=self.factor)
        bucket.push()

    def share(self, index: int) -> None:
        self._send(index, self.topology.get_edge(self.steps))

    def wait(self) -> None:
        for under_way in self._under_way.values():
            under_way.work.wait()

    def forget(self) -> None:
        self.wait()
        self._under_way.clear()

    def resume(self, steps: int) -> None:
        self.forget()
        self.steps = steps
        self._stale = steps > 0

    def resend(self) -> None:
        """Sends all buckets as they are to the group of the last step; all ranks do so."""
        self._stale = False
        self.forget()
        with torch.no_grad():
            for index in range(len(self.buckets)):
                self.share(index)

    def release(self) -> None:
        self.forget()
        super().release()

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _send(self, index: int, edge: Edge) -> None:
        if len(edge.ranks) == 1:
            return
        bucket = self.buckets[index]
        bucket.pull()
        if self._swaps(edge):
            peer = next(rank for rank in edge.ranks if rank != self.communicator.rank)
            work = self.communicator.exchange(
                bucket.spare, bucket.values, peer=peer, channel=CHANNEL
            )
        else:
            torch.mul(bucket.values, _share(edge), out=bucket.spare)
            if len(edge.ranks) == self.communicator.size:
                work = self.communicator.all_reduce(bucket.spare, op="sum", channel=CHANNEL)
            else:
                group = self._groups[tuple(edge.ranks)]
                work = group.all_reduce(bucket.spare, op="sum")
        self._under_way[index] = _UnderWay(edge, work)

    def _group(self, edge: Edge) -> object:
        if len(edge.ranks) == self.communicator.size:
            return self.communicator.groups[CHANNEL]
        group = self._groups.get(tuple(edge.ranks))
        return None if group is None else group.groups[0]

    def _swaps(self, edge: Edge) -> bool:
        return len(edge.ranks) == 2 and not self.communicator.native

    def _shared_memory(self) -> bool:
        edges = self.topology.get_all_edges()
        return any(len(edge.ranks) > 1 and not self._swaps(edge) for edge in edges)


def _share(edge: Edge) -> float:
    """What each of the others counts; exactly the own weight where the average is the mean."""
    if math.isclose(edge.weight * len(edge.ranks), 1):
        return edge.weight
    return (1 - edge.weight) / (len(edge.ranks) - 1)
