"""BlueFog's interface; `import dear.bluefog as bf` replaces `import bluefog.torch as bf`.

    bf.init()
    bf.set_topology(bf.topology_util.RingGraph(bf.size()))
    x = bf.neighbor_allreduce(x)
    optimizer = bf.DistributedAdaptWithCombineOptimizer(optimizer, model)

`bf.init` joins the same job as `dear.init`. Wrong arguments raise `dear.UserError`. Importing this
package does not import torch; the first access to a name in `_NAMES` does. This file also defines
the topologies that BlueFog has in `topology_util`.
"""

# ruff: noqa: N802 - BlueFog's names

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from dear import topology
from dear.errors import UserError
from dear.lazy import nx
from dear.topology import schedules

_NAMES = {
    "dear.bluefog.job": """init shutdown is_initialized size rank local_size local_rank
        machine_size machine_rank is_homogeneous is_available mpi_threads_supported
        unified_mpi_window_model_supported nccl_built set_topology load_topology
        set_machine_topology load_machine_topology in_neighbor_ranks out_neighbor_ranks
        in_neighbor_machine_ranks out_neighbor_machine_ranks set_skip_negotiate_stage
        get_skip_negotiate_stage poll
        synchronize wait suspend resume timeline_start_activity timeline_end_activity
        timeline_context""",
    "dear.bluefog.collectives": """barrier allreduce allreduce_ allreduce_nonblocking
        allreduce_nonblocking_ allgather allgather_nonblocking broadcast broadcast_
        broadcast_nonblocking broadcast_nonblocking_ broadcast_parameters broadcast_optimizer_state
        allreduce_parameters broadcast_object
        InferSourceFromDestinationRanks InferDestinationFromSourceRanks
        neighbor_allreduce neighbor_allreduce_nonblocking neighbor_allgather
        neighbor_allgather_nonblocking hierarchical_neighbor_allreduce
        hierarchical_neighbor_allreduce_nonblocking pair_gossip pair_gossip_nonblocking""",
    "dear.bluefog.windows": """win_create win_free win_put win_put_nonblocking win_accumulate
        win_accumulate_nonblocking win_get win_get_nonblocking win_update win_update_then_collect
        win_read_neighbor win_wait win_poll win_mutex get_win_version
        get_current_created_window_names win_associated_p turn_on_win_ops_with_associated_p
        turn_off_win_ops_with_associated_p""",
    "dear.bluefog.optimizers": """CommunicationType DistributedGradientAllreduceOptimizer
        DistributedAdaptWithCombineOptimizer DistributedAdaptThenCombineOptimizer
        DistributedAllreduceOptimizer DistributedNeighborAllreduceOptimizer
        DistributedHierarchicalNeighborAllreduceOptimizer DistributedWinPutOptimizer
        DistributedPullGetOptimizer DistributedPushSumOptimizer""",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

Peers = Iterator[tuple[list[int], list[int]]]


ExponentialGraph = topology.exponential
SymmetricExponentialGraph = topology.symmetric_exponential
GetRecvWeights = topology.recv_weights
GetSendWeights = topology.send_weights
IsTopologyEquivalent = topology.is_equivalent
IsRegularGraph = topology.is_regular


def ExponentialTwoGraph(size: int) -> nx.DiGraph:
    """Returns the graph in which rank r sends to ranks r + 1, r + 2, r + 4, ...; equal weights."""
    return topology.exponential(size)


def FullyConnectedGraph(size: int) -> nx.DiGraph:
    """Returns the graph in which all ranks exchange with all others; weights 1 / n."""
    return topology.complete(size)


def RingGraph(size: int, connect_style: int = 0) -> nx.DiGraph:
    """Returns a ring; style 0: both directions; 1: i sends to i - 1; 2: i sends to i + 1."""
    if connect_style not in (0, 1, 2):
        raise UserError(f"connect_style must be 0, 1 or 2, got {connect_style}")
    return topology.ring(size, ("both", "left", "right")[connect_style])


def StarGraph(size: int, center_rank: int = 0) -> nx.DiGraph:
    """Returns the graph in which all ranks exchange with `center_rank`; Metropolis weights."""
    return topology.star(size, center_rank)


def MeshGrid2DGraph(size: int, shape: tuple[int, int] | None = None) -> nx.DiGraph:
    """Returns a grid of `shape`, by default as square as possible; Metropolis weights."""
    return topology.mesh(size, shape)


def GetDynamicOnePeerSendRecvRanks(topo: nx.DiGraph, self_rank: int) -> Peers:
    """Yields ([send], [receive]) endlessly; each rank sends to its neighbours in `topo` in turn."""
    return schedules.forever(schedules.one_peer(topo, self_rank))


def GetExp2DynamicSendRecvMachineRanks(
    world_size: int, local_size: int, self_rank: int, local_rank: int
) -> Peers:
    """Yields ([send], [receive]) endlessly, as machine numbers at distance 1, 2, 4, ... in turn."""
    if world_size % local_size or local_rank != self_rank % local_size:
        raise UserError(
            f"rank {self_rank} (local rank {local_rank}) of {world_size} does not fit machines of "
            f"{local_size} ranks"
        )
    machines, machine = world_size // local_size, self_rank // local_size
    return schedules.forever(schedules.one_peer_machines(machines, machine))


def GetInnerOuterRingDynamicSendRecvRanks(
    world_size: int, local_size: int, self_rank: int
) -> Peers:
    """Yields ([send], [receive]) endlessly, along rings inside machines and between them."""
    return schedules.forever(schedules.inner_outer_ring(world_size, local_size, self_rank))


def GetInnerOuterExpo2DynamicSendRecvRanks(
    world_size: int, local_size: int, self_rank: int
) -> Peers:
    """Yields ([send], [receive]) endlessly, along exponential graphs in and between machines."""
    return schedules.forever(schedules.inner_outer_exp2(world_size, local_size, self_rank))


topology_util = sys.modules[__name__]
"""Same module as `bf`, under the name of BlueFog's module: for `bf.topology_util.RingGraph`."""

_TOPOLOGIES = """ExponentialTwoGraph ExponentialGraph SymmetricExponentialGraph MeshGrid2DGraph
    StarGraph RingGraph FullyConnectedGraph GetRecvWeights GetSendWeights IsTopologyEquivalent
    IsRegularGraph GetDynamicOnePeerSendRecvRanks GetExp2DynamicSendRecvMachineRanks
    GetInnerOuterRingDynamicSendRecvRanks GetInnerOuterExpo2DynamicSendRecvRanks"""

__all__ = sorted([*_HOME, *_TOPOLOGIES.split(), "topology_util"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dear.bluefog' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
