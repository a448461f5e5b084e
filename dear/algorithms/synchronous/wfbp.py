"""Wait-free back-propagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.buckets.compression import CompressedOptions, refuse_types
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import distribute, trained_parameters
from dear.training.gradients import AveragingEngine

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class Wfbp(Algorithm):
    """Wait-free back-propagation (Poseidon, arXiv 1706.03292): one all-reduce per tensor, at once.

    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, each tensor as soon as its gradient (and those agreed to
    go before it) is there; the end of the pass waits for the rest.
    Cost per step and rank: one all-reduce per parameter tensor; many small ones pay many start-ups.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """How many transfers may run side by side, and how each tensor is compressed."""

        channels: int = 1
        """Tensors take turns on so many channels, each a process group of its own; 2 is the `wfbp2`
        of DeAR's programs."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("option of wfbp 'channels'", self.channels, 1)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        params = trained_parameters(model, optimizer)
        refuse_types(params, options)
        engine = AveragingEngine(
            model, communicator, params, options, overlap=True, channels=options.channels
        )
        return model, distribute(optimizer, engine)
