"""Series of predictions over one property of a cluster: its size, its links or its devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.virtual.costs.parts import Platform
from dear.errors import UserError, one_of

LOW_GBPS, HIGH_GBPS = 0.1, 10_000.0
"""Range in which `reached` looks for a bandwidth."""
PRECISE = 0.01
"""Relative width of the interval at which bisection stops."""

MOST_WORKERS = 1 << 16
"""Largest number of workers of an experiment."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Property of a cluster, with the values of a series."""

    title: str
    unit: str
    ladder: tuple[float, ...]
    """Values if none are given."""

    @property
    def label(self) -> str:
        """Title with the unit, for a figure."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


AXES: Mapping[str, Axis] = {
    "workers": Axis(title="workers", unit="", ladder=tuple(2.0**power for power in range(15))),
    "bandwidth": Axis(
        title="bandwidth of a host's link",
        unit="Gb/s",
        ladder=(0.5, 1, 2.5, 5, 10, 25, 50, 100, 200, 400, 800),
    ),
    "latency": Axis(
        title="latency of a host's link",
        unit="us",
        ladder=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
    ),
    "start_up": Axis(
        title="start-up of an all-reduce", unit="ms", ladder=(0.1, 0.2, 0.5, 1, 2, 5, 7, 10)
    ),
    "compute": Axis(title="speed of a GPU", unit="x", ladder=(0.5, 1, 2, 4, 8)),
}
"""Axes by the name in `--over`; `compute` is relative to the layer profile."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Value of a property."""

    axis: str
    value: float

    @property
    def text(self) -> str:
        return f"{self.value:g} {AXES[self.axis].unit}".rstrip()

    @property
    def speed(self) -> float:
        """Speed of a device / that of the profile."""
        return self.value if self.axis == "compute" else 1.0

    def platform(self, platform: Platform) -> Platform:
        """Returns the platform with this link between hosts."""
        wire = platform.wire("between")
        if self.axis == "bandwidth":
            wire = dataclasses.replace(wire, bytes_per_s=self.value * 1e9 / 8)
        elif self.axis == "latency":
            wire = dataclasses.replace(wire, latency_s=self.value * 1e-6)
        return dataclasses.replace(platform, wires={**platform.wires, "between": wire})


def points(text: str) -> list[Point]:
    """Returns the points of a text such as `workers`, or `bandwidth=1,10,100`.

    Raises:
        UserError: there is no such axis, or a value is not a number above 0.
    """
    name, given, listed = text.partition("=")
    axis = one_of("axis of --over", name, AXES)
    values: Sequence[float] = axis.ladder
    if given:
        try:
            values = [float(value) for value in listed.split(",")]
        except ValueError:
            values = []
        most = MOST_WORKERS if name == "workers" else math.inf
        right = all(0 < value < math.inf and value <= most for value in values)
        whole = name != "workers" or (right and all(value.is_integer() for value in values))
        if not values or not right or not whole:
            what, limit = "numbers", ""
            if name == "workers":
                what, limit = "whole numbers", f", at most {MOST_WORKERS},"
            raise UserError(
                f"--over {name}: must be {what} above 0{limit} with commas between them, got "
                f"{listed!r}"
            )
    return [Point(axis=name, value=value) for value in dict.fromkeys(values)]


def reached(
    efficiency: Callable[[float], float], shares: Sequence[float]
) -> dict[float, float | None]:
    """Returns the smallest bandwidth in Gb/s at which an efficiency reaches each share.

    The method is `turn`, so the efficiency must grow with the bandwidth. None: it does not reach
    the share at `HIGH_GBPS`.
    """
    known: dict[float, float] = {}

    def at(gbps: float) -> float:
        if gbps not in known:
            known[gbps] = efficiency(gbps)
        return known[gbps]

    result: dict[float, float | None] = {}
    for share in shares:
        low, high = LOW_GBPS, HIGH_GBPS
        if at(high) < share:
            result[share] = None
            continue
        result[share] = turn(lambda gbps, share=share: at(gbps) >= share, low, high)
    return result


def turn(
    holds: Callable[[float], bool],
    start: float,
    end: float,
    *,
    whole: bool = False,
    precise: float = PRECISE,
) -> float:
    """Returns the value nearest to `start` at which `holds`, to a relative `precise`.

    The method is bisection on a logarithmic scale; it must hold at `end`, and not at `start`.

    Args:
        whole: only whole numbers are tried.
    """
    while max(start, end) / min(start, end) > 1 + precise:
        middle = math.sqrt(start * end)
        middle = float(round(middle)) if whole else middle
        if middle in (start, end):
            break
        start, end = (start, middle) if holds(middle) else (middle, end)
    return end
