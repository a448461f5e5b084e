"""Merged gradient sparsification."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from dear.algorithms.synchronous.mgwfbp import gathered_cost, merge_gradients
from dear.buckets.compressors import CompressedOptions, make_compressor
from dear.buckets.grouping import greedy, optimal
from dear.cost.collectives import measured_call
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.buckets.grouping import Groups
    from dear.comm.communicator import Communicator
    from dear.training.tuning import BackwardProfile


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
        """How much travels, and which rule merges."""

        compression: Literal["topk", "eftopk", "gaussian"] = "eftopk"
        """How the elements that travel are found, and whether the rest is kept (all but `topk`)."""
        merge: Literal["greedy", "optimal"] = "greedy"
        """As for `mgwfbp`."""
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

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        def plan(ordered: list[Parameter], profile: BackwardProfile) -> Groups:
            device = ordered[0].device
            select = measured_call(communicator, partial(_select, options=options), device)
            gather = gathered_cost(options, communicator, ordered[0])

            def cost(nbytes: float) -> float:
                return select(nbytes) + gather(nbytes)

            sizes = [param.nbytes for param in ordered]
            kinds = [(param.dtype, param.device) for param in ordered]
            rule = optimal if options.merge == "optimal" else greedy
            return rule(sizes, profile.arrivals_s, cost, kinds=kinds)

        return model, merge_gradients(model, optimizer, communicator, options, plan)


def _select(gradient: Tensor, options: Mgs.Options) -> None:
    make_compressor(options, gradient.numel(), gradient.dtype, gradient.device).compress(gradient)
