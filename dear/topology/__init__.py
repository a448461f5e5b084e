"""Topologies: graphs of ranks with mixing weights.

A graph is a `networkx.DiGraph` over ranks 0 .. n-1. An edge i -> j means that i sends to j. Its
`weight` is the factor by which j multiplies the values of i. An edge i -> i has the factor for i's
own values. In the weight matrix `W` (`matrix`), `W[i, j]` is the weight of edge i -> j, so column j
holds the weights that rank j uses. One round of averaging is `x_j <- sum_i W[i, j] x_i`.

The second half of the file checks weights, and computes how fast averaging converges (also
importable as `dear.mixing`). `dear.topology.schedules` has topologies that change from step to
step.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dear.errors import UserError, one_of
from dear.lazy import np, nx
from dear.options import at_least

RingStyle = Literal["both", "left", "right"]
TOLERANCE = 1e-6
_SCHEDULES = ("DYNAMIC", "Edge", "Topology", "TopologyError", "TopologyReg", "schedule")


def __getattr__(name: str) -> Any:
    """Looks up names of `dear.topology.schedules`, which cannot be imported before this module."""
    if name in _SCHEDULES:
        return getattr(importlib.import_module("dear.topology.schedules"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def from_matrix(weights: np.ndarray) -> nx.DiGraph:
    """Returns the graph of a weight matrix `[n, n]`; an entry of 0 makes no edge."""
    weights = np.asarray(weights, dtype=float)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise UserError(f"mixing weights must be a square matrix, got shape {weights.shape}")
    return nx.from_numpy_array(weights, create_using=nx.DiGraph)


def matrix(graph: nx.DiGraph) -> np.ndarray:
    """Returns the weights as float64 `[n, n]`: row = sender, column = receiver."""
    weights: np.ndarray = nx.to_numpy_array(graph, nodelist=range(graph.number_of_nodes()))
    return weights


def circulant(world_size: int, offsets: Iterable[int]) -> nx.DiGraph:
    """Returns the graph in which r sends to r + offset (mod n) for each offset; equal weights."""
    at_least("world size of a topology", world_size, 1)
    reached = {0, *(offset % world_size for offset in offsets)}
    weights = np.zeros((world_size, world_size))
    for rank in range(world_size):
        for offset in reached:
            weights[rank, (rank + offset) % world_size] = 1.0 / len(reached)
    return from_matrix(weights)


def complete(world_size: int) -> nx.DiGraph:
    """Returns the complete graph, with weights 1 / n."""
    return circulant(world_size, range(world_size))


def ring(world_size: int, style: RingStyle = "both") -> nx.DiGraph:
    """Returns a ring with equal weights; `left`: i sends only to i - 1; `right`: only to i + 1."""
    offsets = {"both": (1, -1), "left": (-1,), "right": (1,)}
    return circulant(world_size, one_of("ring style", style, offsets))


def exponential(world_size: int, base: int = 2) -> nx.DiGraph:
    """Returns the graph in which r sends to r + base^k (mod n) for base^k < n; equal weights."""
    return circulant(world_size, powers(base, world_size))


def symmetric_exponential(world_size: int, base: int = 4) -> nx.DiGraph:
    """Returns the graph in which r exchanges with r +- base^k for base^k <= n/2; equal weights."""
    half = [power for power in powers(base, world_size) if power <= world_size // 2]
    return circulant(world_size, [*half, *(-power for power in half)])


def metropolis(neighbors: Iterable[tuple[int, int]], world_size: int) -> nx.DiGraph:
    """Returns symmetric doubly stochastic weights for an undirected graph of pairs of ranks.

    Metropolis-Hastings rule: the weight of an edge is 1 / (1 + the larger degree of its two ends).
    A rank's weight for itself is what remains to 1.
    """
    at_least("world size of a topology", world_size, 1)
    near = nx.empty_graph(world_size)
    near.add_edges_from(pair for pair in neighbors if pair[0] != pair[1])
    outside = sorted(set(near) - set(range(world_size)))
    if outside:
        raise UserError(f"rank {outside[0]} is not in a world of {world_size}")
    weights = np.zeros((world_size, world_size))
    for rank, neighbor in near.edges:
        weights[rank, neighbor] = 1.0 / (1 + max(near.degree[rank], near.degree[neighbor]))
        weights[neighbor, rank] = weights[rank, neighbor]
    weights[np.diag_indices(world_size)] = 1.0 - weights.sum(axis=0)
    return from_matrix(weights)


def star(world_size: int, center: int = 0) -> nx.DiGraph:
    """Returns a star: all ranks exchange with rank `center`; Metropolis weights."""
    at_least("world size of a topology", world_size, 1)
    if not 0 <= center < world_size:
        raise UserError(f"center {center} is not in a world of {world_size}")
    return metropolis([(center, rank) for rank in range(world_size)], world_size)


def mesh(world_size: int, shape: tuple[int, int] | None = None) -> nx.DiGraph:
    """Returns a grid (not a torus) in which ranks have up to four neighbours; Metropolis weights.

    Args:
        shape: rows and columns; None: as square as the world size allows.
    """
    at_least("world size of a topology", world_size, 1)
    if shape is None:
        rows = max(d for d in range(1, math.isqrt(world_size) + 1) if world_size % d == 0)
        shape = rows, world_size // rows
    rows, columns = shape
    if rows * columns != world_size or rows < 1:
        raise UserError(f"a mesh of {rows} x {columns} does not hold {world_size} ranks")
    grid = nx.grid_2d_graph(rows, columns)
    pairs = [(a * columns + b, c * columns + d) for (a, b), (c, d) in grid.edges]
    return metropolis(pairs, world_size)


def powers(base: int, limit: int) -> list[int]:
    """Returns the powers 1, base, base^2, ... below `limit`, exactly (logarithms would round)."""
    at_least("base of an exponential topology", base, 2)
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

if TYPE_CHECKING:
    Name: TypeAlias = str
else:
    Name = Literal[tuple(TOPOLOGIES)]
"""Type of an option that names a static topology."""


def graph(name: str, world_size: int) -> nx.DiGraph:
    """Returns the static topology `name`; raises `UserError` for an unknown name."""
    return one_of("topology", name, TOPOLOGIES)(world_size)


def uniform(graph: nx.DiGraph) -> nx.DiGraph:
    """Returns the same edges, with weight 1 / (k + 1) for each rank itself and its k sources."""
    weights = np.zeros((graph.number_of_nodes(),) * 2)
    for rank in graph.nodes:
        members = [rank, *in_neighbors(graph, rank)]
        weights[members, rank] = 1.0 / len(members)
    return from_matrix(weights)


def splitting(graph: nx.DiGraph) -> nx.DiGraph:
    """Returns the same edges; a rank sends with weight 1 / (k + 1) to itself and k targets.

    Rows sum to 1, so averaging does not change the sum over the ranks; push-sum methods need this.
    """
    return from_matrix(matrix(uniform(graph.reverse())).T)


def in_neighbors(graph: nx.DiGraph, rank: int) -> list[int]:
    """Returns the ranks that send to `rank`, ascending, without itself."""
    return sorted(other for other in graph.predecessors(rank) if other != rank)


def out_neighbors(graph: nx.DiGraph, rank: int) -> list[int]:
    """Returns the ranks that `rank` sends to, ascending, without itself."""
    return sorted(other for other in graph.successors(rank) if other != rank)


def recv_weights(graph: nx.DiGraph, rank: int) -> tuple[float, dict[int, float]]:
    """Returns the weights that `rank` gives to itself and to each of its sources (ascending)."""
    sources = in_neighbors(graph, rank)
    return _weight(graph, rank, rank), {other: _weight(graph, other, rank) for other in sources}


def send_weights(graph: nx.DiGraph, rank: int) -> tuple[float, dict[int, float]]:
    """Returns the weights that `rank` itself and each of its targets (ascending) give to `rank`."""
    targets = out_neighbors(graph, rank)
    return _weight(graph, rank, rank), {other: _weight(graph, rank, other) for other in targets}


def _weight(graph: nx.DiGraph, source: int, target: int) -> float:
    return float(graph.edges[source, target]["weight"]) if graph.has_edge(source, target) else 0.0


def check_graph(
    graph: nx.DiGraph, world_size: int, *, doubly_stochastic: bool = False, symmetric: bool = False
) -> None:
    """Checks that averaging with the weights converges.

    The weights that each rank receives with (a column of the matrix) must be finite, not negative
    and sum to 1. Every rank must reach every other rank.

    Args:
        doubly_stochastic: rows must sum to 1, too. Then averaging keeps the mean over the ranks;
            otherwise ranks agree on a weighted mean.
        symmetric: weights must be the same in both directions.

    Raises:
        UserError: names the first rank, edge or pair that is wrong.
    """
    check_nodes(graph, world_size)
    weights = matrix(graph)
    wrong = np.argwhere(~np.isfinite(weights) | (weights < 0))
    if len(wrong):
        source, target = (int(rank) for rank in wrong[0])
        raise UserError(
            f"topology: the weight {weights[source, target]} of edge {source} -> {target} must be "
            "finite and not negative"
        )
    _sums_to_one(weights.sum(axis=0), "receive")
    if doubly_stochastic or symmetric:
        _sums_to_one(weights.sum(axis=1), "send")
    uneven = np.argwhere(np.abs(weights - weights.T) > TOLERANCE)
    if symmetric and len(uneven):
        source, target = (int(rank) for rank in uneven[0])
        raise UserError(
            f"topology: weights must be symmetric, but {source} -> {target} has "
            f"{weights[source, target]:g} and {target} -> {source} has {weights[target, source]:g}"
        )
    check_connected(graph)


def check_nodes(graph: nx.DiGraph, world_size: int) -> None:
    """Raises `UserError` unless `graph` is a directed graph over ranks 0 .. world_size - 1."""
    if not isinstance(graph, nx.DiGraph):
        raise UserError(f"a topology must be a networkx.DiGraph, got {type(graph).__name__}")
    if set(graph.nodes) != set(range(world_size)):
        raise UserError(
            f"topology: the nodes must be the ranks 0 to {world_size - 1}, got "
            f"{graph.number_of_nodes()} nodes {sorted(graph.nodes)[:8]}"
        )


def check_connected(graph: nx.DiGraph) -> None:
    """Raises `UserError` unless every rank reaches every other rank."""
    for rank in graph.nodes:
        missing = set(graph.nodes) - {rank} - nx.descendants(graph, rank)
        if missing:
            raise UserError(
                f"topology: no value of rank {rank} ever reaches rank {min(missing)}, so the ranks "
                "cannot agree; add edges until the graph is strongly connected"
            )


def _sums_to_one(sums: np.ndarray, kind: str) -> None:
    rank = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[rank] - 1) > TOLERANCE:
        raise UserError(
            f"topology: the {kind} weights of rank {rank} sum to {sums[rank]:g}, but must sum to 1"
        )


def is_regular(graph: nx.DiGraph) -> bool:
    """Returns True if all ranks have the same number of sources and the same number of targets."""
    kinds = {(len(in_neighbors(graph, r)), len(out_neighbors(graph, r))) for r in graph.nodes}
    return len(kinds) <= 1


def is_equivalent(first: nx.DiGraph | None, second: nx.DiGraph | None) -> bool:
    """Returns True if both graphs have the same ranks, edges and weights."""
    if first is None or second is None:
        return first is second
    if set(first.nodes) != set(second.nodes):
        return False
    return bool(np.allclose(matrix(first), matrix(second), rtol=0, atol=1e-12))


def mixing_rate(graph: nx.DiGraph) -> float:
    """Returns the second largest eigenvalue magnitude: each round multiplies differences by it."""
    magnitudes = np.sort(np.abs(np.linalg.eigvals(matrix(graph))))
    return float(magnitudes[-2]) if len(magnitudes) > 1 else 0.0


def spectral_gap(graph: nx.DiGraph) -> float:
    """Returns 1 - `mixing_rate`: 1 means equal after one round, 0 means never equal."""
    return 1.0 - mixing_rate(graph)


def rounds_to(reduction: float, graph: nx.DiGraph) -> float:
    """Returns how many rounds multiply differences between ranks by `reduction`, in (0, 1)."""
    if not 0 < reduction < 1:
        raise UserError(f"reduction must lie between 0 and 1, got {reduction}")
    rate = mixing_rate(graph)
    if rate >= 1.0 - 1e-12:
        return math.inf
    return max(1.0, math.log(reduction) / math.log(rate)) if rate > 1e-12 else 1.0
