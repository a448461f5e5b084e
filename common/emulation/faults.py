"""Faults of an experiment: a fault is injected at its time, undone, and reported."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.emulation.cluster import EmulatedCluster
from common.emulation.config import Fault
from common.emulation.links.profile import network_profile
from dear.errors import UserError

Event = dict[str, Any]
"""Event with the keys at_s, what, host, rank, for_s, ok, message; see `FaultInjector.stop`."""

MEASURING = "measuring"  # phase name of common.harness.worker; faults are timed from its start
_POLL_S = 0.02
_SLOWDOWN = struct.Struct("<d")


def check_fault(
    fault: Fault, *, hosts: int, ranks_per_host: int, world_size: int, replayed: bool
) -> None:
    """Raises `UserError` for a fault that cannot happen to a trial of this shape. `replayed` is
    True if the model's compute is replayed; only such a model can be made faster."""
    used = min(hosts, -(-world_size // ranks_per_host))
    if fault.rank is not None and not 0 <= fault.rank < world_size:
        raise UserError(f"faults: there is no rank {fault.rank}; allowed: 0 to {world_size - 1}")
    if fault.host is not None and not 0 <= fault.host < used:
        raise UserError(f"faults: host {fault.host} runs no rank; allowed: 0 to {used - 1}")
    if fault.kind == "slow_host" and not replayed and (fault.factor or 1) < 1:
        raise UserError(
            f"faults: slow_host: a model that computes cannot be made faster, got factor "
            f"{fault.factor:g}; use at least 1, or a replayed model MODEL@DEVICE"
        )


def blame(outcome_error: Mapping[str, Any] | None, events: Sequence[Event]) -> str | None:
    """Returns the first successful event of `FaultInjector.stop` that may explain an outcome's
    `error`, such as `host h2: link cut at 1.0 s for good`; None if the trial did not fail.
    """
    if outcome_error is None or outcome_error["kind"] not in ("failed", "timeout"):
        return None
    event = next((event for event in events if event["ok"]), None)
    if event is None:
        return None
    lasting = "" if event["for_s"] is None else f" for {event['for_s']:g} s"
    if event["for_s"] is None and event["rank"] is None:
        lasting = " for good"
    return f"host {event['host']}: {event['what']} at {event['at_s']:.1f} s{lasting}"


@dataclass(frozen=True)
class _Change:
    """Action of a fault with a description, and the action that undoes it, if there is any."""

    what: str
    do: Callable[[], None]
    undone: str = ""
    undo: Callable[[], None] | None = None


def wait_until_measuring(phase: Callable[[int], tuple[int, str]], ended: threading.Event) -> bool:
    """Waits for rank 0 to begin measuring; False if the trial `ended` first. `phase` returns PID
    and phase of a rank, as `phase_of` does."""
    while phase(0)[1] != MEASURING:
        if ended.wait(_POLL_S):
            return False
    return True


def phase_of(folder: Path, repeat: int, rank: int) -> tuple[int, str]:
    """Returns PID and phase of a rank; (0, "") before the rank has reported any. `folder` is the
    trial's, where the ranks write their phases."""
    try:
        text = (folder / f"phase-{repeat}-rank{rank}").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0, ""
    pid, _, name = text.partition(" ")
    return (int(pid) if pid.isdigit() else 0), name


class FaultInjector:
    """Fault in one repeat of one trial: `start()` before the ranks start, `stop()` after they end.
    The fault must have passed `check_fault`. `folder` is the trial's, where the ranks write their
    phases. `time_scale` is in real seconds per emulated second."""

    def __init__(
        self,
        fault: Fault,
        cluster: EmulatedCluster,
        folder: Path,
        repeat: int,
        time_scale: float,
        ranks_per_host: int,
    ) -> None:
        self._fault, self._cluster = fault, cluster
        self._folder, self._time_scale = folder, time_scale
        self._phase = partial(phase_of, folder, repeat)
        self._host = fault.host if fault.rank is None else fault.rank // ranks_per_host
        self._change = self._make_change()
        self._events: list[Event] = []
        self._began = 0.0
        self._in_effect = False
        self._trial_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault", daemon=True)

    def start(self) -> None:
        """Starts the thread that waits until rank 0 measures, and then injects the fault."""
        if self._fault.kind == "slow_host":
            self._set_slowdown(1.0)  # the ranks map this file when they start
        self._thread.start()

    def stop(self) -> list[Event]:
        """Undoes the fault if it is still in effect. Returns the events in order. `at_s` is in
        emulated seconds since the measurement began, or None if it never began. `ok` is False if
        the event failed or came too late; `message` gives the reason. Raises `RuntimeError` if the
        fault could not be undone, so the cluster is no longer usable."""
        self._trial_ended.set()
        self._thread.join()
        if self._in_effect and self._change.undo is not None:
            try:
                self._change.undo()
            except Exception as error:
                raise RuntimeError(
                    f"cannot undo {self._change.what!r} on h{self._host}: {error}"
                ) from error
            self._in_effect = False
            if self._fault.for_s is not None:
                self._note(self._change.undone, self._now(), message="with the end of the trial")
        return self._events

    def _run(self) -> None:
        fault, scale = self._fault, self._time_scale
        if not wait_until_measuring(self._phase, self._trial_ended):
            self._note(
                self._change.what, None, ok=False, message="the trial ended before it measured"
            )
            return
        self._began = time.monotonic()
        if self._trial_ended.wait(fault.at_s * scale) or self._phase(0)[1] != MEASURING:
            late = (
                f"planned at {fault.at_s:g} s, but the measurement had ended; set `at_s` to less, "
                "or measure for longer (`measure.min_iter_s`, `learn.budget_s`)"
            )
            self._note(self._change.what, self._now(), ok=False, message=late)
            return
        self._in_effect = True  # even a failed attempt may have changed something
        if not self._attempt(self._change.what, self._change.do):
            return
        if fault.for_s is None or self._change.undo is None:
            return
        if not self._trial_ended.wait(fault.for_s * scale):
            # A change that cannot be undone now remains in effect; `stop` tries again.
            self._in_effect = not self._attempt(self._change.undone, self._change.undo)

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        at_s = self._now()
        try:
            action()
        except Exception as error:  # every kind of failure belongs in the record
            self._note(what, at_s, ok=False, message=f"{type(error).__name__}: {error}")
            return False
        self._note(what, at_s)
        return True

    def _note(
        self, what: str, at_s: float | None, *, ok: bool = True, message: str | None = None
    ) -> None:
        source = {"host": f"h{self._host}", "rank": self._fault.rank, "for_s": self._fault.for_s}
        self._events.append({"at_s": at_s, "what": what, **source, "ok": ok, "message": message})

    def _now(self) -> float:
        return round((time.monotonic() - self._began) / self._time_scale, 4)

    def _make_change(self) -> _Change:
        fault, cluster, host = self._fault, self._cluster, self._host
        if fault.kind == "kill_rank":
            return _Change(f"rank {fault.rank} killed", self._kill)
        if fault.kind == "slow_host":
            slow, restore = (partial(self._set_slowdown, by) for by in (fault.factor, 1.0))
            what = f"compute {fault.factor:g} times slower"
            return _Change(what, slow, "compute back at its speed", restore)
        change = partial(cluster.set_link, host, False)
        what, undone = "link cut", "link restored"
        if fault.kind == "link_rate":
            change = partial(cluster.set_rate, host, network_profile(fault.rate).gbps)
            back = partial(cluster.set_rate, host, cluster.profile.gbps)
            return _Change(f"link changed to {fault.rate}", change, "link back at its rate", back)
        if fault.kind == "link_delay":
            change = partial(cluster.links.set_delay, host, fault.delay_us)
            what, undone = f"latency changed to {fault.delay_us:g} us", "latency back"
        return _Change(what, change, undone, cluster.restore)

    def _set_slowdown(self, factor: float) -> None:
        # Written in place, because the ranks have mapped the file.
        path = self._folder / f"pace-h{self._host}"
        path.touch()
        with path.open("r+b", buffering=0) as file:
            file.write(_SLOWDOWN.pack(factor))

    def _kill(self) -> None:
        rank = self._fault.rank
        pid, _ = self._phase(rank)
        if pid <= 1:
            raise RuntimeError(f"rank {rank} has not reported its process id")
        os.kill(pid, signal.SIGKILL)
