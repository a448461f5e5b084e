"""Decentralized training with the names that users of Decent-DP know.

    import dear
    from dear.decentralized import DecentralizedDataParallel, optim_fn_adamw

    dear.init()
    model = DecentralizedDataParallel(model, optim_fn_adamw, topology="one-peer-exp")
    for x, y in batches:
        criterion(model(x), y).backward()  # also updates

`dear.DistributedOptimizer(..., algorithm="decentralized")` does the same in the ordinary loop.
"""

from dear.decentralized.model import DecentralizedDataParallel, initialize_dist
from dear.decentralized.optim import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from dear.topology.schedules import Edge, Topology, TopologyReg

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "DecentralizedDataParallel",
    "Edge",
    "Topology",
    "TopologyReg",
    "initialize_dist",
    "lr_scheduler_fn_cosine_with_warmup",
    "optim_fn_accum_adam",
    "optim_fn_accum_adamw",
    "optim_fn_adam",
    "optim_fn_adamw",
]
