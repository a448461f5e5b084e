"""How old what arrives from each neighbour is, counted in steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Staleness:
    """Of what one neighbour sent: own steps minus the steps that it had in it, at each use.

    0: the neighbour is level; above: it is behind, or its values are slow to come; below: it is
    ahead.
    """

    uses: int = 0
    total: int = 0
    highest: int | None = None
    last: int | None = None

    def note(self, behind: int) -> None:
        """One use of values that are so many steps behind."""
        self.uses += 1
        self.total += behind
        self.highest = behind if self.highest is None else max(self.highest, behind)
        self.last = behind

    def summary(self) -> dict[str, Any]:
        """`uses`, and `mean`, `max`, `last` in steps (None before the first use)."""
        mean = self.total / self.uses if self.uses else None
        return {"uses": self.uses, "mean": mean, "max": self.highest, "last": self.last}
