"""Merged-gradient wait-free back-propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dear.algorithms.synchronous._exchanges import gathered_cost
from dear.algorithms.synchronous._merged import merge_gradients
from dear.buckets.compression import CompressedOptions, share_of
from dear.buckets.grouping import MIB
from dear.buckets.merging import by_total, greedy, optimal
from dear.cost.collectives import measured_costs, table_costs
from dear.errors import UserError
from dear.options import at_least, only_with
from dear.training.algorithm import Algorithm, Capabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.buckets.merging import Plan
    from dear.comm.communicator import Communicator
    from dear.training.backward_times import BackwardProfile


class MgWfbp(Algorithm):
    """MG-WFBP (Shi, Chu and Li, INFOCOM 2019, arXiv 1811.11141): gradients merged by a cost model.

    Neighbouring gradients share an all-reduce where that ends the communication earlier, given when
    each gradient arrives and what an all-reduce costs by size. Both are measured, in the first
    steps and after them; rank 0 decides, then the groups stay.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, each group as soon as its last gradient is there.
    Cost per step and rank: one all-reduce per group, or all-gather of elements or signs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Which rule merges, where its numbers come from, and how each group is compressed."""

        merge: Literal["greedy", "asc", "optimal", "threshold"] = "greedy"
        """`greedy`: the paper's rule; `asc`: only what could not start yet is merged (ASC-WFBP,
        INFOCOM 2021); `optimal`: the best groups under the cost model, by dynamic programming;
        `threshold`: a group is closed once it has `threshold_mb`."""
        costs: Literal["measured", "10gbe", "56gbib"] = "measured"
        """What an all-reduce costs: measured on these ranks, or a published table (for comparison;
        between its numbers of workers it is interpolated)."""
        small_elements: int = 0
        """Greedy and asc: groups with fewer elements always take in the next gradient (DeAR's
        programs: 8192)."""
        threshold_mb: float | None = None
        """Size for merge=threshold, in MB of 2^20 bytes; 0: every gradient alone."""
        profile_steps: int = 2
        """Steps that are measured before the groups are made; they do not overlap anything."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("option of mgwfbp 'small_elements'", self.small_elements, 0)
            at_least("option of mgwfbp 'profile_steps'", self.profile_steps, 1)
            if (self.threshold_mb is None) == (self.merge == "threshold"):
                raise UserError(
                    "option of mgwfbp 'threshold_mb' goes with merge='threshold' and only with it, "
                    f"got threshold_mb={self.threshold_mb} and merge={self.merge!r}"
                )
            if self.threshold_mb is not None:
                at_least("option of mgwfbp 'threshold_mb'", self.threshold_mb, 0)
            if self.costs != "measured" and self.merge == "threshold":
                raise UserError(
                    f"option of mgwfbp 'costs'={self.costs!r} has no use with merge='threshold'"
                )
            if self.costs != "measured" and self.gathers:
                raise UserError(
                    f"option of mgwfbp 'costs'={self.costs!r} is a table of all-reduces, which "
                    f"compression={self.compression!r} does not use; use costs='measured'"
                )
            only_with(self, "small_elements", "merge", ["greedy", "asc"])

        def settling_steps(self) -> int:
            return max(super().settling_steps(), self.profile_steps)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        def plan(ordered: list[Parameter], profile: BackwardProfile) -> Plan:
            sizes = [param.nbytes for param in ordered]
            kinds = [(param.dtype, param.device) for param in ordered]
            if options.threshold_mb is not None:
                return by_total(sizes, options.threshold_mb * MIB, kinds=kinds)
            cost = _cost(options, communicator, ordered[0])
            if options.merge == "optimal":
                return optimal(sizes, profile.arrivals_s, cost, kinds=kinds)
            return greedy(
                sizes,
                profile.arrivals_s,
                cost,
                wait=options.merge == "greedy",
                least=options.small_elements * ordered[0].element_size(),
                kinds=kinds,
            )

        return model, merge_gradients(model, optimizer, communicator, options, plan)


def _cost(
    options: MgWfbp.Options, communicator: Communicator, like: Parameter
) -> Callable[[float], float]:
    """Seconds to average a group by the bytes of its gradients."""
    if options.gathers:
        return gathered_cost(options, communicator, like)
    if options.costs == "measured":
        cost: Callable[[float], float] = measured_costs(communicator, "all_reduce", like.device)
    else:
        cost = table_costs(options.costs, communicator.size)
    share = share_of(options, like.element_size())
    return lambda nbytes: cost(nbytes * share)
