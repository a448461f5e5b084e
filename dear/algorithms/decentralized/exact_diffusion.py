"""Exact diffusion: decentralized SGD that reaches the exact optimum with one exchange per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.comm.neighbors import Round
from dear.cost.overlap import Overlap
from dear.errors import UserError
from dear.lazy import np, torch
from dear.options import option_of
from dear.topology import from_matrix, matrix
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica, Update
from dear.training.parameters.exchange import GraphExchange, always
from dear.training.parameters.options import GraphAlgorithm, GraphOptions, adapt_then_combine
from dear.training.parameters.stepped import AdaptThenCombine

_DIRECTED = ("ring-left", "ring-right", "exp2")

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


class ExactDiffusion(GraphAlgorithm["ExactDiffusion.Options"]):
    """Exact diffusion (Yuan, Ying, Zhao and Sayed, IEEE Trans. Signal Process. 2019, 1702.05122).

    `psi = x - update; x <- W' (psi + x - last psi)` with W' = (W + 1) / 2, for parameters x and
    weights W. A step updates, adds the change that averaging made in the last step, and averages.
    Invariant: with a constant step size, ranks reach the exact minimum of the sum of their losses.
    Bytes move: from the update until a layer is needed again.
    Cost per step and rank: the parameters once to each neighbour; one more copy in memory.
    Overridden method of the exchange: `adapt` corrects the updated parameters.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """Topology; its weights must be the same in both directions."""

        topology: str = "symmetric-exp"
        """Symmetric static graph: `complete`, `ring`, `star`, `mesh` or `symmetric-exp`."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.topology in _DIRECTED:
                raise UserError(
                    f"{option_of(self, 'topology', self.topology)} is directed; exact diffusion "
                    "needs symmetric weights: use complete, ring, star, mesh or symmetric-exp"
                )

    capabilities = Capabilities(consistency="decentralized")
    bound = "after_update"
    candidates = ({"topology": "ring"},)
    overlap = Overlap(transfers=(adapt_then_combine("parameters"),))

    def engine(self, replica: Replica[Options]) -> AdaptThenCombine:
        weights = matrix(replica.options.graph(replica.communicator, symmetric=True))
        halved = (weights + np.eye(len(weights))) / 2
        part = Round.of(from_matrix(halved), replica.communicator.rank)
        return AdaptThenCombine(replica, ExactDiffusionExchange(always(part)))


class ExactDiffusionExchange(GraphExchange):
    """Exchange that keeps psi: the parameters after the last update, before they were averaged."""

    takes_scaler = False

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, steps)
        self._psi = {bucket: torch.zeros_like(bucket.values) for bucket in self.buckets}
        self._started = False

    def adapt(self, update: Update) -> object:
        with torch.no_grad():
            if self._started:
                for bucket, correction in self._psi.items():
                    correction.neg_().add_(bucket.values)  # x - last psi; 0 in the first step
            self._started = True
            result = update()
            for bucket, correction in self._psi.items():
                psi = bucket.values.clone()
                bucket.values.add_(correction)
                correction.copy_(psi)
        return result

    def saved(self) -> StateDict:
        copies = [psi.clone() for psi in self._psi.values()]
        return {"psi": copies if self._started else None}

    def restore(self, saved: StateDict | None) -> None:
        copies = None if saved is None else saved["psi"]
        self._started = copies is not None
        for index, psi in enumerate(self._psi.values()):
            psi.zero_() if copies is None else psi.copy_(copies[index])
