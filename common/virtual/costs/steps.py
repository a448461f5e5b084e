"""Timings of the steps that collectives consist of.

Sources: the counts of messages and bytes are those of R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005). A cost alpha + n beta of a
message is split here into latency, overhead and bytes, as in LogGP (A. Alexandrov et al., 1995).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.virtual.costs.parts import Kind, Platform, Shape, Timing, Wire
from dear.errors import UserError

READ_BYTES = 256 << 10
"""Bytes that a rank reads at a time from a message of its own (`tcp_chunk` of the comm core)."""


def used_kinds(shape: Shape) -> list[Kind]:
    """Returns the kinds of wires between the ranks of a cluster."""
    used: list[tuple[Kind, bool]] = [
        ("inside", shape.ranks_per_host > 1),
        ("between", shape.hosts > 1),
        ("sites", shape.sites > 1),
    ]
    return [kind for kind, is_used in used if is_used]


def log2(count: int) -> int:
    """Returns the rounds in which the number of ranks that have a message doubles to `count`."""
    return math.ceil(math.log2(count))


def at_once(
    platform: Platform,
    shape: Shape,
    nbytes: float,
    *,
    far: float = 0,
    near: float = 0,
    piece: float = math.inf,
) -> Timing:
    """Messages of `nbytes` from every rank at the same time; they arrive after one hop.

    Args:
        far: messages per rank to ranks of other hosts, evenly over these hosts.
        near: messages per rank to ranks of its own host.
        piece: bytes of a message that a core works on at once, while the others arrive.
    """
    loads = list(_loads(platform, shape, far, near))
    core = _core_bytes_per_s(platform, [wire for wire, _, _ in loads])
    each_s = nbytes / core
    busy_s = [
        count * wire.overhead_s + sharers * count * nbytes / wire.bytes_per_s
        for wire, count, sharers in loads
    ]
    return Timing(
        latency_s=max((wire.latency_s for wire, _, _ in loads), default=0.0),
        link_s=max(*busy_s, (far + near) * each_s, 0.0),
        core_s=min(each_s, piece / core),
    )


def _core_bytes_per_s(platform: Platform, wires: list[Wire]) -> float:
    """Returns the rate of a core; what shared memory passes on is work of a core already."""
    received = any(wire.medium != "memory" for wire in wires)
    return platform.core_bytes_per_s if received else math.inf


def _loads(
    platform: Platform, shape: Shape, far: float, near: float
) -> Iterator[tuple[Wire, float, float]]:
    """Yields a wire, the messages per rank on it, and the ranks that share it."""
    if near:
        yield platform.wire("inside"), near, 1
    if far:
        yield platform.wire("between"), far, shape.ranks_per_host
        if "slow" in platform.wires:
            yield platform.wire("slow"), far, shape.ranks_per_host
        if shape.sites > 1:
            others = shape.hosts - shape.hosts / shape.sites
            crossing = far * others / (shape.hosts - 1)
            yield platform.wire("sites"), crossing, shape.ranks / shape.sites


def to_all(platform: Platform, shape: Shape, nbytes: float) -> Timing:
    """Messages of `nbytes` from every rank to every other rank, all at once."""
    local = shape.ranks_per_host
    return at_once(platform, shape, nbytes, far=shape.ranks - local, near=local - 1)


def ring(platform: Platform, shape: Shape, nbytes: float, *, piece: float | None = None) -> Timing:
    """Reduce-scatter or all-gather of `nbytes` on a ring of all ranks, in their order.

    On P ranks of one wire: (P - 1) x (latency + overhead + n / P / rate). A host's wire carries the
    ring's bytes once per direction, however many ranks it has. A rank passes a block on when a
    piece of it has arrived, so that a hop costs a stall only if a piece and the latency take longer
    than a block takes on the slowest wire.

    Args:
        piece: bytes that a rank passes on at once; None: whole blocks of n / P.
    """
    steps, block = shape.ranks - 1, nbytes / shape.ranks
    piece = block if piece is None else min(piece, block)
    hops = ring_hops(platform, shape)
    wires = {kind: platform.wire(kind) for kind in hops}
    step_s = max(wire.overhead_s + block / wire.bytes_per_s for wire in wires.values())
    core = _core_bytes_per_s(platform, list(wires.values()))
    step_s = max(step_s, block / core)
    piece_s = piece / core
    block_s = max(block / wire.bytes_per_s for wire in wires.values())
    stall_s = {
        kind: max(0.0, wire.latency_s + piece / wire.bytes_per_s + piece_s - block_s)
        for kind, wire in wires.items()
    }
    last = max(wires, key=lambda kind: wires[kind].latency_s)
    stalls_s = sum(count * stall_s[kind] for kind, count in hops.items()) - stall_s[last]
    return Timing(latency_s=stalls_s + wires[last].latency_s, link_s=steps * step_s, core_s=piece_s)


def ring_hops(platform: Platform, shape: Shape) -> dict[Kind, int]:
    """Returns the hops of the block with the longest way along a ring, by kind of wire.

    A block comes to a slow host and leaves it, so two hops at most are slow.
    """
    hops: dict[Kind, int] = {}
    if shape.ranks_per_host > 1:
        hops["inside"] = shape.hosts * (shape.ranks_per_host - 1) + (shape.hosts == 1)
    if shape.hosts > 1:
        hops["between"] = shape.hosts - (shape.sites if shape.sites > 1 else 0)
    if shape.sites > 1:
        hops["sites"] = shape.sites
    nearest = next(kind for kind, count in hops.items() if count)
    hops[nearest] -= 1  # a block visits all ranks without closing the ring
    if "slow" in platform.wires and "between" in hops:
        hops["slow"] = min(2, hops["between"])
        hops["between"] -= hops["slow"]
    return {kind: count for kind, count in hops.items() if count}


def rounds(
    platform: Platform,
    shape: Shape,
    nbytes: float,
    *,
    halving: bool = False,
    senders: int | None = None,
    tree: bool = False,
) -> Timing:
    """Rounds of one message per rank, with partners at the distances 1, 2, 4, ...

    Recursive doubling: log2(P) x (latency + overhead + n / rate). Recursive halving: the message of
    round i has n / 2^i bytes, together (P - 1) / P x n. Ranks beyond a power of two cost one more
    round. The rounds within a host come first, so that all its ranks then share its wire.

    Args:
        halving: the messages shrink by half from round to round.
        senders: ranks of a host that send in a round between hosts; None: all of them.
        tree: not every host sends in every round.

    Raises:
        UserError: the link of one host differs, and its place in the tree is not known.
    """
    if tree:
        refuse_slow_tree(platform, shape)
    result = Timing()
    size = nbytes
    sharers = shape.ranks_per_host if senders is None else senders
    for number in range(log2(shape.ranks_per_host)):
        size = nbytes / 2 ** (number + 1) if halving else nbytes
        result += at_once(platform, shape, size, near=1)
    between = Shape(hosts=shape.hosts, ranks_per_host=sharers, sites=shape.sites)
    for number in range(log2(shape.hosts)):
        exponent = log2(shape.ranks_per_host) + number + 1
        size = nbytes / 2**exponent if halving else nbytes
        result += at_once(platform, between, size, far=1)
    return result


def refuse_slow_tree(platform: Platform, shape: Shape) -> None:
    """Raises `UserError` for a tree of hosts of which one has a link of its own."""
    if "slow" in platform.wires and shape.hosts > 2:
        raise UserError(
            "faults: link_rate, link_delay: how often the messages of a tree pass the link of one "
            "host depends on its place, which predictions do not model; use another --engine or "
            "algorithm, or `run`"
        )


def from_root(platform: Platform, shape: Shape, nbytes: float) -> Timing:
    """Messages of `nbytes` from the root to every other rank, or from each of them to the root.

    Raises:
        UserError: the link of one host has another rate, and it is not known whether it is the
            root's.
    """
    if "slow" in platform.wires and shape.hosts > 2:
        usual, slow = platform.wire("between"), platform.wire("slow")
        if slow.bytes_per_s != usual.bytes_per_s:
            raise UserError(
                "faults: link_rate: messages from or to one root load its link more than others, "
                "and predictions do not model whose link is slow; use another --engine or "
                "algorithm, or `run`"
            )
    local = shape.ranks_per_host
    alone = Shape(hosts=shape.hosts, sites=shape.sites)
    return at_once(platform, alone, nbytes, far=shape.ranks - local, near=local - 1)


def chain(platform: Platform, shape: Shape, nbytes: float, *, segment: float) -> Timing:
    """Broadcast or reduce of `nbytes` from rank to rank, in segments that follow each other.

    (P - 1) x (latency + overhead + segment / rate) until the first segment is at the end, then the
    other segments arrive: (n / segment - 1) x (overhead + segment / rate).
    """
    segment = min(segment, nbytes)
    hops = ring_hops(platform, shape)
    wires = {kind: platform.wire(kind) for kind in hops}
    each_s = max(wire.overhead_s + segment / wire.bytes_per_s for wire in wires.values())
    core = _core_bytes_per_s(platform, list(wires.values()))
    each_s = max(each_s, segment / core)
    first_s = sum(
        count * (wires[kind].latency_s + segment / core + each_s) for kind, count in hops.items()
    )
    return Timing(latency_s=first_s - each_s, link_s=math.ceil(nbytes / segment) * each_s)


def exchange(platform: Platform, shape: Shape, nbytes: float) -> Timing:
    """Messages of `nbytes` from every rank to another, on another host if there are several."""
    far = shape.hosts > 1
    return at_once(platform, shape, nbytes, far=far, near=not far, piece=READ_BYTES)
