"""Wait-free back-propagation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dear.algorithm import Algorithm, Capabilities, Options
from dear.averaging import AveragingEngine
from dear.engine import distribute, trained_parameters

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.communicator import Communicator


class Wfbp(Algorithm):
    """Wait-free back-propagation (Poseidon, arXiv 1706.03292): one all-reduce per tensor, at once.

    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, each tensor as soon as its gradient (and those agreed to
    go before it) is there; the end of the pass waits for the rest.
    Cost per step and rank: one all-reduce per parameter tensor; many small ones pay many start-ups.
    """

    capabilities = Capabilities(consistency="synchronous")

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        params = trained_parameters(model, optimizer)
        engine = AveragingEngine(model, communicator, params, overlap=True)
        return model, distribute(optimizer, engine)
