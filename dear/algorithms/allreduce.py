"""All-reduce after the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dear.algorithm import Algorithm, Capabilities, Options
from dear.averaging import AveragingEngine
from dear.engine import distribute, trained_parameters

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.communicator import Communicator


class AllReduce(Algorithm):
    """Plain bulk-synchronous SGD: average every gradient when the backward pass has ended.

    The readable reference that every synchronous algorithm must match.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: after the backward pass, nothing overlaps.
    Cost per step and rank: one all-reduce per parameter tensor, 2 (P-1)/P of the model's bytes in
    a ring (Patarasuk and Yuan 2009).
    """

    capabilities = Capabilities(consistency="synchronous")

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        params = trained_parameters(model, optimizer)
        engine = AveragingEngine(model, communicator, params, overlap=False)
        return model, distribute(optimizer, engine)
