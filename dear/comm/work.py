"""Transfers that have started (`Work`), and a communicator's log and counters of them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dear.comm.flight import recorder
from dear.comm.handles import DeviceClock, Noted, WorkTimes
from dear.errors import UserError
from dear.lazy import comm_core, torch

CALLBACK_S = 5.0


class Work:
    """Collective that has started; its tensors may be read or written again after `wait`."""

    noted: Callable[[], None] | None = None
    """Tells the flight recorder that a collective of torch's backends has ended."""
    _times: WorkTimes | None = None
    _recorded: threading.Event | None = None
    _device_times: Callable[[], WorkTimes] | None = None

    def __init__(
        self,
        communicator: Account,
        handle: Any,
        queue: object,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._communicator = communicator
        self._handle = handle
        self.nbytes = tensors[0].nbytes
        """Payload in bytes: the larger of input and output on this rank."""
        if len(tensors) > 1:
            self.nbytes = max(self.nbytes, tensors[1].nbytes)
        device = device_type(tensors[0])
        self.native = device in communicator.native
        self._streamed = device in communicator.streamed
        if communicator.record_times and not self.native:
            self._record(queue, tensors)

    def _record(self, queue: object, tensors: Sequence[torch.Tensor]) -> None:
        communicator, handle = self._communicator, self._handle
        if self._streamed:
            clock = communicator.device_clock(tensors[0].device)
            self._device_times = clock.follow(handle, queue, communicator.clock(), tensors)
            return
        with contextlib.suppress(RuntimeError):  # Gloo's reduce-scatter has no future
            future, recorded = handle.get_future(), threading.Event()
            self._recorded, enqueued = recorded, communicator.clock()
            future.add_done_callback(lambda _: self._finished(queue, enqueued, recorded))

    def wait(self) -> None:
        """Blocks until the result may be used (on CUDA: by the current stream).

        Raises RuntimeError if a peer died, made another call, or exceeded the group's timeout.
        """
        began_s = self._communicator.clock()
        self.join()
        self._communicator.held_up(began_s, reported=self.native)

    def join(self) -> None:
        """Waits, as `wait` does, but counts no exposed communication; for helper threads."""
        self._handle.wait()
        if self.noted is not None:
            self.noted()

    def done(self) -> bool:
        """Returns True once the collective has ended; never blocks."""
        return bool(self._handle.is_completed())

    def on_complete(self, callback: Callable[[], None]) -> None:
        """Calls `callback` from a thread of the backend once the collective has ended.

        Raises:
            UserError: the backend is NCCL, which tells the host only that a collective is queued.
        """
        if self._streamed:
            raise UserError(
                "on_complete: NCCL does not tell the host when a collective ends; call wait(), or "
                "use comm_core or gloo"
            )
        self.future().add_done_callback(lambda _: callback())

    def future(self) -> torch.futures.Future[Any]:
        """Returns a future that completes with the collective, for callbacks that start none."""
        ask = getattr(self._handle, "unordered_future", self._handle.get_future)
        future: torch.futures.Future[Any] = ask()
        return future

    def times(self) -> WorkTimes:
        """Returns the times of a finished collective; raises `UserError` if there are none."""
        if self.native and self._handle.is_completed():
            times: WorkTimes = self._handle.times()
            return times
        if self._device_times is not None and self._handle.is_completed():
            return self._device_times()
        if self._recorded is not None and self._handle.is_completed():
            self._recorded.wait(CALLBACK_S)  # the callback may run shortly after the end
        if self._times is None:
            raise UserError(
                "no times: the collective has not ended, or its communicator was made without "
                "record_times=True"
            )
        return self._times

    def _finished(self, queue: object, enqueued_s: float, recorded: threading.Event) -> None:
        now_s = self._communicator.clock()
        before_s = self._communicator.queue_free_s.get(queue, enqueued_s)
        self._communicator.queue_free_s[queue] = now_s
        self._times = WorkTimes(
            enqueued_s=enqueued_s, started_s=max(enqueued_s, before_s), finished_s=now_s
        )
        recorded.set()


def device_type(tensor: torch.Tensor) -> str:
    """Returns `tensor.device.type`, faster for CPU tensors."""
    return "cpu" if tensor.is_cpu else tensor.device.type


@dataclass
class Log:
    """Events on this rank while `Account.logged` was active."""

    started: list[tuple[str, int, Work | Noted]] = field(default_factory=list)
    """Name of the call, channel number in its (sub-)communicator, and the work."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each wait for communication, in seconds on `Communicator.clock`."""


class Account:
    """Log of one rank's transfers, and counter of the time that this rank waits for them.

    Args:
        native: types of devices whose tensors the backend `comm_core` moves.
        streamed: types of devices whose transfers end on a stream of the device (NCCL), so that the
            host does not see the end.
        record_times: keep `Work.times()`; costs a callback per collective.
    """

    _log: Log | None = None
    """The active log, or None."""

    def __init__(
        self, *, native: frozenset[str], streamed: frozenset[str], record_times: bool
    ) -> None:
        self.native, self.streamed = native, streamed
        """Types of devices whose tensors `comm_core` moves (with priorities, and with times on
        `clock` on Linux); types of devices whose tensors NCCL moves."""
        self.record_times = record_times
        self.clock, self.pause = time.perf_counter, time.sleep
        """Clock in seconds, and sleep; all code that measures or waits uses these two."""
        self.queue_free_s: dict[object, float] = {}
        self._device_clocks: dict[torch.device, DeviceClock] = {}
        self.blocked_s = 0.0
        """Exposed communication: seconds for which `Work.wait` blocked its callers."""
        self.held_up_until_s = -math.inf
        """Time on `clock` at which the last wait for an operation that reports no end was over."""
        self.bytes_sent = 0
        """Payload bytes that this rank has given to collectives so far (their input tensors)."""
        self._counting = threading.Lock()
        """Lock of `bytes_sent`, since threads of algorithms and backends start collectives, too."""

    @contextlib.contextmanager
    def logged(self) -> Iterator[Log]:
        """Logs this rank's events within the context, and records `Work.times()` meanwhile."""
        before, self._log = self.record_times, Log()
        self.record_times = True
        try:
            yield self._log
        finally:
            self.record_times, self._log = before, None

    def note(self, name: str, nbytes: int) -> Callable[[], None]:
        """Logs the start of a transfer from outside; returns a function that logs its end.

        The caller calls that function after the wait, which may be later than the true end.
        """
        if self._log is None:
            return lambda: None
        noted = Noted(nbytes, self.clock())
        self._log.started.append((name, 0, noted))

        def ended() -> None:
            noted.finished_s = noted.finished_s or self.clock()

        return ended

    def held_up(self, since_s: float, *, reported: bool = True) -> None:
        """Counts the time from `since_s` (on `clock`) until now as a wait for communication.

        Args:
            reported: True for an operation of the backend, which may report when it ended. Without
                such a report, the end of the wait stands for the end of the operation.
        """
        now_s = self.clock()
        self.blocked_s += now_s - since_s
        if not (reported and self.native):
            self.held_up_until_s = now_s
        if self._log is not None:
            self._log.waits.append((since_s, now_s))

    def note_all_awaited(self) -> None:
        """Notes that torch's own code, which reports no waits, has waited for all transfers."""
        if self.native:
            comm_core.note_all_awaited()
        else:
            self.held_up_until_s = self.clock()

    def device_clock(self, device: torch.device) -> DeviceClock:
        """Returns the clock of a GPU's streams; creates it on the first call."""
        if device not in self._device_clocks:
            self._device_clocks[device] = DeviceClock(self.clock, device)
        return self._device_clocks[device]

    def _work(
        self, name: str, handle: Any, channel: int, queue: object, *tensors: torch.Tensor
    ) -> Work:
        """Returns the work of a call that was just started.

        Args:
            queue: process group of the call; calls of one group run one after another.
            tensors: the output, if it is separate, and the input.
        """
        with self._counting:
            self.bytes_sent += tensors[-1].nbytes
        work = Work(self, handle, queue, tensors)
        if not work.native and (flight := recorder.current()) is not None:
            work.noted = flight.note(name, queue, tensors)
        if self._log is not None:
            self._log.started.append((name, channel, work))
        return work
