"""Gradient tracking: decentralized SGD that reaches the exact optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dear.buckets.flat import Bucket, with_gradients
from dear.comm.neighbors import Round
from dear.cost.overlap import Overlap
from dear.errors import UserError
from dear.lazy import torch
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica, Update
from dear.training.parameters.exchange import SumExchange, always
from dear.training.parameters.options import GraphAlgorithm, GraphOptions, combine_then_adapt
from dear.training.parameters.stepped import CombineThenAdapt


class GradientTracking(GraphAlgorithm["GradientTracking.Options"]):
    """DIGing (Nedic, Olshevsky and Shi, SIAM J. Optim. 2017, arXiv 1607.03218).

    `y <- W y + g - last g; x <- W x - update(y)`, for parameters x, gradients g and weights W.
    Plain averaging with a constant step size stops near the optimum, because each rank's own
    gradient pulls it away from the mean. Here each rank keeps an estimate y of the mean gradient.
    It averages y like its parameters, adds the change of its own gradient, and steps with y.
    Invariant: the mean of the estimates is the mean of the gradients. With a constant step size,
    ranks reach the exact minimum of the sum of their losses (linearly, if it is strongly convex).
    Bytes move: during both passes.
    Cost per step and rank: twice the parameters to each neighbour; two more copies in memory.
    Overridden methods of the exchange: `carried` adds the estimates, `adapt` updates with them.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """Topology; every named topology keeps the mean."""

    capabilities = Capabilities(consistency="decentralized")
    bound = "beside_passes"
    candidates = ({"topology": "ring"},)
    overlap = Overlap(transfers=(combine_then_adapt("parameters"), combine_then_adapt("gradients")))

    copies = 2

    def engine(self, replica: Replica[Options]) -> CombineThenAdapt:
        graph = replica.options.graph(replica.communicator, doubly_stochastic=True)
        part = Round.of(graph, replica.communicator.rank)
        return CombineThenAdapt(replica, GradientTrackingExchange(always(part)))


class Trackers:
    """Estimates `y` of the mean gradient: `y <- average(y) + gradient - last gradient`.

    A parameter without a gradient on a rank counts as having a zero gradient there. If no gradient
    for a parameter has reached a rank, directly or in an estimate, the parameter gets none, so that
    optimizers skip it as in serial training. The same is true if it is frozen now.

    Args:
        estimates: zeroed flat buffers for `y`, one per bucket.
    """

    def __init__(self, estimates: dict[Bucket, torch.Tensor]) -> None:
        self.estimates = estimates
        self._last = {bucket: torch.zeros_like(bucket.values) for bucket in estimates}
        self._used: set[torch.nn.Parameter] = set()

    def update(self, update: Update) -> object:
        """Adds this rank's gradients to the estimates; `update` then sees these as gradients.

        The caller must have averaged the estimates since the last call.

        Raises:
            UserError: a gradient is sparse.
        """
        self._refuse_sparse()
        gradients: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        with torch.no_grad():
            for bucket, estimate in self.estimates.items():
                last = self._last[bucket]
                estimate.sub_(last)
                bucket.copy_gradients(bucket.views(last))
                estimate.add_(last)
                for param, view in zip(bucket.params, bucket.views(estimate), strict=True):
                    if not param.requires_grad:  # frozen meanwhile
                        gradients[param] = None
                    elif param.grad is not None or param in self._used or bool(view.any()):
                        self._used.add(param)
                        gradients[param] = view
        return with_gradients(gradients, update)

    def _refuse_sparse(self) -> None:
        for bucket in self.estimates:
            for param in bucket.params:
                gradient = param.grad
                if gradient is not None and gradient.layout is not torch.strided:
                    raise UserError(
                        f"sparse gradient of shape {tuple(param.shape)}: estimates of the mean "
                        "gradient are dense; build the embedding with sparse=False"
                    )

    def kept(self, exchange: SumExchange) -> dict[str, list[torch.Tensor]]:
        """Returns the result of `SumExchange.kept` for the estimates."""
        return {"estimate": exchange.views(self.estimates), "last": exchange.views(self._last)}

    def begin_anew(self) -> None:
        """Forgets all gradients."""
        self._used.clear()
        for bucket, estimate in self.estimates.items():
            estimate.zero_()
            self._last[bucket].zero_()


class GradientTrackingExchange(SumExchange):
    """Exchange that averages gradient estimates as well as parameters; updates use them."""

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, steps)
        self._trackers = Trackers(
            {bucket: torch.zeros_like(bucket.values) for bucket in self.buckets}
        )

    def carried(self, bucket: Bucket) -> Sequence[torch.Tensor]:
        return [bucket.values, self._trackers.estimates[bucket]]

    def adapt(self, update: Update) -> object:
        return self._trackers.update(update)

    def kept(self) -> dict[str, list[torch.Tensor]]:
        return self._trackers.kept(self)

    def begin_anew(self) -> None:
        self._trackers.begin_anew()
