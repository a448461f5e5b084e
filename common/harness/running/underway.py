"""State of a cell that has begun, saved after each launch, so that an interrupted run can continue.

The file lies beside the records until the cell has ended. A later run continues the trials for
which nothing has changed that their numbers depend on.
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
    """Facts of the fabric at that time."""


@dataclass(frozen=True, kw_only=True)
class Underway:
    """Cell that has begun.

    Attributes:
        run: run that began it; its records name this run.
        uses: what the numbers depend on (`used.used`), by hash.
        standing: results of the trials that have not ended, by hash.
    """

    schema: int = SCHEMA
    run: str
    uses: dict[str, dict[str, Any]] = field(default_factory=dict)
    standing: dict[str, Standing] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the file completely or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Underway | None:
        """Reads what `save` wrote; None if there is no file.

        A file of another version has no results for this one.
        """
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        return typed(cls, values) if values["schema"] == SCHEMA else cls(schema=0, run="")


def path_of(folder: Path, seed: int) -> Path:
    """Returns the file of a cell of the sweep in `folder`; `seed` is that of its rounds."""
    return folder / f"underway-{seed:08x}.json"
