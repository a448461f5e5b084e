"""Timeline of events, as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import sys
from operator import itemgetter
from pathlib import Path

MICROSECONDS = 1e6


class Timeline:
    """Spans on named rows of one rank.

    Args:
        path: path of the file. `-rankR` is inserted before its suffix: each rank has its own file.
    """

    def __init__(self, path: str, rank: int) -> None:
        given = Path(path)
        self.path = given.with_name(f"{given.stem}-rank{rank}{given.suffix or '.json'}")
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._events: list[tuple[float, dict[str, object]]] = []
        """Start and description of each span."""

    def add(self, row: str, name: str, began_s: float, ended_s: float, **facts: object) -> None:
        """Adds a span from `began_s` to `ended_s`, in seconds on the communicator's clock."""
        span = {
            "name": name,
            "ph": "X",
            "pid": self._rank,
            "tid": self._rows.setdefault(row, len(self._rows)),
            "ts": began_s * MICROSECONDS,
            "dur": max(0.0, ended_s - began_s) * MICROSECONDS,
            "args": facts,
        }
        self._events.append((began_s, span))

    def add_transfers(self) -> None:
        """Adds the comm core's transfers so far, if it is in use; its clock is `monotonic`."""
        core = sys.modules.get("comm_core")
        for event in core.events() if core is not None else ():
            self.add(
                f"comm_core {event['group']}",
                event["operation"],
                event["started_s"],
                event["finished_s"],
                nbytes=event["nbytes"],
                dtype=str(event["dtype"]),
            )

    def write(self, path: Path | None = None) -> None:
        """Writes all spans so far; replaces the file of an earlier call.

        Args:
            path: path of the file, in place of the one from the constructor.
        """

        def named(what: str, name: str, **place: int) -> dict[str, object]:
            return {"name": what, "ph": "M", "pid": self._rank, **place, "args": {"name": name}}

        names = [named("thread_name", row, tid=tid) for row, tid in self._rows.items()]
        names.append(named("process_name", f"rank {self._rank}"))
        path = path or self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        events = [span for _, span in sorted(self._events, key=itemgetter(0))]
        path.write_text(
            json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}), encoding="utf-8"
        )
