"""Wait-free back-propagation, and the engine of the algorithms that average tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dear.buckets.carriers import Dense, make_carrier
from dear.buckets.compressors import CompressedOptions, HalfOptions
from dear.buckets.grouping import Arrived, Cost, Groups, by_count
from dear.buckets.halves import Usage
from dear.comm.communicator import Batch
from dear.comm.work import Work
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, grouped
from dear.training.gradients import GradientEngine


class Wfbp(Algorithm["Wfbp.Options"]):
    """Wait-free back-propagation (Poseidon, arXiv 1706.03292): one all-reduce per tensor, at once.

    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, each tensor when its gradient and those before it in the
    agreed order have arrived; the end of the pass waits for the rest.
    Cost per step and rank: one all-reduce per parameter tensor, so many small ones cost many
    start-ups.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Number of concurrent transfers, and the compression of each tensor."""

        channels: int = 1
        """Number of channels that tensors use in turn, each with its own process group; 2 is
        `wfbp2` of DeAR's suite."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("wfbp option 'channels'", self.channels, 1)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        return by_count(len(arrived.sizes), 1)

    def engine(self, replica: Replica[Options]) -> AveragingEngine:
        return AveragingEngine(replica, replica.params, channels=replica.options.channels)


class AveragingEngine(GradientEngine[HalfOptions]):
    """Engine that averages in or right after the backward pass; the step is the optimizer's own.

    A missing gradient counts as zero if another rank has one (with `signum`, the rank does not
    vote). If no rank has a gradient for a parameter, `grad` stays None, so that optimizers skip it
    as in serial training.

    Cost per pass and rank: one all-reduce per parameter (for payloads that no reduction can sum,
    one all-gather), and one all-reduce of a byte per parameter.

    Args:
        params: parameters to average; may be empty.
        overlap: True starts the transfer of a tensor when its gradient arrives; False starts all
            transfers at the end of the pass.
        channels: number of channels that tensors use in turn.
    """

    def __init__(
        self,
        replica: Replica[HalfOptions],
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
        self._batches = [Batch(communicator, channel) for channel in range(channels)]
        self._running: list[tuple[torch.nn.Parameter, torch.Tensor, Work | None]] = []
        """Gradients that are being averaged, with their works (None: one of `_batches` has the
        work)."""
        # Without overlap the whole model is one unit. It is complete only at the end of the pass.
        self._units = [[param] for param in params] if overlap else [list(params)]
        super().__init__(replica, self._units, learn=bool(params))

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns each tensor as a group, even if all of them start together."""
        return grouped([param] for unit in self.schedule.launched() for param in unit)

    def ready(self, unit: int) -> None:
        for param in self._units[unit]:
            present = param.grad is not None
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            channel = len(self._running) % self._channels
            carrier, work = self._carriers[param], None
            if isinstance(carrier, Dense):
                self._batches[channel].start(gradient)
            else:
                work = carrier.send(gradient, [present], channel=channel)
            self._running.append((param, gradient, work))

    def passed(self) -> None:
        if self._usage is None:
            return
        self._usage.start()
        for batch in self._batches:
            batch.wait()
        for param, gradient, work in self._running:
            if work is not None:
                work.wait()
                self._carriers[param].receive(gradient)
        unused = self._usage.unused()
        for param, gradient, _ in self._running:
            if param.grad is None and param not in unused:
                param.grad = gradient
        self._running.clear()

    def drop(self) -> None:
        for batch in self._batches:
            batch.wait()
        while self._running:
            work = self._running.pop()[2]
            if work is not None:
                work.wait()
