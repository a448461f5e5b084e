"""What a stream of a `Communicator` is: operations that run one after another in the background.

An operation is a generator: it starts collectives, yields their works, and goes on once they have
ended; its frame is what keeps temporary tensors alive. A stream runs its operations in the order of
the calls and never starts one before its predecessor has ended, so an operation may use what an
earlier one of its stream produced. On CPUs a thread does that (only where it is needed: a lone
collective is started by the caller); on CUDA a `torch.cuda.Stream` does, and the host never waits.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch

Body = Generator[list[Any], None, None]
"""Yields lists of `torch.distributed.Work` to await before it is continued."""

EXIT_TIMEOUT_S = 5.0
"""Longest that a process which ends without `destroy` waits for each stream's operations."""


class Operation(Protocol):
    """One call under way."""

    name: str
    error: Exception | None
    """Why it failed; None while it runs and when it went well."""

    def wait(self) -> None:
        """Makes the caller (CUDA: its current stream) wait for the result; never raises `error`."""

    def settle(self) -> None:
        """Blocks the host until the operation has ended; never raises `error`."""

    def ended(self) -> bool:
        """True once it has ended, well or badly; never blocks."""


class HostOperation:
    """An operation on CPU tensors: run by a stream's thread, or just started by the caller."""

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self.error: Exception | None = None
        self._body: Body | None = body
        self._works: list[Any] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread_runs_it = False

    def start(self) -> None:
        """Runs the body up to its only yield, in the caller's thread."""
        self._works = self._advance() or []

    def leave_to_thread(self) -> None:
        """Says, before a thread can see it, that `run` will be called."""
        self._thread_runs_it = True

    def run(self) -> None:
        """Runs the whole body; called by the stream's thread."""
        try:
            while (works := self._advance()) is not None:
                self._await(works)
                if self.error is not None:
                    break
        except Exception as error:
            self.error = error
        self._finish()

    def wait(self) -> None:
        self.settle()

    def settle(self) -> None:
        if self._thread_runs_it:
            self._ended.wait()
            return
        with self._lock:  # two threads may wait for one operation; the works see one of them
            if not self._ended.is_set():
                self._await(self._works)
                self._finish()

    def ended(self) -> bool:
        if self._ended.is_set():
            return True
        return not self._thread_runs_it and all(work.is_completed() for work in self._works)

    def _advance(self) -> list[Any] | None:
        assert self._body is not None
        with torch.no_grad():
            return next(self._body, None)

    def _await(self, works: Sequence[Any]) -> None:
        # All of them, also after a failure: the others may still use the temporaries.
        for work in works:
            try:
                work.wait()
            except Exception as error:
                self.error = self.error or error

    def _finish(self) -> None:
        if self._body is not None:
            self._body.close()
        self._body, self._works = None, []
        self._ended.set()


_open_streams: weakref.WeakSet[HostStream] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    # For a script that ends without `destroy`: a thread that comes back from a collective into an
    # interpreter that is gone aborts the process.
    for stream in list(_open_streams):
        stream.close(EXIT_TIMEOUT_S)


class HostStream:
    """A stream for CPU tensors.

    Args:
        ordered: the backend itself runs the collectives of a process group one after another; then
            lone collectives are handed to it without waiting for the earlier ones.
    """

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._changed = threading.Condition()
        self._started: deque[HostOperation] = deque()
        self._queue: deque[HostOperation] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        _open_streams.add(self)

    def submit(self, name: str, body: Body, *, tensors: Sequence[torch.Tensor], lone: bool) -> Any:
        """Queues `body`; `lone` says that it is one collective and nothing after it.

        Raises whatever the backend raises at once, e.g. for a dtype that it lacks.
        """
        operation = HostOperation(name, body)
        with self._changed:
            self._forget_ended()
            if lone and not self._queue and (self._ordered or not self._started):
                operation.start()
                self._started.append(operation)
                return operation
            operation.leave_to_thread()
            self._queue.append(operation)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="comm_core stream", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return operation

    def idle(self) -> bool:
        """True if nothing is queued or under way."""
        with self._changed:
            self._forget_ended()
            return not self._queue and not self._started

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread once its queue is empty, or gives up waiting for that."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _forget_ended(self) -> None:
        while self._started and self._started[0].ended():
            self._started.popleft()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                operation = self._queue[0]
                before, self._started = self._started, deque()
            for earlier in before:
                earlier.settle()
            operation.run()
            with self._changed:
                self._queue.popleft()
            del operation, before  # an idle thread keeps no tensor alive


class DeviceOperation:
    """An operation on CUDA tensors: queued on the device, with an event behind it."""

    error: Exception | None = None

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._event = torch.cuda.Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def settle(self) -> None:
        self._event.synchronize()

    def ended(self) -> bool:
        return self._event.query()


class DeviceStream:
    """A stream for the tensors of one CUDA device, over a backend whose `Work.wait` makes the
    current CUDA stream wait (NCCL). Another backend works too, but then `submit` blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last: DeviceOperation | None = None

    def submit(self, name: str, body: Body, *, tensors: Sequence[torch.Tensor], lone: bool) -> Any:
        """Queues `body` behind the caller's current stream and all that this stream has."""
        operation = DeviceOperation(name, self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for works in body:
                for work in works:
                    work.wait()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        operation.record(self._stream)
        self._last = operation
        return operation

    def idle(self) -> bool:
        """True if the device has run all that was submitted."""
        return self._last is None or self._last.ended()

    def close(self) -> None:
        """Blocks the host until the device has run all that was submitted."""
        if self._last is not None:
            self._last.settle()
