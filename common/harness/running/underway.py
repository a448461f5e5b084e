"""State of a cell (trials that are compared) that has begun but not ended.

It is saved after each launch in a file beside the records, so that a later run can continue. A
trial continues only if everything that its results depend on is unchanged.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.results.records import FabricFacts, Result, SetAside, typed
from common.results.records.trust import Note

SCHEMA = 2


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
    """Facts about the cluster on which the results were measured."""


@dataclass(frozen=True, kw_only=True)
class Underway:
    """Cell that has begun.

    Attributes:
        run: name of the run that began the cell, as in its records.
        uses: facts on which the results depend (`used.used`), by hash of the trial.
        standing: results of the trials that have not ended, by hash of the trial.
    """

    schema: int = SCHEMA
    run: str
    uses: dict[str, dict[str, Any]] = field(default_factory=dict)
    standing: dict[str, Standing] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Underway | None:
        """Reads the file; None if there is none. Results of another version are left out."""
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        return typed(cls, values) if values["schema"] == SCHEMA else cls(schema=0, run="")


def path_of(folder: Path, seed: int) -> Path:
    """Returns the path of a cell's file; `seed` is the seed of the cell's rounds."""
    return folder / f"underway-{seed:08x}.json"
