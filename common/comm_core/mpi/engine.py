"""The MPI library by way of mpi4py, and the thread that makes all calls of it in this process.

Operations come to the thread through a queue and are started in its order. While any is under way
it polls, first without pause, then with pauses that grow to half a millisecond; otherwise it
sleeps. Between two polls it needs Python's lock.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("dear")

_SPIN_S, _SHORTEST_S, _LONGEST_S = 50e-6, 20e-6, 500e-6
_PAUSE_PART = 8  # a pause is this part of the time since the last news: it delays little
_BUSY_POLL_S = 10e-6  # a poll that took more of the processor's time has moved data
_POLLS = 8  # in one go while data moves: what is around them costs as much as they do
_EXPIRY_S = 0.01  # between looks at the operations' deadlines

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


class Engine:
    """The thread that makes all MPI calls of this process."""

    def __init__(self) -> None:
        self.mpi = library()
        self.types: dict[torch.dtype, Any] = {}
        self._ops: dict[tuple[torch.dtype, str], Any] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._futures: concurrent.futures.ThreadPoolExecutor | None = None
        self._requests: list[Any] = []
        self._works: list[Any] = []  # of the requests
        self._statuses: list[Any] = []  # as many, or more
        self._process = os.getpid()
        self._ended = False
        self._failed = False
        self._stop_at: float | None = None
        self._owns = False
        self._thread = threading.Thread(target=self._run, name="mpi", daemon=True)
        self._thread.start()
        self.call(self._start)

    def _start(self) -> None:
        mpi = self.mpi
        if mpi.Is_finalized():
            raise dist.DistBackendError(
                "MPI has already been finalised in this process and cannot start again"
            )
        self._owns = not mpi.Is_initialized()
        level = mpi.Init_thread(mpi.THREAD_MULTIPLE) if self._owns else mpi.Query_thread()
        levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        name = next(name for name in levels if getattr(mpi, f"THREAD_{name}") == level)
        if self._owns and level < mpi.THREAD_SERIALIZED:
            raise dist.DistBackendError(
                f"this MPI library gives only MPI_THREAD_{name}; calls from a thread need "
                "MPI_THREAD_SERIALIZED"
            )
        if not self._owns and level < mpi.THREAD_MULTIPLE:
            raise dist.DistBackendError(
                f"another library initialised MPI with MPI_THREAD_{name}, but a second user of MPI "
                "in the process needs MPI_THREAD_MULTIPLE"
            )
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank, self.size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        for dtype, name in TYPES.items():
            self.types[dtype] = (
                getattr(mpi, name) if name else mpi.BYTE.Create_contiguous(2).Commit()
            )

    def op(self, reduction: dist.ReduceOp, dtype: torch.dtype) -> Any:
        """MPI's operation for torch's; that of AVG is SUM, and a division follows."""
        asked = reduction.op.name
        if dtype == torch.bool:
            name = _LOGICAL.get(asked)
        elif dtype.is_floating_point:
            name = _NUMERIC.get(asked)
        elif dtype.is_complex:
            name = _NUMERIC.get(asked) if asked not in ("MIN", "MAX") else None
        else:
            name = (_NUMERIC | _BITWISE).get(asked) if asked != "AVG" else None
        if name is None:
            raise TypeError(f"the MPI backend cannot reduce {dtype} by {asked}")
        if TYPES[dtype] is not None:
            return getattr(self.mpi, name)
        if (dtype, name) not in self._ops:
            fold = _FOLDS[name]

            def reduce(source: Any, target: Any, _: Any) -> None:
                if target.nbytes:
                    result = torch.frombuffer(target, dtype=dtype)
                    fold(torch.frombuffer(source, dtype=dtype), result, out=result)

            self._ops[dtype, name] = self.mpi.Op.Create(reduce, commute=True)
        return self._ops[dtype, name]

    def post(self, task: Callable[[], None]) -> None:
        """Runs `task` on the thread some time. It must not raise."""
        if self._ended:
            raise dist.DistBackendError("MPI has ended in this process")
        self._tasks.put(task)

    def call(self, task: Callable[[], Any]) -> Any:
        """Runs `task` on the thread, waits for it, and raises what it raises."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(task())
            except self.mpi.Exception as error:
                done.set_exception(dist.DistBackendError(error.Get_error_string()))
            except BaseException as error:
                done.set_exception(error)

        self.post(run)
        return done.result()

    def begin(self, work: Any) -> None:
        """Starts an operation, an `operations.Work`; on the thread only."""
        try:
            if self.mpi.Is_finalized():
                raise dist.DistBackendError("MPI was finalised by another library of this process")
            request = work.start()
        except self.mpi.Exception as error:
            work.fail(dist.DistBackendError(f"{work}: {error.Get_error_string()}"))
        except Exception as error:
            work.fail(error)
        else:
            self._requests.append(request)
            self._works.append(work)

    def settle_future(self, settle: Callable[[], None]) -> None:
        """Runs `settle` on a thread of its own."""
        # A future's callbacks may wait: on the progress thread they would hold up every other.
        if self._futures is None:
            self._futures = concurrent.futures.ThreadPoolExecutor(1, "mpi-futures")
        self._futures.submit(settle)

    def _run(self) -> None:
        # Signals are for the main thread, whose blocking calls would not notice one taken here.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if sys.platform == "linux":  # which else rounds the short pauses up by 50 us
            ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)
        last_news = next_expiry = time.monotonic()
        polls = 1
        pause: float | None = None
        while self._stop_at is None or (self._requests and time.monotonic() < self._stop_at):
            began = self._take(pause)
            if not self._requests:
                pause = None
                continue
            used = time.thread_time()
            ended = self._poll(polls)
            used = time.thread_time() - used
            now = time.monotonic()
            moving = used > _BUSY_POLL_S * polls
            polls = _POLLS if moving else 1
            if began or ended or moving:
                last_news = now
            quiet = now - last_news
            pause = 0.0
            if quiet >= _SPIN_S:
                pause = min(max(quiet / _PAUSE_PART, _SHORTEST_S), _LONGEST_S)
            if now >= next_expiry:
                next_expiry = now + _EXPIRY_S
                for work in self._works:
                    work.expire(now)
        if not self._requests and self._owns and not self._failed and not self.mpi.Is_finalized():
            self.mpi.Finalize()

    def _take(self, pause: float | None) -> bool:
        took = False
        while True:
            try:
                task = self._tasks.get(block=pause != 0, timeout=pause)
            except queue.Empty:
                return took
            task()
            took, pause = True, 0

    def _poll(self, polls: int) -> bool:
        mpi = self.mpi
        statuses = self._statuses
        statuses += [mpi.Status() for _ in range(len(self._requests) - len(statuses))]
        code = mpi.SUCCESS
        indices = None
        try:
            while not indices and polls:
                indices = mpi.Request.Testsome(self._requests, statuses)
                polls -= 1
        except mpi.Exception as error:
            code = error.Get_error_class()
            if code == mpi.ERR_IN_STATUS:
                indices = [i for i, r in enumerate(self._requests) if r == mpi.REQUEST_NULL]
            else:  # MPI did not say which request it was, so none can be trusted any more
                indices = list(range(len(self._requests)))
        if not indices:
            return False
        ended = [self._works[index] for index in indices]
        gone = set(indices)
        self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
        self._works = [w for i, w in enumerate(self._works) if i not in gone]
        for work, status in zip(ended, statuses, strict=False):
            work.retire(status.Get_error() if code == mpi.ERR_IN_STATUS else code, status)
        return True

    def finalize(self) -> None:
        """Ends the thread and, if it began MPI, MPI; waits for the other processes to do so."""
        if os.getpid() != self._process or self._ended:
            return  # a fork has neither the thread nor a place in the job
        # MPI_Finalize waits for the other ranks, and they may be waiting for this one.
        self._failed = hasattr(sys, "last_type")
        stop_at = time.monotonic() + (0.0 if self._failed else 2.0)
        self._tasks.put(lambda: setattr(self, "_stop_at", stop_at))
        self._ended = True
        self._thread.join()
        if self._futures is not None:
            self._futures.shutdown()
        if self._requests:
            log.warning(
                "MPI was left running: %d operations had not ended at exit", len(self._works)
            )


_engine: Engine | None = None


def the_engine() -> Engine:
    """This process's; the first call starts MPI."""
    global _engine
    if _engine is None:
        _engine = Engine()
        # With the first group, not on import: handlers run in reverse order, so whoever came to
        # use MPI after us (Horovod) is done with it before MPI ends.
        atexit.register(_engine.finalize)
    return _engine
