"""Collectives of Gloo and of Open MPI.

Sources:
    gloo_timing: torch's ProcessGroupGloo.cpp, whose reduce_scatter_tensor copies the input,
        all-reduces the copy and keeps a part of it; gloo/allreduce.cc (a ring: torch never asks for
        its other algorithm, bcube), allgather.cc, broadcast.cc, reduce.cc.
    mpi_timing: the backend `mpi` calls nonblocking collectives; Open MPI 4.1, ompi/mca/coll/libnbc:
        nbc_iallreduce.c, nbc_ireduce_scatter.c, nbc_iallgatherv.c, nbc_ibcast.c, nbc_ireduce.c.
    blocking_mpi_timing: Horovod calls blocking ones; Open MPI 4.1, ompi/mca/coll/tuned:
        coll_tuned_decision_fixed.c, for operations that commute.
"""

from __future__ import annotations

from common.virtual.costs import steps
from common.virtual.costs.parts import Platform, Shape, Timing

GLOO_SEGMENT = 1 << 20
"""Largest segment of an all-reduce of Gloo in bytes; a block has two segments at least."""
SMALL = 65536
"""Bytes below which libnbc uses binomial trees."""
DOUBLING_BELOW = (
    (4, 65536),
    (16, 8192),
    (32, 4096),
    (64, 128),
    (256, 262144),
    (512, 4096),
    (4096, 16384),
)
"""(ranks, bytes): with fewer ranks than this, MPI_Allreduce doubles recursively below so many
bytes; `DOUBLING_BELOW_ELSE` for more ranks. For fewer than 4 ranks, some sizes use a ring; from 128
ranks on, the smallest use a reduce and a broadcast. Both are left out."""
DOUBLING_BELOW_ELSE = 32768


def gloo_timing(operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Returns the timing of a collective of Gloo; two segments are in flight at a time."""
    block = nbytes / shape.ranks
    if operation == "broadcast":
        return steps.rounds(platform, shape, nbytes, tree=True)
    if operation == "exchange":
        return steps.exchange(platform, shape, nbytes)
    piece = block / 2 if operation == "all_gather" else min(block / 2, GLOO_SEGMENT)
    half = steps.ring(platform, shape, nbytes, piece=piece)
    if operation == "all_gather":
        return half
    if operation == "reduce":
        return half + steps.from_root(platform, shape, block)
    if operation == "reduce_scatter":
        return half + half + Timing(core_s=(nbytes + block) / platform.core_bytes_per_s)
    return half + half


def mpi_timing(operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Returns the timing of a nonblocking collective; in place, an all-reduce is two trees."""
    block = nbytes / shape.ranks
    if operation == "all_gather":
        return steps.to_all(platform, shape, block)
    if operation == "exchange":
        return steps.exchange(platform, shape, nbytes)
    if operation in ("all_reduce", "reduce_scatter", "reduce"):
        if operation == "reduce" and shape.ranks <= 4 and nbytes >= SMALL:
            return steps.chain(platform, shape, nbytes, segment=8192)
        reduced = steps.rounds(platform, shape, nbytes, senders=1, tree=True)
        if operation == "all_reduce":
            return reduced + steps.rounds(platform, shape, nbytes, tree=True)
        if operation == "reduce_scatter":
            return reduced + steps.from_root(platform, shape, block)
        return reduced
    if shape.ranks <= 4:
        return steps.from_root(platform, shape, nbytes)
    if nbytes < SMALL:
        return steps.rounds(platform, shape, nbytes, tree=True)
    segment = 8192 if nbytes < 524288 else 32768
    return steps.chain(platform, shape, nbytes, segment=segment)


def blocking_mpi_timing(operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Returns the timing of a blocking collective.

    An all-reduce doubles recursively (log2(P) messages of n), or halves and doubles (Rabenseifner:
    2 log2(P) messages, 2 (P - 1) / P x n together). Broadcasts and reduces are binomial trees; Open
    MPI's other trees for some sizes are left out.
    """
    ranks, block = shape.ranks, nbytes / shape.ranks
    halved = steps.rounds(platform, shape, nbytes, halving=True)
    if operation == "all_reduce":
        limits = (limit for most, limit in DOUBLING_BELOW if ranks < most)
        if nbytes < next(limits, DOUBLING_BELOW_ELSE):
            return steps.rounds(platform, shape, nbytes)
        return halved + halved
    if operation == "reduce_scatter":
        rings = ranks < 4 or (ranks < 64 and nbytes >= (262144 if ranks < 32 else 524288))
        return steps.ring(platform, shape, nbytes) if rings else halved
    if operation == "all_gather":  # Bruck's algorithm has the messages of recursive doubling
        rings = ranks >= 16 and block >= (262144 if ranks < 32 else 8192)
        return steps.ring(platform, shape, nbytes) if rings else halved
    if operation == "exchange":
        return steps.exchange(platform, shape, nbytes)
    return steps.rounds(platform, shape, nbytes, senders=1, tree=True)
