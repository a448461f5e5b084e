"""Gradient tracking: decentralized SGD that reaches the exact optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.buckets.flat import Bucket, with_gradients
from dear.comm.neighbors import Round
from dear.cost.overlap import Overlap
from dear.lazy import torch
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica, Update
from dear.training.parameters.exchange import GraphExchange, always
from dear.training.parameters.options import GraphAlgorithm, GraphOptions, combine_then_adapt
from dear.training.parameters.stepped import CombineThenAdapt

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


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
    optimizers skip it as in serial training.

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
        """
        gradients: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        with torch.no_grad():
            for bucket, estimate in self.estimates.items():
                last = self._last[bucket]
                estimate.sub_(last)
                bucket.copy_gradients(bucket.views(last))
                estimate.add_(last)
                for param, view in zip(bucket.params, bucket.views(estimate), strict=True):
                    if param.grad is not None or param in self._used or bool(view.any()):
                        self._used.add(param)
                        gradients[param] = view
        return with_gradients(gradients, update)

    def saved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns copies of the estimates and of the last gradients."""
        return [(y.clone(), self._last[bucket].clone()) for bucket, y in self.estimates.items()]

    def restore(self, saved: Sequence[tuple[torch.Tensor, torch.Tensor]] | None) -> None:
        """Continues from a result of `saved`; None: from zeros."""
        for index, (bucket, estimate) in enumerate(self.estimates.items()):
            for part, buffer in enumerate((estimate, self._last[bucket])):
                buffer.zero_() if saved is None else buffer.copy_(saved[index][part])


class GradientTrackingExchange(GraphExchange):
    """Exchange that averages gradient estimates as well as parameters; updates use them."""

    takes_scaler = False

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, steps)
        self._trackers = Trackers(
            {bucket: torch.zeros_like(bucket.values) for bucket in self.buckets}
        )

    def carried(self, bucket: Bucket) -> Sequence[torch.Tensor]:
        return [bucket.values, self._trackers.estimates[bucket]]

    def adapt(self, update: Update) -> object:
        return self._trackers.update(update)

    def saved(self) -> StateDict:
        return {"trackers": self._trackers.saved()}

    def restore(self, saved: StateDict | None) -> None:
        self._trackers.restore(None if saved is None else saved["trackers"])
