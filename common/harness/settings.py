"""What a worker must know of the emulated cluster that it runs on; the sweep writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.models.pace import Pace

_FILE = "emulation.json"


@dataclass(frozen=True, kw_only=True)
class EmulationSettings:
    """Of one trial; where nothing is emulated: one host without a name, at full speed."""

    folder: Path
    time_scale: float = 1.0
    """How many times slower than what it stands for the cluster runs."""
    hosts: tuple[str, ...] = ()
    ranks_per_host: int = 1

    @classmethod
    def load(cls, folder: Path) -> EmulationSettings:
        """From the trial's folder."""
        path = folder / _FILE
        if not path.exists():
            return cls(folder=folder)
        values = json.loads(path.read_text())
        return cls(
            folder=folder,
            time_scale=values["time_scale"],
            hosts=tuple(values["hosts"]),
            ranks_per_host=values["ranks_per_host"],
        )

    def save(self) -> None:
        """Into the trial's folder."""
        values = {
            "time_scale": self.time_scale,
            "hosts": self.hosts,
            "ranks_per_host": self.ranks_per_host,
        }
        (self.folder / _FILE).write_text(json.dumps(values, indent=2))

    def pace(self, rank: int) -> Pace:
        """How fast replayed compute runs on the host of `rank`."""
        if not self.hosts:
            return Pace(self.time_scale, None)
        host = self.hosts[rank // self.ranks_per_host]
        return Pace(self.time_scale, self.folder / f"pace-{host}")

    def emulated(self, iters: Sequence[Sequence[float]]) -> list[list[float]]:
        """Seconds of this machine as seconds of the emulated cluster."""
        return [[step_s / self.time_scale for step_s in block] for block in iters]
