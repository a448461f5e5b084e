"""What an MPI call works on, and the call under way as torch.distributed sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .engine import TYPES, the_engine

Tensors = Sequence[torch.Tensor]

_LIMIT = 2**31 - 1  # elements per call of MPI
_FOR_EVER_S = 10 * 365 * 86400.0
_GRACE_S = 1.0  # a waiter sees a time-out itself only if the thread is stuck inside MPI

RECEIVES = ("recv", "recv_any_source")


class Row:
    """The elements of one or more CPU tensors, one after the other.

    Where the tensors already lie like that it is their own memory; else, and where it must not
    share memory with `other` (MPI lets no two arguments overlap), it is a copy, which `fill` writes
    and `spill` reads back.

    Raises:
        ValueError, TypeError: MPI cannot carry the tensors, or `other` has another type.
    """

    def __init__(self, name: str, tensors: Tensors, other: Row | None = None) -> None:
        if not tensors:
            raise ValueError(f"{name}: no tensor was given")
        self.name = name
        self.tensors = list(tensors)
        self.dtype = tensors[0].dtype
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name}: the tensor is on {tensor.device}, but the MPI backend takes CPU "
                    "tensors"
                )
            if tensor.layout != torch.strided:
                raise TypeError(
                    f"{name}: the tensor is {tensor.layout}, but the MPI backend takes dense ones"
                )
            if tensor.dtype != self.dtype:
                raise TypeError(
                    f"{name}: tensors of {self.dtype} and {tensor.dtype} in one operation"
                )
        if self.dtype not in TYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
            raise TypeError(f"the MPI backend does not carry {self.dtype}; it has {names}")
        if other is not None and other.dtype != self.dtype:
            raise TypeError(f"{name}: output of {other.dtype}, input of {self.dtype}")
        self.counts = [tensor.numel() for tensor in tensors]
        self.elements = sum(self.counts)
        if self.elements > _LIMIT:
            raise ValueError(
                f"{name}: {self.elements} elements are beyond MPI's limit of {_LIMIT} elements per "
                "call; split the tensor"
            )
        self.nbytes = self.elements * self.dtype.itemsize
        parts = [tensor for tensor in tensors if tensor.numel()]
        ends = [part.data_ptr() + part.nbytes for part in parts]
        self.address = parts[0].data_ptr() if parts else 0
        direct = parts and all(map(_plain, parts))
        direct = direct and ends[:-1] == [part.data_ptr() for part in parts[1:]]
        overlaps = other is not None and (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )
        # An empty tensor has no address, and MPI takes none for MPI_BOTTOM: it is a copy too.
        self._copy = None
        if not direct or overlaps:
            self._copy = torch.empty(max(self.elements, 1), dtype=self.dtype)
            self.address = self._copy.data_ptr()

    def fill(self) -> None:
        """Tensors -> memory."""
        for mine, tensor in self._pairs():
            mine.copy_(tensor)

    def spill(self) -> None:
        """Memory -> tensors."""
        for mine, tensor in self._pairs():
            tensor.copy_(mine)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # `.data`: autograd neither records the copy nor objects to one into a leaf.
        if self._copy is None:
            return []
        parts = self._copy[: self.elements].split([tensor.numel() for tensor in self.tensors])
        return [(part.view(t.shape), t.data) for part, t in zip(parts, self.tensors, strict=True)]

    def divide(self, by: int) -> None:
        """Divides every element in place."""
        for part in self.tensors if self._copy is None else [self._copy]:
            part.data.div_(by)

    def check_whole(self, ranks: int, part: Row, equal: str = "") -> None:
        """Raises ValueError unless this has `ranks` times the elements of `part`."""
        if self.elements != ranks * part.elements:
            raise ValueError(
                f"{self.name}: {self.elements} elements for {ranks} ranks with {part.elements} "
                "elements each"
            )
        if equal and len(set(self.counts)) > 1:
            raise ValueError(f"{self.name}: the {equal} tensors differ in size")

    def check_part(self, kind: str, whole: Row, whole_kind: str, rank: int) -> None:
        """Raises ValueError unless this has the elements of block `rank` of `whole`."""
        if self.elements != whole.counts[rank]:
            raise ValueError(
                f"{self.name}: {kind} of {self.elements} elements, {whole_kind} {rank} of "
                f"{whole.counts[rank]}"
            )

    def message(self) -> list[Any]:
        """What mpi4py's calls take."""
        engine = the_engine()
        memory = engine.mpi.buffer.fromaddress(self.address, self.nbytes)
        return [memory, engine.types[self.dtype]]

    def blocks(self) -> list[Any]:
        """What those calls take that have a block of any length, `counts`, for each rank."""
        memory, kind = self.message()
        return [memory, self.counts, kind]


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Work(dist.Work):
    """One operation under way.

    Args:
        name: of the operation.
        title: what messages of errors call it.
        start: makes the MPI call; returns its request.
        target: brought home, divided by `divisor`, once the call has ended well.
        outputs: of the future.
        broke: told that the group's ranks no longer agree on what comes next.
    """

    def __init__(
        self,
        name: str,
        title: str,
        timeout_s: float,
        start: Callable[[], Any],
        target: Row | None,
        divisor: int,
        outputs: list[torch.Tensor],
        broke: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.start: Callable[[], Any] | None = start
        self._name, self._title = name, title
        self._timeout_s = min(timeout_s, _FOR_EVER_S)
        self._deadline = time.monotonic() + self._timeout_s
        self._target = target
        self._divisor = divisor
        self._outputs = outputs
        self._broke = broke
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._source = -1
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def __str__(self) -> str:
        return self._title

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the operation has ended; without a timeout of its own its own applies.

        Raises:
            torch.distributed.DistBackendError: what the operation failed of, or that `timeout` is
                over: it is then still under way, and may be waited for again.
        """
        given = timeout.total_seconds()
        longest = min(given, _FOR_EVER_S) if given > 0 else self._timeout_s + _GRACE_S
        if not self._ended.wait(longest):
            raise dist.DistBackendError(f"{self} has not ended in {longest:g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        if not self._ended.is_set():
            raise ValueError(f"{self} has no result yet: wait for it first")
        return self._outputs

    def source_rank(self) -> int:
        if self._name not in RECEIVES:
            raise ValueError(f"{self._name} has no source rank: only a receive has")
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Ends with the operation, with the list of its outputs."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            if not self._ended.is_set():
                return self._future
        self._settle_future()
        return self._future

    def retire(self, code: int, status: Any) -> None:
        """The request has ended: brings the result home and lets waiters go. On the thread."""
        engine = the_engine()
        error: Exception | None = None
        if code != engine.mpi.SUCCESS:
            error = dist.DistBackendError(f"{self}: {engine.mpi.Get_error_string(code)}")
        elif self._name in RECEIVES:
            self._source = status.Get_source()
            count = status.Get_count(engine.types[self._target.dtype])
            if count != self._target.elements:
                error = dist.DistBackendError(
                    f"{self}: rank {self._source} sent {count} elements, but the tensor has "
                    f"{self._target.elements}"
                )
        if error is None and self._target is not None and not self._ended.is_set():
            if self._divisor != 1:
                self._target.divide(self._divisor)
            self._target.spill()
        self._end(error) if error is None else self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the operation with `error`, unless it has ended already."""
        if self._name != "send" and self._name not in RECEIVES:  # there only two ranks exchange
            self._broke(f"{self} failed")
        self._end(error)

    def expire(self, now: float) -> None:
        """Ends the operation if its time is over, though MPI goes on with it."""
        if self._deadline <= now and not self._ended.is_set():
            self.fail(
                dist.DistBackendError(
                    f"{self} has not ended in {self._timeout_s:g} s; a rank died, or did not call "
                    "it"
                )
            )

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            if error is None:
                self.start = self._target = None  # tensors; a caller may keep this work
            self._ended.set()
        if self._future is not None:
            the_engine().settle_future(self._settle_future)

    def _settle_future(self) -> None:
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._outputs)
