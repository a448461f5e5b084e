"""Cost models of a message by its size: a start-up and a time per byte, fitted to measurements."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from dear.errors import UserError
from dear.options import at_least

ROUNDS = 30
HUBER = 1.5
"""Number of standard deviations beyond which a residual counts less."""

Cost = Callable[[float], float]
"""Function from the bytes of the full buffer to the seconds of a single collective."""


def occupancy_s(cost: Cost, nbytes: float) -> float:
    """Returns the seconds for which a message occupies the link, which messages behind it cannot
    overlap: those of `cost.occupancy_s`, if it has this method, else the whole cost."""
    known = getattr(cost, "occupancy_s", cost)
    seconds: float = known(nbytes)
    return seconds


@dataclass(frozen=True, kw_only=True)
class OnWire:
    """Cost by bytes of gradients, of which `share` bytes travel per byte."""

    cost: Cost
    share: float

    def __call__(self, nbytes: float) -> float:
        return self.cost(nbytes * self.share)

    def occupancy_s(self, nbytes: float) -> float:
        """Returns the seconds for which a message occupies the link."""
        return occupancy_s(self.cost, nbytes * self.share)


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Seconds of one collective = alpha + beta x bytes of the full buffer (not of a shard)."""

    alpha_s: float
    beta_s_per_byte: float
    queued_alpha_s: float | None = None
    """Part of alpha that a message costs in a queue, where its start-up overlaps the bytes of the
    messages before it. None: not measured, so all of alpha counts."""

    def __post_init__(self) -> None:
        at_least("alpha_s", self.alpha_s, 0)
        at_least("beta_s_per_byte", self.beta_s_per_byte, 0)

    def __call__(self, nbytes: float) -> float:
        """Returns the seconds for a buffer of `nbytes`; 0 for an empty one."""
        return self.alpha_s + self.beta_s_per_byte * nbytes if nbytes else 0.0

    def occupancy_s(self, nbytes: float) -> float:
        """Returns the seconds for which a message delays the next message in a queue."""
        alpha_s = self.alpha_s if self.queued_alpha_s is None else self.queued_alpha_s
        return min(alpha_s, self.alpha_s) + self.beta_s_per_byte * nbytes if nbytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Regime(AlphaBeta):
    """Line for messages below a size; larger messages are sent in another way."""

    name: str | None
    """Name of the regime in the engine. None: the engine reports none, and the measured times show
    a bend at `below_bytes`. Two neighbours of the same name also meet at such a bend."""
    below_bytes: float


@dataclass(frozen=True, kw_only=True)
class CollectiveCost(AlphaBeta):
    """Seconds of one collective by the bytes of the full buffer: one line per regime.

    Alpha and beta belong to the largest messages; if `smaller` is empty, to all messages.
    """

    smaller: tuple[Regime, ...] = ()
    """Regimes of smaller messages, ascending by size."""
    name: str | None = None
    """Name of the largest messages' regime in the engine; None: the engine reports no regimes."""
    slope: Literal["fit", "wire"] = "fit"
    """Source of `beta_s_per_byte`: fitted times, or the rate of the links and the headers."""

    def line(self, nbytes: float) -> AlphaBeta:
        """Returns the line for messages of this size."""
        return next((part for part in self.smaller if nbytes < part.below_bytes), self)

    def __call__(self, nbytes: float) -> float:
        return self.latency_s(nbytes) + self.transfer_s(nbytes) if nbytes else 0.0

    def latency_s(self, nbytes: float) -> float:
        """Returns the start-up of a message of this size, in seconds."""
        return self.line(nbytes).alpha_s if nbytes else 0.0

    def transfer_s(self, nbytes: float) -> float:
        """Returns the seconds for the bytes of a message of this size, without its start-up."""
        return self.line(nbytes).beta_s_per_byte * nbytes

    def occupancy_s(self, nbytes: float) -> float:
        line = self.line(nbytes)
        return super().occupancy_s(nbytes) if line is self else line.occupancy_s(nbytes)

    def divided(self, factor: float) -> CollectiveCost:
        """Returns the cost in a unit of time that is `factor` times as long."""
        parts = tuple(_divided(part, factor) for part in self.smaller)
        return dataclasses.replace(_divided(self, factor), smaller=parts)


LineT = TypeVar("LineT", bound=AlphaBeta)


def _divided(line: LineT, factor: float) -> LineT:
    queued_s = line.queued_alpha_s
    return dataclasses.replace(
        line,
        alpha_s=line.alpha_s / factor,
        beta_s_per_byte=line.beta_s_per_byte / factor,
        queued_alpha_s=None if queued_s is None else queued_s / factor,
    )


def fit_alpha_beta(
    nbytes: Sequence[float],
    seconds: Sequence[float],
    spreads: Sequence[float] | None = None,
    beta_s_per_byte: float | None = None,
) -> AlphaBeta:
    """Fits a line to measurements by robust least squares of the relative errors.

    With relative errors, small messages determine the start-up and large ones the time per byte.
    Huber's weights keep a disturbed measurement from counting much.

    Args:
        spreads: relative uncertainty of each time; None: equal for all.
        beta_s_per_byte: the slope if it is known; only the start-up is fitted then.

    Raises:
        UserError: fewer than two sizes (one, if the slope is known), or a time that is not
            positive.
    """
    least = 2 if beta_s_per_byte is None else 1
    if len(nbytes) != len(seconds) or len(set(nbytes)) < least:
        raise UserError(f"a fit needs times of {least} sizes at least, got {len(set(nbytes))}")
    if min(seconds) <= 0:
        raise UserError(f"a fit needs times above 0, got {min(seconds)}")
    expected = list(seconds)
    trust = [1.0] * len(seconds)
    spreads = [1.0] * len(seconds) if spreads is None else spreads
    alpha = beta = 0.0
    for _ in range(ROUNDS):
        each = zip(trust, expected, spreads, strict=True)
        weights = [share / (value * spread) ** 2 for share, value, spread in each]
        alpha, beta = _weighted_line(nbytes, seconds, weights, beta_s_per_byte)
        fitted = [max(alpha + beta * n, 1e-15) for n in nbytes]
        each = zip(seconds, fitted, spreads, strict=True)
        errors = [abs(t / f - 1) / spread for t, f, spread in each]
        # 1.4826: the deviation of normal errors from their median; the floor is rounding.
        limit = HUBER * max(1.4826 * statistics.median(errors), 1e-9)
        trust = [min(1.0, limit / max(error, 1e-15)) for error in errors]
        expected = fitted
    return AlphaBeta(alpha_s=alpha, beta_s_per_byte=beta)


def _weighted_line(
    xs: Sequence[float], ys: Sequence[float], weights: Sequence[float], known: float | None
) -> tuple[float, float]:
    """Returns intercept and slope by least squares, both at least 0; a `known` slope is kept."""
    total = sum(weights)
    x_mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    if known is not None:
        return max(0.0, y_mean - known * x_mean), known
    covariance = sum(
        w * (x - x_mean) * (y - y_mean) for w, x, y in zip(weights, xs, ys, strict=True)
    )
    slope = covariance / sum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    if slope < 0:
        return y_mean, 0.0
    if y_mean - slope * x_mean < 0:
        squares = sum(w * x * x for w, x in zip(weights, xs, strict=True))
        products = sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True))
        return 0.0, products / squares
    return y_mean - slope * x_mean, slope
