"""Parts that the rows of all tables have in common; None where a row has no value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Trial of a row."""

    model: str
    world_size: int
    algorithm: str
    status: str
    network: str | None = None
    """Network of an emulated cluster."""
    fault: str | None = None
    """Fault that was injected into the emulated cluster."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Comparison of a trial with the baseline, and with the fastest trials of its cell."""

    compared_to: str | None = None
    """Label of the baseline, also if it is flagged; None for the baseline itself."""
    speedup: float | None = None
    """Time of the baseline over the time of this trial: of a step, or to the target accuracy. None
    if it is only known to lie beyond `speedup_low` or `speedup_high`."""
    speedup_low: float | None = None
    """Ends of the 95 % interval."""
    speedup_high: float | None = None
    verdict: str | None = None
    detectable: float | None = None
    """Relative difference that such a sweep detects with a probability of 80 %."""
    precision: float | None = None
    """Requested half width of the speed-up's interval, relative to the speed-up."""
    more_repeats: int | None = None
    """Further repeats that would probably give that half width; 0: it is reached. None: unknown, or
    very many."""
    leads: bool | None = None
    """Whether the trial is the fastest of its cell, or not distinguishable from it."""


@dataclass(frozen=True, kw_only=True)
class Validity:
    """Validity of a row's number."""

    flag: str | None = None
    """Reason why the number is flagged. A flagged number has no verdict."""
    reason: str | None = None
    """Reason why there is no number, or why it is flagged, and all other notes."""
