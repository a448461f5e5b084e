"""Topologies that change from step to step.

They are functions of the step number, so a resumed run can continue at any step. There are two
kinds:

- A `Schedule` belongs to one rank. It gives the ranks that this rank sends to and receives from in
  a step. The schedules of all ranks match. `DYNAMIC` holds the named schedules, and `forever` makes
  an iterator from a schedule.
- A `Topology` belongs to all ranks. It gives the disjoint groups that average in a step (as in
  Decent-DP). `TopologyReg` holds the named topologies, and registers new ones.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dear.errors import UserError, one_of
from dear.lazy import nx
from dear.topology import exponential, out_neighbors, powers

Peers = tuple[list[int], list[int]]
"""Ranks to send to, and ranks to receive from."""


@dataclass(frozen=True)
class Schedule:
    """Peers of one rank by the step number, counted from 0."""

    at: Callable[[int], Peers]
    period: int
    """Number of steps after which the schedule repeats."""

    def __call__(self, step: int) -> Peers:
        return self.at(step)


def one_peer(graph: nx.DiGraph, rank: int) -> Schedule:
    """Returns a schedule in which each rank sends to one target per step, the nearest first.

    In an irregular graph a rank may receive from several ranks or from none.
    """
    world_size = graph.number_of_nodes()
    turns = {
        sender: sorted(out_neighbors(graph, sender), key=lambda to: (to - sender) % world_size)
        for sender in graph.nodes
    }

    def at(step: int) -> Peers:
        target = {r: turn[step % len(turn)] for r, turn in turns.items() if turn}
        send = [target[rank]] if rank in target else []
        return send, sorted(sender for sender, receiver in target.items() if receiver == rank)

    return Schedule(at, math.lcm(*(len(turn) for turn in turns.values() if turn)))


def one_peer_machines(machines: int, machine: int) -> Schedule:
    """Returns a schedule of machines (not ranks): exchange at distance 1, 2, 4, ... in turn."""
    if machines < 2:
        raise UserError(f"an exchange between machines needs at least 2 machines, got {machines}")
    return one_peer(exponential(machines), machine)


def inner_outer_ring(world_size: int, local_size: int, rank: int) -> Schedule:
    """Returns a schedule in which one rank per machine exchanges with the next machine.

    The ranks of a machine take turns. The others exchange in a ring inside the machine.
    """
    return _inner_outer(world_size, local_size, rank, lambda count: [1])


def inner_outer_exp2(world_size: int, local_size: int, rank: int) -> Schedule:
    """Returns the schedule of `inner_outer_ring`, but with distances 1, 2, 4, ... in turn."""
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
        inner_ranks = [other for other in range(local_size) if other != away]
        index, distance = inner_ranks.index(local), inner[step % len(inner)]
        to = inner_ranks[(index + distance) % len(inner_ranks)]
        source = inner_ranks[(index - distance) % len(inner_ranks)]
        return [machine * local_size + to], [machine * local_size + source]

    return Schedule(at, math.lcm(local_size, len(outer), len(inner)))


DYNAMIC: dict[str, Callable[[int, int, int], Schedule]] = {
    "one-peer-exp": lambda world_size, local_size, rank: one_peer(exponential(world_size), rank),
    "inner-outer-ring": inner_outer_ring,
    "inner-outer-exp2": inner_outer_exp2,
}
"""Schedules by the names in options; functions of world size, ranks per machine, and rank."""

if TYPE_CHECKING:
    DynamicName: TypeAlias = str
else:
    DynamicName = Literal[("none", *DYNAMIC)]
"""Type of an option that names a schedule, or `none`."""


def schedule(name: str, world_size: int, rank: int, local_size: int) -> Schedule:
    """Returns the schedule `name` of one rank; `one-peer-exp` ignores `local_size`.

    Raises `UserError` if the name is unknown or the schedule does not fit the world.
    """
    return one_of("dynamic topology", name, DYNAMIC)(world_size, local_size, rank)


def forever(schedule: Schedule) -> Iterator[Peers]:
    """Yields the peers of steps 0, 1, 2, ... without end."""
    return map(schedule, itertools.count())


class TopologyError(UserError, ValueError):
    """Error for a topology that is invalid or does not fit the world; its message says why."""


@dataclass(frozen=True)
class Edge:
    """Group of ranks that average in one step.

    Each of its m ranks takes `weight * own + (1 - weight) / (m - 1) * sum of the others`. A single
    rank keeps its value.
    """

    ranks: Sequence[int]
    weight: float
    """Weight of the rank's own value, 0 .. 1."""
    group: Any = None
    """Process group of the ranks, or None; set for `pre_average_hook`."""


class Topology(ABC):
    """Periodic schedule in which `edges_at(step)` divides all ranks into groups.

    Subclasses return one period from `_get_topo_edges`. They may use `self._world_size`. There are
    `self._n_nodes` nodes with `self._local_world_size` ranks each, in rank order.

    Args:
        local_world_size: ranks per node, or a function that returns them. It is called only if
            `_get_topo_edges` reads one of both attributes, so other topologies may have nodes of
            different sizes.

    Raises:
        TopologyError: the schedule is invalid, or does not fit such a world.
    """

    name = "topology"

    def __init__(
        self, local_world_size: int | Callable[[], int], *, world_size: int, rank: int
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._node = local_world_size
        if isinstance(local_world_size, int):
            _ = self._local_world_size  # raises an error if it does not fit
        steps = [[Edge([0], 1.0)]] if world_size == 1 else self._get_topo_edges()
        if not _is_period(steps):
            raise TopologyError(
                f"topology {self.name}: _get_topo_edges() must return a list of steps, each a list "
                f"of Edge(ranks, weight), got {reprlib.repr(steps)}"
            )
        self._steps = [[Edge(sorted(e.ranks), e.weight) for e in edges] for edges in steps]
        _validate(self.name, self._steps, world_size)
        self._own = [next(edge for edge in edges if rank in edge.ranks) for edges in self._steps]

    @property
    def _local_world_size(self) -> int:
        if not isinstance(self._node, int):
            self._node = self._node()
        if self._node < 1 or self._world_size % self._node:
            raise TopologyError(
                f"topology {self.name}: {self._world_size} ranks cannot be split into nodes of "
                f"{self._node} ranks each"
            )
        return self._node

    @property
    def _n_nodes(self) -> int:
        return self._world_size // self._local_world_size

    @abstractmethod
    def _get_topo_edges(self) -> list[list[Edge]]:
        """Returns the edges of each step of one period; in each step, every rank is in one edge."""

    @property
    def period(self) -> int:
        """Number of steps after which the schedule repeats."""
        return len(self._steps)

    def edges_at(self, step: int) -> list[Edge]:
        """Returns all groups of a step, counted from 0."""
        return self._steps[step % len(self._steps)]

    def get_edge(self, step: int) -> Edge:
        """Returns this rank's group in a step, counted from 0."""
        return self._own[step % len(self._own)]

    def get_all_edges(self) -> list[Edge]:
        """Returns this rank's group in each step of a period."""
        return list(self._own)


class TopologyReg:
    """Registry of topologies by name; `@TopologyReg.register("mine")` adds a `Topology` subclass.

    All ranks must register the same topologies before they use them.
    """

    registry: dict[str, type[Topology]] = {}  # noqa: RUF012 - filled by `register`

    @classmethod
    def register(cls, name: str) -> Callable[[type[Topology]], type[Topology]]:
        """Registers the decorated `Topology`; raises `TopologyError` if the name is taken."""

        def add(topology: type[Topology]) -> type[Topology]:
            if name in cls.registry:
                raise TopologyError(f"a topology {name!r} exists already; use another name")
            if not (isinstance(topology, type) and issubclass(topology, Topology)):
                raise TopologyError(f"topology {name!r} must be a subclass of Topology")
            cls.registry[name] = topology
            topology.name = name
            return topology

        return add

    @classmethod
    def check_name(cls, name: str) -> None:
        """Raises `UserError` unless a topology `name` is registered."""
        one_of("topology", name, cls.registry)

    @classmethod
    def make(
        cls, name: str, *, world_size: int, rank: int, local_world_size: int | Callable[[], int] = 1
    ) -> Topology:
        """Makes the topology `name`; raises `UserError` if the name is unknown or does not fit."""
        kind = one_of("topology", name, cls.registry)
        return kind(local_world_size, world_size=world_size, rank=rank)


def _is_period(steps: object) -> bool:
    lists = (list, tuple)
    return isinstance(steps, lists) and all(
        isinstance(edges, lists)
        and all(isinstance(edge, Edge) and isinstance(edge.ranks, Iterable) for edge in edges)
        for edges in steps
    )


def _validate(name: str, steps: Sequence[Sequence[Edge]], world_size: int) -> None:
    if not steps:
        raise TopologyError(f"topology {name}: there must be at least one step, got none")
    linked = nx.empty_graph(world_size)
    for number, edges in enumerate(steps):
        where = f"topology {name}, step {number}"
        seen: set[int] = set()
        for edge in edges:
            _validate_edge(where, edge, world_size)
            for rank in edge.ranks:
                if rank in seen:
                    raise TopologyError(f"{where}: rank {rank} appears twice")
                seen.add(rank)
            if edge.weight < 1:
                nx.add_path(linked, edge.ranks)
        missing = sorted(set(range(world_size)) - seen)
        if missing:
            shown = ", ".join(map(str, missing[:8]))
            raise TopologyError(f"{where}: rank {shown} is in no edge; every rank must be in one")
    apart = set(linked) - nx.node_connected_component(linked, 0)
    if apart:
        raise TopologyError(
            f"topology {name}: no step connects rank 0 and rank {min(apart)}, even indirectly, so "
            "they would never agree; add edges between them"
        )


def _validate_edge(where: str, edge: Edge, world_size: int) -> None:
    if not edge.ranks:
        raise TopologyError(f"{where}: an edge has no ranks; give at least one")
    for rank in edge.ranks:
        if not (isinstance(rank, int) and 0 <= rank < world_size):
            raise TopologyError(f"{where}: rank {rank!r} is not in a world of {world_size}")
    if not (math.isfinite(edge.weight) and 0 <= edge.weight <= 1):
        raise TopologyError(f"{where}: weight {edge.weight} of {edge.ranks} is not in 0 .. 1")
    if len(edge.ranks) == 1 and edge.weight != 1:
        raise TopologyError(
            f"{where}: rank {edge.ranks[0]} is alone, so its weight must be 1, not {edge.weight}"
        )


def _exponent(name: str, count: int, what: str) -> int:
    """Returns k if `count` is 2^k with k >= 1; raises `TopologyError` otherwise."""
    k = count.bit_length() - 1
    if count != 2**k or k < 1:
        raise TopologyError(f"topology {name} needs 2^k {what} (2, 4, 8, 16, ...), not {count}")
    return k


@TopologyReg.register("complete")
class CompleteTopology(Topology):
    """Topology of one group with all ranks; for any world size."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge(range(self._world_size), 1 / self._world_size)]]


@TopologyReg.register("ring")
class RingTopology(Topology):
    """Topology of pairs: each rank averages with its right and its left neighbour in turn."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        if n % 2:
            odd = f"not {n}: ranks average in pairs; use 'complete'"
            raise TopologyError(f"topology ring needs an even number of ranks, {odd}")
        first = [Edge([i, i + 1], 0.5) for i in range(0, n, 2)]
        return [first, [Edge([i, (i - 1) % n], 0.5) for i in range(0, n, 2)]]


@TopologyReg.register("one-peer-exp")
class OnePeerExpTopology(Topology):
    """Topology of pairs: in step i, two ranks average if their numbers differ only in bit i.

    For worlds of 2^k ranks. Without updates, k steps give all ranks the mean of all (arXiv
    2110.13363).
    """

    def _get_topo_edges(self) -> list[list[Edge]]:
        rounds = _exponent(self.name, self._world_size, "ranks")
        ranks = range(self._world_size)
        return [
            [Edge([j, j ^ (1 << i)], 0.5) for j in ranks if not j & (1 << i)] for i in range(rounds)
        ]


@TopologyReg.register("alternating-exp-ring")
class AlternatingExpRingTopology(Topology):
    """Topology of pairs of nodes as in `one-peer-exp`, for 2^k nodes (Decent-DP).

    In alternate steps, a pair averages over both nodes, or each node averages alone. So while some
    pairs use the network, others average inside their nodes.
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
