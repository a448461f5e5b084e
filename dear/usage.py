"""Which parameters have a gradient on any rank: the others must be left as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.communicator import Communicator, Work


class Usage:
    """One all-reduce of a byte per parameter, started when the last gradient is there."""

    def __init__(self, params: Sequence[Parameter], communicator: Communicator) -> None:
        self._params = list(params)
        self._communicator = communicator
        self._marks = torch.zeros(len(params), dtype=torch.uint8, device=params[0].device)
        # A queue of its own, ahead of the large transfers; other backends have one only.
        own = communicator.native and communicator.size > 1
        self._queue = {"channel": 1, "priority": 1} if own else {}
        communicator.ensure_channels(2 if own else 1)
        self._work: Work | None = None
        self._unused: set[Parameter] = set()

    def start(self) -> None:
        """Asks; a further call supersedes the one before."""
        if self._work is not None:
            self._work.wait()
        has = [param.grad is not None for param in self._params]
        if self._communicator.size == 1:
            pairs = zip(self._params, has, strict=True)
            self._unused = {param for param, mark in pairs if not mark}
            return
        if all(has):
            self._marks.fill_(1)
        else:
            self._marks.copy_(torch.tensor(has, dtype=torch.uint8))
        self._work = self._communicator.all_reduce(self._marks, op="max", **self._queue)

    def unused(self) -> set[Parameter]:
        """The parameters that no rank had a gradient for when `start` was called."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._marks.all():
                self._unused = set()
            else:
                marks = zip(self._params, self._marks.tolist(), strict=True)
                self._unused = {param for param, mark in marks if not mark}
        return self._unused
