"""Who averages with whom in which step: schedules of disjoint groups that cover all ranks.

Decent-DP's topologies (`complete`, `ring`, `one-peer-exp`, `alternating-exp-ring`) and a registry
for others. Needs no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dear.errors import UserError, unknown


class TopologyError(UserError, ValueError):
    """A topology that cannot be used, or not in this world; the message says why."""


@dataclass(frozen=True)
class Edge:
    """A group of ranks that average in one step.

    Each takes `weight * own + (1 - weight) / (m - 1) * sum of the others`, m being their number; a
    rank alone keeps its own.
    """

    ranks: Sequence[int]
    weight: float
    """Of the own value, 0 .. 1."""
    group: Any = None
    """The process group of the ranks, where there is one: set for `pre_average_hook`."""


class Topology(ABC):
    """A periodic schedule: `edges_at(step)` partitions the ranks.

    Subclasses give one period in `_get_topo_edges`, for `self._world_size` ranks, of which
    `self._local_world_size` are on each of `self._n_nodes` nodes, in the order of their numbers.

    Raises:
        TopologyError: the schedule is not possible in such a world, or not a valid one.
    """

    name = "topology"

    def __init__(self, local_world_size: int, *, world_size: int, rank: int) -> None:
        if local_world_size < 1 or world_size % local_world_size:
            raise TopologyError(
                f"topology {self.name}: {world_size} ranks do not make nodes of {local_world_size} "
                "ranks each"
            )
        self._rank = rank
        self._world_size = world_size
        self._local_world_size = local_world_size
        self._n_nodes = world_size // local_world_size
        if world_size == 1:
            self._steps: list[list[Edge]] = [[Edge([0], 1.0)]]
        else:
            self._steps = [
                [Edge(sorted(edge.ranks), edge.weight) for edge in edges]
                for edges in self._get_topo_edges()
            ]
        _validate(self.name, self._steps, world_size)
        own = [next(edge for edge in edges if rank in edge.ranks) for edges in self._steps]
        self._own: list[Edge] = own

    @abstractmethod
    def _get_topo_edges(self) -> list[list[Edge]]:
        """The edges of each step of one period; every rank is in exactly one edge of each."""

    @property
    def period(self) -> int:
        """Steps after which the schedule starts again."""
        return len(self._steps)

    def edges_at(self, step: int) -> list[Edge]:
        """All groups of a step, counted from 0."""
        return self._steps[step % len(self._steps)]

    def get_edge(self, step: int) -> Edge:
        """This rank's group in a step, counted from 0."""
        return self._own[step % len(self._own)]

    def get_all_edges(self) -> list[Edge]:
        """This rank's group in each step of a period."""
        return list(self._own)


class TopologyReg:
    """The known topologies by name; `@TopologyReg.register("mine")` adds a subclass of `Topology`.

    Ranks must register the same before they use it.
    """

    registry: dict[str, type[Topology]] = {}  # noqa: RUF012 - filled by `register`

    @classmethod
    def register(cls, name: str) -> Callable[[type[Topology]], type[Topology]]:
        """Registers the decorated class as `name`.

        Raises:
            TopologyError: the name is taken, or the class is no subclass of `Topology`.
        """

        def add(topology: type[Topology]) -> type[Topology]:
            if name in cls.registry:
                raise TopologyError(f"a topology {name!r} is registered already")
            if not (isinstance(topology, type) and issubclass(topology, Topology)):
                raise TopologyError(f"topology {name!r} must be a subclass of Topology")
            cls.registry[name] = topology
            topology.name = name
            return topology

        return add

    @classmethod
    def check_name(cls, name: str) -> None:
        """Raises `UserError` unless a topology is registered as `name`."""
        if name not in cls.registry:
            raise unknown("topology", name, cls.registry)

    @classmethod
    def make(cls, name: str, *, world_size: int, rank: int, local_world_size: int = 1) -> Topology:
        """The topology `name` in this world; raises `UserError` if it is unknown or impossible."""
        cls.check_name(name)
        return cls.registry[name](local_world_size, world_size=world_size, rank=rank)


def _validate(name: str, steps: Sequence[Sequence[Edge]], world_size: int) -> None:
    if not steps:
        raise TopologyError(f"topology {name}: it has no steps")
    linked = list(range(world_size))  # each rank's representative among those it can reach

    def root(rank: int) -> int:
        while linked[rank] != rank:
            rank = linked[rank]
        return rank

    for number, edges in enumerate(steps):
        where = f"topology {name}, step {number}"
        seen: set[int] = set()
        for edge in edges:
            _validate_edge(where, edge, world_size)
            for rank in edge.ranks:
                if rank in seen:
                    raise TopologyError(f"{where}: rank {rank} is there twice")
                seen.add(rank)
                if edge.weight < 1:
                    linked[root(rank)] = root(edge.ranks[0])
        missing = sorted(set(range(world_size)) - seen)
        if missing:
            shown = ", ".join(map(str, missing[:8]))
            raise TopologyError(f"{where}: rank {shown} is in no edge; each must be in one")
    apart = [rank for rank in range(world_size) if root(rank) != root(0)]
    if apart:
        raise TopologyError(
            f"topology {name}: nothing ever passes between rank 0 and rank {apart[0]}, so they "
            "would train apart"
        )


def _validate_edge(where: str, edge: Edge, world_size: int) -> None:
    if not edge.ranks:
        raise TopologyError(f"{where}: an edge without ranks")
    for rank in edge.ranks:
        if not (isinstance(rank, int) and 0 <= rank < world_size):
            raise TopologyError(f"{where}: rank {rank!r} is none of the {world_size} ranks")
    if not (math.isfinite(edge.weight) and 0 <= edge.weight <= 1):
        raise TopologyError(f"{where}: weight {edge.weight} of {edge.ranks} is not in 0 .. 1")
    if len(edge.ranks) == 1 and edge.weight != 1:
        raise TopologyError(
            f"{where}: rank {edge.ranks[0]} is alone, so its weight must be 1, not {edge.weight}"
        )


def _exponent(name: str, count: int, what: str, least: int) -> int:
    """k for `count` = 2^k, where k >= `least`."""
    k = count.bit_length() - 1
    if count != 2**k or k < least:
        possible = ", ".join(str(2**i) for i in range(least, least + 4))
        raise TopologyError(f"topology {name} needs 2^k {what} ({possible}, ...), not {count}")
    return k


@TopologyReg.register("complete")
class CompleteTopology(Topology):
    """Everybody takes the mean of all, in every step; any world."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge(range(self._world_size), 1 / self._world_size)]]


@TopologyReg.register("ring")
class RingTopology(Topology):
    """Each rank takes the mean with its right and its left neighbour in turn; even worlds."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        if n % 2:
            raise TopologyError(
                f"topology ring needs an even number of ranks, not {n}: they pair off; use "
                "'complete'"
            )
        first = [Edge([i, i + 1], 0.5) for i in range(0, n, 2)]
        return [first, [Edge([i, (i - 1) % n], 0.5) for i in range(0, n, 2)]]


@TopologyReg.register("one-peer-exp")
class OnePeerExpTopology(Topology):
    """In step i ranks whose numbers differ in bit i take their mean; worlds of 2^k ranks.

    After k steps, all with the same value, everybody has the mean of all (arXiv 2110.13363).
    """

    def _get_topo_edges(self) -> list[list[Edge]]:
        rounds = _exponent(self.name, self._world_size, "ranks", 1)
        ranks = range(self._world_size)
        return [
            [Edge([j, j ^ (1 << i)], 0.5) for j in ranks if not j & (1 << i)] for i in range(rounds)
        ]


@TopologyReg.register("alternating-exp-ring")
class AlternatingExpRingTopology(Topology):
    """Nodes pair off as in `one-peer-exp`; a pair averages jointly and each for itself by turns.

    While some pairs use the network the others stay within their nodes (Decent-DP); 2^k nodes.
    """

    def _get_topo_edges(self) -> list[list[Edge]]:
        rounds = _exponent(self.name, self._n_nodes, "nodes", 1)
        size = self._local_world_size

        def apart(*nodes: int) -> list[Edge]:
            return [Edge(range(n * size, (n + 1) * size), 1 / size) for n in nodes]

        def joint(one: int, other: int) -> list[Edge]:
            both = [rank for edge in apart(one, other) for rank in edge.ranks]
            return [Edge(both, 1 / len(both))]

        steps: list[list[Edge]] = []
        pairs = 0
        for i in range(rounds):
            first: list[Edge] = []
            second: list[Edge] = []
            for node in range(self._n_nodes):
                peer = node ^ (1 << i)
                if node < peer:
                    early, late = (apart, joint) if pairs % 2 == 0 else (joint, apart)
                    first += early(node, peer)
                    second += late(node, peer)
                    pairs += 1
            steps += [first, second]
        return steps
