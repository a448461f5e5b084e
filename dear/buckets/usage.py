"""Which parameters have a gradient on any rank: the others must be left as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.buckets.halves import AllReduced
    from dear.comm.communicator import Communicator, Work


class Usage:
    """One all-reduce of a byte per parameter, started when the last gradient is there.

    Where the last message is a small all-reduce the marks travel in that one.
    """

    def __init__(self, params: Sequence[Parameter], communicator: Communicator) -> None:
        self._params = list(params)
        self._communicator = communicator
        self._marks = torch.zeros(len(params), dtype=torch.uint8, device=params[0].device)
        # A queue of its own, ahead of the large transfers; other backends have one only.
        own = communicator.native and communicator.size > 1
        self._queue = {"channel": 1, "priority": 1} if own else {}
        communicator.ensure_channels(2 if own else 1)
        self._work: Work | None = None
        self._carrier: AllReduced | None = None
        self._unused: set[Parameter] = set()

    def start(self, carrier: AllReduced | None = None) -> None:
        """Asks; a further call supersedes the one before.

        Args:
            carrier: with room for all marks, if it has room; started by the caller right after.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        has = [param.grad is not None for param in self._params]
        if self._communicator.size == 1:
            pairs = zip(self._params, has, strict=True)
            self._unused = {param for param, mark in pairs if not mark}
            return
        self._carrier = carrier
        if carrier is not None:
            carrier.await_reduce()
        marks = self._marks if carrier is None else carrier.marks
        if all(has):
            marks.fill_(1)
        else:
            marks.copy_(torch.tensor(has, dtype=torch.uint8))
        if carrier is None:
            self._work = self._communicator.all_reduce(marks, op="max", **self._queue)

    def unused(self) -> set[Parameter]:
        """The parameters that no rank had a gradient for when `start` was called."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._read(self._marks)
        elif self._carrier is not None:
            self._carrier.await_reduce()
            self._read(self._carrier.marks)
            self._carrier = None
        return self._unused

    def _read(self, marks: torch.Tensor) -> None:
        if marks.all():
            self._unused = set()
        else:
            pairs = zip(self._params, marks.tolist(), strict=True)
            self._unused = {param for param, mark in pairs if not mark}
