"""Push-DIGing: gradient tracking over directed graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithms.decentralized._tracking import PushDigingEngine
from dear.comm.mixers import GraphMixer
from dear.comm.neighbors import Round
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import distribute
from dear.training.graph_options import GraphOptions, always

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator
    from dear.topology.traffic import Traffic


class PushDiging(Algorithm):
    """Push-DIGing (Nedic, Olshevsky and Shi, SIAM J. Optim. 2017, arXiv 1607.03218).

    Ranks share themselves out to whom they send to, together with a weight that undoes what an
    uneven graph does to the shares; so senders need not know how many others a receiver hears.
    Invariant: sums over the ranks are kept; ranks reach the exact minimum of the sum of their
    losses with a constant step size, over any strongly connected directed graph.
    Bytes move: from the update until a layer is needed again.
    Cost per step and rank: twice the parameters to each neighbour; three more copies in memory.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """The topology; only its edges count, weights follow from the number of receivers."""

    capabilities = Capabilities(consistency="decentralized", needs_topology=True)
    bound = "after_update"

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic:
        return options.along_graph(world_size).times(2)

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        part = Round.splitting(options.graph(communicator), communicator.rank)
        engine = PushDigingEngine(
            model,
            optimizer,
            communicator,
            GraphMixer(communicator, always(part)),
            bucket_mb=options.bucket_mb,
        )
        return model, distribute(optimizer, engine)
