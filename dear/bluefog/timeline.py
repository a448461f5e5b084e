"""What a process did when, in Chrome's trace format: activities, waits and transfers.

Where the environment variable BLUEFOG_TIMELINE is set, `bf.shutdown()` writes the file of that name
with `<rank>.json` behind it; the comm core adds what it transferred. Times are those of
`time.monotonic()`, in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dear.errors import UserError

VARIABLE = "BLUEFOG_TIMELINE"

_events: list[dict[str, Any]] = []
_open: dict[str, list[tuple[str, float]]] = {}


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """An activity around `tensor_name` begins; they may nest. False if no timeline is written."""
    if VARIABLE not in os.environ:
        return False
    _open.setdefault(tensor_name, []).append((activity_name, time.monotonic()))
    return True


def timeline_end_activity(tensor_name: str) -> bool:
    """The last activity begun around `tensor_name` ends; raises `UserError` if there is none."""
    if VARIABLE not in os.environ:
        return False
    if not _open.get(tensor_name):
        raise UserError(f"no activity of {tensor_name!r} has been started")
    activity, began = _open[tensor_name].pop()
    _note(activity, tensor_name, began, time.monotonic())
    return True


@contextlib.contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """An activity for the length of a `with` block."""
    timeline_start_activity(tensor_name, activity_name)
    try:
        yield
    finally:
        timeline_end_activity(tensor_name)


def noted(operation: str, name: str | None, result: Callable[[], Any]) -> Callable[[], Any]:
    """`result` that appears in the timeline as a wait for `operation`."""
    if VARIABLE not in os.environ:
        return result

    def waiting() -> Any:
        began = time.monotonic()
        try:
            return result()
        finally:
            _note(f"wait {operation}", name or operation, began, time.monotonic())

    return waiting


def write(rank: int) -> None:
    """Writes what there is, if a timeline was asked for, and forgets it."""
    prefix = os.environ.get(VARIABLE)
    if prefix is not None:
        events = _events + [_transfer(event) for event in _transfers()]
        for event in events:
            event["pid"] = rank
        Path(f"{prefix}{rank}.json").write_text(json.dumps({"traceEvents": events}))
    _events.clear()
    _open.clear()


def _note(name: str, row: str, began_s: float, ended_s: float) -> None:
    _events.append(
        {
            "name": name,
            "ph": "X",
            "tid": row,
            "ts": began_s * 1e6,
            "dur": (ended_s - began_s) * 1e6,
        }
    )


def _transfers() -> list[dict[str, Any]]:
    core = sys.modules.get("comm_core")
    return core.events() if core is not None else []


def _transfer(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": event["operation"],
        "ph": "X",
        "tid": f"comm_core {event['group']}",
        "ts": event["started_s"] * 1e6,
        "dur": (event["finished_s"] - event["started_s"]) * 1e6,
        "args": {"nbytes": event["nbytes"], "dtype": str(event["dtype"])},
    }
