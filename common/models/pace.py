"""How fast replayed compute runs: waiting instead of computing, without drifting."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dear.errors import UserError
from dear.lazy import torch

# A shorter wait is not worth a system call; the next one makes up for it.
SHORTEST_SLEEP_S = 40e-6
# How often the slowdown is read again, in wall seconds.
SLOWDOWN_PERIOD_S = 0.01
# Clocks and wake-ups are off by some of these per layer: less is no block.
BLOCKED_S = 200e-6
# So many begins of communication are known; who waits for what began before has waited long enough.
_KEPT = 64
_PR_SET_TIMERSLACK = 29
T = TypeVar("T")


class Pace:
    """Waits for emulated seconds of compute, one layer after the other.

    Plays a device that computes while its host runs ahead. Deadlines are absolute: late wake-ups
    and the host's own work between two layers do not add up, the next layers end by as much
    earlier. So does what this CPU does in the device's place, as the optimizer's update (`work`):
    the device is held for as long as it would need, and what the CPU takes beyond that is made up
    for by the layers that follow. But work begins when its inputs are there: if the thread had to
    wait for something in between, as it does for communication, it takes its full time from then.

    Communication that begins when nothing else is on the wire begins late by what the thread is
    late by (DeAR's all-gather behind its update), and what queues up behind it is as late. So it is
    known to the device by as much earlier than it came (`lulls_s`). What the thread was late by
    without delaying communication is lost with the next waiting: it hid behind that.

    Args:
        time_scale: wall seconds per emulated second.
        slowdown: file with one little-endian double by which compute takes longer; it may come,
            change and go at any time. Without a file compute takes its own time.
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
        self._begun: deque[_Begun] = deque(maxlen=_KEPT)
        self._noted = -math.inf
        self.host_s = 0.0
        """Seconds that the thread had run, or waited for a core, when it was last here."""
        self.awaited_s: Callable[[], float] | None = None
        """Tells when the last collective ended that this thread has waited for, by
        `time.perf_counter`; None: the backend does not tell, so any block may be such a wait."""
        self.held_up_s: Callable[[], float] = lambda: -math.inf
        """Tells when the last wait for communication ended whose own end nobody tells, by the same
        clock: that of a library of its own (Horovod), or for a neighbour to catch up."""
        self.lulls_s: Callable[[float], Sequence[tuple[float, float]]] = lambda _: ()
        """Tells since when and until when this process communicated nothing, by the same clock, of
        all such times that ended after the one given, in order; where nobody knows, communication
        is taken to have begun in time."""
        self.queued_s = 0.0
        """Seconds of this machine that the device has been given to do so far."""
        self.idle_s = 0.0
        """Seconds of this machine for which the device has waited for communication so far."""

    def slowdown(self, now: float) -> float:
        """By how much compute takes longer now, at `now` of `time.perf_counter`."""
        path = self._slowdown
        if path is None or now < self._read_again:
            return self._factor
        self._read_again = now + SLOWDOWN_PERIOD_S
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._factor = 1.0
            return self._factor
        if len(data) >= 8:  # else it is being written
            factor = struct.unpack("<d", data[:8])[0]
            if not 0 < factor < math.inf:
                raise ValueError(f"{path}: not a positive finite factor, but {factor}")
            self._factor = factor
        return self._factor

    def clock(self) -> float:
        """When the device is done with what it has been given; where nothing is paced, now.

        What lies between two readings is what a device would have needed, and its waiting.
        """
        now = time.perf_counter()
        if self._thread != threading.get_ident():
            return max(self._deadline, now)
        # Kept, or a later reading could find out better, and be earlier.
        host_s = _host_s()
        self._deadline = self._free(now, host_s)
        self._leave(now, host_s)
        return self._deadline

    def settle(self) -> None:
        """Host and device go on together from now on, as from a barrier: what the host was behind
        by is forgotten, or it could be lost at any later moment. Nothing is to be under way."""
        now = time.perf_counter()
        self._deadline = max(self._deadline, now)
        self._begun.clear()
        self._noted = now
        self._leave(now, _host_s())

    def late_s(self) -> float:
        """By how much the host is behind its device now, in seconds of this machine."""
        return max(0.0, time.perf_counter() - self.clock())

    def wait(self, seconds: float) -> None:
        """Returns when `seconds` emulated seconds of compute would have ended."""
        self.begin(seconds)
        self.finish()

    def work(self, compute: Callable[[], T], seconds: Callable[[], float]) -> T:
        """`compute()`, for which the device needs `seconds()`, asked afterwards, of its own."""
        self.begin(0.0)
        result = compute()
        self.hold(seconds())
        self.finish()
        return result

    def begin(self, seconds: float, lead_s: float = 0.0) -> None:
        """The compute begins; what is done until `finish` counts as part of it.

        Args:
            lead_s: `finish` returns by so many seconds of this machine earlier than the device.
        """
        now, host_s = time.perf_counter(), _host_s()
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            self._deadline = max(self._deadline, now)
            # Lets the kernel wake this thread in time; by default it may take 50 us more.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
        else:
            self._deadline = self._free(now, host_s)
        self.host_s = host_s
        self._lead = lead_s
        self.hold(seconds)

    def hold(self, seconds: float) -> None:
        """The device has so many emulated seconds more to do."""
        wall_s = seconds * self.time_scale * self.slowdown(time.perf_counter())
        self._deadline += wall_s
        self.queued_s += wall_s

    def rest(self) -> float:
        """Wall seconds until `finish` would return."""
        return self._deadline - self._lead - time.perf_counter()

    def finish(self) -> None:
        """Returns when the compute that has begun would have ended."""
        rest = self.rest()
        if rest >= SHORTEST_SLEEP_S:
            time.sleep(rest)
        self._leave(time.perf_counter(), _host_s())

    def _leave(self, now: float, host_s: float) -> None:
        self._left, self.host_s = now, host_s
        self._late_s = max(0.0, now - self._deadline)

    def _free(self, now: float, host_s: float) -> float:
        """When the device can begin with what comes next: once it is done with what it was given,
        and has what the thread has waited for since it was last here, if it was blocked.

        What the thread has computed after waiting is no part of the waiting.
        """
        computed_s = host_s - self.host_s
        awaited, held_up = self._news()
        self._note_begins(computed_s, awaited)
        free = max(self._deadline, awaited - self._behind_s(awaited), held_up)
        block_s = now - max(self._left, awaited, held_up) - computed_s
        if block_s > BLOCKED_S and self.awaited_s is None:
            free = max(free, now)
        self.idle_s += free - self._deadline
        if block_s > BLOCKED_S and self.awaited_s is not None:
            free = max(free, min(now, free + block_s))
        return free

    def _news(self) -> tuple[float, float]:
        """When waits ended of which nothing was known before: of `awaited_s`, and of `held_up_s`;
        minus infinity without one."""
        before = self._known
        self._known = (-math.inf if self.awaited_s is None else self.awaited_s(), self.held_up_s())
        awaited, held_up = (
            after if after > seen else -math.inf
            for seen, after in zip(before, self._known, strict=True)
        )
        return awaited, held_up

    def _note_begins(self, computed_s: float, awaited: float) -> None:
        """Finds out by how much what has communicated since the last visit began behind the device.

        It would have begun when the device was done, but not before what was on the wire had ended.
        Of several that the thread has waited for in turn each begins behind the one before.
        Who launches it later for reasons of his own, as at the end of a cycle, does not compute
        meanwhile; and a lead is the most by which it can be too early.

        Args:
            computed_s: by the thread, since it was last here.
            awaited: when what the thread has waited for since then had ended.
        """
        for idle_since, began in self.lulls_s(self._noted):
            before_s = self._behind_s(idle_since)
            behind_s = began - max(self._deadline, idle_since - before_s)
            has_waited = self._left < min(awaited, idle_since)
            late_s = max(self._late_s, before_s) if has_waited else self._late_s
            behind_s = max(-self._lead, min(behind_s, late_s + computed_s))
            self._begun.append(_Begun(at=began, behind_s=behind_s))
            self._noted = began

    def _behind_s(self, ended: float) -> float:
        """By how much what ended then was later than it would have been for the device."""
        return next((one.behind_s for one in reversed(self._begun) if one.at < ended), 0.0)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """Communication that began when there was none."""

    at: float
    behind_s: float


_SCHEDSTAT = Path("/proc/thread-self/schedstat")


_own = threading.local()


def _host_s() -> float:
    """Seconds that this thread has run, and has waited for a core where the kernel tells."""
    return time.thread_time() + (_waited_s() or 0.0)


def _waited_s() -> float | None:
    """Seconds that this thread has waited for a core; None where the kernel does not tell."""
    if getattr(_own, "process", None) != os.getpid():  # else it may be the file of a parent
        _own.process = os.getpid()
        try:
            _own.file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            _own.file = None
    return None if _own.file is None else int(os.pread(_own.file, 64, 0).split()[1]) / 1e9


_current = Pace(1.0, None)


def set_pace(pace: Pace) -> None:
    """Makes `pace` that of all replayed models of this process."""
    global _current
    _current = pace


def current() -> Pace:
    """The process's pace; by default real time."""
    return _current


def paced(kind: type[torch.optim.Optimizer], memory_bytes_per_s: float) -> type[Any]:
    """`kind`, but what this CPU needs for an update beyond the device is made up for afterwards.

    The device needs the time to read and write once what an update touches: parameters (read and
    written), gradients (read), and the optimizer's state by element (read and written), as one
    fused kernel would. See `Pace.work`.

    Args:
        kind: one of torch's that update each element by itself.
        memory_bytes_per_s: of the device.
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
    """What an update of the parameters that have gradients reads and writes, on this rank."""
    total = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = optimizer.state.get(param, {}).values()
            kept = sum(_nbytes(one) for one in state if torch.is_tensor(one) and one.dim())
            total += 2 * _nbytes(param) + _nbytes(param.grad) + 2 * kept
    return total


def _nbytes(tensor: Any) -> int:
    local = getattr(tensor, "to_local", None)  # a sharded tensor counts what is here
    return tensor.nbytes if local is None else local().nbytes


class Brake:
    """`with brake:` around a piece of real compute; on leaving, waits until that took long enough.

    Long enough is a number of times what this thread ran: the present factor of `pace`, times its
    time scale (or `crowd` where that is 1). So a rank computes as fast as if the core were its own,
    only slower by that number: what it has waited for a core, since the piece before, counts
    towards it. Whether other ranks compute at the same time is the algorithm's doing, and their
    cores are not this host's. Time blocked, as in waiting for communication, is not the host's
    compute and counts nowhere.

    Args:
        pace: knows the present factor; None: no wait ever.
        crowd: how much longer than it runs a rank's compute takes where no host is slowed: the
            threads of all ranks per core of this machine, at least 1.

    Raises:
        UserError: on entering, if this kernel does not tell threads' times.
    """

    def __init__(self, pace: Pace | None, crowd: float = 1.0) -> None:
        self._pace = pace
        self._crowd = max(1.0, crowd)
        self._times = 1.0
        self._inside = False
        self._ran_s = self._slept_s = 0.0
        self._waited_s: float | None = None
        self.absorbed_s = 0.0
        """Seconds for which this thread has waited for a core, without being late by them."""

    @property
    def scaled(self) -> bool:
        """Whether there is a time scale by which all compute is slowed."""
        return self._pace is not None and self._pace.time_scale > 1

    def __enter__(self) -> None:
        if self._pace is None:
            return
        self._times = self._pace.slowdown(time.perf_counter())
        if self._pace.time_scale > 1:
            self._times *= self._pace.time_scale
        elif self._times > 1:
            self._times *= self._crowd
        if self._times <= 1:
            self._waited_s = None
            return
        self._inside = True
        self._ran_s, waited_s = _ran_and_waited_s()
        self._waited_s = waited_s if self._waited_s is None else self._waited_s
        self._slept_s = 0.0

    def catch_up(self, *_: object) -> None:
        """Within a piece: waits until what has been computed of it so far took long enough."""
        if self._inside:
            self._wait()

    def __exit__(self, *_: object) -> None:
        if not self._inside:
            return
        ran_s, waited_s = self._wait()
        self.absorbed_s += min(waited_s, (self._times - 1) * ran_s)
        # What it waits for a core when it wakes is the next piece's.
        self._waited_s += waited_s
        self._inside = False

    def _wait(self) -> tuple[float, float]:
        """What the piece has run and waited so far."""
        ran_s, waited_s = _ran_and_waited_s()
        ran_s, waited_s = ran_s - self._ran_s, waited_s - self._waited_s
        rest_s = self._times * ran_s - (ran_s + waited_s + self._slept_s)
        if rest_s >= SHORTEST_SLEEP_S:
            time.sleep(rest_s)
            self._slept_s += rest_s
        return ran_s, waited_s


def _ran_and_waited_s() -> tuple[float, float]:
    """Seconds that this thread has run, and has waited for a core.

    The kernel's file tells what it has run up to the last tick only; its clock tells all.
    """
    waited_s = _waited_s()
    if waited_s is None:
        raise UserError(
            f"this kernel has no {_SCHEDSTAT}, by which models that compute for real are slowed "
            "(time_scale, or a slow_host); use a model MODEL@DEVICE"
        )
    return time.thread_time(), waited_s
