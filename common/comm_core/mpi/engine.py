"""The MPI library by way of mpi4py, and who gets its operations on.

Operations start in the thread that asks for them. MPI gets on only while somebody calls it: whoever
waits for an operation polls, and when nobody waits, a thread of ours does while any is under way.
Both poll without pause at first and with growing pauses while nothing moves. One lock keeps two
threads from being in MPI at a time.
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
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("dear")

_SPIN_S, _SHORTEST_S, _LONGEST_S = 200e-6, 20e-6, 5e-3
_PAUSE_PART = 16  # a pause is this part of the time since the last news: it delays little
_BUSY_POLL_S = 10e-6  # a poll that took more of the processor's time has moved data
_ASIDE_S = 500e-6  # the thread stands aside so long when it sees somebody poll who waits
_FOR_EVER_S = 10 * 365 * 86400.0
_EXIT_S = 2.0  # for what is under way when the process ends

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
"""torch's element types -> MPI's names; None: MPI has none, and one is made."""

_NUMERIC = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_BITWISE = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
# The logical operations stand in for bool: a sum is "or", a product is "and".
_LOGICAL = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PRODUCT": "LAND", "MIN": "LAND"}
_LOGICAL |= {"BAND": "LAND", "BXOR": "LXOR"}
# For two-byte floats MPI sees opaque bytes, reduced by these. A NaN wins on every rank.
_FOLDS = {"SUM": torch.add, "PROD": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}


def library() -> Any:
    """mpi4py's module `MPI`, which has not started MPI yet.

    Raises:
        ImportError: there is no mpi4py, or no MPI for it; the sentence says what to install.
    """
    # Importing mpi4py starts MPI unless told otherwise; it is to start with the first group.
    if "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py
        except ImportError:
            raise ImportError("backend mpi needs mpi4py: pip install mpi4py") from None
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise ImportError(
            f"backend mpi needs an MPI library, mpi4py found none ({line}): "
            "apt-get install libopenmpi-dev"
        ) from error
    return MPI


class Work(dist.Work):
    """One operation under way.

    Args:
        title: what messages of errors call it.
        outputs: of the future.
        finish: brings the result home once MPI has ended the call well, given its status.
        broke: told why, if the group's ranks may no longer agree on what comes next.
    """

    def __init__(
        self,
        title: str,
        timeout: timedelta,
        outputs: list[torch.Tensor],
        finish: Callable[[Any], int | None],
        broke: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._title = title
        self._timeout_s = min(timeout.total_seconds(), _FOR_EVER_S)
        self._deadline = time.monotonic() + self._timeout_s
        self._outputs, self._finish, self._broke = outputs, finish, broke
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._ended = threading.Event()
        self._ending = threading.Lock()  # of those who end it, the first does
        self._error: Exception | None = None
        self._source: int | None = None

    def __str__(self) -> str:
        return self._title

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the operation has ended; without a timeout of its own its own applies.

        Raises:
            torch.distributed.DistBackendError: what the operation failed of, or that `timeout` is
                over: it is then still under way, and may be waited for again.
        """
        given = min(timeout.total_seconds(), _FOR_EVER_S)
        until = time.monotonic() + (given if given > 0 else _FOR_EVER_S)
        the_engine().drive(self._ended.is_set, self._ended.wait, until)
        if not self._ended.is_set():
            raise dist.DistBackendError(f"{self} has not ended in {given:g} s")
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
            raise ValueError(f"{self} has no source rank: only a receive that has ended has")
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Ends with the operation, with the list of its outputs."""
        if not self._ended.is_set():
            return self._future
        # The thread that ended the operation may not have come to settle the first one yet.
        return self._settled(torch.futures.Future())

    def retire(self, error: str | None, status: Any) -> None:
        """The call has ended: brings the result home, or fails."""
        if self._ended.is_set():
            return
        try:
            if error is not None:
                raise dist.DistBackendError(error)
            self._source = self._finish(status)
        except Exception as reason:
            self._end(dist.DistBackendError(f"{self}: {reason}"))
        else:
            self._end()

    def expire(self, now: float) -> None:
        """Fails the operation if its time is over, though MPI goes on with it."""
        if self._deadline <= now and not self._ended.is_set():
            over = f"{self} has not ended in {self._timeout_s:g} s"
            self._end(dist.DistBackendError(f"{over}; a rank died, or did not call it"))

    def _end(self, error: Exception | None = None) -> None:
        if not self._ending.acquire(blocking=False):
            return
        if error is not None:
            self._broke(f"{self} failed")
        self._error = error
        self._finish = None  # has the tensors; a caller may keep this work
        self._ended.set()
        self._settled(self._future)

    def _settled(self, future: torch.futures.Future) -> torch.futures.Future:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)
        return future


class Engine:
    """The MPI library of this process, which this starts, and its operations under way."""

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
        # Among themselves our threads take turns; of another user's calls this knows nothing.
        needed = "SERIALIZED" if self._owns else "MULTIPLE"
        if level < getattr(mpi, f"THREAD_{needed}"):
            raise dist.DistBackendError(
                f"MPI_THREAD_{name} is all that "
                + ("this MPI library gives" if self._owns else "another library initialised")
                + f", but the MPI backend needs MPI_THREAD_{needed}"
            )
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank, self.size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        self.types = {
            dtype: getattr(mpi, name) if name else mpi.BYTE.Create_contiguous(2).Commit()
            for dtype, name in TYPES.items()
        }
        self._folds: dict[tuple[torch.dtype, str], Any] = {}
        self._lock = threading.Lock()  # around every call of MPI, and the operations under way
        self._requests: list[Any] = []
        self._works: list[tuple[Work, Any]] = []  # of the requests, with what they must keep alive
        self._waited = 0.0  # when somebody who waits last polled
        self._begun = threading.Event()
        self._process = os.getpid()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="mpi", daemon=True)
        self._thread.start()

    def reduction(self, asked: dist.ReduceOp, dtype: torch.dtype) -> Any:
        """MPI's operation for torch's; that of AVG is SUM, and a division follows."""
        word = asked.op.name
        if dtype == torch.bool:
            name = _LOGICAL.get(word)
        elif dtype.is_floating_point:
            name = _NUMERIC.get(word)
        elif dtype.is_complex:
            name = _NUMERIC.get(word) if word not in ("MIN", "MAX") else None
        else:
            name = (_NUMERIC | _BITWISE).get(word) if word != "AVG" else None
        if name is None:
            raise TypeError(f"the MPI backend cannot reduce {dtype} by {word}")
        if TYPES[dtype] is not None:
            return getattr(self.mpi, name)
        if (dtype, name) not in self._folds:
            fold = _FOLDS[name]

            def reduce(source: Any, target: Any, _: Any) -> None:
                if target.nbytes:
                    result = torch.frombuffer(target, dtype=dtype)
                    fold(torch.frombuffer(source, dtype=dtype), result, out=result)

            self._folds[dtype, name] = self.mpi.Op.Create(reduce, commute=True)
        return self._folds[dtype, name]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Makes a call of MPI that does not wait for long."""
        with self._lock:
            return self._call(function, *arguments)

    def begin(self, work: Work, keep: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts an operation; `keep` is not freed before MPI has ended it."""
        with self._lock:
            self._requests.append(self._call(function, *arguments))
            self._works.append((work, keep))
        self._begun.set()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._ended or self.mpi.Is_finalized():
            raise dist.DistBackendError("MPI has ended in this process")
        try:
            return function(*arguments)
        except self.mpi.Exception as error:
            raise dist.DistBackendError(error.Get_error_string()) from error

    def drive(
        self, done: Callable[[], bool], nap: Callable[[float], Any], until: float = float("inf")
    ) -> None:
        """Gets operations on until `done` or the time `until`; `nap` pauses, true if for news."""
        waits = threading.current_thread() is not self._thread
        news, pause = time.monotonic(), 0.0
        while not done():
            if waits:
                self._waited = time.monotonic()
            elif time.monotonic() - self._waited < _ASIDE_S:
                time.sleep(_ASIDE_S)  # two that poll would take Python's lock from each other
                continue
            # After a pause a poll finds its memory cold and takes longer, though nothing moves.
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
        """Asks MPI what has ended; whether anything has, or it took longer than `busy_s`."""
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
                # Else MPI did not say which request it was, so none can be trusted any more.
                if code == mpi.ERR_IN_STATUS:
                    indices = [i for i in indices if self._requests[i] == mpi.REQUEST_NULL]
            moved = time.thread_time() - began > busy_s
            works = [work for work, _ in self._works]
            gone = set(indices)
            if gone:
                self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
                self._works = [w for i, w in enumerate(self._works) if i not in gone]
        for index, status in zip(indices, statuses, strict=False):
            error = status.Get_error() if code == mpi.ERR_IN_STATUS else code
            failure = None if error == mpi.SUCCESS else mpi.Get_error_string(error)
            works[index].retire(failure, status)
        now = time.monotonic()
        for work in works:
            work.expire(now)
        return bool(gone) or moved

    def finish(self) -> None:
        """Ends MPI with the process, if this began it; waits for the other processes to do so."""
        if os.getpid() != self._process:
            return  # a fork has neither the thread nor a place in the job
        # MPI_Finalize waits for the other ranks, and they may be waiting for this one.
        failed = hasattr(sys, "last_type")
        if not failed:
            self.drive(lambda: not self._requests, time.sleep, time.monotonic() + _EXIT_S)
        with self._lock:
            self._ended = True
        self._begun.set()
        self._thread.join()
        left = len(self._requests)
        if left:
            log.warning("MPI was left running: %d operations had not ended at exit", left)
        if not self._owns or self.mpi.Is_finalized():
            return
        if failed or left:
            # Left to exit like any other process, MPI's own threads would still run while the
            # memory of its libraries is freed. This aborts the job after all other exit handlers.
            from mpi4py.run import set_abort_status

            set_abort_status(1)
        else:
            self.mpi.Finalize()


_engine: Engine | None = None


def the_engine() -> Engine:
    """This process's; the first call starts MPI."""
    global _engine
    if _engine is None:
        _engine = Engine()
        # With the first group, not on import: handlers run in reverse order, so whoever came to
        # use MPI after us (Horovod) is done with it before MPI ends.
        atexit.register(_engine.finish)
    return _engine
