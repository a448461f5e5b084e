"""State of a cell (trials that are compared) that has begun but not ended.

It is saved after each launch in a file beside the records, so that a later run can continue. A
trial continues only if everything that its results depend on is unchanged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.results.records import FabricFacts, Result, SetAside, typed
from common.results.records.trust import Note
from common.results.store import write_whole

SCHEMA = 3


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Results of a running trial so far; see `turn.Turn`."""

    run: str = ""
    """Name of the run that began the trial, as in its record."""
    uses: dict[str, Any] = field(default_factory=dict)
    """Facts on which the results depend (`used.used`)."""
    started: str
    duration_s: float
    positions: list[int] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    at_2k: list[Result] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    facts: FabricFacts
    """Facts about the cluster on which the results were measured."""


@dataclass(frozen=True, kw_only=True)
class Underway:
    """Cell that has begun.

    Attributes:
        standing: results of the trials that have not ended, by hash of the trial. A run of some of
            the cell's trials leaves those of the others as they are.
    """

    schema: int = SCHEMA
    standing: dict[str, Standing] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the file atomically; removes it if nothing is left of the cell."""
        if self.standing:
            write_whole(path, json.dumps(dataclasses.asdict(self)))
        else:
            path.unlink(missing_ok=True)

    def without(self, hashes: Collection[str]) -> Underway:
        """Returns the cell without these trials."""
        left = {key: value for key, value in self.standing.items() if key not in hashes}
        return Underway(standing=left)

    @classmethod
    def load(cls, path: Path) -> Underway:
        """Reads the file; nothing stands if there is none, or if it has another version."""
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        return typed(cls, values) if values["schema"] == SCHEMA else cls(schema=0)


def begun(folder: Path) -> dict[str, str]:
    """Returns the trials of a sweep that have begun and not ended: their runs by their hashes."""
    cells = map(Underway.load, folder.glob("underway-*.json"))
    return {key: standing.run for cell in cells for key, standing in cell.standing.items()}


def path_of(folder: Path, seed: int) -> Path:
    """Returns the path of a cell's file; `seed` is the seed of the cell's rounds."""
    return folder / f"underway-{seed:08x}.json"
