"""NCCL's collectives: the fastest of ring and tree, each with the protocols LL, LL128 and Simple.

Source of formulas and numbers: NCCL's own model for this choice, src/graph/tuning.cc of NCCL 2.19
(`ncclTopoTuneModel`, `ncclTopoGetAlgoTime`; BSD licence). Rates are those of the wires; NCCL's caps
per channel are left out, as are NVLS and CollNet (reductions in switches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from common.virtual.costs import steps
from common.virtual.costs.parts import Kind, Platform, Shape, Timing, Wire

LL, LL128, SIMPLE = range(3)
"""Protocols: flags with every 8 bytes, with every 128 bytes, and per chunk."""
BASE_US = {"tree": (6.8, 14.0, 0.0), "ring": (6.6, 14.0, 8.4)}
"""Microseconds of any collective, by protocol (`baseLat`)."""
HOP_US = {
    "nvlink": {"tree": (0.6, 1.25, 28.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 28.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 28.0), "ring": (2.7, 4.0, 14.0)},
}
"""Microseconds of a hop, by protocol (`hwLat`); those of the network are InfiniBand's."""
POST_US = (1.0, 1.0, 3.0)
"""Microseconds per step of a ring through several hosts (`getNetOverhead`), by protocol."""
PLATEAU = 1.4
"""Factor of the latency of large all-reduces on a ring through several hosts, since Ampere."""
TREE_SHARE = tuple(
    [int(tenths) / 10 for tenths in row.split()]
    for row in (
        "10 10 10 10 9 8 7 7 7 7 6 5 4 4 5 6 7 8 9 10 10 10 10",
        "10 10 10 10 10 9 8 8 8 7 6 6 6 6 6 6 8 9 9 9 9 10 10",
        "9 9 9 9 9 9 9 8 7 6 6 5 5 5 5 6 7 8 7 7 8 9 9",
    )
)
"""Share of its rate that a tree reaches, by protocol, for 64 bytes x 2^i (`treeCorrectionFactor`).
Between two sizes, the share is interpolated, so that more bytes never take less time."""


def timing(operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Returns the timing of the fastest algorithm and protocol."""
    protocols = [LL, LL128, SIMPLE]
    if shape.ranks_per_host > 1 and platform.wire("inside").medium != "nvlink":
        protocols.remove(LL128)
    if operation == "exchange":
        protocols = [LL, SIMPLE]
    candidates = list(_candidates(operation, nbytes, shape, protocols))
    # NCCL chooses without knowing of a slow host.
    return min(candidates, key=lambda timing: timing(platform.usual).alone_s)(platform)


def _candidates(
    operation: str, nbytes: float, shape: Shape, protocols: list[int]
) -> Iterator[Callable[[Platform], Timing]]:
    for protocol in protocols:
        yield partial(_ring, operation, protocol, nbytes, shape)
        if operation == "all_reduce":
            yield partial(_tree, protocol, nbytes, shape)


def _ring(operation: str, protocol: int, nbytes: float, shape: Shape, platform: Platform) -> Timing:
    """Timing base + hops + n / rate on a ring, or one hop for `exchange`.

    The longest way of a block has P - 1 hops, H of them between H hosts (H - 1 with one rank per
    host), twice for an all-reduce. A rank sends (P - 1) / P x n bytes, twice for an all-reduce, and
    n in a broadcast or reduce.
    """
    several = shape.hosts > 1
    passes = 2 if operation == "all_reduce" else 1
    share = (shape.ranks - 1) / shape.ranks
    hops, sent = steps.ring_hops(platform, shape), passes * share
    if operation == "exchange":
        hops, sent = {_kinds(platform, shape)[-1]: 1}, shape.ranks_per_host if several else 1
    elif operation in ("broadcast", "reduce"):
        sent = 1
    latency_us = BASE_US["ring"][protocol]
    for kind, count in hops.items():
        hop_us = _hop_us("ring", protocol, platform.wire(kind))
        if several and kind == "inside":
            hop_us = max(hop_us, POST_US[protocol])
        latency_us += passes * count * hop_us
    if operation == "all_reduce" and several and protocol == SIMPLE:
        latency_us *= PLATEAU
    reduces = several or operation in ("all_reduce", "reduce")
    factor = {
        LL: 1 / 4 if reduces else 1 / 3,
        LL128: 0.92 if shape.ranks_per_host > 1 else 0.7,
        SIMPLE: 1.0,
    }[protocol]
    rate = _rate(protocol, factor, platform, shape)
    return Timing(latency_s=1e-6 * latency_us, link_s=sent * nbytes / rate)


def _tree(protocol: int, nbytes: float, shape: Shape, platform: Platform) -> Timing:
    """Timing base + 2 x (R - 1 hops in a host + log2(H) hops between hosts) + 2 n / rate."""
    steps.refuse_slow_tree(platform, shape)
    latency_us = BASE_US["tree"][protocol]
    hops: dict[Kind, int] = {
        "inside": shape.ranks_per_host - 1,
        "between": int(math.log2(shape.hosts)),
        "sites": shape.sites - 1,
    }
    for kind in steps.used_kinds(shape):
        latency_us += 2 * hops[kind] * _hop_us("tree", protocol, platform.wire(kind))
    factor = {LL: 1 / 3.8, LL128: 7 / 9 if shape.hosts == 1 else 120 / 128, SIMPLE: 1.0}[protocol]
    rate = _rate(protocol, 0.92 * factor, platform, shape) * _tree_share(protocol, nbytes)
    return Timing(latency_s=1e-6 * latency_us, link_s=2 * nbytes / rate)


def _tree_share(protocol: int, nbytes: float) -> float:
    table = TREE_SHARE[protocol]
    place = min(max(math.log2(nbytes / 64), 0.0), len(table) - 1.0)
    low = min(int(place), len(table) - 2)
    return table[low] + (place - low) * (table[low + 1] - table[low])


def _kinds(platform: Platform, shape: Shape) -> list[Kind]:
    slow: list[Kind] = ["slow"] if "slow" in platform.wires and shape.hosts > 1 else []
    return [*steps.used_kinds(shape), *slow]


def _hop_us(algorithm: str, protocol: int, wire: Wire) -> float:
    """Returns the microseconds of a hop.

    NCCL adds the latency of a network card to its table; InfiniBand's is in the table already.
    """
    if wire.kind == "inside":
        return HOP_US[wire.medium][algorithm][protocol]
    table_us = HOP_US["network"][algorithm][protocol]
    wire_us = 1e6 * (wire.latency_s + wire.overhead_s)
    return max(table_us, wire_us) if wire.medium == "rdma" else table_us + wire_us


def _rate(protocol: int, factor: float, platform: Platform, shape: Shape) -> float:
    """Returns the bytes per second on the slowest wire; `llMaxBws` limits LL."""
    slowest = min(platform.wire(kind).bytes_per_s for kind in _kinds(platform, shape))
    most = {1: 87.7e9, 2: 39.0e9}.get(shape.hosts, 20.4e9) if protocol == LL else math.inf
    return min(factor * slowest, most)
