"""A cell that has begun: kept after each launch, so that a run that is stopped goes on there.

The file stands beside the records until the cell has ended. It is gone on with only where nothing
has changed that a number depends on: repeats of one trial are one sample.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.results.records import FabricFacts, Result, SetAside, typed
from common.results.records.trust import Note

SCHEMA = 1
_SAME = (
    *("cpu", "cores", "cpus", "core_limit", "gpus", "kernel", "sysctl", "python", "packages"),
    *("comm_core", "commit", "diff", "environment"),
)
"""Of `machine_card`: what must not have changed."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a trial of the cell has so far; see `cell.Turn`."""

    started: str
    duration_s: float
    positions: list[int] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    at_2k: list[Result] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    facts: FabricFacts
    """Of the fabric when it was kept."""


@dataclass(frozen=True, kw_only=True)
class Underway:
    """A cell that has begun.

    Attributes:
        run: that has begun it; its records have this one.
        machine: of that run.
        standing: by hash of the trial, of those that have not ended.
    """

    schema: int = SCHEMA
    run: str
    machine: dict[str, Any]
    standing: dict[str, Standing] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes it, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Underway | None:
        """What `save` wrote; None where nothing has begun, or another version has written it."""
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return typed(cls, values) if values.get("schema") == SCHEMA else None

    def changed(self, machine: Mapping[str, Any]) -> list[str]:
        """What is another now, so that the cell must begin again.

        Args:
            machine: as it is now (`machine_card`).
        """
        # As it was read: JSON knows no tuples.
        now = json.loads(json.dumps(machine))
        return [key for key in _SAME if now.get(key) != self.machine.get(key)]


def path_of(folder: Path, seed: int) -> Path:
    """Where a cell of the sweep in `folder` is kept; `seed` is that of its order."""
    return folder / f"underway-{seed:08x}.json"
