"""Streams of a `Communicator`: operations that run one after another in the background.

The body of an operation is a generator. It starts collectives, yields their works and is resumed
once they have ended; its frame keeps temporary tensors alive. A stream runs its operations in the
order of the calls and starts none before the previous one has ended, so an operation may use the
results of earlier ones on its stream. For CPU tensors a thread runs the operations (only if needed:
the caller itself starts a single collective). For CUDA tensors a `torch.cuda.Stream` does, and the
host never waits. A lane is a process group with the streams that use it. A handle is a number that
identifies one or more operations.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .collectives import Body, Channel
from .job import backends_of

log = logging.getLogger("comm_core")

EXIT_TIMEOUT_S = 5.0
"""Longest wait for each stream's operations when the process exits without `destroy`."""

# Backends that run the collectives of a group one after another, in the order of the calls. Gloo
# runs two at a time.
_ORDERED = frozenset({"comm_core"})

_EACH = 1 << 40  # handles per communicator: different communicators never use the same handle
_serials = itertools.count()


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
        """True once the operation has succeeded or failed; never blocks."""


class HostOperation:
    """Operation on CPU tensors, run by a stream's thread or started directly by the caller."""

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

    def _advance(self) -> list[Any] | None:
        assert self._body is not None
        with torch.no_grad():
            return next(self._body, None)

    def _await(self, works: Sequence[Any]) -> None:
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


_open_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    # For a script that ends without `destroy`. A thread that returns to Python after the end of the
    # interpreter aborts the process. Such a thread may be a stream's, or one of Gloo's, which frees
    # the tensors of an operation shortly after its end. Gloo joins its threads when the process
    # group is destroyed; that would hang if an operation still waits for a peer.
    while _open_lanes:
        lane = _open_lanes.pop()
        lane.host.close(EXIT_TIMEOUT_S)
        if set(lane.backends.values()) == {"gloo"} and lane.idle():
            lane.close()
            lane.channel = None


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

    def submit(self, name: str, body: Body, *, tensors: Sequence[torch.Tensor], lone: bool) -> Any:
        """Queues `body`. `lone` means that it is a single collective with no work after it.

        Raises the errors that the backend raises at once, e.g. for an unsupported dtype.
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
        """True if nothing is queued or in flight."""
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
        return self._event.query()


class DeviceStream:
    """Stream for the tensors of one CUDA device.

    Expects a backend whose `Work.wait` makes the current CUDA stream wait (NCCL). With another
    backend `submit` blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last: DeviceOperation | None = None

    def submit(self, name: str, body: Body, *, tensors: Sequence[torch.Tensor], lone: bool) -> Any:
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
        """True if the device has finished everything submitted."""
        return self._last is None or self._last.ended()

    def close(self) -> None:
        """Blocks the host until the device has finished everything submitted."""
        if self._last is not None:
            self._last.settle()


class Lane:
    """Process group with one stream for each device whose tensors use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.backends = backends_of(group)
        ordered = self.backends.get("cpu") in _ORDERED
        self.host = HostStream(ordered)
        self.devices: dict[torch.device, DeviceStream] = {}
        self.channel: Channel | None = Channel(group, dist.get_world_size(group), ordered)
        """None after the interpreter's exit handler has run."""
        _open_lanes.add(self)

    def stream(self, device: torch.device) -> HostStream | DeviceStream:
        """Returns the stream for tensors on `device`."""
        if device.type == "cpu":
            return self.host
        if device not in self.devices:
            self.devices[device] = DeviceStream(device)
        return self.devices[device]

    def idle(self) -> bool:
        """True if nothing is queued or in flight."""
        return all(stream.idle() for stream in (self.host, *self.devices.values()))

    def close(self) -> None:
        """Ends the streams, then destroys the process group."""
        for stream in (self.host, *self.devices.values()):
            stream.close()
        try:
            dist.destroy_process_group(self.channel.group)
        except (ValueError, AssertionError):
            log.debug("torch.distributed has already destroyed this process group")


class Handles:
    """Operations by handle. Successful operations are forgotten; errors are kept."""

    def __init__(self) -> None:
        self._first = next(_serials) * _EACH
        self._next = self._first
        self._pending: dict[int, tuple[Operation, ...]] = {}
        self._failed: dict[int, RuntimeError] = {}
        self._unreported: set[int] = set()

    def new(self, *operations: Operation) -> int:
        """Returns a new handle for `operations`."""
        self._forget_ended()
        handle = self._next
        self._next += 1
        self._pending[handle] = operations
        return handle

    def wait(self, handle: int) -> None:
        """Waits like `Operation.wait`; raises the errors of `Communicator.sync_stream`."""
        self._check(handle)
        # A handle that is not pending has ended.
        for operation in self._pending.get(handle, ()):
            operation.wait()
            self._note_error(handle, operation)
        if handle in self._failed:
            self._unreported.discard(handle)
            raise self._failed[handle]

    def done(self, handle: int) -> bool:
        """True once all operations of `handle` have succeeded or failed; never blocks."""
        self._check(handle)
        return all(operation.ended() for operation in self._pending.get(handle, ()))

    def wait_all(self) -> None:
        """Waits for all operations; raises the first error that has not been raised yet."""
        for handle, operations in self._pending.items():
            for operation in operations:
                operation.wait()
                self._note_error(handle, operation)
        self._forget_ended()
        if errors := self.take_unreported():
            raise errors[0]

    def settle_all(self) -> None:
        """Blocks the host until all operations have ended; raises nothing."""
        for operations in self._pending.values():
            for operation in operations:
                operation.settle()
        self._forget_ended()

    def take_unreported(self) -> list[RuntimeError]:
        """Returns the errors that were not raised yet, oldest first, and marks them reported."""
        errors = [self._failed[handle] for handle in sorted(self._unreported)]
        self._unreported.clear()
        return errors

    def _check(self, handle: int) -> None:
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise TypeError(f"a handle must be an int, got {handle!r}")
        if not self._first <= handle < self._next:
            raise ValueError(f"unknown handle {handle}: this communicator never returned it")

    def _forget_ended(self) -> None:
        # Stops at the first operation that still runs: most operations end oldest first.
        while self._pending:
            handle, operations = next(iter(self._pending.items()))
            if not all(operation.ended() for operation in operations):
                return
            for operation in operations:
                operation.settle()  # does not block here; it collects the error
                self._note_error(handle, operation)
            del self._pending[handle]

    def _note_error(self, handle: int, operation: Operation) -> None:
        if operation.error is not None and handle not in self._failed:
            failed = RuntimeError(f"{operation.name} failed: {operation.error}")
            failed.__cause__ = operation.error
            self._failed[handle] = failed
            self._unreported.add(handle)
