"""Topologies that change from step to step, as functions of the step number.

So a run can go on where it stopped. There are two kinds:

- a `Schedule` is of one rank: whom it sends to and receives from at a step; what one rank expects
  is what another sends. `DYNAMIC` holds those that have names, `forever` makes a generator of one.
- a `Topology` is of all ranks: which disjoint groups average at a step (Decent-DP's topologies).
  `TopologyReg` holds those that have names, and takes in others.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dear.errors import UserError, one_of
from dear.lazy import nx
from dear.topology import exponential, out_neighbors, powers

Peers = tuple[list[int], list[int]]
"""Ranks to send to, ranks to receive from."""


@dataclass(frozen=True)
class Schedule:
    """One rank's peers: call it with a step number, counted from 0."""

    at: Callable[[int], Peers]
    period: int
    """Steps after which it starts again."""

    def __call__(self, step: int) -> Peers:
        return self.at(step)


def one_peer(graph: nx.DiGraph, rank: int) -> Schedule:
    """Each rank sends to one of its destinations in turn, nearest first (going upwards).

    In an irregular graph a rank may receive from several or from nobody.
    """
    world_size = graph.number_of_nodes()
    turns = {
        other: sorted(out_neighbors(graph, other), key=lambda to: (to - other) % world_size)
        for other in graph.nodes
    }

    def at(step: int) -> Peers:
        target = {r: turn[step % len(turn)] for r, turn in turns.items() if turn}
        send = [target[rank]] if rank in target else []
        return send, sorted(other for other, to in target.items() if to == rank)

    return Schedule(at, math.lcm(*(len(turn) for turn in turns.values() if turn)))


def one_peer_machines(machines: int, machine: int) -> Schedule:
    """Machines exchange at distance 1, 2, 4, ... in turn; numbers of machines, not of ranks."""
    if machines < 2:
        raise UserError(f"an exchange between machines needs at least 2, there is {machines}")
    return one_peer(exponential(machines), machine)


def inner_outer_ring(world_size: int, local_size: int, rank: int) -> Schedule:
    """One rank of each machine in turn exchanges with the next machine, the others in a ring.

    The others' ring leaves out the one that is away.
    """
    return _inner_outer(world_size, local_size, rank, lambda count: [1])


def inner_outer_exp2(world_size: int, local_size: int, rank: int) -> Schedule:
    """The same with distances 1, 2, 4, ... in turn, between machines and inside them."""
    return _inner_outer(world_size, local_size, rank, lambda count: powers(2, count))


def _inner_outer(
    world_size: int, local_size: int, rank: int, distances: Callable[[int], list[int]]
) -> Schedule:
    if local_size < 3:
        raise UserError(
            f"inner-outer topologies need at least 3 ranks per machine, got {local_size}"
        )
    if world_size % local_size or world_size // local_size < 2:
        raise UserError(
            f"inner-outer topologies need at least 2 machines of {local_size} ranks each, got "
            f"{world_size} ranks"
        )
    machines = world_size // local_size
    outer, inner = distances(machines), distances(local_size - 1)
    machine, local = divmod(rank, local_size)

    def at(step: int) -> Peers:
        away = step % local_size
        if local == away:
            distance = outer[step % len(outer)]
            to, source = (machine + distance) % machines, (machine - distance) % machines
            return [to * local_size + local], [source * local_size + local]
        at_home = [other for other in range(local_size) if other != away]
        place, distance = at_home.index(local), inner[step % len(inner)]
        to = at_home[(place + distance) % len(at_home)]
        source = at_home[(place - distance) % len(at_home)]
        return [machine * local_size + to], [machine * local_size + source]

    return Schedule(at, math.lcm(local_size, len(outer), len(inner)))


DYNAMIC: dict[str, Callable[[int, int, int], Schedule]] = {
    "one-peer-exp": lambda world_size, local_size, rank: one_peer(exponential(world_size), rank),
    "inner-outer-ring": inner_outer_ring,
    "inner-outer-exp2": inner_outer_exp2,
}
"""Schedules by the names that options and experiments use: of world size, ranks per machine, rank.
"""

DynamicName = Literal[("none", *DYNAMIC)]
"""The type of an option that names one of them, or none."""


def schedule(name: str, world_size: int, rank: int, local_size: int) -> Schedule:
    """The schedule `name` for one rank; `one-peer-exp` needs no `local_size`, ranks per machine.

    Raises `UserError` for an unknown name, or a world that the schedule does not fit.
    """
    return one_of("dynamic topology", name, DYNAMIC)(world_size, local_size, rank)


def forever(schedule: Schedule) -> Iterator[Peers]:
    """The peers of step 0, 1, 2, ... without end."""
    return map(schedule, itertools.count())


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
        steps = [[Edge([0], 1.0)]] if world_size == 1 else self._get_topo_edges()
        self._steps = [[Edge(sorted(e.ranks), e.weight) for e in edges] for edges in steps]
        _validate(self.name, self._steps, world_size)
        self._own = [next(edge for edge in edges if rank in edge.ranks) for edges in self._steps]

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
        """Registers the decorated subclass of `Topology`; TopologyError if the name is taken."""

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
        one_of("topology", name, cls.registry)

    @classmethod
    def make(cls, name: str, *, world_size: int, rank: int, local_world_size: int = 1) -> Topology:
        """The topology `name` in this world; raises `UserError` if it is unknown or impossible."""
        kind = one_of("topology", name, cls.registry)
        return kind(local_world_size, world_size=world_size, rank=rank)


def _validate(name: str, steps: Sequence[Sequence[Edge]], world_size: int) -> None:
    if not steps:
        raise TopologyError(f"topology {name}: it has no steps")
    linked = nx.empty_graph(world_size)
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
                nx.add_path(linked, edge.ranks)
        missing = sorted(set(range(world_size)) - seen)
        if missing:
            shown = ", ".join(map(str, missing[:8]))
            raise TopologyError(f"{where}: rank {shown} is in no edge; each must be in one")
    apart = set(linked) - nx.node_connected_component(linked, 0)
    if apart:
        raise TopologyError(
            f"topology {name}: nothing ever passes between rank 0 and rank {min(apart)}, so they "
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


def _exponent(name: str, count: int, what: str) -> int:
    """k for `count` = 2^k, where k >= 1."""
    k = count.bit_length() - 1
    if count != 2**k or k < 1:
        raise TopologyError(f"topology {name} needs 2^k {what} (2, 4, 8, 16, ...), not {count}")
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
            odd = f"not {n}: they pair off; use 'complete'"
            raise TopologyError(f"topology ring needs an even number of ranks, {odd}")
        first = [Edge([i, i + 1], 0.5) for i in range(0, n, 2)]
        return [first, [Edge([i, (i - 1) % n], 0.5) for i in range(0, n, 2)]]


@TopologyReg.register("one-peer-exp")
class OnePeerExpTopology(Topology):
    """In step i ranks whose numbers differ in bit i take their mean; worlds of 2^k ranks.

    After k steps, all with the same value, everybody has the mean of all (arXiv 2110.13363).
    """

    def _get_topo_edges(self) -> list[list[Edge]]:
        rounds = _exponent(self.name, self._world_size, "ranks")
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
        rounds = _exponent(self.name, self._n_nodes, "nodes")
        size = self._local_world_size

        def apart(*nodes: int) -> list[Edge]:
            return [Edge(range(n * size, (n + 1) * size), 1 / size) for n in nodes]

        def joint(*nodes: int) -> list[Edge]:
            both = [rank for edge in apart(*nodes) for rank in edge.ranks]
            return [Edge(both, 1 / len(both))]

        steps = []
        for i in range(rounds):
            pairs = [(n, n ^ (1 << i)) for n in range(self._n_nodes) if not n & (1 << i)]
            for turns in ((apart, joint), (joint, apart)):
                steps.append([e for j, pair in enumerate(pairs) for e in turns[j % 2](*pair)])
        return steps
