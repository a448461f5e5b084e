"""Gradient tracking: decentralized SGD that reaches the exact optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithms.decentralized._tracking import GradientTrackingEngine
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


class GradientTracking(Algorithm):
    """DIGing (Nedic, Olshevsky and Shi, SIAM J. Optim. 2017, arXiv 1607.03218).

    Each rank keeps an estimate of the mean gradient, averages it like its parameters, corrects it
    by how its own gradient has changed, and steps with it.
    Invariant: the mean of the estimates is the mean of the gradients; with a constant step size
    ranks reach the exact minimum of the sum of their losses, linearly if that is strongly convex.
    Bytes move: beside both passes.
    Cost per step and rank: twice the parameters to each neighbour; two more copies in memory.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """The topology; every named one keeps the mean."""

    capabilities = Capabilities(consistency="decentralized", needs_topology=True)
    bound = "beside_passes"

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic:
        return options.along_graph(world_size).times(2)

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        graph = options.graph(communicator, doubly_stochastic=True)
        mixer = GraphMixer(communicator, always(Round.of(graph, communicator.rank)))
        engine = GradientTrackingEngine(
            model, optimizer, communicator, mixer, bucket_mb=options.bucket_mb
        )
        return model, distribute(optimizer, engine)
