"""Where the time of a step goes: computing in each part, or held up by communication."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Mark = tuple[float, float]
"""A moment, and how long the rank had been held up by communication until then; seconds."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Seconds of one rank's step; only where the host waits for each part to end (CPU).

    An algorithm may communicate, and update, within any of the three calls of the training loop:
    the first three leave out what was spent waiting for communication, so that all four add up.
    """

    forward_s: float
    """`zero_grad`, the forward pass and the loss."""
    backward_s: float
    update_s: float
    """The call of `optimizer.step()`; updates made elsewhere count where they are made."""
    exposed_comm_s: float
    """Held up in `Work.wait`, inside any of the other three."""

    @classmethod
    def between(cls, began: Mark, forward: Mark, backward: Mark, end: Mark) -> StepParts:
        """From the marks at the step's beginning and at the end of each of its three calls."""
        return cls(
            forward_s=_unblocked_s(began, forward),
            backward_s=_unblocked_s(forward, backward),
            update_s=_unblocked_s(backward, end),
            exposed_comm_s=end[1] - began[1],
        )

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(asdict(self).values())


def typical(steps: Sequence[StepParts]) -> StepParts:
    """The mean of the middle half by duration: its parts add up, and no straggler counts."""
    ordered = sorted(steps, key=lambda step: step.step_s)
    cut = (len(ordered) + 1) // 4
    middle = ordered[cut : len(ordered) - cut]
    return StepParts(
        **{
            name: statistics.fmean(getattr(step, name) for step in middle)
            for name in StepParts.__dataclass_fields__
        }
    )


def breakdown(parts: StepParts, time_scale: float, *, waits_seen: bool) -> dict[str, float | None]:
    """The record's `breakdown`, in seconds of what the fabric stands for; adds up to `step_s`.

    Args:
        waits_seen: False where an algorithm waits in code of its own: `exposed_comm_s` is then
            None, and contained in the other parts.
    """
    values: dict[str, float | None] = {
        name: value / time_scale for name, value in asdict(parts).items()
    }
    if not waits_seen:
        values["exposed_comm_s"] = None
    return values | {"step_s": parts.step_s / time_scale}


def _unblocked_s(start: Mark, end: Mark) -> float:
    return end[0] - start[0] - (end[1] - start[1])
