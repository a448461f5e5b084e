"""Whether a step and its bound fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reach = Literal["wrong bound", "far from bound"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Shares of its bound that a step may reach."""

    most: float = 1.02
    """A step that is shorter still proves that its bound is wrong: nothing is faster than it can
    be, and clocks are good to a percent."""
    least: float = 0.5
    """A step longer than twice its bound is explained by no lack of overlap: one after the other,
    two things take at most twice as long as side by side. Something is paid that the bound does not
    know, as the start-ups of many messages, or a rank without a core."""


LIMITS = Limits()


def reach(of_bound: float, limits: Limits = LIMITS) -> Reach | None:
    """What is odd about a step that reaches such a share of its bound; None: nothing."""
    if of_bound > limits.most:
        return "wrong bound"
    return "far from bound" if of_bound < limits.least else None


def note(kind: Reach, of_bound: float) -> str:
    """The same for people."""
    if kind == "wrong bound":
        return (
            f"wrong bound: the step is {1 - 1 / of_bound:.0%} shorter than it, so costs or compute "
            "were measured wrong, or fewer bytes travel than it assumes"
        )
    return (
        f"far from its bound: the step takes {1 / of_bound:.1f} times as long, more than if "
        "nothing ran beside anything"
    )


def percent(of_bound: float | None, kind: Reach | None) -> str:
    """The share as a table has it; nothing without one."""
    if of_bound is None:
        return ""
    return f"WRONG {of_bound:.0%}" if kind == "wrong bound" else f"{of_bound:.0%}"
