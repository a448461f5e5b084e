"""What a stream of a `Communicator` is: operations that run one after another in the background.

An operation is a generator: it starts collectives, yields their works, and goes on once they have
ended; its frame is what keeps temporary tensors alive. A stream runs its operations in the order of
the calls and never starts one before its predecessor has ended, so an operation may use what an
earlier one of its stream produced. On CPUs a thread does that (only where it is needed: a lone
collective is started by the caller); on CUDA a `torch.cuda.Stream` does, and the host never waits.
A lane is a process group with the streams that feed it, a handle a number that stands for
operations.
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
"""Longest that a process which ends without `destroy` waits for each stream's operations."""

# Backends that run the collectives of a group one after another, in the order of the calls. Gloo
# does not: it runs two at a time.
_ORDERED = frozenset({"comm_core"})

_EACH = 1 << 40  # handles of different communicators never coincide
_serials = itertools.count()


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


_open_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    # For a script that ends without `destroy`: a thread that comes back into an interpreter that
    # is gone aborts the process, be it ours, from a collective, or one of Gloo's, which gives back
    # the tensors of an operation a little after it has ended. Gloo joins its threads when the
    # process group goes; one that still waits for somebody would not come back.
    while _open_lanes:
        lane = _open_lanes.pop()
        lane.host.close(EXIT_TIMEOUT_S)
        if set(lane.backends.values()) == {"gloo"} and lane.idle():
            lane.close()
            lane.channel = None


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


class Lane:
    """One process group, and a stream for each device whose tensors use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.backends = backends_of(group)
        ordered = self.backends.get("cpu") in _ORDERED
        self.host = HostStream(ordered)
        self.devices: dict[torch.device, DeviceStream] = {}
        self.channel: Channel | None = Channel(group, dist.get_world_size(group), ordered)
        """None once the interpreter ends."""
        _open_lanes.add(self)

    def stream(self, device: torch.device) -> HostStream | DeviceStream:
        """The stream for tensors of `device`."""
        if device.type == "cpu":
            return self.host
        if device not in self.devices:
            self.devices[device] = DeviceStream(device)
        return self.devices[device]

    def idle(self) -> bool:
        """True if nothing is queued or under way."""
        return all(stream.idle() for stream in (self.host, *self.devices.values()))

    def close(self) -> None:
        """Ends the streams, then lets go of the process group."""
        for stream in (self.host, *self.devices.values()):
            stream.close()
        try:
            dist.destroy_process_group(self.channel.group)
        except (ValueError, AssertionError):
            log.debug("torch.distributed has already let go of this process group")


class Handles:
    """Operations by handle; those that ended well are forgotten, the errors of others are kept."""

    def __init__(self) -> None:
        self._first = next(_serials) * _EACH
        self._next = self._first
        self._pending: dict[int, tuple[Operation, ...]] = {}
        self._failed: dict[int, RuntimeError] = {}
        self._unreported: set[int] = set()

    def new(self, *operations: Operation) -> int:
        """A handle for `operations`."""
        self._forget_ended()
        handle = self._next
        self._next += 1
        self._pending[handle] = operations
        return handle

    def wait(self, handle: int) -> None:
        """Waits as `Operation.wait` does; raises as `Communicator.sync_stream` says."""
        self._check(handle)
        # What is not pending any more has ended.
        for operation in self._pending.get(handle, ()):
            operation.wait()
            self._note_error(handle, operation)
        if handle in self._failed:
            self._unreported.discard(handle)
            raise self._failed[handle]

    def done(self, handle: int) -> bool:
        """True once all operations of `handle` have ended, well or badly; never blocks."""
        self._check(handle)
        return all(operation.ended() for operation in self._pending.get(handle, ()))

    def wait_all(self) -> None:
        """Waits for all; raises the first error that has not been raised yet."""
        for handle, operations in self._pending.items():
            for operation in operations:
                operation.wait()
                self._note_error(handle, operation)
        self._forget_ended()
        if errors := self.take_unreported():
            raise errors[0]

    def settle_all(self) -> None:
        """Blocks the host until all have ended; raises nothing."""
        for operations in self._pending.values():
            for operation in operations:
                operation.settle()
        self._forget_ended()

    def take_unreported(self) -> list[RuntimeError]:
        """Errors that have not been raised, oldest first; they count as reported from now on."""
        errors = [self._failed[handle] for handle in sorted(self._unreported)]
        self._unreported.clear()
        return errors

    def _check(self, handle: int) -> None:
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise TypeError(f"a handle is an int, got {handle!r}")
        if not self._first <= handle < self._next:
            raise ValueError(f"unknown handle {handle}: this communicator never returned it")

    def _forget_ended(self) -> None:
        # Oldest first, and no further than the first that runs: most end in that order.
        while self._pending:
            handle, operations = next(iter(self._pending.items()))
            if not all(operation.ended() for operation in operations):
                return
            for operation in operations:
                operation.settle()  # does not block any more, but finds the error
                self._note_error(handle, operation)
            del self._pending[handle]

    def _note_error(self, handle: int, operation: Operation) -> None:
        if operation.error is not None and handle not in self._failed:
            failed = RuntimeError(f"{operation.name} failed: {operation.error}")
            failed.__cause__ = operation.error
            self._failed[handle] = failed
            self._unreported.add(handle)
