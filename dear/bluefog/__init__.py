"""BlueFog's interface: `import dear.bluefog as bf` in place of `import bluefog.torch as bf`.

    bf.init()
    bf.set_topology(bf.topology_util.RingGraph(bf.size()))
    x = bf.neighbor_allreduce(x)
    optimizer = bf.DistributedAdaptWithCombineOptimizer(optimizer, model)

It runs on the job that `dear.init` joins. Wrong arguments raise `dear.UserError`. Importing it does
not import torch; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "dear.bluefog.job": """init shutdown is_initialized size rank local_size local_rank machine_size
        machine_rank is_homogeneous nccl_built set_topology load_topology set_machine_topology
        load_machine_topology in_neighbor_ranks out_neighbor_ranks in_neighbor_machine_ranks
        out_neighbor_machine_ranks set_skip_negotiate_stage get_skip_negotiate_stage""",
    "dear.bluefog.handles": "poll synchronize wait suspend resume",
    "dear.bluefog.collectives": """barrier allreduce allreduce_ allreduce_nonblocking
        allreduce_nonblocking_ allgather allgather_nonblocking broadcast broadcast_
        broadcast_nonblocking broadcast_nonblocking_ broadcast_parameters broadcast_optimizer_state
        allreduce_parameters InferSourceFromDestinationRanks InferDestinationFromSourceRanks""",
    "dear.bluefog.neighbor": """neighbor_allreduce neighbor_allreduce_nonblocking neighbor_allgather
        neighbor_allgather_nonblocking hierarchical_neighbor_allreduce
        hierarchical_neighbor_allreduce_nonblocking pair_gossip pair_gossip_nonblocking""",
    "dear.bluefog.windows": """win_create win_free win_put win_put_nonblocking win_accumulate
        win_accumulate_nonblocking win_get win_get_nonblocking win_update win_update_then_collect
        win_wait win_poll win_mutex get_win_version get_current_created_window_names
        win_associated_p turn_on_win_ops_with_associated_p turn_off_win_ops_with_associated_p""",
    "dear.bluefog.optimizers": """CommunicationType DistributedGradientAllreduceOptimizer
        DistributedAdaptWithCombineOptimizer DistributedAdaptThenCombineOptimizer
        DistributedAllreduceOptimizer DistributedNeighborAllreduceOptimizer
        DistributedHierarchicalNeighborAllreduceOptimizer DistributedWinPutOptimizer
        DistributedPullGetOptimizer DistributedPushSumOptimizer""",
    "dear.bluefog.timeline": """timeline_start_activity timeline_end_activity timeline_context""",
    "dear.bluefog.topology_util": """ExponentialTwoGraph ExponentialGraph SymmetricExponentialGraph
        MeshGrid2DGraph StarGraph RingGraph FullyConnectedGraph GetRecvWeights GetSendWeights
        IsTopologyEquivalent IsRegularGraph GetDynamicOnePeerSendRecvRanks
        GetExp2DynamicSendRecvMachineRanks GetInnerOuterRingDynamicSendRecvRanks
        GetInnerOuterExpo2DynamicSendRecvRanks""",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOME, "topology_util"])


def __getattr__(name: str) -> Any:
    if name == "topology_util":
        return importlib.import_module("dear.bluefog.topology_util")
    if name not in _HOME:
        raise AttributeError(f"module 'dear.bluefog' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
