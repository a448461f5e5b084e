"""Costs of all collectives of an engine on a described cluster.

from common.virtual.costs.engines import costs_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import Shape

platform = platform_of("100gbib", inside="nvlink3")
costs = costs_of("nccl", platform, Shape(hosts=16, ranks_per_host=4))
costs["all_reduce"](25e6)  # seconds of an all-reduce of 25 MB
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from common.virtual.costs import comm_core, cpu, nccl, steps
from common.virtual.costs.parts import Composed, Platform, Shape, Timing, Wire
from dear.cost.fit import AlphaBeta
from dear.errors import UserError, one_of

LOOPBACK = Wire(kind="inside", latency_s=30e-6, overhead_s=9e-6, bytes_per_s=1.2e9)
"""TCP within a host, per rank: Gloo all-reduces 25 MB of two ranks on two cores in 21 ms
(docs/records/collectives/local-n2.json); 4 KiB over a ring of two take 70 to 100 us there."""
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "exchange")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Timings of an engine's collectives, and how it runs the messages of a channel."""

    timing: Callable[[str, float, Platform, Shape], Timing]
    in_flight: float = 1
    """Number of queued messages of a channel that it advances at once."""
    inside: tuple[str, ...] = ("memory", "tcp")
    """Media of the wires inside a host that it can use."""
    loopback: bool = False
    """True if it never uses shared memory, but TCP."""
    of_library: bool = False
    """True if only a library that an algorithm brings sends by it, and no communicator."""


def textbook(operation: str, nbytes: float, platform: Platform, shape: Shape) -> Timing:
    """Returns the timing of rings of whole blocks, and of binomial trees."""
    if operation in ("broadcast", "reduce"):
        return steps.rounds(platform, shape, nbytes, senders=1, tree=True)
    if operation == "exchange":
        return steps.exchange(platform, shape, nbytes)
    half = steps.ring(platform, shape, nbytes)
    return half + half if operation == "all_reduce" else half


_GPU = ("nvlink", "pcie")
ENGINES: Mapping[str, Engine] = {
    # The operations of a group run in the order of the calls (README of the comm core).
    "comm_core": Engine(timing=comm_core.timing),
    "gloo": Engine(
        timing=cpu.gloo_timing, in_flight=2, loopback=True
    ),  # torch's default number of threads
    "mpi": Engine(timing=cpu.mpi_timing, in_flight=math.inf),
    "nccl": Engine(timing=nccl.timing, inside=_GPU),  # kernels of a stream run one by one
    # One thread of Horovod calls these one by one.
    "horovod_gloo": Engine(timing=cpu.gloo_timing, loopback=True, of_library=True),
    "horovod_mpi": Engine(timing=cpu.blocking_mpi_timing, of_library=True),
    "horovod_nccl": Engine(timing=nccl.timing, inside=_GPU),
    "ring": Engine(timing=textbook, inside=("memory", "tcp", *_GPU)),
}
"""Engines by name; `ring` is the textbook's, for costs given as alpha and beta."""


def costs_of(engine: str, platform: Platform, shape: Shape) -> dict[str, Composed]:
    """Returns the cost by operation; in a world of one rank, everything costs 0.

    Raises:
        UserError: there is no such engine, or the platform lacks a wire that the shape needs.
        Unavailable: the comm core, which is asked for its regimes, is not built.
    """
    kind = one_of("engine", engine, ENGINES)
    for name in steps.used_kinds(shape):
        wire = platform.wire(name)
        if name == "inside" and wire.medium not in kind.inside:
            raise UserError(
                f"engine {engine} cannot use {wire.medium} inside a host (allowed: "
                f"{', '.join(kind.inside)})"
            )
        if wire.medium == "memory" and kind.loopback:
            platform = replace(platform, wires={**platform.wires, "inside": LOOPBACK})
    if shape.ranks == 1:
        return {name: Composed(timing=lambda _: Timing(), in_flight=1) for name in OPERATIONS}

    def timing(operation: str, nbytes: float) -> Timing:
        return kind.timing(operation, nbytes, platform, shape)

    return {
        name: Composed(timing=cache(partial(timing, name)), in_flight=kind.in_flight)
        for name in OPERATIONS
    }


def ring_of(all_reduce: AlphaBeta, ranks: int) -> Platform:
    """Returns the platform on which the engine `ring` has this cost of an all-reduce.

    All ranks are on hosts of their own: alpha is the latency of 2 (P - 1) hops, and beta the time
    of 2 (P - 1) / P bytes on the wire.
    """
    hops = 2 * max(ranks - 1, 1)
    beta = all_reduce.beta_s_per_byte
    wire = Wire(
        kind="between",
        latency_s=all_reduce.alpha_s / hops,
        bytes_per_s=hops / ranks / beta if beta else math.inf,
    )
    return Platform(wires={"between": wire})
