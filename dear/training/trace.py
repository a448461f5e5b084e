"""What happened when, as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MICROSECONDS = 1e6


class Timeline:
    """Spans on named rows of one rank.

    Args:
        path: of the file; `-rankR` is put before its suffix, for every rank writes one.
    """

    def __init__(self, path: str, rank: int) -> None:
        given = Path(path)
        self.path = given.with_name(f"{given.stem}-rank{rank}{given.suffix or '.json'}")
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []

    def add(self, row: str, name: str, began_s: float, ended_s: float, **facts: Any) -> None:
        """One span; times in seconds on the communicator's clock."""
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": self._rank,
                "tid": self._rows.setdefault(row, len(self._rows)),
                "ts": began_s * MICROSECONDS,
                "dur": max(0.0, ended_s - began_s) * MICROSECONDS,
                "args": facts,
            }
        )

    def write(self) -> None:
        """Writes all spans so far, replacing what was written before."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": tid, "args": {"name": row}}
            for row, tid in self._rows.items()
        ]
        names.append(
            {
                "name": "process_name",
                "ph": "M",
                "pid": self._rank,
                "args": {"name": f"rank {self._rank}"},
            }
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        events = sorted(self._events, key=lambda event: event["ts"])
        self.path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
