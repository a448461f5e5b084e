"""Measures what collectives cost on a communicator, as it is and with the clock that it has."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from dear.buckets.flat import buffer
from dear.cost.bounds import EXCHANGE
from dear.cost.collectives import AlphaBeta, fit_alpha_beta
from dear.errors import unknown
from dear.lazy import torch

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator, Work
    from dear.comm.subgroups import SubCommunicator

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "exchange"]
"""`exchange`: pairs of ranks, far apart by their numbers, swap buffers, all pairs at once (of an
odd number one rank rests)."""
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather", EXCHANGE)

SIZES = tuple(2**power for power in range(12, 25, 2))
"""4 KiB to 16 MiB, in bytes of the full buffer."""
REPEATS = 5
ENOUGH_S = 0.1
"""Larger messages are not tried once one takes so long and its time is mostly that of its bytes."""
MOSTLY = 4.0
"""It is if the message takes so many times longer than the smallest."""

_fits: WeakKeyDictionary[Communicator, dict[tuple[str, str], AlphaBeta]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Times of one collective by size, the same on all ranks."""

    operation: Operation
    nbytes: list[int]
    seconds: list[list[float]]
    """Per size the repeats, each the maximum over ranks."""

    @property
    def medians_s(self) -> list[float]:
        return [statistics.median(times) for times in self.seconds]

    def fit(self) -> AlphaBeta:
        """Alpha and beta by a robust fit of the medians."""
        return fit_alpha_beta(self.nbytes, self.medians_s)


def measure_collective(
    communicator: Communicator,
    operation: Operation,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    enough_s: float = ENOUGH_S,
    shared: bool = False,
) -> Measurement:
    """Times `operation` on float32 buffers; every rank calls it, and nothing else runs meanwhile.

    Args:
        sizes: bytes of the full buffer, ascending; rounded up to a multiple of the world size.
        repeats: timed calls per size; one more is made first and left out.
        enough_s: stops after the first size beyond the second whose calls take longer, and several
            times longer than the smallest size's.
        shared: the buffers lie in memory that the backend reads in place, where it has such.
    """
    if operation not in OPERATIONS:
        raise unknown("operation", operation, OPERATIONS)
    unit = 4 * communicator.size
    nbytes: list[int] = []
    own: list[list[float]] = []
    pairs = _pairs(communicator) if operation == EXCHANGE else {}
    for size in sizes:
        count = -(-size // unit) * communicator.size
        if nbytes and nbytes[-1] == count * 4:
            continue
        call = _caller(communicator, operation, count, device, shared, pairs)
        times = [_timed(communicator, call, device) for _ in range(repeats + 1)][1:]
        nbytes.append(count * 4)
        own.append(times)
        typical, least = statistics.median(times), statistics.median(own[0])
        enough = len(own) > 2 and typical > max(enough_s, MOSTLY * least)
        # One rank decides, or the ranks would go on to different sizes.
        if communicator.broadcast_object(enough):
            break
    for pair in pairs.values():
        pair.close()
    ranks = communicator.gather_objects(own)
    seconds = [
        [max(times) for times in zip(*size, strict=True)] for size in zip(*ranks, strict=True)
    ]
    return Measurement(operation=operation, nbytes=nbytes, seconds=seconds)


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
        tensor = torch.randn(size // 4, device=device)
        times = []
        for _ in range(REPEATS + 1):
            began = communicator.clock()
            call(tensor)
            _end_of(device)
            times.append(communicator.clock() - began)
        seconds.append(max(statistics.median(times[1:]), 1e-9))
        if seconds[-1] > ENOUGH_S and len(seconds) > 1:
            break
    return communicator.broadcast_object(fit_alpha_beta(sizes[: len(seconds)], seconds))


def _caller(
    communicator: Communicator,
    operation: Operation,
    count: int,
    device: torch.device,
    shared: bool,
    pairs: Mapping[tuple[int, ...], Communicator],
) -> Callable[[], Work | None]:
    like = torch.empty(0, device=device)

    def zeros(numel: int) -> torch.Tensor:
        if shared:
            return buffer(like, numel, communicator)
        return torch.zeros(numel, device=device)

    full = zeros(count)
    if operation == "all_reduce":
        return lambda: communicator.all_reduce(full, op="sum")
    if operation == EXCHANGE:
        peer = _opposite(communicator.rank, communicator.size)
        if peer is None:
            return lambda: None
        pair = communicator if communicator.size == 2 else next(iter(pairs.values()), None)
        if communicator.native and pair is not None:
            return lambda: pair.all_reduce(full, op="sum")
        received = zeros(count)
        return lambda: communicator.exchange(received, full, peer=peer)
    shard = zeros(count // communicator.size)
    if operation == "reduce_scatter":
        return lambda: communicator.reduce_scatter(shard, full, op="sum")
    return lambda: communicator.all_gather(full, shard)


def _pairs(communicator: Communicator) -> dict[tuple[int, ...], SubCommunicator]:
    """The pair of this rank, where its all-reduce does the same as a swap and takes less time."""
    from dear.comm.subgroups import sub_communicators  # needs torch

    ranks = range(communicator.size // 2)
    if not communicator.native or communicator.size == 2:
        return {}
    return sub_communicators(communicator, [(rank, rank + len(ranks)) for rank in ranks])


def _opposite(rank: int, size: int) -> int | None:
    """The rank half the world away, which is on another host if there are several."""
    half = size // 2
    return None if rank >= 2 * half else (rank + half) % (2 * half)


def _timed(
    communicator: Communicator, call: Callable[[], Work | None], device: torch.device
) -> float:
    communicator.barrier()
    began = communicator.clock()
    work = call()
    if work is not None:
        work.wait()
    _end_of(device)
    # A clock may be too coarse for the smallest.
    return max(communicator.clock() - began, 1e-9)


def _end_of(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
