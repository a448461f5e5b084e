"""State of a cell that has begun, saved after each launch, so that an interrupted run can continue.

The file lies beside the records until the cell has ended. A later run continues only if nothing has
changed that a number depends on, because all repeats of a trial form one sample.
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
"""Fields of `machine_card` that must not have changed."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Results of a running trial so far; see `turn.Turn`."""

    started: str
    duration_s: float
    positions: list[int] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    at_2k: list[Result] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    facts: FabricFacts
    """Facts of the fabric at that time."""


@dataclass(frozen=True, kw_only=True)
class Underway:
    """Cell that has begun.

    Attributes:
        run: run that began it; its records name this run.
        machine: machine card of that run.
        standing: results of the trials that have not ended, by hash.
    """

    schema: int = SCHEMA
    run: str
    machine: dict[str, Any]
    standing: dict[str, Standing] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the file completely or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Underway | None:
        """Reads what `save` wrote; None if there is no file, or one of another version."""
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return typed(cls, values) if values.get("schema") == SCHEMA else None

    def changed(self, machine: Mapping[str, Any]) -> list[str]:
        """Returns the changed fields of the machine card, after which the cell must begin again.

        Args:
            machine: the current machine card.
        """
        # The saved card was read from JSON, which has no tuples.
        now = json.loads(json.dumps(machine))
        return [key for key in _SAME if now.get(key) != self.machine.get(key)]


def path_of(folder: Path, seed: int) -> Path:
    """Returns the file of a cell of the sweep in `folder`; `seed` is that of its rounds."""
    return folder / f"underway-{seed:08x}.json"
