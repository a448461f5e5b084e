"""Costs of collectives as a network file keeps them: microseconds, and megabytes of 1e6 bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dear.cost.fit import AlphaBeta, CollectiveCost, Regime
from dear.cost.measurement import Measurement
from dear.errors import UserError
from dear.options import at_least

DIGITS = 5
"""Significant digits of a number in a network file."""


@dataclass(frozen=True, kw_only=True)
class RegimeCost:
    """Entry of `regimes:`, a line: a message of N megabytes takes alpha_us + N x beta_us_per_mb."""

    alpha_us: float
    """Start-up in microseconds."""
    beta_us_per_mb: float
    """Microseconds per 1e6 bytes of the full buffer; 1000 divided by this is the rate in GB/s."""
    below_bytes: float | None = None
    """Size of the full buffer at which the next regime begins; None: this is the last one."""
    queued_alpha_us: float | None = None
    """Part of the start-up that a message costs in a queue, in microseconds; None: not measured."""
    name: str | None = None
    """Name of the regime in the engine; None: the engine reports none."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "name":
                at_least(f"regimes: {field.name}", getattr(self, field.name), 0)

    @classmethod
    def of(cls, line: AlphaBeta, name: str | None, below_bytes: float | None) -> RegimeCost:
        """Returns the entry of a fitted line."""
        queued_s = line.queued_alpha_s
        return cls(
            alpha_us=_rounded(1e6 * line.alpha_s),
            beta_us_per_mb=_rounded(1e12 * line.beta_s_per_byte),
            below_bytes=below_bytes,
            queued_alpha_us=None if queued_s is None else _rounded(1e6 * queued_s),
            name=name,
        )

    def line(self) -> AlphaBeta:
        """Returns the line in seconds and bytes."""
        queued_us = self.queued_alpha_us
        return AlphaBeta(
            alpha_s=1e-6 * self.alpha_us,
            beta_s_per_byte=1e-12 * self.beta_us_per_mb,
            queued_alpha_s=None if queued_us is None else 1e-6 * queued_us,
        )


@dataclass(frozen=True, kw_only=True)
class OperationCost:
    """Entry of `operations:`: cost of one collective, and how well it fits the measured times."""

    regimes: tuple[RegimeCost, ...]
    """Lines, ascending by size."""
    smallest_bytes: int
    """Size of the smallest measured message; the cost of smaller ones is extrapolated."""
    largest_bytes: int
    """Size of the largest measured message; the cost of larger ones is extrapolated."""
    residual_rms: float
    """Root mean square of the relative errors of the fit, or of a fit to one half of the repeats
    when it predicts the other half, whichever is larger."""
    residual_worst: float
    """Largest absolute value of these errors."""

    def __post_init__(self) -> None:
        *ends, last = [regime.below_bytes for regime in self.regimes] or [0]
        known = [end for end in ends if end is not None]
        if last is not None or len(known) < len(ends) or sorted(set(known)) != known:
            given = ", ".join(str(regime.below_bytes) for regime in self.regimes) or "no regime"
            raise UserError(
                f"regimes: below_bytes must ascend, and the last regime has none, got {given}"
            )
        at_least("smallest_bytes", self.smallest_bytes, 1)
        at_least("largest_bytes", self.largest_bytes, self.smallest_bytes)
        at_least("residual_rms", self.residual_rms, 0)
        at_least("residual_worst", self.residual_worst, 0)

    @classmethod
    def of(cls, measurement: Measurement, time_scale: float = 1.0) -> OperationCost:
        """Returns the fit to a measurement; its unit of time is `time_scale` seconds."""
        cost, off = measurement.fit().divided(time_scale), measurement.residuals()
        rms, worst = math.sqrt(sum(x * x for x in off) / len(off)), max(map(abs, off))
        if min(map(len, measurement.seconds)) > 1:
            agreement = measurement.agreement()
            rms, worst = max(rms, agreement.error), max(worst, agreement.worst)
        lines: list[Regime | CollectiveCost] = [*cost.smaller, cost]
        smaller = [
            RegimeCost.of(part, part.name, _bend(part, larger, measurement.nbytes))
            for part, larger in zip(cost.smaller, lines[1:], strict=True)
        ]
        return cls(
            regimes=(*smaller, RegimeCost.of(cost, cost.name, None)),
            smallest_bytes=min(measurement.nbytes),
            largest_bytes=max(measurement.nbytes),
            residual_rms=_rounded(rms),
            residual_worst=_rounded(worst),
        )

    def cost(self) -> CollectiveCost:
        """Returns the cost in seconds by bytes of the full buffer."""
        *smaller, last = self.regimes
        parts = tuple(
            Regime(name=part.name, below_bytes=part.below_bytes or 0.0, **vars(part.line()))
            for part in smaller
        )
        return CollectiveCost(**vars(last.line()), name=last.name, smaller=parts)


@dataclass(frozen=True, kw_only=True)
class OperationCosts:
    """Value of `operations:`. A size is that of the full buffer (after a gather, before a scatter);
    for `exchange` and `sendrecv`, of what one rank sends."""

    all_reduce: OperationCost | None = None
    reduce_scatter: OperationCost | None = None
    all_gather: OperationCost | None = None
    broadcast: OperationCost | None = None
    exchange: OperationCost | None = None
    """Swap of buffers by pairs of ranks that are half the world apart, all pairs at once."""
    sendrecv: OperationCost | None = None
    """Message of every rank to the next one, all at once, as nccl-tests measures it. Of several
    ranks on a host, only one sends to another host."""


@dataclass(frozen=True, kw_only=True)
class NetworkCosts:
    """Section `costs:` of a network file: what collectives cost, measured on a cluster."""

    engine: str
    """Library that moved the bytes: nccl, comm_core, gloo or mpi."""
    world_size: int
    """Number of ranks."""
    ranks_per_host: int | None = None
    """None: unknown, or not the same on all hosts."""
    source: str
    """Files, versions and date of the measurement."""
    operations: OperationCosts

    def __post_init__(self) -> None:
        at_least("costs: world_size", self.world_size, 2)
        if self.ranks_per_host is not None:
            at_least("costs: ranks_per_host", self.ranks_per_host, 1, self.world_size)
        if not self.by_operation():
            raise UserError("costs: operations must name a collective, got none")

    def by_operation(self) -> dict[str, OperationCost]:
        """Returns the operations that were measured, by name."""
        named = vars(self.operations).items()
        return {name: cost for name, cost in named if cost is not None}

    def collective_costs(self) -> Mapping[str, CollectiveCost]:
        """Returns the cost in seconds by operation."""
        return {name: cost.cost() for name, cost in self.by_operation().items()}


def _bend(part: Regime, larger: Regime | CollectiveCost, sizes: Sequence[int]) -> float:
    """Returns the size at which a regime ends.

    Unless the engine names regimes, only the first measured size surely belongs to a regime. So the
    end is where the lines of two regimes meet, if they meet after the last size below.
    """
    below = max(size for size in sizes if size < part.below_bytes)
    steeper = part.beta_s_per_byte - larger.beta_s_per_byte
    meeting = (larger.alpha_s - part.alpha_s) / steeper if steeper else 0.0
    bends = part.name == larger.name and below < meeting < part.below_bytes
    return float(round(meeting)) if bends else part.below_bytes


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
