"""Decentralized data-parallel training; groups average while the next step computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from dear.buckets.flat import Bucket, value_bucket
from dear.comm import runtime
from dear.comm.communicator import Communicator, sub_communicators
from dear.comm.runtime import ranks_per_machine
from dear.comm.work import Work
from dear.cost.bounds import Traffic
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least
from dear.topology.schedules import Edge, Topology, TopologyReg
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica
from dear.training.parameters.exchange import BucketExchange
from dear.training.parameters.options import LocalOptions
from dear.training.parameters.overlapped import Overlapped, UpdateIn, overlapped

CHANNEL = 1
"""Channel of the averages; the script's own communication does not queue behind them."""

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


class Decentralized(Algorithm["Decentralized.Options"]):
    """D-PSGD (Lian et al., NeurIPS 2017, arXiv 1705.09056), overlapped as in Decent-DP.

    Invariant: x_i(t+1) = sum_j W_ij(t) x_j(t) - update(g_i(x_i(t))), where x are parameters, g
    gradients and W weights. Each rank computes its gradient at its own parameters and applies it to
    the average over its group. Models of different ranks differ; `dear.consensus` averages them.
    `p.grad` is always the rank's own gradient.
    Bytes move: each bucket of parameters from its update until its update in the next step.
    Cost per step and rank: one exchange of the model with one peer (`ring`, `one-peer-exp`), or an
    all-reduce of it in a group of ranks (`complete`: all; `alternating-exp-ring`: 1 or 2 nodes).
    Overridden methods of the exchange: `share` sends to the group of this step, and `mix` averages
    in the next step.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(LocalOptions):
        """Topology, time of the update, and weight of the average."""

        topology: str = "complete"
        """`complete` (any world), `ring` (even worlds), `one-peer-exp` (2^k ranks),
        `alternating-exp-ring` (2^k nodes), or a name registered with
        `dear.topology.schedules.TopologyReg`."""
        update: UpdateIn = "backward"
        """`backward`: updates each bucket as soon as its last gradient arrives. `step`: updates in
        `step()`, so that gradients can be clipped or unscaled before."""
        adaptive_factor: float = 1.0
        """Weight a of the average, 0 .. 1: x <- (1 - a) x + a (W x)."""
        ranks_per_node: int | None = None
        """Ranks per node for `alternating-exp-ring`; None: as many as the launcher started here."""

        def __post_init__(self) -> None:
            TopologyReg.check_name(self.topology)
            super().__post_init__()
            at_least("decentralized option 'adaptive_factor'", self.adaptive_factor, 0)
            if self.adaptive_factor > 1:
                raise UserError(
                    "decentralized option 'adaptive_factor' must be at most 1, got "
                    f"{self.adaptive_factor}"
                )
            at_least("decentralized option 'ranks_per_node'", self.ranks_per_node, 1)

    capabilities = Capabilities(consistency="decentralized")
    bound = "decentralized"
    candidates = ({"topology": "ring"}, {"topology": "one-peer-exp"})

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        at: Literal["gradient", "step"] = "gradient" if options.update == "backward" else "step"
        sent = Transfer(
            kind="exchange", carries=("parameters",), starts=at, awaited=at, steps_later=1
        )
        return Overlap(transfers=(sent,), updates=at)

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic:
        topology = _topology(options, world_size, 0, options.ranks_per_node or (lambda: local_size))
        return Traffic.in_groups(topology, world_size)

    def engine(self, replica: Replica[Options]) -> Overlapped:
        options, communicator = replica.options, replica.communicator
        node = options.ranks_per_node or partial(_ranks_per_node, communicator)
        topology = _topology(options, communicator.size, communicator.rank, node)
        exchange = GroupExchange(topology)
        exchange.set_factor(options.adaptive_factor)
        return overlapped(replica, exchange, options.update)


def _topology(
    options: Decentralized.Options, world_size: int, rank: int, node: int | Callable[[], int]
) -> Topology:
    return TopologyReg.make(
        options.topology, world_size=world_size, rank=rank, local_world_size=node
    )


class GroupExchange(BucketExchange):
    """Averages in the groups of a schedule, one step behind.

    A group all-reduces its values. If the result is the mean itself, parameters become views of it.
    Two ranks exchange their values instead and mix them locally. This sends as many bytes, and
    needs no process group of the pair. With the comm core, pairs all-reduce, too. There, if one
    rank comes later, large messages of an exchange would pass one after the other instead of at the
    same time. The all-reduce also adds the values in the background.

    Args:
        topology: gives the groups. Group t averages the values after step t, counted from 1.
        views: True makes parameters views of their buckets.
    """

    def __init__(self, topology: Topology, *, views: bool = True) -> None:
        super().__init__()
        self.topology = topology
        self.factor = 1.0
        """Weight of the average, 0 .. 1: `(1 - factor) * own + factor * average`."""
        self.pending: dict[Bucket, Work] = {}
        """Transfers of `share` that `mix` has not used yet."""
        self._views = views
        self._resumed = False
        """True if a state was loaded and its values were not sent again yet."""

    def open(self, communicator: Communicator, device: torch.device) -> None:
        super().open(communicator, device)
        communicator.ensure_channels(CHANNEL + 1)
        communicator.connect(device, CHANNEL)
        self._in_pairs = device.type not in communicator.native
        larger = [
            edge.ranks
            for step in range(self.topology.period)
            for edge in self.topology.edges_at(step)
            if 1 < len(edge.ranks) < communicator.size and not self._swaps(edge)
        ]
        self._groups = sub_communicators(communicator, larger)

    def set_factor(self, factor: float) -> None:
        """Changes `factor`; raises `UserError` unless it is in 0 .. 1."""
        at_least("adaptive factor", factor, 0)
        at_least("1 - adaptive factor", 1 - factor, 0)
        self.factor = factor

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        edges = self.topology.get_all_edges()
        self.buckets = [
            value_bucket(
                params,
                self.communicator,
                spare=True,
                viewed=self._views,
                shared=any(len(edge.ranks) > 1 and not self._swaps(edge) for edge in edges),
            )
            for params in members
        ]

    def begin(self, steps: int) -> None:
        if not self._resumed:
            return
        # All ranks send again the values that were under way when the state was saved.
        self._resumed = False
        self.drop()
        with torch.no_grad():
            for bucket in self.buckets:
                self.share(bucket, steps)

    def share(self, bucket: Bucket, steps: int) -> None:
        edge = self.topology.get_edge(steps)
        if len(edge.ranks) == 1:
            return
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
        self.pending[bucket] = work

    def mix(self, bucket: Bucket, steps: int) -> None:
        work = self.pending.pop(bucket, None)
        if work is None:
            return
        work.wait()
        edge = self.topology.get_edge(steps - 1)
        if self._swaps(edge):
            bucket.values.lerp_(bucket.spare, self.factor * (1 - edge.weight))
            bucket.push()
            return
        excess = edge.weight - _share(edge)  # the sum contains this rank's values with `_share`
        if self.factor == 1 and excess == 0:
            bucket.take_spare()
            return
        bucket.values.mul_(1 - self.factor + self.factor * excess)
        bucket.values.add_(bucket.spare, alpha=self.factor)
        bucket.push()

    def wait(self) -> None:
        for work in self.pending.values():
            work.wait()

    def drop(self) -> None:
        super().drop()
        self.pending.clear()

    def restore(self, saved: StateDict | None) -> None:
        self.drop()
        self._resumed = bool(saved and saved["steps"])

    def release(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def upcoming(self, bucket: Bucket, steps: int) -> Edge | None:
        """Returns the group whose average `mix` would use, or None if there is no such average."""
        if bucket not in self.pending:
            return None
        edge = self.topology.get_edge(steps - 1)
        if len(edge.ranks) == self.communicator.size:
            return Edge(edge.ranks, edge.weight, self.communicator.groups[CHANNEL])
        group = self._groups.get(tuple(edge.ranks))
        return Edge(edge.ranks, edge.weight, None if group is None else group.groups[0])

    def _swaps(self, edge: Edge) -> bool:
        return len(edge.ranks) == 2 and self._in_pairs


def _share(edge: Edge) -> float:
    """Returns the weight of each other rank; for a mean, exactly the rank's own weight."""
    if math.isclose(edge.weight * len(edge.ranks), 1):
        return edge.weight
    return (1 - edge.weight) / (len(edge.ranks) - 1)


def _ranks_per_node(communicator: Communicator) -> int:
    if not runtime.is_initialized():
        return 1
    return ranks_per_machine(communicator, "ranks_per_node")
