"""Exact diffusion: decentralized SGD that reaches the exact optimum, for one exchange per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithms.decentralized._tracking import ExactDiffusionEngine
from dear.comm.mixers import GraphMixer
from dear.comm.neighbors import Round
from dear.errors import UserError
from dear.options import option_of
from dear.topology.graphs import from_matrix, matrix
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import distribute
from dear.training.graph_options import GraphOptions, always

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator
    from dear.topology.traffic import Traffic

_DIRECTED = ("ring-left", "ring-right", "exp2")


class ExactDiffusion(Algorithm):
    """Exact diffusion (Yuan, Ying, Zhao and Sayed, IEEE Trans. Signal Process. 2019, 1702.05122).

    Adapt, correct by what averaging did to the last step, combine with (W + 1) / 2.
    Invariant: with a constant step size ranks reach the exact minimum of the sum of their losses.
    Bytes move: from the update until a layer is needed again.
    Cost per step and rank: the parameters once to each neighbour; one more copy in memory.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """The topology, whose weights must be the same in both directions."""

        topology: str = "symmetric-exp"
        """A symmetric static graph: `complete`, `ring`, `star`, `mesh` or `symmetric-exp`."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.topology in _DIRECTED:
                raise UserError(
                    f"{option_of(self, 'topology')}={self.topology} is directed; exact diffusion "
                    "needs symmetric weights: complete, ring, star, mesh or symmetric-exp"
                )

    capabilities = Capabilities(consistency="decentralized", needs_topology=True)
    bound = "after_update"

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic:
        return options.along_graph(world_size)

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        weights = matrix(options.graph(communicator, symmetric=True))
        for rank in range(communicator.size):
            weights[rank, rank] += 1
        part = Round.of(from_matrix(weights / 2), communicator.rank)
        engine = ExactDiffusionEngine(
            model,
            optimizer,
            communicator,
            GraphMixer(communicator, always(part)),
            bucket_mb=options.bucket_mb,
        )
        return model, distribute(optimizer, engine)
