"""Push-DIGing: gradient tracking over directed graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dear.algorithms.decentralized.gradient_tracking import Trackers
from dear.buckets.flat import Bucket
from dear.comm.neighbors import Round
from dear.cost.overlap import Overlap
from dear.lazy import torch
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica, Update
from dear.training.parameters.exchange import SumExchange, always
from dear.training.parameters.options import GraphAlgorithm, GraphOptions, adapt_then_combine
from dear.training.parameters.stepped import AdaptThenCombine


class PushDiging(GraphAlgorithm["PushDiging.Options"]):
    """Push-DIGing (Nedic, Olshevsky and Shi, SIAM J. Optim. 2017, arXiv 1607.03218).

    `u <- C (u + update(y)); v <- C v; x = u / v; y <- C y + g - last g`, for parameters x and
    gradients g; y estimates the mean of g. C splits a rank's values equally among itself and its
    targets, together with a weight v. Division by v corrects for uneven graphs, so a sender need
    not know how many ranks send to its receivers.
    Invariant: averaging keeps sums over the ranks. With a constant step size, ranks reach the exact
    minimum of the sum of their losses, over any strongly connected directed graph.
    Bytes move: from the update until a layer is needed again.
    Cost per step and rank: twice the parameters to each neighbour; three more copies in memory.
    Overridden methods of the exchange: `carried` returns a bucket's u, y and v in one message,
    `adapt` computes u, and `mix` divides by v.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """Topology. Only its edges count; weights follow from the number of receivers."""

    capabilities = Capabilities(consistency="decentralized")
    bound = "after_update"
    candidates = ({"topology": "ring"},)
    overlap = Overlap(transfers=(adapt_then_combine("parameters", "gradients"),))

    copies = 2

    def engine(self, replica: Replica[Options]) -> AdaptThenCombine:
        graph = replica.options.graph(replica.communicator)
        part = Round.splitting(graph, replica.communicator.rank)
        return AdaptThenCombine(replica, PushDigingExchange(always(part)))


class PushDigingExchange(SumExchange):
    """Exchange of numerators u, gradient estimates y and weights v; parameters are u / v."""

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, steps)
        self._messages: dict[Bucket, torch.Tensor] = {}
        """Message of each bucket: u, y and v, in this order."""
        self._numerators: dict[Bucket, torch.Tensor] = {}
        estimates: dict[Bucket, torch.Tensor] = {}
        for bucket in self.buckets:
            size = bucket.values.numel()
            message = self._messages[bucket] = bucket.values.new_zeros(2 * size + 1)
            self._numerators[bucket], estimates[bucket] = message[:size], message[size:-1]
        self._trackers = Trackers(estimates)

    def adapt(self, update: Update) -> object:
        with torch.no_grad():
            for bucket, numerator in self._numerators.items():
                # u = x * v + (x after - x before), without a copy of x. The current x is used, so
                # that loaded or broadcast parameters count.
                torch.mul(bucket.values, self._messages[bucket][-1] - 1, out=numerator)
            result = self._trackers.update(update)
            for bucket, numerator in self._numerators.items():
                numerator.add_(bucket.values)
        return result

    def carried(self, bucket: Bucket) -> Sequence[torch.Tensor]:
        return [self._messages[bucket]]

    def mix(self, bucket: Bucket, steps: int) -> None:
        super().mix(bucket, steps)
        torch.div(self._numerators[bucket], self._messages[bucket][-1], out=bucket.values)

    def kept(self) -> dict[str, list[torch.Tensor]]:
        # A parameter's weight is that of its bucket, as buckets may be others after a load.
        weights = [self._messages[bucket][-1] for bucket in self.buckets for _ in bucket.params]
        return {**self._trackers.kept(self), "weight": weights}

    def begin_anew(self) -> None:
        self._trackers.begin_anew()
        for message in self._messages.values():
            message[-1] = 1.0
