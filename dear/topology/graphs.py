"""Graphs of ranks with mixing weights: who averages with whom, and by how much.

A graph is a `networkx.DiGraph` over ranks 0 .. n-1. Its edge i -> j says that i sends to j and has
as `weight` the factor that j gives to what comes from i; an edge i -> i is what i gives itself. As
a matrix `W` (`matrix`), `W[i, j]` is that weight: column j is what rank j receives, and one round
of averaging is `x_j <- sum_i W[i, j] x_i`.

Schedules that change from step to step are in `dear.topology.schedules`, checks and convergence
rates in `dear.topology.mixing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from dear.errors import UserError, unknown
from dear.lazy import LazyModule
from dear.options import at_least

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
else:
    nx = LazyModule("networkx")
    np = LazyModule("numpy")

RingStyle = Literal["both", "left", "right"]


def from_matrix(weights: np.ndarray) -> nx.DiGraph:
    """The graph of a weight matrix `[n, n]`; entries that are zero are no edges."""
    weights = np.asarray(weights, dtype=float)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise UserError(f"mixing weights must be a square matrix, got shape {weights.shape}")
    return nx.from_numpy_array(weights, create_using=nx.DiGraph)


def matrix(graph: nx.DiGraph) -> np.ndarray:
    """Weights as float64 `[n, n]`: row = sender, column = receiver."""
    return nx.to_numpy_array(graph, nodelist=range(graph.number_of_nodes()))


def circulant(world_size: int, offsets: Iterable[int]) -> nx.DiGraph:
    """Every rank r sends to r + each of `offsets` (modulo the world); all weights are equal."""
    at_least("world size of a topology", world_size, 1)
    reached = {0, *(offset % world_size for offset in offsets)}
    weights = np.zeros((world_size, world_size))
    for rank in range(world_size):
        for offset in reached:
            weights[rank, (rank + offset) % world_size] = 1.0 / len(reached)
    return from_matrix(weights)


def complete(world_size: int) -> nx.DiGraph:
    """Everybody with everybody, weights 1 / n."""
    return circulant(world_size, range(world_size))


def ring(world_size: int, style: RingStyle = "both") -> nx.DiGraph:
    """Neighbours on a circle, equal weights.

    Args:
        style: `both` directions; `left`: i sends to i - 1 only; `right`: i sends to i + 1 only.
    """
    offsets = {"both": (1, -1), "left": (-1,), "right": (1,)}
    if style not in offsets:
        raise unknown("ring style", style, offsets)
    return circulant(world_size, offsets[style])


def exponential(world_size: int, base: int = 2) -> nx.DiGraph:
    """r sends to r + base^k for every power below the world size, equal weights."""
    at_least("base of an exponential topology", base, 2)
    return circulant(world_size, powers(base, world_size))


def symmetric_exponential(world_size: int, base: int = 4) -> nx.DiGraph:
    """r exchanges with r + base^k and r - base^k for every power up to half the world size."""
    at_least("base of an exponential topology", base, 2)
    half = [power for power in powers(base, world_size) if power <= world_size // 2]
    return circulant(world_size, [*half, *(-power for power in half)])


def metropolis(neighbors: Iterable[tuple[int, int]], world_size: int) -> nx.DiGraph:
    """Symmetric doubly stochastic weights for any undirected graph (Metropolis-Hastings).

    The weight of an edge is 1 / (1 + the larger degree of its two ends); ranks keep the rest.

    Args:
        neighbors: pairs of ranks.
    """
    at_least("world size of a topology", world_size, 1)
    edges = {frozenset(pair) for pair in neighbors if pair[0] != pair[1]}
    degree = [0] * world_size
    for edge in edges:
        for rank in edge:
            if not 0 <= rank < world_size:
                raise UserError(f"rank {rank} is not in a world of {world_size}")
            degree[rank] += 1
    weights = np.zeros((world_size, world_size))
    for one, other in (sorted(edge) for edge in edges):
        weights[one, other] = weights[other, one] = 1.0 / (1 + max(degree[one], degree[other]))
    weights[np.diag_indices(world_size)] = 1.0 - weights.sum(axis=0)
    return from_matrix(weights)


def star(world_size: int, center: int = 0) -> nx.DiGraph:
    """Everybody exchanges with rank `center`; Metropolis weights."""
    at_least("world size of a topology", world_size, 1)
    if not 0 <= center < world_size:
        raise UserError(f"center {center} is no rank of a world of {world_size}")
    return metropolis([(center, rank) for rank in range(world_size)], world_size)


def mesh(world_size: int, shape: tuple[int, int] | None = None) -> nx.DiGraph:
    """A grid (not a torus) whose ranks exchange with up to four neighbours; Metropolis weights.

    Args:
        shape: rows and columns; default: as square as the world size allows.
    """
    at_least("world size of a topology", world_size, 1)
    rows, columns = shape or _squarest(world_size)
    if rows * columns != world_size or rows < 1:
        raise UserError(f"a mesh of {rows} x {columns} does not hold {world_size} ranks")
    pairs = [(rank, rank + 1) for rank in range(world_size) if (rank + 1) % columns]
    pairs += [(rank, rank + columns) for rank in range(world_size - columns)]
    return metropolis(pairs, world_size)


def _squarest(world_size: int) -> tuple[int, int]:
    rows = max(d for d in range(1, math.isqrt(world_size) + 1) if world_size % d == 0)
    return rows, world_size // rows


def powers(base: int, limit: int) -> list[int]:
    """1, base, base^2, ... below `limit`; in whole numbers, for logarithms round."""
    result, power = [], 1
    while power < limit:
        result.append(power)
        power *= base
    return result


TOPOLOGIES: dict[str, Callable[[int], nx.DiGraph]] = {
    "complete": complete,
    "ring": ring,
    "ring-left": lambda world_size: ring(world_size, "left"),
    "ring-right": lambda world_size: ring(world_size, "right"),
    "star": star,
    "mesh": mesh,
    "exp2": exponential,
    "symmetric-exp": symmetric_exponential,
}
"""Static topologies by the names that options and experiments use."""


def graph(name: str, world_size: int) -> nx.DiGraph:
    """The static topology `name` for so many ranks; raises `UserError` for an unknown name."""
    if name not in TOPOLOGIES:
        raise unknown("topology", name, TOPOLOGIES)
    return TOPOLOGIES[name](world_size)


def uniform(graph: nx.DiGraph) -> nx.DiGraph:
    """The same edges; every rank weighs itself and each of its k sources with 1 / (k + 1)."""
    weights = np.zeros((graph.number_of_nodes(),) * 2)
    for rank in graph.nodes:
        members = [rank, *in_neighbors(graph, rank)]
        weights[members, rank] = 1.0 / len(members)
    return from_matrix(weights)


def splitting(graph: nx.DiGraph) -> nx.DiGraph:
    """The same edges; every rank shares itself out equally: 1 / (k + 1) to each of k and itself.

    Rows sum to 1, so the sum over the ranks is kept: what push-sum methods need.
    """
    weights = np.zeros((graph.number_of_nodes(),) * 2)
    for rank in graph.nodes:
        members = [rank, *out_neighbors(graph, rank)]
        weights[rank, members] = 1.0 / len(members)
    return from_matrix(weights)


def in_neighbors(graph: nx.DiGraph, rank: int) -> list[int]:
    """The ranks that send to `rank`, ascending, without itself."""
    return sorted(other for other in graph.predecessors(rank) if other != rank)


def out_neighbors(graph: nx.DiGraph, rank: int) -> list[int]:
    """The ranks that `rank` sends to, ascending, without itself."""
    return sorted(other for other in graph.successors(rank) if other != rank)


def recv_weights(graph: nx.DiGraph, rank: int) -> tuple[float, dict[int, float]]:
    """What `rank` weighs itself with, and each of its sources (ascending)."""
    sources = in_neighbors(graph, rank)
    return _weight(graph, rank, rank), {other: _weight(graph, other, rank) for other in sources}


def send_weights(graph: nx.DiGraph, rank: int) -> tuple[float, dict[int, float]]:
    """What `rank` weighs itself with, and what each of its destinations weighs it with."""
    targets = out_neighbors(graph, rank)
    return _weight(graph, rank, rank), {other: _weight(graph, rank, other) for other in targets}


def _weight(graph: nx.DiGraph, source: int, target: int) -> float:
    return float(graph.edges[source, target]["weight"]) if graph.has_edge(source, target) else 0.0
