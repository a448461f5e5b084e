"""Operations on CPU or CUDA tensors, and streams that run them one after another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from .collectives import Body, Waited


class Operation(Protocol):
    """One call in flight."""

    name: str
    error: Exception | None
    """Cause of the failure; None while the operation runs and after a success."""

    def wait(self) -> None:
        """Makes the caller (CUDA: its current stream) wait for the result; never raises `error`."""

    def settle(self) -> None:
        """Blocks the host until the operation has ended; never raises `error`."""

    def ended(self) -> bool:
        """Returns True once the operation has succeeded or failed; never blocks."""


class Stream(Protocol):
    """Queue of operations on one device."""

    def submit(
        self, name: str, body: Body, *, tensors: Sequence[torch.Tensor], lone: bool
    ) -> Operation:
        """Queues `body`, which uses `tensors`.

        Raises the errors that the backend raises at once, e.g. for an unsupported dtype.

        Args:
            lone: `body` is a single collective with no work after it.
        """

    def idle(self) -> bool:
        """Returns True if nothing is queued or in flight."""

    def close(self) -> None:
        """Blocks the host until everything submitted has ended."""


class HostOperation:
    """Operation on CPU tensors, run by a stream's thread or started directly by the caller."""

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self.error: Exception | None = None
        self._body: Body | None = body
        self._works: Sequence[Waited] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread_runs_it = False

    def start(self) -> None:
        """Runs the body up to its only yield, in the caller's thread."""
        self._works = self._advance() or []

    def leave_to_thread(self) -> None:
        """Declares that a thread will call `run`. Call this before the thread can see it."""
        self._thread_runs_it = True

    def run(self) -> None:
        """Runs the whole body. The stream's thread calls this."""
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
        with self._lock:  # several threads may wait for one operation, but only one for its works
            if not self._ended.is_set():
                self._await(self._works)
                self._finish()

    def ended(self) -> bool:
        if self._ended.is_set():
            return True
        return not self._thread_runs_it and all(work.is_completed() for work in self._works)

    def _advance(self) -> Sequence[Waited] | None:
        assert self._body is not None
        with torch.no_grad():
            return next(self._body, None)

    def _await(self, works: Sequence[Waited]) -> None:
        # Waits for all of them even after a failure: the others may still use temporary tensors.
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


class HostStream:
    """Stream for CPU tensors.

    Args:
        ordered: the backend itself runs the collectives of a process group one after another.
            Single collectives then start without waiting for earlier ones.
    """

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._changed = threading.Condition()
        self._started: deque[HostOperation] = deque()
        self._queue: deque[HostOperation] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(
        self, name: str, body: Body, *, tensors: Sequence[torch.Tensor], lone: bool
    ) -> HostOperation:
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
        with self._changed:
            self._forget_ended()
            return not self._queue and not self._started

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread once its queue is empty; waits at most `timeout_s` for that."""
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
                earlier, self._started = self._started, deque()
            for started in earlier:
                started.settle()
            operation.run()
            with self._changed:
                self._queue.popleft()
            del operation, earlier  # an idle thread must not keep tensors alive


class DeviceOperation:
    """Operation on CUDA tensors, queued on the device and followed by an event."""

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
        ended: bool = self._event.query()
        return ended


class DeviceStream:
    """Stream for the tensors of one CUDA device.

    Expects a backend whose `Work.wait` makes the current CUDA stream wait (NCCL). With another
    backend `submit` blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last: DeviceOperation | None = None

    def submit(
        self, name: str, body: Body, *, tensors: Sequence[torch.Tensor], lone: bool
    ) -> DeviceOperation:
        """Queues `body` after the work of the caller's current CUDA stream and of this stream."""
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
        return self._last is None or self._last.ended()

    def close(self) -> None:
        if self._last is not None:
            self._last.settle()
