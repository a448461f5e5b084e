"""Plausibility of a step time, compared with its lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BoundNote = Literal["wrong bound", "far from bound"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of plausible shares, where a share is the lower bound divided by the step time."""

    most: float = 1.02
    """Largest plausible share. A shorter step proves that the bound is wrong, because clocks are
    right to within 1 %."""
    least: float = 0.5
    """Smallest plausible share. A step of more than twice its bound has costs that are not in the
    bound, such as the start-ups of many messages, or a rank without a core. Lack of overlap does
    not explain it: two tasks in turn take at most twice as long as side by side."""


LIMITS = Limits()


def bound_note(of_bound: float, limits: Limits = LIMITS) -> BoundNote | None:
    """Returns why a share is implausible; None if it is plausible."""
    if of_bound > limits.most:
        return "wrong bound"
    return "far from bound" if of_bound < limits.least else None


def describe(kind: BoundNote, of_bound: float) -> str:
    """Describes an implausible share in a sentence."""
    if kind == "wrong bound":
        return (
            f"wrong bound: the step is {1 - 1 / of_bound:.0%} shorter than its bound, so costs or "
            "compute were measured wrong, or fewer bytes travel than the bound assumes"
        )
    return (
        f"far from its bound: the step takes {1 / of_bound:.1f} times as long, which is "
        "more than without any overlap"
    )


def share(of_bound: float, kind: BoundNote | None) -> str:
    """Returns the text of the share for a table."""
    return f"WRONG {of_bound:.0%}" if kind == "wrong bound" else f"{of_bound:.0%}"
