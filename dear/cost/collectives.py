"""Cost of a collective by message size: measured, or taken from published tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from dear.comm.communicator import Communicator, padded, sub_communicators
from dear.comm.work import Work
from dear.cost.fit import AlphaBeta, CollectiveCost, fit_alpha_beta
from dear.cost.measurement import (
    EXCHANGE,
    LARGE,
    MEASURABLE,
    PIPELINE,
    Measurement,
    Operation,
    carried,
    typical_s,
)
from dear.errors import one_of, unknown
from dear.lazy import torch
from dear.options import at_least

# All-reduce by number of workers: (alpha in s, beta in s per byte), as shipped with MG-WFBP
# (HKBU-HPML, 2 to 16) and DeAR (lzhangbv, 32 and more; some of these were scaled by hand).
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
    """Returns alpha and beta of all-reduce from the published table of `network`.

    Between two entries of the table, both values are interpolated by the number of workers. Beyond
    the last entry, alpha grows like the steps of a ring (P - 1), and beta like its bytes
    ((P - 1) / P). For one worker both are 0. Measured costs describe the actual network better.
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


SIZES = tuple(2**power for power in range(12, 25, 2))
"""Sizes of the full buffer in bytes: 4 KiB to 16 MiB."""
REPEATS, FEW_REPEATS = 16, 6
"""Repeats of messages below `MANY_BELOW` bytes (they take milliseconds), and of larger messages."""
MANY_BELOW = 1 << 20
WARM_BYTES = 30e6
"""Bytes that a connection carries before it is timed. TCP reaches the link's rate only some time
after slow start, and speeds up only with the bytes that it sends."""
BUDGET_S = 5.0
"""Seconds that one operation may take, warm-up included (`budget_of`)."""
WARM_SHARE, WARM_CALLS = 0.4, 4
"""Largest share of the budget for the warm-up, and warm-up calls between readings of the clock."""
ENOUGH_S = 0.1
"""`measured_call` tries no larger size after a call that takes longer than this."""
LEAST_SIZES = 3
QUEUE, FEW_QUEUED, QUEUED_FROM = 8, 3, 16 << 10
"""Messages per measured queue, below `MANY_BELOW` bytes and above; and the smallest size in bytes
that is measured in a queue."""
LONG_START_UP = 0.25
"""Share of the start-up in the time of a message from which a queue of messages of at least
`MANY_BELOW` bytes is measured. A smaller share does not stand out from the times of the bytes."""
DISTANT_BARRIER_S, TIMED_BARRIERS = 3e-3, 5
"""Seconds of a barrier from which ranks count as distant, and barriers that are timed."""
QUEUE_SHARE = 0.5
"""Time limit of the queues, as a share of the budget of single messages."""
MOST_BITS = 64
"""Exponent of the size that `start_up_bytes` returns if bytes are free."""

Key = tuple[str, str, int, bool]
_fits: WeakKeyDictionary[Communicator, dict[Key, CollectiveCost]] = WeakKeyDictionary()
_barriers: WeakKeyDictionary[Communicator, float] = WeakKeyDictionary()
"""Seconds of a barrier, by communicator: measured once, so all measurements use the same method."""


def measure_collective(
    communicator: Communicator,
    operation: Operation,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int | None = None,
    shared: bool = False,
    warm: bool = True,
    queues: bool = False,
    budget_s: float = BUDGET_S,
) -> Measurement:
    """Times `operation` on float32 buffers; all ranks must call it while nothing else runs.

    Args:
        sizes: bytes of the full buffer, rounded up to multiples of 4 x world size. Sizes at which
            the engine's regimes begin are added if they lie within the range.
        repeats: timed calls per size, after a first call that does not count. None: chosen by size.
        shared: allocate the buffers in memory that the backend reads in place, if it has such.
        warm: sends `WARM_BYTES` over the connections first.
        queues: also measures messages of each regime that wait in a queue, for `QUEUE_SHARE` of
            the budget in addition.
        budget_s: as for `budget_of`. Larger sizes are skipped when time runs out, but the smallest
            three are always measured, with at least two repeats each.
    """
    if operation not in MEASURABLE:
        raise unknown("operation", operation, MEASURABLE)
    left_s = budget_of(communicator, budget_s)
    calls = _Calls(communicator, operation, device, shared)
    starts = [first for _, first in calls.regimes or () if min(sizes) < first < max(sizes)]
    wanted = sorted({padded(size, 4 * communicator.size) for size in (*sizes, *starts)})
    if warm and communicator.size > 1:
        nbytes = max(size for size in wanted if size <= MANY_BELOW or size == wanted[0])
        kept_s = (1 - WARM_SHARE) * left_s()
        calls.warm_up(nbytes, lambda: left_s() > kept_s)
    known = calls.wire_s_per_byte is not None
    pipelines = (first for name, first in calls.regimes or () if name == PIPELINE and known)
    steady = next(pipelines, math.inf)
    seconds = timed_by_size(
        communicator,
        wanted,
        calls.timed_of,
        left_s=left_s,
        of_ranks=calls.lead.of_ranks,
        repeats=repeats,
        free_bytes=0.0 if known else calls.free_bytes,
        # Two sizes suffice in a regime whose slope is known.
        enough=lambda sizes: sum(nbytes >= steady for nbytes in sizes) >= 2,
    )
    measurement = calls.measurement(seconds)
    if queues and operation != EXCHANGE and communicator.size > 1:
        queued = calls.queued(measurement, QUEUE_SHARE * budget_s)
        measurement = dataclasses.replace(measurement, queued=queued)
    calls.close()
    return measurement


class _Calls:
    """Calls of one collective on buffers of given sizes; the constructor is a collective call."""

    def __init__(
        self, communicator: Communicator, operation: Operation, device: torch.device, shared: bool
    ) -> None:
        self._communicator, self._operation = communicator, operation
        self._device, self._shared = device, shared
        self._pair = _pair(communicator, device) if operation == EXCHANGE else None
        if operation == EXCHANGE:  # the comm core all-reduces in pairs; rank 0 is always in one
            communicator.connect(device)
            regimes = self._pair.regimes("all_reduce", device) if self._pair else None
        else:
            regimes = communicator.regimes(operation, device)
        self.regimes: tuple[tuple[str, int], ...] | None = communicator.broadcast_object(regimes)
        alone = communicator.size == 1
        self._share = 1.0 if alone else carried(operation, communicator.size)
        """Bytes on the wire per byte of the buffer."""
        self.free_bytes = 0.0 if alone else communicator.burst_bytes / self._share
        """Bytes of the buffer that idle links pass at once."""
        rate = None if alone else communicator.wire_bytes_per_s
        self.wire_s_per_byte = self._share / rate if rate else None
        self.lead = leading(communicator, operation)

    def of(self, nbytes: int, count: int = 1) -> Callable[[], None]:
        """Returns a function that starts `count` collectives and waits for them."""
        start = _starter(
            self._communicator, self._operation, nbytes // 4, self._device, self._shared, self._pair
        )

        def call() -> None:
            for work in [start() for _ in range(count)]:
                if work is not None:
                    work.wait()

        return call

    def timed_of(self, nbytes: int) -> Callable[[], float]:
        """Returns a function that sends a message and returns its seconds on this rank."""
        call = self.of(nbytes)
        return partial(self.seconds, call, call)

    def seconds(self, call: Callable[[], object], message: Callable[[], object]) -> float:
        """Returns the seconds of a call on this rank, after a barrier or after `message`."""
        clock, device = self._communicator.clock, self._device
        self.lead.before(partial(_timed, clock, message, device))
        return _timed(clock, call, device)

    def warm_up(self, nbytes: int, in_time: Callable[[], bool]) -> None:
        """Sends messages of `nbytes` until the connections have carried `WARM_BYTES`."""
        call, sent = self.of(nbytes), 0.0
        while sent < WARM_BYTES and in_time():
            for _ in range(WARM_CALLS):
                call()
            sent += WARM_CALLS * nbytes * self._share

    def measurement(self, seconds: Mapping[int, list[float]]) -> Measurement:
        """Returns a measurement with these seconds of the repeats by size."""
        return Measurement(
            operation=self._operation,
            nbytes=list(seconds),
            seconds=list(seconds.values()),
            free_bytes=self.free_bytes,
            regimes=self.regimes,
            wire_s_per_byte=self.wire_s_per_byte,
        )

    def queued(self, alone: Measurement, budget_s: float) -> tuple[tuple[int, float], ...]:
        """Returns (size, seconds) of a message in a queue, for the smallest size of each regime.

        A size of at least `MANY_BELOW` bytes is left out if the share of its start-up is below
        `LONG_START_UP`, or if time runs out.
        """
        cost = alone.fit()
        alone_s = dict(zip(alone.nbytes, alone.typical_s, strict=True))
        counts = {
            size: QUEUE if size < MANY_BELOW else FEW_QUEUED
            for size in _heads(alone.nbytes, self.regimes)
            if size < MANY_BELOW or cost.latency_s(size) >= LONG_START_UP * alone_s[size]
        }
        times = timed_by_size(
            self._communicator,
            list(counts),
            lambda size: partial(self.seconds, self.of(size, counts[size]), self.of(size)),
            left_s=budget_of(self._communicator, budget_s),
            of_ranks=self.lead.of_ranks,
            repeats=FEW_REPEATS,
        )
        return tuple(
            (size, max(0.0, (typical_s(seconds) - alone_s[size]) / (counts[size] - 1)))
            for size, seconds in times.items()
        )

    def close(self) -> None:
        if self._pair is not None and self._pair is not self._communicator:
            self._pair.close()


def budget_of(communicator: Communicator, budget_s: float) -> Callable[[], float]:
    """Returns a function that gives the seconds left of a budget, counted from this call.

    Both are seconds of the communicator's clock; the budget is `budget_s` times its `time_scale`.
    All ranks must call that function together; each gets rank 0's value.
    """
    began_s, whole_s = communicator.clock(), budget_s * communicator.time_scale
    return lambda: whole_s - communicator.broadcast_object(communicator.clock() - began_s)


def barrier_s(communicator: Communicator) -> float:
    """Returns the seconds of a barrier in the modelled cluster, as rank 0 timed it; collective.

    It is the shortest of several barriers, because a rank may have to wait for a core. The first
    call with a communicator measures.
    """
    if communicator not in _barriers:
        communicator.barrier()  # the ranks may arrive at different times
        times = []
        for _ in range(TIMED_BARRIERS):
            began_s = communicator.clock()
            communicator.barrier()
            times.append(communicator.clock() - began_s)
        shortest_s = min(times) / communicator.time_scale
        _barriers[communicator] = float(communicator.broadcast_object(shortest_s))
    return _barriers[communicator]


def is_distant(communicator: Communicator) -> bool:
    """Returns True if a barrier takes `DISTANT_BARRIER_S` or more, as between sites; collective."""
    return communicator.size > 1 and barrier_s(communicator) >= DISTANT_BARRIER_S


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Preparation of all ranks for a timed call, and how their times become that of the call."""

    before: Callable[[Callable[[], object]], object]
    """Called before each timed call, with a function that sends a message of the same size. A
    barrier does not need this function."""
    of_ranks: Callable[[Sequence[float]], float] = max
    """Computes the seconds of a call from those of all ranks."""


def leading(communicator: Communicator, operation: Operation = "all_reduce") -> Lead:
    """Returns what precedes timed calls: a barrier, or between distant ranks a message; collective.

    A barrier ends on some ranks one latency later than on others, and their wait for each other
    becomes a part of the next message. In training, a message follows others of about its size, and
    TCP's windows are open. Between distant ranks, both would count as much as the message, so there
    is no barrier. The ranks may then begin at different times, and one rank waits in one call, and
    another rank in the next. The mean of the ranks' times contains this once for each call, like
    the time of a training step.
    """
    # No rank of a broadcast waits for those behind it: the next would begin before this one ends.
    if operation == "broadcast" or not is_distant(communicator):
        return Lead(before=lambda message: communicator.barrier())
    of_ranks: Callable[[Sequence[float]], float] = statistics.fmean
    if operation == EXCHANGE:
        # Pairs do not wait for each other, and one rank of an odd number is in no pair.
        half = communicator.size // 2

        def of_ranks(times: Sequence[float]) -> float:
            pairs = zip(times[:half], times[half : 2 * half], strict=True)
            return max(map(statistics.fmean, pairs))

    return Lead(before=lambda message: message(), of_ranks=of_ranks)


def timed_by_size(
    communicator: Communicator,
    sizes: Sequence[int],
    timed_of: Callable[[int], Callable[[], float]],
    *,
    left_s: Callable[[], float],
    of_ranks: Callable[[Sequence[float]], float] = max,
    repeats: int | None = None,
    free_bytes: float = 0.0,
    enough: Callable[[Collection[int]], bool] = lambda sizes: False,
) -> dict[int, list[float]]:
    """Times messages by size; stops before larger sizes when time runs out.

    Small messages are timed in two rounds, before and after the large ones, because a disturbance
    may last for a whole round. The repeats of both rounds alternate in the result, so the two
    halves that `Measurement.agreement` compares are the two rounds.

    Args:
        sizes: ascending, in bytes. The first three, and those up to `LARGE * free_bytes`, are
            always timed.
        timed_of: returns, for a size, a function that sends one message and returns its seconds on
            this rank.
        left_s: seconds left for all sizes (`budget_of`).
        of_ranks: returns the seconds of a message from those of all ranks (`Lead`).
        repeats: per size, after a first call that does not count. None: chosen by size.
        free_bytes: as in `Measurement`.
        enough: True if the sizes timed so far suffice.

    Returns:
        Seconds of the repeats by size.
    """
    times: dict[int, list[float]] = {}
    again: dict[int, Callable[[], float]] = {}
    for size in sizes:
        left = left_s()
        optional = len(times) >= LEAST_SIZES and size > LARGE * free_bytes
        if optional and (enough(times) or left < LEAST_SIZES * _expected_s(times, size)):
            break
        timed = timed_of(size)
        first_s = of_ranks(communicator.gather_objects(timed()))
        # With what precedes the message: between distant sites, it takes as long.
        spent_s = max(first_s, left - left_s())
        count = repeats or (REPEATS if size < MANY_BELOW else FEW_REPEATS)
        # A quarter of the time left at most, because larger sizes follow.
        count = max(min(count, int(left / 4 / spent_s)), min(count, 2))
        if size < MANY_BELOW and count > 1:
            count //= 2
            again[size] = timed
        times[size] = _times(communicator, timed, count, of_ranks)
    for size, timed in again.items():
        timed()
        second = _times(communicator, timed, len(times[size]), of_ranks)
        times[size] = [time_s for pair in zip(times[size], second, strict=True) for time_s in pair]
    return times


def _expected_s(times: Mapping[int, Sequence[float]], size: int) -> float:
    """Returns the seconds of a message of `size` bytes, larger than the timed ones, at most.

    They grow like the bytes, or along the line through the last two times, if that is less.
    """
    before, last = sorted(times)[-2:]
    last_s = typical_s(times[last])
    slope = max(0.0, last_s - typical_s(times[before])) / (last - before)
    return min(last_s * size / last, last_s + slope * (size - last))


def _times(
    communicator: Communicator,
    timed: Callable[[], float],
    count: int,
    of_ranks: Callable[[Sequence[float]], float],
) -> list[float]:
    # A rank that leaves the barrier last waits for no rank, so its own time may be almost 0.
    ranks = communicator.gather_objects([timed() for _ in range(count)])
    return [of_ranks(call_s) for call_s in zip(*ranks, strict=True)]


def _heads(sizes: Sequence[int], regimes: Sequence[tuple[str, int]] | None) -> list[int]:
    """Returns the smallest timed size of each regime, from `QUEUED_FROM` bytes on."""
    firsts = [max(first, QUEUED_FROM) for _, first in regimes or ((None, 0),)]
    heads = (next((size for size in sizes if size >= first), None) for first in firsts)
    return sorted({size for size in heads if size is not None})


def measured_costs(
    communicator: Communicator,
    operation: Operation,
    device: torch.device,
    largest: int = SIZES[-1],
    queues: bool = False,
) -> CollectiveCost:
    """Measures a collective and returns its fitted cost, the same on all ranks.

    The first call with the same arguments measures; later calls return the same fit. In a world of
    one, everything costs 0.

    Args:
        largest: bytes of the largest message. Larger ones are sent only if `burst_bytes` is so
            large that fewer than two sizes would exceed it.
        queues: as for `measure_collective`.
    """
    if communicator.size == 1:
        return CollectiveCost(alpha_s=0.0, beta_s_per_byte=0.0)
    fits = _fits.setdefault(communicator, {})
    key = (operation, device.type, largest, queues)
    if key not in fits:
        free = communicator.burst_bytes / carried(operation, communicator.size)
        # Each size is four times the previous one: the last two are above LARGE * free.
        most = max(largest, 16 * LARGE * free)
        sizes = [size for size in SIZES if size <= most]
        measurement = measure_collective(
            communicator, operation, device, sizes=sizes, queues=queues
        )
        fits[key] = measurement.fit()
    return fits[key]


def start_up_bytes(cost: Callable[[float], float]) -> float:
    """Returns the smallest size at which the bytes of a message take as long as its start-up.

    The size is in bytes, and a power of two, so that slightly different measurements agree: 1 if
    messages are free, 2^64 if bytes are free. From some size on, a message may need one more
    latency. This is not a time of its bytes. Therefore, their time is computed from each of three
    doublings of the size, and the median counts.

    Args:
        cost: seconds of a message by its bytes, never decreasing.
    """
    for size in (2.0**power for power in range(MOST_BITS)):
        steps = ((4, size / 2), (2, size), (1, 2 * size))
        bytes_s = statistics.median(n * (cost(end) - cost(end / 2)) for n, end in steps)
        if bytes_s >= cost(size) - bytes_s:
            return size
    return 2.0**MOST_BITS


def measured_call(
    communicator: Communicator,
    call: Callable[[torch.Tensor], object],
    device: torch.device,
    sizes: Sequence[int] = SIZES,
) -> AlphaBeta:
    """Fits the seconds of `call` on float32 tensors by their bytes; all ranks get rank 0's fit."""
    seconds = []
    for size in sizes:
        run = partial(call, torch.randn(size // 4, device=device))
        times = [_timed(communicator.clock, run, device) for _ in range(FEW_REPEATS)][1:]
        seconds.append(statistics.median(times))
        if seconds[-1] > ENOUGH_S and len(seconds) > 1:
            break
    return communicator.broadcast_object(fit_alpha_beta(sizes[: len(seconds)], seconds))


def _starter(
    communicator: Communicator,
    operation: Operation,
    count: int,
    device: torch.device,
    shared: bool,
    pair: Communicator | None,
) -> Callable[[], Work | None]:
    """Returns a function that starts `operation`; its result is None if this rank does nothing."""
    like = torch.empty(0, device=device)

    def zeros(numel: int) -> torch.Tensor:
        return communicator.allocate(like, numel) if shared else like.new_zeros(numel)

    full = zeros(count)
    if operation == "all_reduce":
        return lambda: communicator.all_reduce(full, op="sum")
    if operation == "broadcast":
        return lambda: communicator.broadcast(full, root=0)
    if operation == EXCHANGE:
        # The peer is half the world away: on another host, if there are several.
        half = communicator.size // 2
        if communicator.rank >= 2 * half:
            return lambda: None
        if pair is not None:
            return lambda: pair.all_reduce(full, op="sum")
        peer, received = (communicator.rank + half) % (2 * half), zeros(count)
        return lambda: communicator.exchange(received, full, peer=peer)
    shard = zeros(count // communicator.size)
    if operation == "reduce_scatter":
        return lambda: communicator.reduce_scatter(shard, full, op="sum")
    return lambda: communicator.all_gather(full, shard)


def _pair(communicator: Communicator, device: torch.device) -> Communicator | None:
    """Returns this rank's pair, or None; an all-reduce of the pair is faster than a swap."""
    half = communicator.size // 2
    native = device.type in communicator.native
    if not native or communicator.size == 2:
        return communicator if native else None
    pairs = sub_communicators(communicator, [(rank, rank + half) for rank in range(half)])
    return next(iter(pairs.values()), None)


def _timed(clock: Callable[[], float], call: Callable[[], object], device: torch.device) -> float:
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(clock() - began, 1e-9)  # a clock may be too coarse for the smallest messages
