"""Times of collectives by size: what is fitted to them, and how well it foresees them."""

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
"""The name of what pairs of ranks do, among the fits of collectives."""
Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "exchange"]
"""`exchange`: pairs of ranks, far apart by their numbers, swap buffers, all pairs at once (of an
odd number one rank rests)."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

Regimes = tuple[tuple[str, int], ...]
"""Ways in which an engine sends messages by size: name, and least bytes of the full buffer;
ascending, the first from 0."""
PIPELINE = "pipeline"
"""The name of the regime in which a message takes a start-up and what its bytes keep a link busy.
"""

LEAST_SPREAD = 0.01
"""Times that agree by chance are no more certain than this, as a share."""
BENT = 0.03
"""Times that are off a line by more, and by more than noise, may lie on two."""
LARGE = 4.0
"""A message that has so many times the bytes that links pass at once says what a byte costs."""
TYPICAL = 0.25
"""The share of repeats that took less than what counts: others only ever disturb."""


def typical_s(times: Sequence[float]) -> float:
    """The lower quartile of repeats."""
    ordered = sorted(times)
    place = TYPICAL * (len(ordered) - 1)
    low = ordered[math.floor(place)]
    return low + (place % 1) * (ordered[math.ceil(place)] - low)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times of one collective by size, the same on all ranks."""

    operation: Operation
    nbytes: list[int]
    seconds: list[list[float]]
    """Repeats of each size, each the maximum over ranks."""
    free_bytes: float = 0.0
    """Bytes of the buffer that cost nothing: what links pass at once after a rest."""
    regimes: Regimes | None = None
    """Regimes as the engine tells them; None: it tells none."""
    wire_s_per_byte: float | None = None
    """Seconds that a byte of the full buffer keeps a link busy, with headers; None: not known."""
    queued: tuple[tuple[int, float], ...] = ()
    """Sizes, and by how many seconds a queue of such messages takes longer for each one behind the
    first."""

    @property
    def typical_s(self) -> list[float]:
        return [typical_s(times) for times in self.seconds]

    def fit(self) -> CollectiveCost:
        """Alpha and beta of each regime, by a robust fit to the typical time of each size.

        A size counts by how well its repeats agree. Where one line is off by more than noise and
        two are not, there are two. In the pipeline the slope is that of the wire, where it is
        known. Where bytes cost nothing after a rest, beta is what one costs a link that
        is busy; only of a regime that begins among such small messages all bytes count, and its
        line holds after a rest.
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
        """Name and first bytes of each regime, and the places of its sizes.

        One with too few sizes for a line joins that before, as it is the nearest to say something.
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
        """The regime as it is, or in parts, by Schwarz' criterion (Ann. Stat. 6, 1978) with what
        the halves of the repeats are off each other as noise."""
        charged = [self._charged(self.nbytes[i], first) for i in chosen]
        # A line needs two sizes, and what costs nothing is one.
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
        """Squares of how far these sizes are off their line, as shares of it."""
        line = self._line(chosen, first, None)
        expected = [
            line.alpha_s + line.beta_s_per_byte * self._charged(self.nbytes[i], first)
            for i in chosen
        ]
        return sum((self.typical_s[i] / e - 1) ** 2 for i, e in zip(chosen, expected, strict=True))

    def _known(self, name: str | None) -> float | None:
        return self.wire_s_per_byte if name == PIPELINE else None

    def expected_s(self, cost: CollectiveCost) -> list[float]:
        """Returns the fitted times of messages after a rest, by size."""
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
        """Every other repeat of each size, from the first (0) or the second (1)."""
        return dataclasses.replace(self, seconds=[times[which::2] for times in self.seconds])

    def agreement(self, least_bytes: float = 0) -> Agreement:
        """Returns how well one half of the repeats predicts the other, for messages of this size
        and more.

        Raises:
            UserError: a size without a second repeat, or none so large.
        """
        if min(map(len, self.seconds)) < 2:
            raise UserError("one half of the repeats predicts the other: two are needed per size")
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
        """The line with what the queues of its sizes tell; else of the nearest smaller ones."""
        sizes = [pair for pair in self.queued if pair[0] < end]
        inside = [pair for pair in sizes if pair[0] >= first] or sizes[-1:]
        if not inside:
            return line
        left_s = [seconds - line.beta_s_per_byte * nbytes for nbytes, seconds in inside]
        queued_s = min(line.alpha_s, max(0.0, statistics.median(left_s)))
        return dataclasses.replace(line, queued_alpha_s=queued_s)

    def _charged(self, nbytes: int, first: float) -> float:
        """Bytes that cost something, of a message in the regime that begins with `first`."""
        if self.regimes is not None and len(self.regimes) > 1 and first < self.free_bytes:
            return nbytes
        return max(0.0, nbytes - self.free_bytes)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Relative error of a fit to one half of the repeats, judged by the other half."""

    error: float
    """The root of the mean square over sizes and both halves."""
    noise: float
    """The same of the other half's own times in place of the fit: what no fit can foresee."""
    worst: float
    """The largest error."""

    @property
    def misfit(self) -> float:
        """Part of the error that the noise does not explain."""
        return math.sqrt(max(0.0, self.error**2 - self.noise**2))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def carried(operation: Operation, world_size: int) -> float:
    """Bytes that each rank's link carries each way, per byte of the full buffer.

    Of a reduce-scatter or an all-gather (P-1)/P, of an all-reduce twice that (Patarasuk and Yuan,
    JPDC 2009), and of an exchange 1.
    """
    at_least("world_size", world_size, 2)
    share = (world_size - 1) / world_size
    shares = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, EXCHANGE: 1.0}
    return shares[operation]
