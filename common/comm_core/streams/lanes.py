"""Lanes of process groups, handles of operations, and a base class that has both."""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..job import backends_of, copy_of
from .collectives import Body, Channel, check_pair, check_tensor, plain
from .operations import DeviceStream, HostStream, Operation, Stream

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("comm_core")

EXIT_TIMEOUT_S = 5.0
"""Longest wait for each stream's operations when the process exits without `destroy`."""

# Backends that run the collectives of a group one after another, in the order of the calls. Gloo
# runs two at a time.
_ORDERED = frozenset({"comm_core"})

_EACH = 1 << 40  # handles per communicator: different communicators never use the same handle
_serials = itertools.count()

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
            del lane.channel


class Lane:
    """Process group with one stream for each device whose tensors use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.backends = backends_of(group)
        ordered = self.backends.get("cpu") in _ORDERED
        self.host = HostStream(ordered)
        self.devices: dict[torch.device, DeviceStream] = {}
        self.channel = Channel(group, dist.get_world_size(group), ordered)
        _open_lanes.add(self)

    def stream(self, device: torch.device) -> Stream:
        """Returns the stream for tensors on `device`."""
        if device.type == "cpu":
            return self.host
        if device not in self.devices:
            self.devices[device] = DeviceStream(device)
        return self.devices[device]

    def idle(self) -> bool:
        """Returns True if nothing is queued or in flight."""
        return all(stream.idle() for stream in self._streams())

    def close(self) -> None:
        """Ends the streams, then destroys the process group."""
        for stream in self._streams():
            stream.close()
        try:
            dist.destroy_process_group(self.channel.group)
        except (ValueError, AssertionError):
            log.debug("torch.distributed has already destroyed this process group")

    def _streams(self) -> list[Stream]:
        return [self.host, *self.devices.values()]


class Handles:
    """Operations by handle. Successful operations are forgotten; errors are kept. Thread-safe.

    No thread waits for an operation under the lock: it may end only after a call of another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._first = next(_serials) * _EACH
        self._next = self._first
        self._pending: dict[int, tuple[Operation, ...]] = {}
        self._failed: dict[int, RuntimeError] = {}
        self._unreported: set[int] = set()

    def new(self, *operations: Operation) -> int:
        """Returns a new handle for `operations`."""
        with self._lock:
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
        with self._lock:
            if handle in self._failed:
                self._unreported.discard(handle)
                raise self._failed[handle]

    def done(self, handle: int) -> bool:
        """Returns True once all operations of `handle` have succeeded or failed; never blocks."""
        self._check(handle)
        return all(operation.ended() for operation in self._pending.get(handle, ()))

    def wait_all(self) -> None:
        """Waits for all operations; raises the first error that has not been raised yet."""
        for handle, operations in self._under_way():
            for operation in operations:
                operation.wait()
                self._note_error(handle, operation)
        self._forget_ended()
        if errors := self.take_unreported():
            raise errors[0]

    def settle_all(self) -> None:
        """Blocks the host until all operations have ended; raises nothing."""
        for _, operations in self._under_way():
            for operation in operations:
                operation.settle()
        self._forget_ended()

    def take_unreported(self) -> list[RuntimeError]:
        """Returns the errors that were not raised yet, oldest first, and marks them reported."""
        with self._lock:
            errors = [self._failed[handle] for handle in sorted(self._unreported)]
            self._unreported.clear()
            return errors

    def _under_way(self) -> list[tuple[int, tuple[Operation, ...]]]:
        with self._lock:
            return list(self._pending.items())

    def _check(self, handle: int) -> None:
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise TypeError(f"a handle must be an int, got {handle!r}")
        if not self._first <= handle < self._next:
            raise ValueError(f"unknown handle {handle}: this communicator never returned it")

    def _forget_ended(self) -> None:
        # Stops at the first operation that still runs: most operations end oldest first.
        with self._lock:
            while self._pending:
                handle, operations = next(iter(self._pending.items()))
                if not all(operation.ended() for operation in operations):
                    return
                for operation in operations:
                    operation.settle()  # does not block here; it collects the error
                    self._note_error(handle, operation)
                del self._pending[handle]

    def _note_error(self, handle: int, operation: Operation) -> None:
        with self._lock:
            if operation.error is not None and handle not in self._failed:
                failed = RuntimeError(f"{operation.name} failed: {operation.error}")
                failed.__cause__ = operation.error
                self._failed[handle] = failed
                self._unreported.add(handle)


class Streams:
    """`nstreams` lanes that take operations in turn; see `comm_core.Communicator`."""

    def __init__(
        self,
        nstreams: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if not isinstance(nstreams, int) or isinstance(nstreams, bool):
            raise TypeError(f"nstreams must be an int, got {nstreams!r}")
        if nstreams < 1:
            raise ValueError(f"a Communicator needs at least 1 stream, got nstreams={nstreams}")
        self.nstreams = nstreams
        self._group = group
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._handles = Handles()
        self._lanes: list[Lane] = []
        self._open()

    def _open(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call comm_core.init() first")
        group = self._group or dist.distributed_c10d._get_default_group()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} of the job is not in the given group")
        self._lanes = [Lane(copy_of(group, self._timeout)) for _ in range(self.nstreams)]
        self._turn = 0
        self._pair_turns: dict[int, int] = {}
        if self._lanes[0].backends.get("cuda") == "nccl" and torch.cuda.is_available():
            # All ranks of a group must take part in NCCL's first call; only two do in a sendrecv.
            for lane in self._lanes:
                dist.barrier(lane.channel.group, device_ids=[torch.cuda.current_device()])

    def destroy(self) -> None:
        """Waits for the operations in flight and releases the process groups. Idempotent.

        Errors that no `syncStream` or `synchronize` has raised are logged as warnings.
        """
        if not self._lanes:
            return
        self._handles.settle_all()
        for error in self._handles.take_unreported():
            log.warning("an operation that was never waited for failed: %s", error)
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()

    def reload(self) -> None:
        """Destroys the process groups and creates new ones. A collective call."""
        self.destroy()
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

    def sync_stream(self, handle: int) -> None:
        """Waits for the operation of `handle`. May be called any number of times.

        Raises:
            TypeError: `handle` is not an int.
            ValueError: this communicator never returned `handle`.
            RuntimeError: the operation failed.
        """
        self._check_open()
        self._handles.wait(handle)

    def done(self, handle: int) -> bool:
        """Returns True once the operation of `handle` has ended; never blocks.

        Raises:
            TypeError, ValueError: as in `sync_stream`.
        """
        self._check_open()
        return self._handles.done(handle)

    def synchronize(self) -> None:
        """Waits for every operation so far.

        Raises:
            RuntimeError: an operation failed and its error has not been raised yet; the first such.
        """
        self._check_open()
        self._handles.wait_all()

    def barrier(self) -> None:
        """Returns once every rank has called it and this rank's operations so far have ended.

        Blocks the host, on CUDA too.
        """
        self.synchronize()
        self._handles.settle_all()  # on CUDA, `synchronize` does not block the host
        on_host = "cpu" in self._lanes[0].backends
        device_ids = None if on_host else [torch.cuda.current_device()]
        dist.barrier(self._lanes[0].channel.group, device_ids=device_ids)

    def num_free_streams(self) -> int:
        """Returns the number of streams with nothing queued or in flight."""
        self._check_open()
        return sum(lane.idle() for lane in self._lanes)

    def _checked(self, name: str, tensor: torch.Tensor, written: bool = True) -> torch.Tensor:
        self._check_open()
        return check_tensor(name, tensor, self._lanes[0].backends, written)

    def _checked_pair(
        self, name: str, send: torch.Tensor, recv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        send, recv = self._checked(name, send, written=False), self._checked(name, recv)
        check_pair(name, send, recv)
        return send, recv

    def _check_open(self) -> None:
        if not self._lanes:
            raise RuntimeError("this Communicator has been destroyed: call reload() to reopen it")

    def _next_lane(self) -> Lane:
        self._check_open()
        lane = self._lanes[self._turn % self.nstreams]
        self._turn += 1
        return lane

    def _in_turn(
        self, name: str, body: Callable[..., Body], *arguments: object, lone: bool = True
    ) -> int:
        lane = self._next_lane()
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        lone = lone and all(plain(tensor) for tensor in tensors)
        stream = lane.stream(tensors[0].device)
        return self._handles.new(
            stream.submit(name, body(lane.channel, *arguments), tensors=tensors, lone=lone)
        )

    def _must_wait(self, tensor: torch.Tensor) -> bool:
        return self._lanes[0].channel.must_wait(tensor)
