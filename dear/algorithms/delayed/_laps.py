"""Gradients of several steps on their way at once: copies in buffers of their own, and sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.buckets.flat import ALIGNMENT_BYTES, buffer, shaped
from dear.buckets.grouping import padded
from dear.buckets.sparse import SparseSum, gather_entries
from dear.errors import UserError
from dear.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator, Work

    Gradients = dict[Parameter, Tensor | None]


class Message(ABC):
    """What one group of parameters sends in one step. `p.grad` is copied, and never written to."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.params = list(params)
        self.work: Work | None = None
        self.packed_s: tuple[float, float] | None = None
        """When the copy began and ended, on the communicator's clock."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of gradients in it."""

    @abstractmethod
    def pack(self, divisor: int) -> None:
        """Copies the gradients there are, divided by `divisor`."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """The sums (None where no rank has a gradient), valid until the next `pack`."""

    def wait(self) -> None:
        """Returns when the transfer, if there is one, has ended."""
        if self.work is not None:
            self.work.wait()


class DenseMessage(Message):
    """One all-reduce of the gradients, and of a mark per parameter.

    A mark is 1 where a rank has a gradient: where their sum is 0, nobody has.

    Args:
        data: flat, the gradients one after another and then the marks.
    """

    def __init__(self, params: Sequence[Parameter], data: Tensor) -> None:
        super().__init__(params)
        self.data = data
        self._views = []
        offset = 0
        for param in self.params:
            self._views.append(shaped(data, offset, param))
            offset += param.numel()
        self._marks = data[offset : offset + len(self.params)]
        self._whole = False

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def pack(self, divisor: int) -> None:
        with torch.no_grad():
            for param, view in zip(self.params, self._views, strict=True):
                gradient = param.grad
                if gradient is None:
                    view.zero_()
                    continue
                if gradient.dtype != view.dtype or gradient.device != view.device:
                    raise UserError(
                        f"a parameter of shape {tuple(param.shape)} was {view.dtype} on "
                        f"{view.device} in the first step and its gradient is {gradient.dtype} on "
                        f"{gradient.device} now: close() the optimizer before moving the model, "
                        "and wrap again"
                    )
                if gradient.layout is not torch.strided:
                    raise UserError(_changed_kind(param, "sparse", "dense"))
                torch.div(gradient, divisor, out=view)
            has = [param.grad is not None for param in self.params]
            self._whole = all(has)
            if self._whole:
                self._marks.fill_(1)
            else:
                self._marks.copy_(torch.tensor(has, dtype=torch.float32))

    def gradients(self) -> Gradients:
        if self._whole:  # then no mark can be 0, and the device need not be asked
            return dict(zip(self.params, self._views, strict=True))
        marks = self._marks.abs().tolist()
        found = zip(self.params, self._views, marks, strict=True)
        return {param: view if mark > 0 else None for param, view, mark in found}


class SparseMessage(Message):
    """One all-gather of the entries of one sparse gradient."""

    def __init__(self, param: Parameter) -> None:
        super().__init__([param])
        self.mine: Tensor | None = None
        self._sum: SparseSum | None = None

    @property
    def nbytes(self) -> int:
        return self.work.nbytes if self.work is not None else 0

    def pack(self, divisor: int) -> None:
        self._divisor = divisor
        (param,) = self.params
        gradient = param.grad
        if gradient is not None and gradient.layout is not torch.sparse_coo:
            raise UserError(_changed_kind(param, "dense", "sparse"))
        self.mine = None if gradient is None else gradient.detach().coalesce()

    def send(self, entries: tuple[list[int], int], communicator: Communicator) -> None:
        """Sends what was packed; `entries` are those of all ranks."""
        (param,) = self.params
        self._sum = SparseSum(self.mine, param, entries, communicator, divisor=self._divisor)
        self.work = self._sum.work

    def gradients(self) -> Gradients:
        return {self.params[0]: self._sum.result()}


def _changed_kind(param: Parameter, now: str, before: str) -> str:
    return (
        f"the gradient of a parameter of shape {tuple(param.shape)} is {now} now, and was {before} "
        "before (or on another rank): all ranks send one kind"
    )


class Lap:
    """One step's gradients, in messages that are packed and sent one by one.

    Args:
        groups: of dense parameters, each of one type and device.
        sparse: parameters with sparse gradients; their messages follow those of the groups.
        divisor: of the gradients, before they are summed.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Parameter]],
        sparse: Sequence[Parameter],
        communicator: Communicator,
        divisor: int,
    ) -> None:
        self._communicator = communicator
        self._divisor = divisor
        self._dense = _in_few_buffers(groups, communicator)
        self._sparse = [SparseMessage(param) for param in sparse]
        self.messages: list[Message] = [*self._dense, *self._sparse]

    def pack(self, index: int) -> None:
        """Copies the gradients of message `index`, and sends it if it is dense.

        What an earlier pass of the same step has sent is superseded.
        """
        message, clock = self.messages[index], self._communicator.clock
        message.wait()
        began = clock()
        message.pack(self._divisor)
        message.packed_s = began, clock()
        if isinstance(message, DenseMessage):
            message.work = self._communicator.all_reduce(message.data, op="sum")

    def send_sparse(self) -> None:
        """Sends the sparse ones, when all are packed; waits for word of everybody's sizes."""
        if not self._sparse:
            return
        mine = [message.mine for message in self._sparse]
        device = self._sparse[0].params[0].device
        # Not behind the large transfers.
        entries = gather_entries(mine, device, self._communicator, channel=1)
        for message, found in zip(self._sparse, entries, strict=True):
            message.send(found, self._communicator)

    def wait(self) -> None:
        """Returns when every transfer has ended."""
        for message in self.messages:
            message.wait()

    def gradients(self) -> Gradients:
        """Waits for the sums; those of dense parameters are views of the lap's buffers."""
        self.wait()
        found: Gradients = {}
        for message in self.messages:
            found |= message.gradients()
        return found


def _in_few_buffers(
    groups: Sequence[Sequence[Parameter]], communicator: Communicator
) -> list[DenseMessage]:
    """A message per group, all of one type in one buffer: each has a file descriptor."""
    rooms: dict[tuple[torch.dtype, torch.device], int] = {}
    places = []
    for params in groups:
        kind = params[0].dtype, params[0].device
        start = rooms.get(kind, 0)
        size = sum(param.numel() for param in params) + len(params)
        places.append((kind, slice(start, start + size)))
        rooms[kind] = start + padded(size, max(1, ALIGNMENT_BYTES // params[0].element_size()))
    like = {(params[0].dtype, params[0].device): params[0] for params in groups}
    buffers = {kind: buffer(like[kind], room, communicator) for kind, room in rooms.items()}
    return [
        DenseMessage(params, buffers[kind][place])
        for params, (kind, place) in zip(groups, places, strict=True)
    ]
