"""Times of collectives by message size, the lines fitted to them, and the error of these lines.

A regime is a range of message sizes that the engine sends in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dear.cost.fit import AlphaBeta, CollectiveCost, Regime, fit_alpha_beta
from dear.errors import UserError
from dear.options import at_least

EXCHANGE = "exchange"
"""Name of the operation in which pairs of ranks swap buffers, among the fits of collectives."""
Operation = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "exchange", "broadcast", "sendrecv"
]
"""`exchange`: pairs of ranks swap buffers, all pairs at once. The two ranks of a pair are half the
world apart; with an odd number of ranks, one rank does nothing. `sendrecv`: every rank sends to the
next one, as nccl-tests does; only its logs have this."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)[:4]
"""Operations that every trial times."""
MEASURABLE: tuple[Operation, ...] = get_args(Operation)[:5]
"""Operations that `measure_collective` times."""

Regimes = tuple[tuple[str, int], ...]
"""Regimes of an engine: name, and the smallest full buffer in bytes; ascending, the first is 0."""
PIPELINE = "pipeline"
"""Name of the regime in which a message costs a start-up plus the time that its bytes keep a link
busy."""

LEAST_SPREAD = 0.01
"""Least relative uncertainty of a time; repeats may agree better by chance."""
BENT = 0.03
"""Relative error of one line above which two lines are tried, unless noise explains the error."""
LARGE = 4.0
"""Messages of at least `LARGE` x `free_bytes` bytes are needed to measure the cost of a byte."""
TYPICAL = 0.25
"""Quantile of the repeats that is fitted; it is low, since disturbances only make times longer."""


def typical_s(times: Sequence[float]) -> float:
    """Returns the lower quartile of the repeats."""
    ordered = sorted(times)
    place = TYPICAL * (len(ordered) - 1)
    low = ordered[math.floor(place)]
    return low + (place % 1) * (ordered[math.ceil(place)] - low)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times of one collective by message size, the same on all ranks."""

    operation: Operation
    nbytes: list[int]
    seconds: list[list[float]]
    """Seconds of the repeats of each size, on the slowest rank (distant ranks: the mean)."""
    free_bytes: float = 0.0
    """Bytes of the buffer that idle links pass at once, so that they cost nothing."""
    regimes: Regimes | None = None
    """Regimes that the engine reports; None: it reports none."""
    wire_s_per_byte: float | None = None
    """Seconds for which one byte of the full buffer keeps a link busy, with headers; None: unknown.
    """
    queued: tuple[tuple[int, float], ...] = ()
    """Sizes in bytes, and the seconds that each further message of this size adds to a queue."""

    @property
    def typical_s(self) -> list[float]:
        return [typical_s(times) for times in self.seconds]

    def fit(self) -> CollectiveCost:
        """Fits alpha and beta of each regime to the typical times, by robust least squares.

        A size whose repeats agree has more weight. A regime is split if two lines fit much better
        than one. If the engine reports the speed of the wire, this gives the slope of `PIPELINE`.
        If links pass `free_bytes` at once, beta is the cost of the bytes beyond them. In a regime
        that starts below `free_bytes`, all bytes count, and the line holds after idle links.
        """
        cut = [part for regime in self._reached() for part in self._cut(*regime)]
        ends = [*(first for _, first, _ in cut[1:]), math.inf]
        parts = [
            (name, first, self._queued(self._line(chosen, first, self._known(name)), first, end))
            for (name, first, chosen), end in zip(cut, ends, strict=True)
        ]
        smaller = tuple(
            Regime(name=name, below_bytes=end, **vars(line))
            for (name, _, line), (_, end, _) in itertools.pairwise(parts)
        )
        name, _, line = parts[-1]
        slope: Literal["fit", "wire"] = "fit" if self._known(name) is None else "wire"
        return CollectiveCost(**vars(line), name=name, smaller=smaller, slope=slope)

    def _reached(self) -> list[tuple[str | None, float, list[int]]]:
        """Returns each regime with enough sizes: its name, first bytes, and indices of sizes.

        A regime with too few sizes for a line joins the regime before it.
        """
        starts: Sequence[tuple[str | None, float]] = self.regimes or ((None, 0.0),)
        joined: list[tuple[str | None, float, list[int]]] = []
        for (name, first), (_, end) in zip(starts, [*starts[1:], ("", math.inf)], strict=True):
            chosen = [i for i, nbytes in enumerate(self.nbytes) if first <= nbytes < end]
            if joined and len(joined[-1][2]) < 2:  # the smallest: they join what comes after
                before = joined.pop()
                first, chosen = before[1], before[2] + chosen
            if joined and len(chosen) < (2 if self._known(name) is None else 1):
                joined[-1][2].extend(chosen)
            else:
                joined.append((name, first, chosen))
        return joined

    def _cut(
        self, name: str | None, first: float, chosen: list[int]
    ) -> list[tuple[str | None, float, list[int]]]:
        """Splits a regime into parts if Schwarz' criterion (Ann. Stat. 6, 1978) prefers this.

        The difference between the two halves of the repeats estimates the noise.
        """
        charged = [self._charged(self.nbytes[i], first) for i in chosen]
        # A line needs two sizes with different costs; all sizes that cost nothing count as one.
        places = [
            at
            for at in range(2, len(chosen) - 1)
            if charged[at - 1] > charged[0] and charged[-1] > charged[at]
        ]
        if self._known(name) is not None or not places:
            return [(name, first, chosen)]
        count, alone = len(chosen), self._off(chosen, first)
        noise = max(LEAST_SPREAD, self._noise(chosen) / 2)
        if alone <= count * max(BENT, noise) ** 2:
            return [(name, first, chosen)]
        starts = {at: float(self.nbytes[chosen[at]]) for at in places}
        off = {
            at: self._off(chosen[:at], first) + self._off(chosen[at:], starts[at]) for at in places
        }
        at = min(places, key=off.__getitem__)
        floor = count * noise**2
        gained = count * math.log((alone + floor) / (off[at] + floor))
        if gained <= 3 * math.log(count):  # a start-up, a slope and a boundary more
            return [(name, first, chosen)]
        return self._cut(name, first, chosen[:at]) + self._cut(name, starts[at], chosen[at:])

    def _noise(self, chosen: Sequence[int]) -> float:
        if min(len(self.seconds[i]) for i in chosen) < 2:
            return 0.0
        halves = [[typical_s(self.seconds[i][which::2]) for i in chosen] for which in (0, 1)]
        return _rms([a / b - 1 for a, b in zip(*halves, strict=True)])

    def _off(self, chosen: Sequence[int], first: float) -> float:
        """Returns the sum of squared relative errors of the line that is fitted to these sizes."""
        line = self._line(chosen, first, None)
        expected = [
            line.alpha_s + line.beta_s_per_byte * self._charged(self.nbytes[i], first)
            for i in chosen
        ]
        return sum((self.typical_s[i] / e - 1) ** 2 for i, e in zip(chosen, expected, strict=True))

    def _known(self, name: str | None) -> float | None:
        return self.wire_s_per_byte if name == PIPELINE else None

    def expected_s(self, cost: CollectiveCost) -> list[float]:
        """Returns the fitted time for each measured size, if links were idle before."""
        starts = [0, *(part.below_bytes for part in cost.smaller)]

        def one(nbytes: int) -> float:
            line = cost.line(nbytes)
            first = max(start for start in starts if start <= nbytes)
            return line.alpha_s + line.beta_s_per_byte * self._charged(nbytes, first)

        return [one(nbytes) for nbytes in self.nbytes]

    def residuals(self) -> list[float]:
        """Returns the relative difference of the typical time from the fitted time, by size."""
        expected = self.expected_s(self.fit())
        return [t / e - 1 for t, e in zip(self.typical_s, expected, strict=True)]

    def half(self, which: int) -> Measurement:
        """Returns every second repeat of each size, from the first (0) or the second (1) on."""
        return dataclasses.replace(self, seconds=[times[which::2] for times in self.seconds])

    def agreement(self, least_bytes: float = 0) -> Agreement:
        """Returns how well each half of the repeats predicts the other, from `least_bytes` on.

        Raises:
            UserError: a size has a single repeat, or no size has `least_bytes`.
        """
        if min(map(len, self.seconds)) < 2:
            raise UserError("agreement compares the halves of the repeats: two are needed per size")
        halves = [self.half(0), self.half(1)]
        errors, noise = [], []
        for known, asked in (halves, halves[::-1]):
            expected = known.expected_s(known.fit())
            each = zip(self.nbytes, expected, known.typical_s, asked.typical_s, strict=True)
            for nbytes, value, before, after in each:
                if nbytes >= least_bytes:
                    errors.append(value / after - 1)
                    noise.append(before / after - 1)
        if not errors:
            raise UserError(f"{self.operation}: no message of {least_bytes:g} bytes was timed")
        worst = max(map(abs, errors))
        return Agreement(error=_rms(errors), noise=_rms(noise), worst=worst)

    def _line(self, chosen: Sequence[int], first: float, known: float | None) -> AlphaBeta:
        typical = self.typical_s
        spreads = [LEAST_SPREAD + typical[i] / min(self.seconds[i]) - 1 for i in chosen]
        charged = [self._charged(self.nbytes[i], first) for i in chosen]
        return fit_alpha_beta(charged, [typical[i] for i in chosen], spreads, known)

    def _queued(self, line: AlphaBeta, first: float, end: float) -> AlphaBeta:
        """Returns `line` with its start-up in a queue, measured at these or smaller sizes."""
        sizes = [pair for pair in self.queued if pair[0] < end]
        inside = [pair for pair in sizes if pair[0] >= first] or sizes[-1:]
        if not inside:
            return line
        left_s = [seconds - line.beta_s_per_byte * nbytes for nbytes, seconds in inside]
        queued_s = min(line.alpha_s, max(0.0, statistics.median(left_s)))
        return dataclasses.replace(line, queued_alpha_s=queued_s)

    def _charged(self, nbytes: int, first: float) -> float:
        """Returns how many of a message's bytes cost time; its regime starts at size `first`."""
        if self.regimes is not None and len(self.regimes) > 1 and first < self.free_bytes:
            return nbytes
        return max(0.0, nbytes - self.free_bytes)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Relative error of a fit to one half of the repeats, compared with the other half."""

    error: float
    """Root mean square over sizes and both halves."""
    noise: float
    """Root mean square of the difference between the halves, which no fit can predict."""
    worst: float
    """Largest absolute error."""

    @property
    def misfit(self) -> float:
        """Part of the error that the noise does not explain."""
        return math.sqrt(max(0.0, self.error**2 - self.noise**2))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def carried(operation: Operation, world_size: int) -> float:
    """Returns the bytes that each rank's link carries each way, per byte of the full buffer.

    Reduce-scatter and all-gather: (P-1)/P for P ranks. All-reduce: twice that (Patarasuk and Yuan,
    JPDC 2009). All others: 1.
    """
    at_least("world_size", world_size, 2)
    share = (world_size - 1) / world_size
    shares = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share}
    return shares.get(operation, 1.0)
