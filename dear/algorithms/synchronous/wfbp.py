"""Wait-free back-propagation, and the engine of all that average tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dear.buckets.carriers import make_carrier
from dear.buckets.compressors import CompressedOptions
from dear.buckets.grouping import Arrived, Cost, Groups, by_count
from dear.buckets.halves import Usage
from dear.comm.communicator import Work
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, grouped
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
        """Number of concurrent transfers, and the compression of each tensor."""

        channels: int = 1
        """Tensors take turns on so many channels, each a process group of its own; 2 is the `wfbp2`
        of DeAR's programs."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("option of wfbp 'channels'", self.channels, 1)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        return by_count(len(arrived.sizes), 1)

    def engine(self, replica: Replica) -> AveragingEngine:
        return AveragingEngine(replica, replica.params, channels=replica.options.channels)


class AveragingEngine(GradientEngine):
    """Averages in or right after the backward pass; the step is the optimizer's own.

    Also gradients that a rank lacks are sent: they count as zero if another rank has one. A
    parameter that no rank has a gradient for keeps `grad=None`, so that optimizers leave it alone
    as in serial training.

    Cost per pass and rank: one all-reduce per parameter (an all-gather, if compressed so that sums
    make no sense), and one all-reduce of a byte per parameter.

    Args:
        params: what is averaged of the replica; may be none.
        overlap: start each tensor's transfer as soon as its gradient is there; otherwise all of
            them start when the pass has ended.
        channels: tensors take turns on so many channels.
    """

    def __init__(
        self,
        replica: Replica,
        params: Sequence[torch.nn.Parameter],
        *,
        overlap: bool = True,
        channels: int = 1,
    ) -> None:
        communicator = replica.communicator
        self._carriers = {
            param: make_carrier(replica.options, communicator, param) for param in params
        }
        self._channels = channels
        communicator.ensure_channels(channels)
        self._usage = Usage(params, communicator) if params else None
        self._running: list[tuple[torch.nn.Parameter, torch.Tensor, Work]] = []
        # Without overlap the whole model is one unit, complete at the end of the pass only: even
        # if every gradient arrives, the last one arrives last.
        self._units = [[param] for param in params] if overlap else [list(params)]
        super().__init__(replica, self._units, learn=bool(params))

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Each tensor by itself, also where all of them start together."""
        return grouped([param] for unit in self.schedule.launched() for param in unit)

    def ready(self, unit: int) -> None:
        for param in self._units[unit]:
            present = param.grad is not None
            gradient = param.grad if present else torch.zeros_like(param)
            channel = len(self._running) % self._channels
            work = self._carriers[param].send(gradient, [present], channel=channel)
            self._running.append((param, gradient, work))

    def passed(self) -> None:
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

    def drop(self) -> None:
        while self._running:
            self._running.pop()[2].wait()
