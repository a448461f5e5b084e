"""BlueFog's names for the topologies of `dear.topology.graphs` and `dear.topology.schedules`."""

# ruff: noqa: N802 - the names that BlueFog's users know

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dear import topology
from dear.errors import UserError
from dear.topology import schedules as topology_dynamic
from dear.topology.graphs import exponential as ExponentialGraph  # noqa: N812
from dear.topology.graphs import is_equivalent as IsTopologyEquivalent  # noqa: N812
from dear.topology.graphs import is_regular as IsRegularGraph  # noqa: N812
from dear.topology.graphs import recv_weights as GetRecvWeights  # noqa: N812
from dear.topology.graphs import send_weights as GetSendWeights  # noqa: N812
from dear.topology.graphs import symmetric_exponential as SymmetricExponentialGraph  # noqa: N812

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "ExponentialGraph",
    "ExponentialTwoGraph",
    "FullyConnectedGraph",
    "GetDynamicOnePeerSendRecvRanks",
    "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks",
    "GetInnerOuterRingDynamicSendRecvRanks",
    "GetRecvWeights",
    "GetSendWeights",
    "IsRegularGraph",
    "IsTopologyEquivalent",
    "MeshGrid2DGraph",
    "RingGraph",
    "StarGraph",
    "SymmetricExponentialGraph",
]

Peers = Iterator[tuple[list[int], list[int]]]


def ExponentialTwoGraph(size: int) -> nx.DiGraph:
    """r sends to r + 1, 2, 4, ...; equal weights."""
    return topology.exponential(size)


def FullyConnectedGraph(size: int) -> nx.DiGraph:
    """Everybody with everybody, weights 1 / n."""
    return topology.complete(size)


def RingGraph(size: int, connect_style: int = 0) -> nx.DiGraph:
    """Style 0: both directions; 1: i sends to i - 1; 2: i sends to i + 1."""
    if connect_style not in (0, 1, 2):
        raise UserError(f"connect_style must be 0, 1 or 2, got {connect_style}")
    return topology.ring(size, ("both", "left", "right")[connect_style])


def StarGraph(size: int, center_rank: int = 0) -> nx.DiGraph:
    """Everybody exchanges with `center_rank`; Metropolis weights."""
    return topology.star(size, center_rank)


def MeshGrid2DGraph(size: int, shape: tuple[int, int] | None = None) -> nx.DiGraph:
    """A grid of `shape`, by default as square as can be; Metropolis weights."""
    return topology.mesh(size, shape)


def GetDynamicOnePeerSendRecvRanks(topo: nx.DiGraph, self_rank: int) -> Peers:
    """Endless ([send], [receive]): one destination of `topo` in turn."""
    return topology_dynamic.forever(topology_dynamic.one_peer(topo, self_rank))


def GetExp2DynamicSendRecvMachineRanks(
    world_size: int, local_size: int, self_rank: int, local_rank: int
) -> Peers:
    """Endless ([send], [receive]) of machine numbers at distance 1, 2, 4, ... in turn."""
    if world_size % local_size or local_rank != self_rank % local_size:
        raise UserError(
            f"rank {self_rank} (number {local_rank} of its machine) of {world_size} does not fit "
            f"machines of {local_size} ranks"
        )
    machines, machine = world_size // local_size, self_rank // local_size
    return topology_dynamic.forever(topology_dynamic.one_peer_machines(machines, machine))


def GetInnerOuterRingDynamicSendRecvRanks(
    world_size: int, local_size: int, self_rank: int
) -> Peers:
    """Endless ([send], [receive]): rings inside machines and between them."""
    return topology_dynamic.forever(
        topology_dynamic.inner_outer_ring(world_size, local_size, self_rank)
    )


def GetInnerOuterExpo2DynamicSendRecvRanks(
    world_size: int, local_size: int, self_rank: int
) -> Peers:
    """Endless ([send], [receive]): exponential graphs inside machines and between them."""
    return topology_dynamic.forever(
        topology_dynamic.inner_outer_exp2(world_size, local_size, self_rank)
    )
