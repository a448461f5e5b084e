"""Wait-free back-propagation, and averaging tensor by tensor for whoever else does that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dear.buckets.carriers import make_carrier
from dear.buckets.compressors import CompressedOptions, refuse_types
from dear.buckets.halves import Usage
from dear.comm.communicator import Communicator, Work
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import distribute, trained_parameters
from dear.training.gradients import GradientEngine


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
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        options: Options,
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        params = trained_parameters(model, optimizer)
        refuse_types(params, options)

        def engine() -> AveragingEngine:
            return AveragingEngine(
                model, communicator, params, options, overlap=True, channels=options.channels
            )

        return model, distribute(optimizer, engine, communicator)


class AveragingEngine(GradientEngine):
    """Averages in or right after the backward pass; the step is the optimizer's own.

    Args:
        options: how gradients are compressed.
        overlap: start each tensor's transfer as soon as its gradient is there; otherwise all of
            them start when the pass has ended.
        channels: tensors take turns on so many channels.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        communicator: Communicator,
        params: Sequence[torch.nn.Parameter],
        options: CompressedOptions,
        *,
        overlap: bool,
        channels: int = 1,
    ) -> None:
        self._averager = GradientAverager(params, communicator, options, channels)
        # Without overlap the whole model is one unit, complete at the end of the pass only: even
        # if every gradient arrives, the last one arrives last.
        self._units = [[param] for param in params] if overlap else [list(params)]
        super().__init__(model, communicator, self._units, learn=True)

    def ready(self, unit: int) -> None:
        for param in self._units[unit]:
            self._averager.launch(param)

    def passed(self) -> None:
        self._averager.finish()

    def drop(self) -> None:
        self._averager.forget()


class GradientAverager:
    """`launch` starts to average one parameter's gradient, `finish` waits for all of them.

    Every rank must launch the same parameters in the same order, also those that have no gradient
    on it: they count as zero if another rank has one. A parameter that no rank has a gradient for
    keeps `grad=None`, so that optimizers leave it alone as in serial training.

    Cost per pass and rank: one all-reduce per launched parameter (an all-gather, if compressed so
    that sums make no sense), and one all-reduce of a byte per parameter.

    Args:
        options: how gradients are compressed, each parameter's by itself.
        channels: parameters take turns on so many channels of the communicator.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        communicator: Communicator,
        options: CompressedOptions,
        channels: int = 1,
    ) -> None:
        self._channels = channels
        self._carriers = {param: make_carrier(options, communicator, param) for param in params}
        communicator.ensure_channels(channels)
        self._usage = Usage(params, communicator) if params else None
        self._running: list[tuple[torch.nn.Parameter, torch.Tensor, Work]] = []

    def launch(self, param: torch.nn.Parameter) -> None:
        """Starts averaging `param.grad`, in place."""
        present = param.grad is not None
        gradient = param.grad if present else torch.zeros_like(param)
        channel = len(self._running) % self._channels
        work = self._carriers[param].send(gradient, [present], channel=channel)
        self._running.append((param, gradient, work))

    def forget(self) -> None:
        """Waits for what a pass that ended early has left under way, and drops it."""
        while self._running:
            self._running.pop()[2].wait()

    def finish(self) -> None:
        """Returns when every launched gradient is the mean over ranks."""
        if self._usage is None:
            return
        self._usage.start()
        for param, gradient, work in self._running:
            work.wait()
            self._carriers[param].receive(gradient)
        unused = self._usage.unused()
        for param, gradient, _ in self._running:
            if param.grad is None and param not in unused:
                param.grad = gradient
        self._running.clear()
