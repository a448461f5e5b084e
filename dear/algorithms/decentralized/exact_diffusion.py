"""Exact diffusion: decentralized SGD that reaches the exact optimum with one exchange per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dear.buckets.flat import Bucket
from dear.comm.neighbors import Round
from dear.cost.overlap import Overlap
from dear.errors import UserError
from dear.lazy import np, torch
from dear.options import option_of
from dear.topology import from_matrix, matrix
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica, Update
from dear.training.parameters.exchange import SumExchange, always
from dear.training.parameters.options import GraphAlgorithm, GraphOptions, adapt_then_combine
from dear.training.parameters.stepped import AdaptThenCombine

_DIRECTED = ("ring-left", "ring-right", "exp2")


class ExactDiffusion(GraphAlgorithm["ExactDiffusion.Options"]):
    """Exact diffusion (Yuan, Ying, Zhao and Sayed, IEEE Trans. Signal Process. 2019, 1702.05122).

    `psi = x - update; x <- W' (psi + x - last psi)` with W' = (W + 1) / 2, for parameters x and
    weights W. A step updates, adds the change that averaging made in the last step, and averages.
    If a script writes to x, `x - last psi` is still that change, so the write counts once.
    Invariant: these changes sum to 0 over the ranks. With a constant step size, ranks reach the
    exact minimum of the sum of their losses.
    Bytes move: from the update until a layer is needed again.
    Cost per step and rank: the parameters once to each neighbour; one more copy in memory.
    Overridden methods of the exchange: `adapt` corrects the updated parameters, and `mix` computes
    the next correction.
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


class ExactDiffusionExchange(SumExchange):
    """Exchange that keeps the change that the last averaging made to the parameters."""

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, steps)
        self._changes = {bucket: torch.zeros_like(bucket.values) for bucket in self.buckets}
        """Change by the last averaging; psi while an averaging is under way."""

    def adapt(self, update: Update) -> object:
        with torch.no_grad():
            result = update()
            for bucket, change in self._changes.items():
                psi = bucket.values.clone()
                bucket.values.add_(change)
                change.copy_(psi)
        return result

    def mix(self, bucket: Bucket, steps: int) -> None:
        super().mix(bucket, steps)
        # In the next step, the parameters may contain a write by the script.
        self._changes[bucket].neg_().add_(bucket.values)

    def kept(self) -> dict[str, list[torch.Tensor]]:
        return {"change": self.views(self._changes)}

    def begin_anew(self) -> None:
        for change in self._changes.values():
            change.zero_()
