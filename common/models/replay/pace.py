"""Pace of replayed compute: waits that replace the compute of a device, such as a GPU.

The host is the CPU of this machine. Times are real (wall) seconds unless called emulated; an
emulated second lasts `time_scale` real seconds.
"""

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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from common.models.replay.threads import host_s as thread_host_s
from dear.lazy import torch

if TYPE_CHECKING:
    from common.models.replay.plan import Unit, Work

# A shorter wait is not worth a system call; it is added to the next wait.
SHORTEST_SLEEP_S = 40e-6
# Period in which the slowdown file is read again, in wall seconds.
SLOWDOWN_PERIOD_S = 0.01
# Clocks and wake-ups are inexact. A shorter gap does not mean that the thread was blocked.
BLOCKED_S = 200e-6
# Number of past starts of communication that are remembered.
_REMEMBERED = 64
_PR_SET_TIMERSLACK = 29
T = TypeVar("T")


class BackwardPass(Protocol):
    """Backward pass of replayed compute; see `common.models.replay.lead.Pass`."""

    def next(self, seconds: float) -> None: ...

    def left(self, nbytes: int) -> None: ...

    def end(self) -> None: ...


class Leads(Protocol):
    """Starts of backward passes; see `common.models.replay.lead.Lead`."""

    def begin(self, pace: Pace) -> BackwardPass: ...


class Pace:
    """Device that computes while its host runs ahead: waits for the emulated seconds of each layer.

    Deadlines are absolute. So late wake-ups, and the time of the host between two layers, do not
    add up: the next waits are shorter. The same is true of work that the host does in place of the
    device, such as the optimizer's update (`work`): the device is busy for the time that it would
    need, and later waits are shorter by the rest. But work begins when its inputs exist: if the
    thread was blocked in between, for example by communication, the work takes its full time from
    then on.

    A late thread also starts communication late. If the network was idle (as before DeAR's
    all-gather after the update), all messages queued behind are late, too. The device is then
    treated as if it had received them earlier by this delay (`lulls_s`). A delay that has not
    delayed communication is forgotten at the next wait.

    Args:
        time_scale: real seconds per emulated second.
        slowdown: file with one little-endian double, the factor by which compute takes longer. It
            may appear, change and disappear at any time; without the file, the factor is 1.
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
        """Seconds for which the thread had run or waited for a core at the end of the last call."""
        self.awaited_s: Callable[[], float] | None = None
        """Function that returns when the last collective ended that this thread has waited for
        (`time.perf_counter`). None: the backend does not report it; then each time in which the
        thread is blocked counts as such a wait."""
        self.held_up_s: Callable[[], float] = lambda: -math.inf
        """Function that returns when the last wait ended that `awaited_s` does not cover
        (`time.perf_counter`): waits in Horovod's library, and waits for a neighbour to catch up."""
        self.lulls_s: Callable[[float], Sequence[tuple[float, float]]] = lambda _: ()
        """Function from a time to the periods (start, end) without communication of this process
        that ended later, in order (`time.perf_counter`). It returns nothing if the backend does not
        report them; communication then counts as started in time."""
        self.part: Work | Unit | None = None
        """Part of the replayed model that computes next; None before the first."""
        self.queued_s = 0.0
        """Seconds of work that the device has got so far."""
        self.idle_s = 0.0
        """Seconds for which the device has waited for communication so far."""

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
                raise ValueError(f"{path}: the factor must be positive and finite, got {factor}")
            self._factor = factor
        return self._factor

    def clock(self) -> float:
        """Returns when the device will have finished its work; the current time if it has none.

        The difference of two readings is the time for which a device would have worked or waited.
        """
        now = time.perf_counter()
        if self._thread != threading.get_ident():
            return max(self._deadline, now)
        # The result is stored, so that a later reading never returns an earlier time.
        host_s = thread_host_s()
        self._deadline = self._free(now, host_s)
        self._leave(now, host_s)
        return self._deadline

    def settle(self) -> None:
        """Lets host and device continue at the same time, as after a barrier.

        The delay of the host is forgotten. No communication may be in progress.
        """
        now = time.perf_counter()
        self._deadline = max(self._deadline, now)
        self._starts.clear()
        self._noted = now
        self._leave(now, thread_host_s())

    def late_s(self) -> float:
        """Returns by how many seconds the host is now behind its device."""
        return max(0.0, time.perf_counter() - self.clock())

    def wait(self, seconds: float) -> None:
        """Waits for `seconds` emulated seconds of compute."""
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
        """Starts compute of `seconds` emulated seconds; the host may work until `finish`.

        Args:
            lead_s: seconds by which `finish` returns earlier than the device ends.
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

    def backward_pass(self, lead: Leads) -> BackwardPass:
        """Starts a backward pass, whose stretches end earlier on the host by `lead`."""
        return lead.begin(self)

    def rest(self) -> float:
        """Returns the seconds until `finish` would return."""
        return self._deadline - self._lead - time.perf_counter()

    def finish(self) -> None:
        """Waits for the end of the compute that `begin` has started."""
        rest = self.rest()
        if rest >= SHORTEST_SLEEP_S:
            time.sleep(rest)
        self._leave(time.perf_counter(), thread_host_s())

    def _leave(self, now: float, host_s: float) -> None:
        self._left, self.host_s = now, host_s
        self._late_s = max(0.0, now - self._deadline)

    def _free(self, now: float, host_s: float) -> float:
        """Returns when the device can begin its next work.

        Before, it must have finished its previous work, and must have received the data for which
        the thread was blocked since the last call. Compute of the thread after such a wait is not
        part of the wait.
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
        """Returns the results of `awaited_s` and `held_up_s`; minus infinity if not new."""
        before = self._known
        self._known = (-math.inf if self.awaited_s is None else self.awaited_s(), self.held_up_s())
        awaited, held_up = (
            after if after > seen else -math.inf
            for seen, after in zip(before, self._known, strict=True)
        )
        return awaited, held_up

    def _note_starts(self, computed_s: float, awaited: float) -> None:
        """Records how much later than on a device communication has started since the last call.

        On a device, it would have started when the work was done, but not before the previous
        communication ended. A thread that delays a message for other reasons, such as the end of a
        cycle, does not compute meanwhile. A message can be too early by at most the lead.

        Args:
            computed_s: seconds for which the thread has computed since the last call.
            awaited: end of the communication for which the thread has waited since then.
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
        """Returns by how much later a message that ended at `ended` is than on a device."""
        earlier = (start.behind_s for start in reversed(self._starts) if start.at < ended)
        return next(earlier, 0.0)


@dataclass(frozen=True, kw_only=True)
class _Start:
    at: float
    behind_s: float


_current = Pace(1.0, None)


def set_pace(pace: Pace) -> None:
    """Makes `pace` the pace of all replayed models of this process."""
    global _current
    _current = pace


def current() -> Pace:
    """Returns the pace of this process; by default, time scale 1."""
    return _current


def paced(kind: type[torch.optim.Optimizer], memory_bytes_per_s: float) -> type[Any]:
    """Returns a subclass of `kind` whose update takes the device's time; see `Pace.work`.

    This time is the memory traffic of one fused kernel / the device's bandwidth. The kernel reads
    gradients, and reads and writes parameters and the optimizer's state.

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
    """Returns the bytes that an update reads and writes on this rank."""
    total = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            total += 2 * _nbytes(param) + _nbytes(param.grad)
            for value in optimizer.state.get(param, {}).values():
                if torch.is_tensor(value) and value.dim():
                    total += 2 * _nbytes(value)
    return total


def _nbytes(tensor: Any) -> int:
    local = getattr(tensor, "to_local", None)  # only the local part of a sharded tensor counts
    return tensor.nbytes if local is None else local().nbytes
