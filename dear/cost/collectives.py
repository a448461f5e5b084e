"""What a collective costs: a start-up and a time per byte, measured or from published tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args
from weakref import WeakKeyDictionary

from dear.comm.communicator import Communicator, buffer, sub_communicators
from dear.errors import UserError, one_of, unknown
from dear.lazy import torch
from dear.options import at_least

ROUNDS = 30
HUBER = 1.5
"""Residuals beyond so many deviations count less."""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """Seconds of one collective = alpha + beta x bytes of the full buffer (not of a shard)."""

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        at_least("alpha_s", self.alpha_s, 0)
        at_least("beta_s_per_byte", self.beta_s_per_byte, 0)

    def __call__(self, nbytes: float) -> float:
        """Seconds for a buffer of `nbytes`; nothing costs nothing."""
        return self.alpha_s + self.beta_s_per_byte * nbytes if nbytes else 0.0


def fit_alpha_beta(
    nbytes: Sequence[float], seconds: Sequence[float], spreads: Sequence[float] | None = None
) -> AlphaBeta:
    """The line through the measurements, by robust least squares of the relative errors.

    Relative, so that small messages say what a start-up costs and large ones what a byte costs;
    robust (Huber's weights), so that a measurement that something disturbed hardly counts.

    Args:
        spreads: how uncertain each time is, as a share of it; None: all alike.

    Raises:
        UserError: fewer than two sizes, or a time that is not positive.
    """
    if len(nbytes) != len(seconds) or len(set(nbytes)) < 2:
        raise UserError(f"a fit needs times of two sizes at least, got {len(set(nbytes))}")
    if min(seconds) <= 0:
        raise UserError(f"a fit needs times above 0, got {min(seconds)}")
    expected = list(seconds)
    trust = [1.0] * len(seconds)
    spreads = [1.0] * len(seconds) if spreads is None else spreads
    alpha = beta = 0.0
    for _ in range(ROUNDS):
        each = zip(trust, expected, spreads, strict=True)
        weights = [share / (value * spread) ** 2 for share, value, spread in each]
        alpha, beta = _weighted_line(nbytes, seconds, weights)
        fitted = [max(alpha + beta * n, 1e-15) for n in nbytes]
        each = zip(seconds, fitted, spreads, strict=True)
        errors = [abs(t / f - 1) / spread for t, f, spread in each]
        # 1.4826: the deviation of normal errors from their median; the floor is rounding.
        limit = HUBER * max(1.4826 * statistics.median(errors), 1e-9)
        trust = [min(1.0, limit / max(error, 1e-15)) for error in errors]
        expected = fitted
    return AlphaBeta(alpha_s=alpha, beta_s_per_byte=beta)


def _weighted_line(
    xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Intercept and slope of least squares, neither below 0."""
    total = sum(weights)
    x_mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
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


# All-reduce by number of workers: (alpha in s, beta in s per byte), as the programs of MG-WFBP
# (HKBU-HPML, 2 to 16) and DeAR (lzhangbv, 32 and more) ship them; the latter scaled some by hand.
TABLES: dict[str, dict[int, tuple[float, float]]] = {
    "56gbib": {
        2: (2.554691138304671e-06, 9.837548167872609e-11),
        4: (4.204298980348825e-05, 2.0589360830118177e-10),
        8: (9.75367204301171e-05, 3.0568230536676206e-10),
        16: (2.3583677659915685e-04, 4.0594787739537565e-10),
        32: (4.063207999629258e-04, 4.906985929465796e-10),
        64: (8.063207999629258e-04, 5.888383115358955e-10),
    },
    "10gbe": {
        2: (2.554691138304671e-06, 9.837548167872609e-11),
        4: (4.204298980348825e-05, 2.0589360830118177e-10),
        8: (5.230272768511732e-04, 8.570746975492128e-10),
        16: (9.080981007148093e-04, 7.395651186836712e-10),
        32: (4.042923236574415e-03, 8.643300782166769e-10),
        48: (5.5429232365744145e-03, 9.643300782166768e-10),
        64: (7.042923236574415e-03, 9.643300782166768e-10),
    },
}


def table_costs(network: str, world_size: int) -> AlphaBeta:
    """What the published table of `network` says of all-reduce, for any number of workers.

    Between two entries both values are interpolated by the number of workers; beyond the last,
    alpha grows like the steps of a ring, P - 1, and beta like its bytes, (P - 1) / P. One worker
    pays nothing. A fall-back: measured costs are of the network that is really there.
    """
    table = one_of("cost table", network, TABLES)
    at_least("world_size", world_size, 1)
    if world_size == 1:
        return AlphaBeta(alpha_s=0.0, beta_s_per_byte=0.0)
    last = max(table)
    if world_size > last:
        alpha, beta = table[last]
        steps = (world_size - 1) / (last - 1)
        return AlphaBeta(alpha_s=alpha * steps, beta_s_per_byte=beta * steps * last / world_size)
    low = max(count for count in table if count <= world_size)
    high = min(count for count in table if count >= world_size)
    share = (world_size - low) / (high - low) if high > low else 0.0
    alpha, beta = (a + share * (b - a) for a, b in zip(table[low], table[high], strict=True))
    return AlphaBeta(alpha_s=alpha, beta_s_per_byte=beta)


EXCHANGE = "exchange"
"""The name of what pairs of ranks do, among the fits of collectives."""
Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "exchange"]
"""`exchange`: pairs of ranks, far apart by their numbers, swap buffers, all pairs at once (of an
odd number one rank rests)."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

SIZES = tuple(2**power for power in range(12, 25, 2))
"""4 KiB to 16 MiB, in bytes of the full buffer."""
REPEATS = 5
ENOUGH_S = 0.1
"""Larger messages are not tried once one takes so long and its time is mostly that of its bytes."""
MOSTLY = 4.0
"""It is if the message takes so many times longer than the smallest."""
LEAST_SPREAD = 0.01
"""Times that agree by chance are no more certain than this, as a share."""
LARGE = 4.0
"""And if it has so many times the bytes that links pass at once."""

_fits: WeakKeyDictionary[Communicator, dict[tuple[str, str], AlphaBeta]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times of one collective by size, the same on all ranks."""

    operation: Operation
    nbytes: list[int]
    seconds: list[list[float]]
    """Per size the repeats, each the maximum over ranks."""
    free_bytes: float = 0.0
    """So much of the buffer costs nothing: what links pass at once after a rest."""

    @property
    def medians_s(self) -> list[float]:
        return [statistics.median(times) for times in self.seconds]

    def fit(self) -> AlphaBeta:
        """Alpha and beta by a robust fit of alpha + beta x (bytes - free bytes) to the medians.

        So beta is what a byte costs a link that is busy, and not less by what rests give away. A
        size counts by how well its repeats agree: those of small messages may differ by half, and
        of large ones, which say what a byte costs, by less than a percent.
        """
        least = [min(times) for times in self.seconds]
        pairs = zip(self.medians_s, least, strict=True)
        spreads = [LEAST_SPREAD + median / low - 1 for median, low in pairs]
        return fit_alpha_beta(self._charged(), self.medians_s, spreads)

    def residuals(self) -> list[float]:
        """By size, how much longer the median is than the fit says, as a share of that."""
        fit = self.fit()
        expected = [fit.alpha_s + fit.beta_s_per_byte * nbytes for nbytes in self._charged()]
        return [t / e - 1 for t, e in zip(self.medians_s, expected, strict=True)]

    def _charged(self) -> list[float]:
        return [max(0.0, nbytes - self.free_bytes) for nbytes in self.nbytes]


def free_bytes(operation: Operation, world_size: int, burst_bytes: float) -> float:
    """Bytes of the full buffer whose transfer fits into a burst of every link.

    Of a reduce-scatter or an all-gather each link carries (P-1)/P of the buffer each way, of an
    all-reduce twice that, and of an exchange all of it.
    """
    at_least("world_size", world_size, 2)
    share = (world_size - 1) / world_size
    carried = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, EXCHANGE: 1}
    return burst_bytes / carried[operation]


def measure_collective(
    communicator: Communicator,
    operation: Operation,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    shared: bool = False,
) -> Measurement:
    """Times `operation` on float32 buffers; every rank calls it, and nothing else runs meanwhile.

    Args:
        sizes: bytes of the full buffer, ascending; rounded up to a multiple of the world size.
        repeats: timed calls per size; one more is made first and left out.
        shared: the buffers lie in memory that the backend reads in place, where it has such.
    """
    if operation not in OPERATIONS:
        raise unknown("operation", operation, OPERATIONS)
    unit = 4 * communicator.size
    nbytes: list[int] = []
    seconds: list[list[float]] = []
    pair = _pair(communicator) if operation == EXCHANGE else None
    free = 0.0
    if communicator.size > 1:
        free = free_bytes(operation, communicator.size, communicator.burst_bytes)
    for count in sorted({-(-size // unit) * communicator.size for size in sizes}):
        call = _caller(communicator, operation, count, device, shared, pair)
        times = []
        for _ in range(repeats + 1):
            communicator.barrier()
            times.append(_timed(communicator.clock, call, device))
        # Of all ranks: who left the barrier last waits for nobody, and may see next to nothing.
        ranks = communicator.gather_objects(times[1:])
        seconds.append([max(call_s) for call_s in zip(*ranks, strict=True)])
        nbytes.append(count * 4)
        typical, least = (statistics.median(size_s) for size_s in (seconds[-1], seconds[0]))
        if (
            len(seconds) > 2
            and count * 4 > LARGE * free
            and typical > max(ENOUGH_S, MOSTLY * least)
        ):
            break
    if pair is not None and pair is not communicator:
        pair.close()
    return Measurement(operation=operation, nbytes=nbytes, seconds=seconds, free_bytes=free)


def measured_costs(
    communicator: Communicator, operation: Operation, device: torch.device
) -> AlphaBeta:
    """The fit of a measurement, the same on all ranks; one rank alone pays nothing.

    Measured at the first call for this communicator, operation and kind of device.
    """
    if communicator.size == 1:
        return AlphaBeta(alpha_s=0.0, beta_s_per_byte=0.0)
    fits = _fits.setdefault(communicator, {})
    key = (operation, device.type)
    if key not in fits:
        fits[key] = measure_collective(communicator, operation, device).fit()
    return fits[key]


def measured_call(
    communicator: Communicator,
    call: Callable[[torch.Tensor], object],
    device: torch.device,
    sizes: Sequence[int] = SIZES,
) -> AlphaBeta:
    """The fit of what `call` takes for a float32 tensor by its bytes; rank 0's, on all ranks."""
    seconds = []
    for size in sizes:
        run = partial(call, torch.randn(size // 4, device=device))
        times = [_timed(communicator.clock, run, device) for _ in range(REPEATS + 1)][1:]
        seconds.append(statistics.median(times))
        if seconds[-1] > ENOUGH_S and len(seconds) > 1:
            break
    return communicator.broadcast_object(fit_alpha_beta(sizes[: len(seconds)], seconds))


def _caller(
    communicator: Communicator,
    operation: Operation,
    count: int,
    device: torch.device,
    shared: bool,
    pair: Communicator | None,
) -> Callable[[], object]:
    like = torch.empty(0, device=device)

    def zeros(numel: int) -> torch.Tensor:
        return buffer(like, numel, communicator) if shared else like.new_zeros(numel)

    full = zeros(count)
    if operation == "all_reduce":
        return lambda: communicator.all_reduce(full, op="sum").wait()
    if operation == EXCHANGE:
        # The rank half the world away, which is on another host if there are several.
        half = communicator.size // 2
        if communicator.rank >= 2 * half:
            return lambda: None
        if pair is not None:
            return lambda: pair.all_reduce(full, op="sum").wait()
        peer, received = (communicator.rank + half) % (2 * half), zeros(count)
        return lambda: communicator.exchange(received, full, peer=peer).wait()
    shard = zeros(count // communicator.size)
    if operation == "reduce_scatter":
        return lambda: communicator.reduce_scatter(shard, full, op="sum").wait()
    return lambda: communicator.all_gather(full, shard).wait()


def _pair(communicator: Communicator) -> Communicator | None:
    """The pair of this rank, where its all-reduce does the same as a swap and takes less time."""
    half = communicator.size // 2
    if not communicator.native or communicator.size == 2:
        return communicator if communicator.native else None
    made = sub_communicators(communicator, [(rank, rank + half) for rank in range(half)])
    return next(iter(made.values()), None)


def _timed(clock: Callable[[], float], call: Callable[[], object], device: torch.device) -> float:
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # A clock may be too coarse for the smallest.
    return max(clock() - began, 1e-9)
