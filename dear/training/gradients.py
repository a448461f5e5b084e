"""Averages gradients tensor by tensor: the collective part of `allreduce` and `wfbp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dear.buckets.carriers import make_carrier
from dear.buckets.compression import CompressedOptions
from dear.buckets.usage import Usage
from dear.lazy import torch
from dear.training.backward import BackwardSchedule
from dear.training.engine import Engine

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator, Work


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
        params: Sequence[Parameter],
        communicator: Communicator,
        options: CompressedOptions,
        channels: int = 1,
    ) -> None:
        self._channels = channels
        self._carriers = {param: make_carrier(options, communicator, param) for param in params}
        communicator.ensure_channels(channels)
        self._usage = Usage(params, communicator) if params else None
        self._running: list[tuple[Parameter, torch.Tensor, Work]] = []

    def launch(self, param: Parameter) -> None:
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


class AveragingEngine(Engine):
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
        params: Sequence[Parameter],
        options: CompressedOptions,
        *,
        overlap: bool,
        channels: int = 1,
    ) -> None:
        super().__init__(model, communicator)
        self._averager = averager = GradientAverager(params, communicator, options, channels)
        # Without overlap the whole model is one unit, complete at the end of the pass only: even
        # if every gradient arrives, the last one arrives last.
        units = [[param] for param in params] if overlap else [list(params)]

        def launch(unit: int) -> None:
            for param in units[unit]:
                averager.launch(param)

        self._schedule = BackwardSchedule(
            self.hooks, units, communicator, launch=launch, finish=averager.finish
        )

    def step(self, update: Callable[[], Any]) -> Any:
        self._schedule.run_if_missing()
        self._schedule.restart()
        return update()

    def step_closure(self, update: Callable[[Callable[[], Any]], Any], closure: Any) -> Any:
        self._schedule.restart()
        return update(closure)

    def synchronize(self) -> None:
        """Averages what was accumulated under `no_sync`; the rest `backward()` has averaged."""
        if self._schedule.unsent:
            self._schedule.run_if_missing()

    def forget(self) -> None:
        self._averager.forget()
        self._schedule.forget()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._schedule.paused()
