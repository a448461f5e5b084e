"""How far a sweep is, and how long the rest will take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """What a progress line tells; counts launches, because trials take turns."""

    total: int
    done: int = 0
    title: str = ""
    best: str = ""
    spent_s: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)
    left: list[tuple[Any, ...]] = field(default_factory=list)
    """Cell of each launch to come."""

    def eta_s(self) -> float | None:
        """Seconds that the remaining launches will take, None before the first has ended."""
        known = [seconds for spent in self.spent_s.values() for seconds in spent]
        if not known:
            return None
        mean = sum(known) / len(known)
        total = 0.0
        for cell in self.left:
            spent = self.spent_s.get(cell)
            total += sum(spent) / len(spent) if spent else mean
        return total
