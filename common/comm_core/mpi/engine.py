"""MPI library, through mpi4py, and the threads that advance its operations.

An operation starts in the calling thread. MPI makes progress only inside MPI calls, so a thread
that waits for an operation polls MPI. If no thread waits, a background thread polls while
operations are in flight. Both poll without pauses at first, and with growing pauses while nothing
moves. A lock allows only one thread at a time in MPI.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

log = logging.getLogger("dear")

_SPIN_S, _SHORTEST_S, _LONGEST_S = 200e-6, 20e-6, 5e-3
_PAUSE_PART = 16  # a pause is 1/16 of the time since the last progress, so it adds little delay
_BUSY_POLL_S = 10e-6  # a poll that takes more CPU time than this has moved data
_ASIDE_S = 500e-6  # the background thread pauses this long while a waiting thread polls
_FOR_EVER_S = 10 * 365 * 86400.0
_EXIT_S = 2.0  # time limit at exit for the operations in flight

TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.float16: None,
    torch.bfloat16: None,
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
"""torch's dtypes -> MPI's names; None: MPI has no such type, and the engine creates one."""

_NUMERIC = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_BITWISE = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
# Bools use the logical operations: a sum is "or", a product is "and".
_LOGICAL = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PRODUCT": "LAND", "MIN": "LAND"}
_LOGICAL |= {"BAND": "LAND", "BXOR": "LXOR"}
# MPI sees two-byte floats as opaque bytes, reduced by these functions. NaN propagates on any rank.
_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def library() -> ModuleType:
    """Returns mpi4py's module `MPI` without starting MPI.

    Raises:
        ImportError: mpi4py or an MPI library is missing; the message says what to install.
    """
    # By default the import of mpi4py.MPI starts MPI. Here MPI starts with the first group.
    if "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py
        except ImportError:
            raise ImportError("backend mpi needs mpi4py; try: pip install mpi4py") from None
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise ImportError(
            f"backend mpi needs an MPI library, but mpi4py found none ({line}); try: "
            "apt-get install libopenmpi-dev"
        ) from error
    return MPI


class Work(dist.Work):
    """One operation in flight.

    Args:
        title: name of the operation in error messages.
        timeout: time limit, counted from now.
        outputs: tensors that the future returns.
        finish: called with the MPI status after a success. It copies the result into the tensors
            and returns the source rank, if any.
        broke: called with the reason after a failure: the ranks may disagree on the next operation.
    """

    def __init__(
        self,
        title: str,
        timeout: timedelta,
        outputs: list[torch.Tensor],
        finish: Callable[[MPI.Status], int | None],
        broke: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._title = title
        self._timeout_s = min(timeout.total_seconds(), _FOR_EVER_S)
        self._deadline = time.monotonic() + self._timeout_s
        self._outputs, self._broke = outputs, broke
        self._finish: Callable[[MPI.Status], int | None] | None = finish
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._ended = threading.Event()
        self._ending = threading.Lock()  # acquired, never released, by the first thread to end it
        self._error: Exception | None = None
        self._source: int | None = None

    def __str__(self) -> str:
        return self._title

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the operation has ended. A `timeout` of 0 means the operation's own limit.

        Raises:
            torch.distributed.DistBackendError: the operation failed, or `timeout` has passed. In
                the second case it is still in flight and may be waited for again.
        """
        limit_s = min(timeout.total_seconds(), _FOR_EVER_S)
        until = time.monotonic() + (limit_s if limit_s > 0 else _FOR_EVER_S)
        the_engine().drive(self._ended.is_set, self._ended.wait, until)
        if not self._ended.is_set():
            raise dist.DistBackendError(f"{self} has not ended in {limit_s:g} s")
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
        if self._source is None:
            raise ValueError(f"{self} has no source rank: only a finished receive has one")
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future that ends with the operation; its value is the list of outputs."""
        if not self._ended.is_set():
            return self._future
        # The thread that ended the operation may not have completed `self._future` yet.
        return self._settled(torch.futures.Future())

    def retire(self, error: str | None, status: MPI.Status) -> None:
        """Ends the operation after MPI has ended the call, with its result or with `error`."""
        finish = self._finish
        if finish is None:
            return
        try:
            if error is not None:
                raise dist.DistBackendError(error)
            self._source = finish(status)
        except Exception as reason:
            self._end(dist.DistBackendError(f"{self}: {reason}"))
        else:
            self._end()

    def expire(self, now: float) -> None:
        """Fails the operation if its deadline has passed, although MPI continues with it."""
        if self._deadline <= now and not self._ended.is_set():
            text = f"{self} has not ended in {self._timeout_s:g} s"
            self._end(dist.DistBackendError(f"{text}; a rank died or did not make the same call"))

    def _end(self, error: Exception | None = None) -> None:
        if not self._ending.acquire(blocking=False):
            return
        if error is not None:
            self._broke(f"{self} failed")
        self._error = error
        self._finish = None  # it holds the tensors, and the caller may keep this work
        self._ended.set()
        self._settled(self._future)

    def _settled(
        self, future: torch.futures.Future[list[torch.Tensor]]
    ) -> torch.futures.Future[list[torch.Tensor]]:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]  # typed as set_result
        return future


class Engine:
    """MPI library of this process and its operations in flight. The constructor starts MPI.

    Raises:
        torch.distributed.DistBackendError: MPI was finalised, or its thread level is too low.
    """

    def __init__(self) -> None:
        self.mpi = mpi = library()
        if mpi.Is_finalized():
            raise dist.DistBackendError(
                "MPI has already been finalised in this process and cannot start again"
            )
        self._owns = not mpi.Is_initialized()
        level = mpi.Init_thread(mpi.THREAD_MULTIPLE) if self._owns else mpi.Query_thread()
        levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        name = next(name for name in levels if getattr(mpi, f"THREAD_{name}") == level)
        # The engine serialises its own MPI calls, but not those of another library that uses MPI.
        needed = "SERIALIZED" if self._owns else "MULTIPLE"
        if level < getattr(mpi, f"THREAD_{needed}"):
            raise dist.DistBackendError(
                "thread level too low: "
                + ("this MPI library has" if self._owns else "another library started MPI with")
                + f" MPI_THREAD_{name}, but the MPI backend needs MPI_THREAD_{needed}"
            )
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank, self.size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        self.types: dict[torch.dtype, MPI.Datatype] = {
            dtype: getattr(mpi, name) if name else mpi.BYTE.Create_contiguous(2).Commit()
            for dtype, name in TYPES.items()
        }
        self._folds: dict[tuple[torch.dtype, str], MPI.Op] = {}
        self._lock = threading.Lock()  # guards every MPI call, `_requests` and `_works`
        self._requests: list[MPI.Request] = []
        self._works: list[
            tuple[Work, object]
        ] = []  # for each request, with the objects to keep alive
        self._waited = 0.0  # time of the last poll by a waiting thread
        self._begun = threading.Event()
        self._process = os.getpid()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="mpi", daemon=True)
        self._thread.start()

    def reduction(self, reduce_op: dist.ReduceOp, dtype: torch.dtype) -> MPI.Op:
        """Returns MPI's operation for torch's. For AVG it is SUM; the caller divides afterwards."""
        torch_name = reduce_op.op.name  # type: ignore[attr-defined]  # not in torch's stub
        if dtype == torch.bool:
            name = _LOGICAL.get(torch_name)
        elif dtype.is_floating_point:
            name = _NUMERIC.get(torch_name)
        elif dtype.is_complex:
            name = _NUMERIC.get(torch_name) if torch_name not in ("MIN", "MAX") else None
        else:
            name = (_NUMERIC | _BITWISE).get(torch_name) if torch_name != "AVG" else None
        if name is None:
            raise TypeError(f"the MPI backend cannot reduce {dtype} by {torch_name}")
        if TYPES[dtype] is not None:
            operation: MPI.Op = getattr(self.mpi, name)
            return operation
        if (dtype, name) not in self._folds:
            fold = _FOLDS[name]

            def reduce(source: MPI.buffer, target: MPI.buffer, _: MPI.Datatype) -> None:
                if target.nbytes:
                    result = torch.frombuffer(target, dtype=dtype)
                    fold(torch.frombuffer(source, dtype=dtype), result, out=result)

            self._folds[dtype, name] = self.mpi.Op.Create(reduce, commute=True)
        return self._folds[dtype, name]

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Makes an MPI call that does not block for long."""
        with self._lock:
            return self._call(function, *arguments)

    def begin(
        self,
        work: Work,
        keep: object,
        function: Callable[..., MPI.Request],
        *arguments: object,
    ) -> None:
        """Starts an operation. The engine holds `keep` until MPI has ended the operation."""
        with self._lock:
            self._requests.append(self._call(function, *arguments))
            self._works.append((work, keep))
        self._begun.set()

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        if self._ended or self.mpi.Is_finalized():
            raise dist.DistBackendError("MPI has ended in this process")
        try:
            return function(*arguments)
        except self.mpi.Exception as error:
            raise dist.DistBackendError(error.Get_error_string()) from error

    def drive(
        self,
        done: Callable[[], bool],
        nap: Callable[[float], bool | None],
        until: float = float("inf"),
    ) -> None:
        """Polls MPI until `done()` or the time `until`.

        Args:
            nap: pauses for at most the given seconds; returns true if an event ended the pause.
        """
        is_waiter = threading.current_thread() is not self._thread
        news, pause = time.monotonic(), 0.0
        while not done():
            if is_waiter:
                self._waited = time.monotonic()
            elif time.monotonic() - self._waited < _ASIDE_S:
                time.sleep(_ASIDE_S)  # two polling threads would compete for Python's lock
                continue
            # After a pause the caches are cold, so a poll takes longer even if nothing moves.
            moved = self._poll(_BUSY_POLL_S + pause / _PAUSE_PART)
            now = time.monotonic()
            if now >= until:
                break
            if moved:
                news, pause = now, 0.0
            elif now - news >= _SPIN_S:
                pause = min(max((now - news) / _PAUSE_PART, _SHORTEST_S), _LONGEST_S, until - now)
                if nap(pause):
                    news, pause = now, 0.0

    def _run(self) -> None:
        while not self._ended:
            self._begun.wait()
            self._begun.clear()
            self.drive(lambda: self._ended or not self._requests, self._nap)

    def _nap(self, pause: float) -> bool:
        news = self._begun.wait(pause)
        self._begun.clear()
        return news

    def _poll(self, busy_s: float) -> bool:
        """Retires finished requests; returns True if any was or the poll took over `busy_s`."""
        mpi = self.mpi
        began = time.thread_time()
        with self._lock:
            if self._ended:
                return False
            statuses = [mpi.Status() for _ in self._requests]
            code = mpi.SUCCESS
            try:
                indices = mpi.Request.Testsome(self._requests, statuses) or []
            except mpi.Exception as error:
                code = error.Get_error_class()
                indices = range(len(self._requests))
                # With any other code MPI does not say which request failed, so all of them fail.
                if code == mpi.ERR_IN_STATUS:
                    indices = [i for i in indices if self._requests[i] == mpi.REQUEST_NULL]
            moved = time.thread_time() - began > busy_s
            works = [work for work, _ in self._works]
            ended = set(indices)
            if ended:
                self._requests = [r for i, r in enumerate(self._requests) if i not in ended]
                self._works = [w for i, w in enumerate(self._works) if i not in ended]
        for index, status in zip(indices, statuses, strict=False):
            ended_with = status.Get_error() if code == mpi.ERR_IN_STATUS else code
            failure = None if ended_with == mpi.SUCCESS else mpi.Get_error_string(ended_with)
            works[index].retire(failure, status)
        now = time.monotonic()
        for work in works:
            work.expire(now)
        return bool(ended) or moved

    def finish(self) -> None:
        """Finalises MPI at exit if this engine started it. Waits for the other processes."""
        if os.getpid() != self._process:
            return  # a forked child has no engine thread and is not part of the job
        # MPI_Finalize waits for the other ranks, and they may be waiting for this one.
        failed = hasattr(sys, "last_type")
        if not failed:
            self.drive(lambda: not self._requests, time.sleep, time.monotonic() + _EXIT_S)
        with self._lock:
            self._ended = True
        self._begun.set()
        self._thread.join()
        unfinished = len(self._requests)
        if unfinished:
            log.warning("MPI was not finalised: %d operations had not ended at exit", unfinished)
        if not self._owns or self.mpi.Is_finalized():
            return
        if failed or unfinished:
            # In a normal exit, MPI's own threads would still run while the memory of its libraries
            # is freed. This aborts the job after all other exit handlers.
            from mpi4py.run import set_abort_status

            set_abort_status(1)
        else:
            self.mpi.Finalize()


_engine: Engine | None = None


def the_engine() -> Engine:
    """Returns this process's engine; the first call starts MPI."""
    global _engine
    if _engine is None:
        _engine = Engine()
        # Registered with the first group, not on import. Exit handlers run in reverse order, so a
        # library that uses MPI from later on (Horovod) is finished before MPI ends.
        atexit.register(_engine.finish)
    return _engine
