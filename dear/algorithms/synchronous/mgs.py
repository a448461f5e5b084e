"""Merged gradient sparsification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dear.algorithms.synchronous.mgwfbp import MergedEngine
from dear.buckets.compressors import CompressedOptions, make_compressor
from dear.buckets.grouping import Groups, greedy, optimal
from dear.cost.collectives import measured_call
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica


class Mgs(Algorithm):
    """MGS-SGD (Shi et al., INFOCOM 2020): merged groups, of which the largest elements travel.

    As `mgwfbp`, but each rank all-gathers the share `density` of its elements of largest magnitude
    with their places; the rest is added to its next gradient (error feedback), unless told
    otherwise. The cost of a message is that of finding the elements and of gathering them, both
    measured.
    Invariant: after `backward()` returns, `p.grad` is on all ranks the same sum of what travelled,
    divided by the number of ranks. With density=1 it is the mean.
    Bytes move: during the backward pass, each group as soon as its last gradient is there.
    Cost per step and rank: one all-gather per group of 8 bytes per travelling float32 element.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Density of the sent elements, and the rule that merges tensors."""

        compression: Literal["topk", "eftopk", "gaussian", "dgcsampling"] = "eftopk"
        """Method that selects the elements. All but `topk` keep the rest for later steps."""
        merge: Literal["greedy", "optimal"] = "greedy"
        """Costs of an all-reduce, as for `mgwfbp`."""
        profile_steps: int = 2
        """Steps that are measured before the groups are made; they send everything, and do not
        overlap anything."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("option of mgs 'profile_steps'", self.profile_steps, 1)

        def settling_steps(self) -> int:
            return max(super().settling_steps(), self.profile_steps)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    def engine(self, replica: Replica) -> SparsifyingEngine:
        return SparsifyingEngine(replica)


class SparsifyingEngine(MergedEngine):
    """Plans with what finding the elements costs, too."""

    def plan(self, sizes: list[int], like: torch.Tensor, **given: Any) -> Groups:
        select = measured_call(self.communicator, self._select, like.device)
        gather = self.cost(like)
        rule = optimal if self.options.merge == "optimal" else greedy

        def cost(nbytes: float) -> float:
            return select(nbytes) + gather(nbytes)

        return self.foreseen(rule(sizes, cost=cost, **given), sizes, cost, **given)

    def _select(self, gradient: torch.Tensor) -> None:
        kind = gradient.numel(), gradient.dtype, gradient.device
        make_compressor(self.options, *kind).compress(gradient)
