"""Delayed all-reduce: an update waits for no transfer of its own step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithms.delayed._delayed import DelayedEngine
from dear.options import at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.algorithm import Options as AlgorithmOptions
from dear.training.engine import distribute, refuse_lbfgs, trained_parameters

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class Dadt(Algorithm):
    """DADT, asynchronous data-parallel training; its idea is Pipe-SGD's (Li et al., NeurIPS 2018,
    arXiv 1811.03619).

    Update t applies the averaged gradients of step t - delay, so their all-reduce has the whole of
    the steps between to run in. The first `delay` steps update nothing; `flush()`, and `close()`,
    apply what is held back, one update for each step.
    Invariant: after `step()` the parameters are final, and the same on all ranks; between
    `backward()` and `step()` `p.grad` is this rank's own gradient, which nothing writes to.
    Bytes move: from the backward pass of a step to `delay` steps later, as groups are complete.
    Cost per step and rank: one all-reduce per group, with a mark per parameter; per sparse gradient
    one all-gather of its entries, and one small all-gather that the end of the backward pass waits
    for. One copy of the gradients into one of `delay` + 1 sets of buffers.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(AlgorithmOptions):
        """How old gradients are, and which travel together."""

        delay: int = 1
        """Steps between gradients and the update that applies them, at least 1 (Pipe-SGD's width
        less one)."""
        buffer_mb: float = 64.0
        """Gradients that are ready one after another share buffers of at most so many MB of 2^20
        bytes; 0: every gradient travels alone."""
        cycle_time_ms: float | None = None
        """Only gradients that are ready within the same cycle of so many milliseconds, as the first
        pass shows, share a buffer; null: whatever comes next."""
        average: bool = True
        """False: gradients are summed over ranks instead."""
        timeline: str | None = None
        """A file to write on `close()`, `-rankR` put before its suffix: when groups were copied,
        sent and applied, for chrome://tracing or Perfetto. null: none."""

        def __post_init__(self) -> None:
            at_least("option of dadt 'delay'", self.delay, 1)
            at_least("option of dadt 'buffer_mb'", self.buffer_mb, 0)
            if self.cycle_time_ms is not None:
                positive("option of dadt 'cycle_time_ms'", self.cycle_time_ms)

        def settling_steps(self) -> int:
            return self.delay

        def staleness(self) -> int:
            return self.delay

    capabilities = Capabilities(consistency="delayed")
    bound = "delayed"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        refuse_lbfgs(optimizer, "dadt")
        params = trained_parameters(model, optimizer)
        engine = DelayedEngine(model, optimizer, communicator, params, options)
        return model, distribute(optimizer, engine)
