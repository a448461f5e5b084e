"""Plausibility of a step time beside its lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BoundNote = Literal["wrong bound", "far from bound"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Plausible shares of the bound: bound over step time."""

    most: float = 1.02
    """A shorter step proves that its bound is wrong, because clocks are good to a percent."""
    least: float = 0.5
    """A step of more than twice its bound has costs that the bound does not know, such as the
    start-ups of many messages, or a rank without a core. Lack of overlap is no explanation: two
    tasks in turn take at most twice as long as side by side."""


LIMITS = Limits()


def bound_note(of_bound: float, limits: Limits = LIMITS) -> BoundNote | None:
    """Returns the kind of an implausible share; None for a plausible one."""
    if of_bound > limits.most:
        return "wrong bound"
    return "far from bound" if of_bound < limits.least else None


def describe(kind: BoundNote, of_bound: float) -> str:
    """Describes an implausible share."""
    if kind == "wrong bound":
        return (
            f"wrong bound: the step is {1 - 1 / of_bound:.0%} shorter than it, so costs or compute "
            "were measured wrong, or fewer bytes travel than it assumes"
        )
    return (
        f"far from its bound: the step takes {1 / of_bound:.1f} times as long, more than if "
        "nothing ran beside anything"
    )


def share(of_bound: float, kind: BoundNote | None) -> str:
    """Returns the share for a table."""
    return f"WRONG {of_bound:.0%}" if kind == "wrong bound" else f"{of_bound:.0%}"
