"""Merged gradient sparsification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dear.algorithms.synchronous.mgwfbp import Gradients, MergedEngine, ProfiledOptions
from dear.buckets.compressors import make_compressor
from dear.buckets.grouping import Groups, greedy, optimal
from dear.cost.collectives import measured_call
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import torch
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica


class Mgs(Algorithm["Mgs.Options"]):
    """MGS-SGD (Shi et al., INFOCOM 2020): merged groups, whose largest elements travel.

    It works like `mgwfbp`, but each rank all-gathers only a share `density` of its elements, those
    of largest magnitude, with their indices. The rest is added to its next gradient (error
    feedback), except with `compression=topk`. The cost of a message is the measured time to select
    and to gather the elements.
    Invariant: after `backward()` returns, `p.grad` is the same on all ranks: the sum of the
    elements sent, divided by the number of ranks. With density=1 it is the mean.
    Bytes move: during the backward pass, each group when its last gradient arrives.
    Cost per step and rank: one all-gather per group, with 8 bytes per float32 element sent.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ProfiledOptions):
        """Density of the sent elements, and the rule that merges tensors."""

        compression: Literal["topk", "eftopk", "gaussian", "dgcsampling"] = "eftopk"
        """Method that selects the elements. All but `topk` add the rest to the next gradient."""
        merge: Literal["greedy", "optimal"] = "greedy"
        """Rule that merges gradients, as for `mgwfbp`."""

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    def engine(self, replica: Replica[Options]) -> SparsifyingEngine:
        return SparsifyingEngine(replica)


class SparsifyingEngine(MergedEngine[Mgs.Options]):
    """Engine whose groups depend also on the time that the selection of elements takes."""

    def plan(self, gradients: Gradients) -> Groups:
        select = measured_call(self.communicator, self._select, gradients.like.device)
        gather = self.cost(gradients.like)
        rule = optimal if self.options.merge == "optimal" else greedy

        def cost(nbytes: float) -> float:
            return select(nbytes) + gather(nbytes)

        groups = rule(
            gradients.sizes, arrivals=gradients.arrivals, cost=cost, kinds=gradients.kinds
        )
        self.predict(groups, gradients, cost)
        return groups

    def _select(self, gradient: torch.Tensor) -> None:
        kind = gradient.numel(), gradient.dtype, gradient.device
        make_compressor(self.options, *kind).compress(gradient)
