"""When a noisy curve that should rise reaches a target: a crossing, not a point of the grid.

The first evaluation at the target would be a multiple of the time between evaluations, and earlier
the more of them there are, since each is one more chance to be lucky. So the curve is smoothed
first. Accuracy should rise with training: the smoothing is the rising curve with the least squared
distance to the evaluations (isotonic regression, by pooling adjacent violators), which has no width
to choose. Its steps are joined by straight lines through their centres (Oron and Flournoy 2017,
"Centered Isotonic Regression"), so that the crossing lies between evaluations. A curve that rises
anyway is left as it is, and interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def smoothed(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of the rising curve nearest to `values` at `times`, which ascend.

    Between corners it is straight. It begins and ends with the first and the last corner: centres
    of what was pooled, which may be later than the first time and earlier than the last.
    """
    blocks: list[tuple[float, float, int]] = []  # sums of times and of values, and how many
    for time, value in zip(times, values, strict=True):
        block = time, value, 1
        while blocks and block[1] / block[2] <= blocks[-1][1] / blocks[-1][2]:
            before = blocks.pop()
            block = tuple(a + b for a, b in zip(before, block, strict=True))
        blocks.append(block)
    return [(time / count, value / count) for time, value, count in blocks]


def crossing(times: Sequence[float], values: Sequence[float], target: float) -> float | None:
    """When the smoothed curve reaches `target`; None if it does not.

    Args:
        times: of the evaluations, ascending (or any measure of progress, as steps).
        values: what was found at these times.
    """
    corners = smoothed(times, values)
    if corners and corners[0][1] >= target:
        return corners[0][0]
    for (before, low), (after, high) in pairwise(corners):
        if low < target <= high:
            return before + (after - before) * (target - low) / (high - low)
    return None
