"""What averages one group of merged gradients, and what that costs if it is compressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dear.buckets.carriers import Payloads, make_carrier
from dear.buckets.compression import CompressedOptions, HalfOptions, share_of
from dear.buckets.compressors import make_compressor
from dear.buckets.grouping import FlatBuffer
from dear.cost.collectives import measured_costs
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator, Work


class Exchange(ABC):
    """Averages the gradients of one group; made anew when the groups change."""

    def __init__(self, params: Sequence[Parameter], communicator: Communicator) -> None:
        self.buffer = FlatBuffer(params, communicator.size)
        self._work: Work | None = None

    def start(self) -> None:
        """Takes the gradients there are and sends them."""
        self.buffer.pack()
        self._work = self._send()

    def drop(self) -> None:
        """Waits for what is under way and forgets it."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def finish(self) -> None:
        """Lets each `p.grad` be the mean, a view of the buffer; None where no rank has one."""
        self.drop()
        self._receive()
        for param, gradient in self.buffer.gradients():
            param.grad = gradient

    @abstractmethod
    def _send(self) -> Work: ...

    @abstractmethod
    def _receive(self) -> None:
        """Leaves the means and the marks in the buffer."""


class ReducedExchange(Exchange):
    """One all-reduce of the buffer with its marks, in its own type or in half precision."""

    def __init__(
        self,
        params: Sequence[Parameter],
        communicator: Communicator,
        options: CompressedOptions | HalfOptions,
    ) -> None:
        super().__init__(params, communicator)
        self._carrier = make_carrier(options, communicator, self.buffer.data)

    def _send(self) -> Work:
        return self._carrier.send(self.buffer.data)

    def _receive(self) -> None:
        self._carrier.receive(self.buffer.data)


class GatheredExchange(Exchange):
    """One all-gather of what a compressor makes of the gradients, and of a mark per parameter."""

    def __init__(
        self,
        params: Sequence[Parameter],
        communicator: Communicator,
        options: CompressedOptions,
    ) -> None:
        super().__init__(params, communicator)
        sizes = [param.numel() for param in params]
        data = self.buffer.data
        self._gradients = data[: sum(sizes)]
        compressor = make_compressor(options, sum(sizes), data.dtype, data.device)
        self._carrier = Payloads(communicator, compressor, sizes)

    def _send(self) -> Work:
        present = [param.grad is not None for param in self.buffer.params]
        return self._carrier.send(self._gradients, present)

    def _receive(self) -> None:
        self._carrier.receive(self._gradients)
        used = torch.tensor(self._carrier.used, dtype=self.buffer.marks.dtype)
        self.buffer.marks.copy_(used)


def make_exchange(
    params: Sequence[Parameter], communicator: Communicator, options: CompressedOptions
) -> Exchange:
    """What averages a group as `options` say."""
    kind = GatheredExchange if options.gathers else ReducedExchange
    return kind(params, communicator, options)


def gathered_cost(
    options: CompressedOptions, communicator: Communicator, like: torch.Tensor
) -> Callable[[float], float]:
    """Measured seconds of the all-gather of payloads, by bytes of gradients like `like`."""
    gather = measured_costs(communicator, "all_gather", like.device)
    share = share_of(options, like.element_size()) * communicator.size
    return lambda nbytes: gather(nbytes * share)
