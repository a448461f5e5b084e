"""Says what a job that met a fault should have done and has not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from common.launch.job import Outcome
from common.launch.per_host import STOP_S
from tests.faults.drawing import Fault
from tests.faults.jobs import Seen

REPORT_S = 5.0
"""Longest time in which a survivor reports a dead or mismatched peer."""
LATE_S = 10.0
"""Longest time by which a job outlives its deadline."""
_STATUS = {"out of memory": "oom", "endless": "timeout", "killed launcher": "failed"}
_CAUSES = {"killed": "was killed by signal 9", "raises": "Drawn: the drawn fault"}


def misses(fault: Fault, seen: Seen) -> Iterator[str]:
    """Yields a sentence for each bar that was missed."""
    fate = fault.how.fate
    if seen.elapsed_s > seen.timeout_s + LATE_S:
        yield f"took {seen.elapsed_s:.0f} s with a limit of {seen.timeout_s:.0f} s"
    if seen.after_s is None and fate != "endless":
        error = seen.outcome and seen.outcome.error
        yield f"the fault did not happen: {error and error['message']}"
        return
    if fault.kind in ("killed driver", "Ctrl-C twice"):
        if seen.after_s > (STOP_S + LATE_S if fault.kind == "Ctrl-C twice" else LATE_S):
            yield f"what ran the launcher ended after {seen.after_s:.0f} s"
        return
    yield from _of_the_outcome(fault, seen)
    if fate in ("dead", "silent", "disagrees"):
        yield from _of_the_survivors(fault, seen)


def slowest_report_s(fault: Fault, seen: Seen) -> float | None:
    """Seconds until the last survivor that reported had done so."""
    others = [after_s for rank, (after_s, _) in seen.reports.items() if rank != fault.victim]
    return max(others, default=None)


def goes_on(fault: Fault) -> bool:
    """True for a job whose ranks promise to go on without this one, see docs/emulation.md.

    The first step makes the memory that others write to.
    """
    ends = ("killed", "stopped", "cut link", "half-open")
    return fault.program == "asyncddp" and fault.step > 0 and fault.kind in ends


def _of_the_outcome(fault: Fault, seen: Seen) -> Iterator[str]:
    outcome, fate = seen.outcome, fault.how.fate
    message = (outcome.error or {}).get("message", "")
    status = _STATUS.get(fault.kind, "ok" if fate == "unharmed" else "failed")
    if goes_on(fault):
        status, lost = _without_it(fault, outcome)
        if status == "ok" and not lost:
            yield f"the result does not name the lost rank: {outcome.result}"
    if outcome.status != status:
        yield f"ended as {outcome.status}, expected {status}: {message}"
        return
    named = f"rank {fault.victim}" in message or (outcome.error or {}).get("rank") == fault.victim
    if status == "failed" and (fate == "dead" or goes_on(fault)) and not named:
        yield f"the job's error does not name rank {fault.victim}: {message}"
    if _CAUSES.get(fault.kind, "") not in message and status != "ok":
        yield f"the job's error does not name the cause: {message}"
    if fault.kind == "killed launcher" and seen.after_s > LATE_S:
        yield f"ended {seen.after_s:.0f} s after its launcher was killed"


def _without_it(fault: Fault, outcome: Outcome) -> tuple[str, bool]:
    """Returns the status of a job that goes on, and whether the result names who was lost.

    Rank 0 writes the result. A rank behind a cut link goes on, too, unless it needs the store.
    """
    result: Mapping[str, Any] = outcome.result or {}
    if fault.kind in ("killed", "stopped"):
        status = "ok" if fault.victim != 0 else "failed"
        return status, result.get("lost_ranks") == [fault.victim]
    expected = {fault.victim} if fault.victim else set(range(1, fault.world))
    lost = set(result.get("lost_peers", ()))
    may_fail = fault.launcher != "local" and outcome.status == "failed"
    return "failed" if may_fail else "ok", bool(lost) and lost <= expected


def _of_the_survivors(fault: Fault, seen: Seen) -> Iterator[str]:
    if goes_on(fault) or (seen.may_lose_ranks and fault.how.fate == "dead"):
        return  # they need nothing of each other
    limit_s = REPORT_S
    if fault.how.fate == "silent":
        limit_s += seen.collective_s
    for rank in range(fault.world):
        if rank == fault.victim and fault.how.fate != "disagrees":
            continue
        if rank not in seen.reports:
            # Launchers end the others soon after the first has failed.
            if fault.launcher == "bare" or seen.after_s > limit_s + LATE_S:
                yield f"rank {rank} reported nothing"
            continue
        after_s, text = seen.reports[rank]
        if after_s > limit_s:
            yield f"rank {rank} reported after {after_s:.1f} s: {text}"
        for what, pattern in _named(fault, seen).items():
            if not re.search(pattern, text):
                yield f"rank {rank} does not name {what}: {text}"
    if fault.how.fate == "silent":
        name = f"rank {fault.victim} (host {seen.hosts[fault.victim]}"
        texts = [text for _, text in seen.reports.values()]
        if not texts:  # the launcher ended them, and says which host or rank it has lost
            name = seen.hosts[fault.victim]
            texts = [(seen.outcome.error or {}).get("message", "")]
        if not any(name in text for text in texts):
            yield f"nobody names rank {fault.victim}: {texts}"


def _named(fault: Fault, seen: Seen) -> dict[str, str]:
    """Returns patterns that the text of a report must match: rank, operation, number and so on."""
    if fault.how.fate == "disagrees":
        return {"the disagreement": "disagree", "operations by number": r"\w+ #\d+ \(\w+"}
    who = rf"rank {fault.victim} \(host {re.escape(seen.hosts[fault.victim])}"
    if fault.how.fate == "silent":  # a rank may wait for another one that waits for the victim
        who = r"rank \d+ \(host \S+"
    return {
        "a rank and its host": who,
        "operation, number and tensor": r"barrier #\d+|\w+ #\d+ \([^)]*\d+ bytes|joined the group",
    }
