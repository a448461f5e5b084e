"""The comm core's collectives: its own regimes by size and shape, and their messages.

`comm_core.regimes` asks the compiled planner which algorithm it uses from which size on. What an
algorithm sends is the C++ of collectives/lanes (`over_lanes.cc`, `ring_stage.cc`), of
`collectives.cc` for several ranks per host, and of collectives/shm within a host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.virtual.costs import steps
from common.virtual.costs.parts import Platform, Shape, Timing
from dear.errors import Unavailable

if TYPE_CHECKING:
    from comm_core import Regime

LEAST_PIECE, PIECES = 16 << 10, 8
"""Smallest piece of a ring in bytes, and pieces per block (`kLeastPiece` and `kPiecesOfBlock` of
collectives/regimes.cc, the only sizes that `comm_core.regimes` does not tell)."""


def timing(operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Returns the timing of a collective of the comm core, with buffers in shared memory.

    Raises:
        Unavailable: the comm core is not built.
    """
    if operation == "exchange":
        return steps.exchange(platform, shape, nbytes)
    # Like a broadcast, a reduce has no two hops: it uses a ring from the same size on.
    rows = _regimes("broadcast" if operation == "reduce" else operation, shape)
    name = next(row.name for row in reversed(rows) if row.first_nbytes <= nbytes)
    if name == "shared_memory":
        return _in_memory(operation, nbytes, platform, shape)
    if name in ("direct", "doubling", "tree", "two_hops"):
        return _few_hops(name, operation, nbytes, platform, shape)
    two_levels = shape.ranks_per_host > 1 and operation not in ("broadcast", "reduce")
    places = shape.hosts if two_levels else shape.ranks
    blocks = 1 if operation in ("broadcast", "reduce") else shape.ranks
    chunk = rows[-1].first_nbytes / blocks / 4  # `pipeline` begins at blocks of four chunks
    block = nbytes / (1 if operation == "broadcast" else shape.ranks)
    piece = min(max(block / PIECES, LEAST_PIECE), chunk / 2) if places > 2 else chunk
    if name == "blocks" and places > 2:
        piece = block
    if operation == "broadcast":
        return steps.chain(platform, shape, nbytes, segment=piece)
    if operation == "reduce":
        ring = steps.ring(platform, shape, nbytes, piece=piece)
        return ring + steps.from_root(platform, shape, block)
    if not two_levels:
        ring = steps.ring(platform, shape, nbytes, piece=piece)
        return ring + ring if operation == "all_reduce" else ring
    # Each local rank has a ring through the hosts: their pieces travel side by side.
    hosts = Shape(hosts=shape.hosts, sites=shape.sites)
    ring = steps.ring(platform, hosts, nbytes, piece=piece * shape.ranks_per_host)
    local = Shape(hosts=1, ranks_per_host=shape.ranks_per_host)
    halves = {"all_reduce": ("reduce_scatter", "all_gather")}.get(operation, (operation,))
    result = Timing()
    for half in halves:
        # The wires between hosts are idle while the ranks of a host copy.
        result += ring + Timing(latency_s=_in_memory(half, nbytes, platform, local).alone_s)
    return result


def _regimes(operation: str, shape: Shape) -> tuple[Regime, ...]:
    try:
        import comm_core
    except ImportError as error:
        raise Unavailable(f"engine comm_core: {error}") from None
    return comm_core.regimes(operation, shape.ranks, shape.hosts)


def _few_hops(name: str, operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Timing of the regimes below `COMM_CORE_TCP_SMALL` or `COMM_CORE_TCP_DIRECT` bytes."""
    if operation == "reduce":
        return steps.from_root(platform, shape, nbytes)
    if name == "tree":
        return steps.rounds(platform, shape, nbytes, senders=1, tree=True)
    if name == "doubling":
        return steps.rounds(platform, shape, nbytes)
    block = nbytes / shape.ranks
    if name == "two_hops":
        hop = steps.to_all(platform, shape, block)
        return hop + hop
    return steps.to_all(platform, shape, nbytes if operation == "all_reduce" else block)


def _in_memory(operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Timing of ranks of one host that read each other's buffers, between meetings of all ranks.

    A rank reads n bytes to sum its share of n / P, and in an all-reduce writes this share into the
    buffers of the others. In an all-gather it copies n bytes. The root of a reduce reads P x n.
    """
    wire, ranks = platform.wire("inside"), shape.ranks
    moved = {"all_reduce": 1 + (ranks - 1) / ranks, "reduce": ranks}
    meetings = 4 if operation == "all_reduce" else 2
    return Timing(
        latency_s=meetings * wire.latency_s,
        link_s=meetings * wire.overhead_s + moved.get(operation, 1) * nbytes / wire.bytes_per_s,
    )
