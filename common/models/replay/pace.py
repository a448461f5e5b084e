"""Pace of replayed compute: waits in place of computing, without drift."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.models.replay.threads import host_s as thread_host_s
from dear.lazy import torch

# A shorter wait is not worth a system call; the next wait makes up for it.
SHORTEST_SLEEP_S = 40e-6
# Period in which the slowdown file is read again, in wall seconds.
SLOWDOWN_PERIOD_S = 0.01
# Clocks and wake-ups are inexact by some of these per layer, so a shorter gap is not a block.
BLOCKED_S = 200e-6
# Number of past starts of communication that are remembered.
_REMEMBERED = 64
_PR_SET_TIMERSLACK = 29
T = TypeVar("T")


class Pace:
    """Waits for emulated seconds of compute, one layer after the other.

    Emulates a device that computes while its host runs ahead. Deadlines are absolute: late wake-ups
    and the host's own work between two layers do not add up, because the next layers end earlier by
    as much. The same holds for work that this CPU does in place of the device, such as the
    optimizer's update (`work`): the device is busy for as long as it would need, and the layers
    that follow make up for the rest of the CPU's time. But work begins when its inputs exist: if
    the thread had to wait for something in between, such as communication, the work takes its full
    time from then.

    If communication starts on an idle network, for example DeAR's all-gather after its update, then
    a late thread starts it late, and all messages queued behind it are as late. The device is
    therefore considered to have received them earlier, by the same amount (`lulls_s`). Lateness
    that did not delay communication is forgotten at the next wait, which hid it.

    Args:
        time_scale: wall seconds per emulated second.
        slowdown: file with one little-endian double, the factor by which compute takes longer. It
            may appear, change and disappear at any time; without it the factor is 1.
    """

    def __init__(self, time_scale: float, slowdown: Path | None) -> None:
        self.time_scale = time_scale
        self._slowdown = slowdown
        self._factor = 1.0
        self._read_again = 0.0
        self._deadline = 0.0
        self._lead = 0.0
        self._thread = 0
        self._left = 0.0
        self._late_s = 0.0
        self._known = -math.inf, -math.inf
        self._starts: deque[_Start] = deque(maxlen=_REMEMBERED)
        self._noted = -math.inf
        self.host_s = 0.0
        """Seconds that the thread had run or waited for a core at the end of the last call."""
        self.awaited_s: Callable[[], float] | None = None
        """Returns when the last collective ended that this thread has waited for, by
        `time.perf_counter`. None: the backend does not report it, so that any block may be such a
        wait."""
        self.held_up_s: Callable[[], float] = lambda: -math.inf
        """Returns when the last wait ended for communication whose own end is not reported, by the
        same clock: waits of Horovod, which has its own library, and waits for a neighbour to catch
        up."""
        self.lulls_s: Callable[[float], Sequence[tuple[float, float]]] = lambda _: ()
        """Returns start and end of all periods without communication of this process that ended
        after the given time, in order, by the same clock. Empty if the backend does not report
        them; communication then counts as started in time."""
        self.queued_s = 0.0
        """Seconds of this machine that the device has been given to do so far."""
        self.idle_s = 0.0
        """Seconds of this machine for which the device has waited for communication so far."""

    def slowdown(self, now: float) -> float:
        """Returns the factor by which compute takes longer at `now` (`time.perf_counter`)."""
        path = self._slowdown
        if path is None or now < self._read_again:
            return self._factor
        self._read_again = now + SLOWDOWN_PERIOD_S
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._factor = 1.0
            return self._factor
        if len(data) >= 8:  # a shorter file is being written
            factor = struct.unpack("<d", data[:8])[0]
            if not 0 < factor < math.inf:
                raise ValueError(f"{path}: not a positive finite factor, but {factor}")
            self._factor = factor
        return self._factor

    def clock(self) -> float:
        """Returns when the device finishes the work that it has; now, if nothing is paced.

        The difference of two readings is the time that a device would have needed or waited.
        """
        now = time.perf_counter()
        if self._thread != threading.get_ident():
            return max(self._deadline, now)
        # Stored, because a later reading knows more and could otherwise return an earlier time.
        host_s = thread_host_s()
        self._deadline = self._free(now, host_s)
        self._leave(now, host_s)
        return self._deadline

    def settle(self) -> None:
        """Lets host and device continue together from now on, as after a barrier.

        The host's lateness is forgotten; it could otherwise be lost at any later moment. No
        communication may be in progress.
        """
        now = time.perf_counter()
        self._deadline = max(self._deadline, now)
        self._starts.clear()
        self._noted = now
        self._leave(now, thread_host_s())

    def late_s(self) -> float:
        """Returns by how much the host is behind its device now, in seconds of this machine."""
        return max(0.0, time.perf_counter() - self.clock())

    def wait(self, seconds: float) -> None:
        """Returns when `seconds` emulated seconds of compute would have ended."""
        self.begin(seconds)
        self.finish()

    def work(self, compute: Callable[[], T], seconds: Callable[[], float]) -> T:
        """Runs `compute()`, for which the device needs `seconds()` emulated seconds.

        Args:
            seconds: called after `compute`.
        """
        self.begin(0.0)
        result = compute()
        self.hold(seconds())
        self.finish()
        return result

    def begin(self, seconds: float, lead_s: float = 0.0) -> None:
        """Starts compute of `seconds` emulated seconds; work until `finish` counts as part of it.

        Args:
            lead_s: seconds of this machine by which `finish` returns earlier than the device.
        """
        now, host_s = time.perf_counter(), thread_host_s()
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            self._deadline = max(self._deadline, now)
            # Makes the kernel wake this thread on time; by default it may be 50 us late.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
        else:
            self._deadline = self._free(now, host_s)
        self.host_s = host_s
        self._lead = lead_s
        self.hold(seconds)

    def hold(self, seconds: float) -> None:
        """Gives the device `seconds` emulated seconds more to do."""
        wall_s = seconds * self.time_scale * self.slowdown(time.perf_counter())
        self._deadline += wall_s
        self.queued_s += wall_s

    def rest(self) -> float:
        """Returns the wall seconds until `finish` would return."""
        return self._deadline - self._lead - time.perf_counter()

    def finish(self) -> None:
        """Returns when the compute that has begun would have ended."""
        rest = self.rest()
        if rest >= SHORTEST_SLEEP_S:
            time.sleep(rest)
        self._leave(time.perf_counter(), thread_host_s())

    def _leave(self, now: float, host_s: float) -> None:
        self._left, self.host_s = now, host_s
        self._late_s = max(0.0, now - self._deadline)

    def _free(self, now: float, host_s: float) -> float:
        """Returns when the device can begin the next work: when it has finished its own, and has
        the data that the thread was blocked for since the last call.

        Compute of the thread after such a wait is not part of the wait.
        """
        computed_s = host_s - self.host_s
        awaited, held_up = self._new_waits()
        self._note_starts(computed_s, awaited)
        free = max(self._deadline, awaited - self._behind_s(awaited), held_up)
        block_s = now - max(self._left, awaited, held_up) - computed_s
        if block_s > BLOCKED_S and self.awaited_s is None:
            free = max(free, now)
        self.idle_s += free - self._deadline
        if block_s > BLOCKED_S and self.awaited_s is not None:
            free = max(free, min(now, free + block_s))
        return free

    def _new_waits(self) -> tuple[float, float]:
        """Returns the ends by `awaited_s` and by `held_up_s`; minus infinity for an end that is
        already known."""
        before = self._known
        self._known = (-math.inf if self.awaited_s is None else self.awaited_s(), self.held_up_s())
        awaited, held_up = (
            after if after > seen else -math.inf
            for seen, after in zip(before, self._known, strict=True)
        )
        return awaited, held_up

    def _note_starts(self, computed_s: float, awaited: float) -> None:
        """Records by how much communication since the last call started later than for the device.

        For the device it would have started when its work was done, but not before the previous
        communication ended. If the thread has waited for several messages in turn, each starts
        later than the one before. A thread that delays a message for other reasons, such as the end
        of a cycle, does not compute meanwhile. A message can be too early by at most the lead.

        Args:
            computed_s: compute of the thread since the last call.
            awaited: end of the communication that the thread has waited for since then.
        """
        for idle_since, began in self.lulls_s(self._noted):
            before_s = self._behind_s(idle_since)
            behind_s = began - max(self._deadline, idle_since - before_s)
            has_waited = self._left < min(awaited, idle_since)
            late_s = max(self._late_s, before_s) if has_waited else self._late_s
            behind_s = max(-self._lead, min(behind_s, late_s + computed_s))
            self._starts.append(_Start(at=began, behind_s=behind_s))
            self._noted = began

    def _behind_s(self, ended: float) -> float:
        """Returns by how much a message that ended then was later than it is for the device."""
        earlier = (start.behind_s for start in reversed(self._starts) if start.at < ended)
        return next(earlier, 0.0)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Start of communication on an idle network."""

    at: float
    behind_s: float


_current = Pace(1.0, None)


def set_pace(pace: Pace) -> None:
    """Makes `pace` the pace of all replayed models of this process."""
    global _current
    _current = pace


def current() -> Pace:
    """Returns the process's pace; by default it is real time."""
    return _current


def paced(kind: type[torch.optim.Optimizer], memory_bytes_per_s: float) -> type[Any]:
    """Returns a subclass of `kind` whose update takes the device's time; see `Pace.work`.

    The device needs the time to read and write once the memory that an update touches, as one fused
    kernel would: parameters (read and written), gradients (read), and the optimizer's state per
    element (read and written).

    Args:
        kind: an optimizer of torch that updates each element independently.
        memory_bytes_per_s: memory bandwidth of the device.
    """

    class Paced(kind):
        element_wise = True

        def step(self, closure: Any = None) -> Any:
            update = super().step
            return current().work(
                lambda: update(closure), lambda: touched_bytes(self) / memory_bytes_per_s
            )

    Paced.__name__ = Paced.__qualname__ = kind.__name__
    return Paced


def touched_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes that an update of the parameters with gradients reads and writes on this
    rank."""
    total = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state.get(param, {}).values()
            kept = sum(_nbytes(value) for value in state if torch.is_tensor(value) and value.dim())
            total += 2 * _nbytes(param) + _nbytes(param.grad) + 2 * kept
    return total


def _nbytes(tensor: Any) -> int:
    local = getattr(tensor, "to_local", None)  # only the local part of a sharded tensor counts
    return tensor.nbytes if local is None else local().nbytes
