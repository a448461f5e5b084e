"""What a sweep compares: which of the folder's records belong together, and relative to what.

A folder's records may hold trials of earlier versions of its experiment; they stay, but are not
mixed with those of the current one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from common.results import records
from common.results.records import Record
from dear.errors import UserError

_FILE = "experiment.json"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The trials of an experiment, by hash and in its order."""

    compare_to: str
    trials: tuple[str, ...]

    def save(self, folder: Path) -> None:
        """Writes it beside the records."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Comparison:
        """Reads what `save` wrote; raises `UserError` if the sweep has never got so far."""
        path = folder / _FILE
        if not path.exists():
            raise UserError(f"{folder} has no {_FILE}: run the sweep again, it goes on")
        values = json.loads(path.read_text())
        return cls(compare_to=values["compare_to"], trials=tuple(values["trials"]))

    def results(self, folder: Path) -> list[Record]:
        """The newest record of each trial that has one."""
        found = records.latest(records.load(folder / "records.jsonl"))
        return [found[trial] for trial in self.trials if trial in found]
