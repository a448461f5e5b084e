"""What mixing weights must fulfil, and how fast averaging over a graph converges."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dear.errors import UserError
from dear.lazy import LazyModule
from dear.topology.graphs import in_neighbors, matrix, out_neighbors

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
else:
    nx = LazyModule("networkx")
    np = LazyModule("numpy")

TOLERANCE = 1e-6


def check_graph(
    graph: nx.DiGraph,
    world_size: int,
    *,
    doubly_stochastic: bool = False,
    symmetric: bool = False,
    connected: bool = True,
) -> None:
    """Refuses weights that do not average.

    Every rank's receive weights (a column of the matrix) must be finite, not negative and sum to 1.

    Args:
        doubly_stochastic: send weights (rows) must sum to 1 too, so that the mean over the ranks is
            kept; otherwise ranks agree on a weighted mean.
        symmetric: weights must be the same in both directions.
        connected: every rank must reach every other; without that they never agree.

    Raises:
        UserError: naming the first rank, edge or pair that is wrong.
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
    if connected:
        check_connected(graph)


def check_nodes(graph: nx.DiGraph, world_size: int) -> None:
    """Refuses what is no directed graph over ranks 0 .. world_size - 1."""
    if not isinstance(graph, nx.DiGraph):
        raise UserError(f"a topology must be a networkx.DiGraph, got {type(graph).__name__}")
    if set(graph.nodes) != set(range(world_size)):
        raise UserError(
            f"topology: its nodes must be the ranks 0 to {world_size - 1}, got "
            f"{graph.number_of_nodes()} nodes {sorted(graph.nodes)[:8]}"
        )


def check_connected(graph: nx.DiGraph) -> None:
    """Refuses a graph in which some rank does not reach some other."""
    for rank in graph.nodes:
        missing = set(graph.nodes) - {rank} - nx.descendants(graph, rank)
        if missing:
            raise UserError(
                f"topology: nothing of rank {rank} ever reaches rank {min(missing)}, so the ranks "
                "cannot agree; add edges until the graph is strongly connected"
            )


def _sums_to_one(sums: np.ndarray, kind: str) -> None:
    rank = int(np.argmax(np.abs(sums - 1)))
    if abs(sums[rank] - 1) > TOLERANCE:
        raise UserError(
            f"topology: the {kind} weights of rank {rank} sum to {sums[rank]:g}, must be 1"
        )


def is_regular(graph: nx.DiGraph) -> bool:
    """True if all ranks have as many sources, and as many destinations (self not counted)."""
    kinds = {(len(in_neighbors(graph, r)), len(out_neighbors(graph, r))) for r in graph.nodes}
    return len(kinds) <= 1


def is_equivalent(one: nx.DiGraph | None, other: nx.DiGraph | None) -> bool:
    """True if both have the same ranks, edges and weights."""
    if one is None or other is None:
        return one is other
    if set(one.nodes) != set(other.nodes):
        return False
    return bool(np.allclose(matrix(one), matrix(other), rtol=0, atol=1e-12))


def mixing_rate(graph: nx.DiGraph) -> float:
    """Second largest magnitude of an eigenvalue: what is left of a disagreement after a round."""
    magnitudes = np.sort(np.abs(np.linalg.eigvals(matrix(graph))))
    return float(magnitudes[-2]) if len(magnitudes) > 1 else 0.0


def spectral_gap(graph: nx.DiGraph) -> float:
    """1 - `mixing_rate`: 1 averages at once, 0 never."""
    return 1.0 - mixing_rate(graph)


def rounds_to(reduction: float, graph: nx.DiGraph) -> float:
    """Rounds of averaging after which a disagreement is `reduction` times what it was.

    Args:
        reduction: between 0 and 1.
    """
    if not 0 < reduction < 1:
        raise UserError(f"reduction must lie between 0 and 1, got {reduction}")
    rate = mixing_rate(graph)
    if rate >= 1.0 - 1e-12:
        return math.inf
    return max(1.0, math.log(reduction) / math.log(rate)) if rate > 1e-12 else 1.0
