"""What a collective costs by its size: measured, or from published tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from dear.comm.communicator import Communicator, Work, buffer, sub_communicators
from dear.cost.fit import AlphaBeta, CollectiveCost, fit_alpha_beta
from dear.cost.measurement import (
    EXCHANGE,
    LARGE,
    OPERATIONS,
    PIPELINE,
    Measurement,
    Operation,
    carried,
    typical_s,
)
from dear.errors import one_of, unknown
from dear.lazy import torch
from dear.options import at_least

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


SIZES = tuple(2**power for power in range(12, 25, 2))
"""4 KiB to 16 MiB, in bytes of the full buffer."""
REPEATS, FEW_REPEATS = 16, 6
"""Of messages below `MANY_BELOW`, which take milliseconds, and of larger ones."""
MANY_BELOW = 1 << 20
WARM_BYTES = 30e6
"""Payload that a connection carries before it is timed: TCP leaves its search for the speed of a
link too early, and then gains speed only with what it sends."""
BUDGET_S = 5.0
"""Of the clock, for one operation, warm-up included."""
WARM_SHARE, WARM_CALLS = 0.4, 4
"""Of that at most so much to warm up, looking at the clock after so many calls."""
ENOUGH_S = 0.1
"""A call that is no collective is not tried with more bytes once it takes so long."""
LEAST_SIZES = 3
QUEUE, QUEUED_FROM = 8, 16 << 10
"""So many messages in a queue, of so many bytes at least, tell what one costs that waits in it."""
MOST_BITS = 64
"""The number of bytes of a message needs no more."""

Key = tuple[str, str, int, float]
_fits: WeakKeyDictionary[Communicator, dict[Key, CollectiveCost]] = WeakKeyDictionary()


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
    """Times `operation` on float32 buffers; every rank calls it, and nothing else runs meanwhile.

    Args:
        sizes: bytes of the full buffer; rounded up to a multiple of the world size. Those with
            which the engine's regimes begin come on top, where they lie between.
        repeats: timed calls per size; one more is made first and left out. None: by size.
        shared: the buffers lie in memory that the backend reads in place, where it has such.
        warm: the connections carry `WARM_BYTES` first.
        queues: also what messages of each regime take that wait in a queue.
        budget_s: seconds of the communicator's clock. Larger messages are left out for which there
            is no time, but not the smallest three, each with two repeats at least.
    """
    if operation not in OPERATIONS:
        raise unknown("operation", operation, OPERATIONS)
    left_s = budget_of(communicator, budget_s)
    pair = _pair(communicator) if operation == EXCHANGE else None
    if operation == EXCHANGE:  # on the comm core the all-reduce of a pair, which rank 0 is part of
        regimes = pair and pair.regimes("all_reduce")
    else:
        regimes = communicator.regimes(operation)
    regimes = communicator.broadcast_object(regimes)
    free, wire_s, share = 0.0, None, 1.0
    if communicator.size > 1:
        share = carried(operation, communicator.size)
        free = communicator.burst_bytes / share
        wire_s = communicator.wire_bytes_per_s and share / communicator.wire_bytes_per_s
    starts = [first for _, first in regimes or () if min(sizes) < first < max(sizes)]
    unit = 4 * communicator.size
    wanted = sorted({-(-size // unit) * unit for size in (*sizes, *starts)})

    def call_of(nbytes: int, count: int = 1) -> Callable[[], None]:
        start = _starter(communicator, operation, nbytes // 4, device, shared, pair)

        def call() -> None:
            works = [start() for _ in range(count)]
            for work in works:
                if work is not None:
                    work.wait()

        return call

    if warm and communicator.size > 1:
        nbytes = max(size for size in wanted if size <= MANY_BELOW or size == wanted[0])
        call, sent = call_of(nbytes), 0.0
        while sent < WARM_BYTES and left_s() > (1 - WARM_SHARE) * budget_s:
            for _ in range(WARM_CALLS):
                call()
            sent += WARM_CALLS * nbytes * share
    steady = next((first for name, first in regimes or () if name == PIPELINE and wire_s), math.inf)

    def timed_of(nbytes: int) -> Callable[[], float]:
        call = call_of(nbytes)
        return lambda: _call_s(communicator, call, device)

    done = timed_by_size(
        communicator,
        wanted,
        timed_of,
        left_s=left_s,
        repeats=repeats,
        free_bytes=0.0 if wire_s else free,
        # Two messages of a regime whose slope is known say all of it.
        enough=lambda done: sum(nbytes >= steady for nbytes in done) >= 2,
    )
    queued = []
    if queues and operation != EXCHANGE and communicator.size > 1:
        for size in _heads(list(done), regimes):
            call = call_of(size, QUEUE)
            ranks = communicator.gather_objects(
                [_call_s(communicator, call, device) for _ in range(FEW_REPEATS)]
            )
            together_s = typical_s([max(call_s) for call_s in zip(*ranks, strict=True)])
            each_s = (together_s - typical_s(done[size])) / (QUEUE - 1)
            queued.append((size, max(0.0, each_s)))
    if pair is not None and pair is not communicator:
        pair.close()
    return Measurement(
        operation=operation,
        nbytes=list(done),
        seconds=list(done.values()),
        free_bytes=free,
        regimes=regimes,
        wire_s_per_byte=wire_s,
        queued=tuple(queued),
    )


def budget_of(communicator: Communicator, budget_s: float) -> Callable[[], float]:
    """What tells how many seconds of the communicator's clock are left of so many from now on; all
    ranks ask together, and rank 0's word holds."""
    began_s = communicator.clock()
    return lambda: budget_s - communicator.broadcast_object(communicator.clock() - began_s)


def timed_by_size(
    communicator: Communicator,
    sizes: Sequence[int],
    timed_of: Callable[[int], Callable[[], float]],
    *,
    left_s: Callable[[], float],
    repeats: int | None = None,
    free_bytes: float = 0.0,
    enough: Callable[[Collection[int]], bool] = lambda done: False,
) -> dict[int, list[float]]:
    """Seconds of each repeat by size, the maximum over ranks; larger sizes only while there is
    time.

    Small messages are timed in two turns, before and after the large ones, because something may
    slow a whole turn. The repeats of both turns alternate in the result, so the two halves that
    `Measurement.agreement` compares are the two turns.

    Args:
        sizes: ascending. The first three are timed in any case, and those that are not yet large
            beside `free_bytes`.
        timed_of: gives what sends a message of this size and returns its seconds on this rank.
        left_s: of the time for all (`budget_of`).
        repeats: per size; one more is made first and left out. None: by size.
        enough: whether these sizes say all.
    """
    done: dict[int, list[float]] = {}
    again: dict[int, Callable[[], float]] = {}
    for size in sizes:
        left = left_s()
        if len(done) >= LEAST_SIZES and size > LARGE * free_bytes:
            before = max(done)
            if enough(done) or left < LEAST_SIZES * typical_s(done[before]) * size / before:
                break
        timed = timed_of(size)
        first_s = max(communicator.gather_objects(timed()))
        count = repeats or (REPEATS if size < MANY_BELOW else FEW_REPEATS)
        # Larger ones are to come.
        count = max(min(count, int(left / 4 / first_s)), min(count, 2))
        if size < MANY_BELOW and count > 1:
            count //= 2
            again[size] = timed
        done[size] = _times(communicator, timed, count)
    for size, timed in again.items():
        timed()
        second = _times(communicator, timed, len(done[size]))
        done[size] = [time_s for pair in zip(done[size], second, strict=True) for time_s in pair]
    return done


def _times(communicator: Communicator, timed: Callable[[], float], count: int) -> list[float]:
    """Seconds of each call, the maximum over ranks: a rank that leaves the barrier last waits for
    nobody, and may see next to nothing."""
    ranks = communicator.gather_objects([timed() for _ in range(count)])
    return [max(call_s) for call_s in zip(*ranks, strict=True)]


def _heads(sizes: Sequence[int], regimes: Sequence[tuple[str, int]] | None) -> list[int]:
    """Of the sizes that were timed, one small one of each regime, but none of `MANY_BELOW`."""
    firsts = [max(first, QUEUED_FROM) for _, first in regimes or ((None, 0),)]
    heads = (next((size for size in sizes if size >= first), MANY_BELOW) for first in firsts)
    return sorted({size for size in heads if size < MANY_BELOW})


def measured_costs(
    communicator: Communicator,
    operation: Operation,
    device: torch.device,
    largest: int = SIZES[-1],
    budget_s: float = BUDGET_S,
) -> CollectiveCost:
    """The fit of a measurement, the same on all ranks; one rank alone pays nothing.

    Measured at the first call for this communicator and the rest.

    Args:
        largest: bytes of the largest message; larger ones are sent only where links pass so much at
            once after a rest that two would not be above it.
        budget_s: as for `measure_collective`.
    """
    if communicator.size == 1:
        return CollectiveCost(alpha_s=0.0, beta_s_per_byte=0.0)
    fits = _fits.setdefault(communicator, {})
    key = (operation, device.type, largest, budget_s)
    if key not in fits:
        free = communicator.burst_bytes / carried(operation, communicator.size)
        # Each size is four times the one before: the last two are above LARGE * free.
        most = max(largest, 16 * LARGE * free)
        sizes = [size for size in SIZES if size <= most]
        measured = measure_collective(
            communicator, operation, device, sizes=sizes, budget_s=budget_s
        )
        fits[key] = measured.fit()
    return fits[key]


def start_up_bytes(cost: Callable[[float], float]) -> float:
    """The largest power of two of bytes that take less time than the start-up of their message.

    So large a message costs less than two of a byte. A power of two, so that measurements that
    differ a little say the same. 1 where messages cost nothing, 2^64 where bytes cost nothing.

    Args:
        cost: seconds of a message by its bytes, never falling.
    """
    powers = (2.0**power for power in range(1, MOST_BITS + 1))
    return next((size / 2 for size in powers if cost(size) >= 2 * cost(1)), 2.0**MOST_BITS)


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
    """What starts `operation` on a buffer of `count` elements; None where this rank has a rest."""
    like = torch.empty(0, device=device)

    def zeros(numel: int) -> torch.Tensor:
        return buffer(like, numel, communicator) if shared else like.new_zeros(numel)

    full = zeros(count)
    if operation == "all_reduce":
        return lambda: communicator.all_reduce(full, op="sum")
    if operation == EXCHANGE:
        # The rank half the world away, which is on another host if there are several.
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


def _pair(communicator: Communicator) -> Communicator | None:
    """The pair of this rank, where its all-reduce does the same as a swap and takes less time."""
    half = communicator.size // 2
    if not communicator.native or communicator.size == 2:
        return communicator if communicator.native else None
    made = sub_communicators(communicator, [(rank, rank + half) for rank in range(half)])
    return next(iter(made.values()), None)


def _call_s(communicator: Communicator, call: Callable[[], object], device: torch.device) -> float:
    communicator.barrier()
    return _timed(communicator.clock, call, device)


def _timed(clock: Callable[[], float], call: Callable[[], object], device: torch.device) -> float:
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # A clock may be too coarse for the smallest.
    return max(clock() - began, 1e-9)
