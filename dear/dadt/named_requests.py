"""Collectives asked for by number: what is asked, and the answer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from dear.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

Key = tuple[int, int, str]

COO_ALL_REDUCE, ALL_REDUCE, BROADCAST = 3, 2, 1
"""What is ready together runs in this order, by number of the type and then of the tensor."""

NAMES = {COO_ALL_REDUCE: "coo_all_reduce", ALL_REDUCE: "all_reduce", BROADCAST: "broad_cast"}


def check_tensor(call: str, number: Any, tensor: Any, *, sparse: bool) -> None:
    """Raises `UserError` unless `number` is a whole number and `tensor` of the right layout."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UserError(f"{call}: the id must be a whole number from 0 up, got {number!r}")
    if not torch.is_tensor(tensor):
        raise UserError(f"{call} needs a tensor, got {type(tensor).__name__}")
    if sparse != (tensor.layout is torch.sparse_coo) or not (
        sparse or tensor.layout is torch.strided
    ):
        wanted = "a sparse COO tensor" if sparse else "a dense tensor"
        raise UserError(f"{call} needs {wanted}, got layout {tensor.layout}")


class Request:
    """One rank's part of one collective: a copy of its tensor, and later the result.

    Args:
        key: type, id and the form of the call; ranks' requests of one key belong together.
        tensor: is left alone.
        clock: returns seconds.
    """

    def __init__(self, key: Key, tensor: torch.Tensor, clock: Callable[[], float]) -> None:
        self.key = key
        self._clock = clock
        copied = tensor.detach()
        # Both are memory of the request's own.
        self.tensor = (
            copied.coalesce().clone()
            if copied.is_sparse
            else copied.clone(memory_format=torch.contiguous_format)
        )
        self.written = torch.cuda.Event() if copied.is_cuda else None
        if self.written is not None:
            self.written.record()
        self._result: torch.Tensor | None = None
        self._read: Any = None
        self._error: Exception | None = None
        self._ended = threading.Event()
        self.missing: list[int] = []
        """Ranks that have not asked for it yet, as far as is known."""
        self.moments: list[tuple[str, float]] = [("StayInQueue", clock())]
        """What began when, on the communicator's clock."""

    @property
    def name(self) -> str:
        """For messages."""
        kind, number, form = self.key
        return f"{NAMES[kind]}{form}(id {number})"

    @property
    def signature(self) -> tuple[str, tuple[int, ...], str, int]:
        """What must be the same on all ranks."""
        tensor = self.tensor
        places = tensor.sparse_dim() if tensor.is_sparse else 0
        return str(tensor.dtype), tuple(tensor.shape), tensor.device.type, places

    def enter(self, phase: str) -> None:
        """A phase of its life begins."""
        self.moments.append((phase, self._clock()))

    def finish(self, result: torch.Tensor) -> None:
        """The answer is there; on CUDA in the order of the current stream."""
        if result.is_cuda:
            self._read = torch.cuda.Event()
            self._read.record()
        self.enter("WaitForFetch")
        self._result = result
        self._ended.set()

    def fail(self, error: Exception) -> None:
        """There will be no answer."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self, timeout_s: float) -> torch.Tensor:
        """The result, a tensor of the caller's own.

        Raises:
            RuntimeError: no answer in time; it says which ranks have not asked.
            Exception: whatever failed.
        """
        if not self._ended.wait(timeout_s):
            asked = f"; ranks {self.missing} have not asked for it" if self.missing else ""
            raise RuntimeError(f"{self.name}: no result within {timeout_s:g} s{asked}")
        if self._error is not None:
            raise self._error
        if self._read is not None:
            self._read.wait()
            for part in _parts(self._result):
                part.record_stream(torch.cuda.current_stream(part.device))
        self.enter("Fetched")
        return self._result


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
