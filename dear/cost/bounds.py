"""How short a training step can be: what an algorithm's idea allows, and what the hardware allows.

Pure functions of seconds and bytes. An algorithm names its formula (`Algorithm.bound`); a measured
step divided into its bound says how much of the idea the program reaches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dear.cost.collectives import EXCHANGE, AlphaBeta
from dear.errors import unknown
from dear.options import at_least, positive
from dear.topology.traffic import Load

Bound = Literal[
    "sequential",
    "wfbp",
    "cross_iteration",
    "delayed",
    "dear",
    "sharded",
    "decentralized",
    "beside_passes",
    "after_update",
    "asynchronous",
]
"""What may run beside what:

- `sequential`: forward, backward, communication and update one after another (bulk-synchronous
  SGD).
- `wfbp`: communication beside the backward pass, then the update (Poseidon, arXiv 1706.03292).
- `cross_iteration`: one all-reduce beside everything that a rank computes, for each layer is
  updated when it is about to run again (ByteScheduler, SOSP 2019).
- `delayed`: one all-reduce beside everything that a rank computes, for nothing waits for it until a
  later step (Pipe-SGD, NeurIPS 2018): the same seconds, but no layer has to be in time.
- `dear`: the reduce-scatter beside the backward pass and the update of what has arrived, the
  all-gather beside the next forward pass (DeAR, arXiv 2302.12445, section III); each rank updates
  its own share.
- `sharded`: parameters are gathered beside both passes, gradients scattered beside the backward
  pass, then each rank updates its own share (ZeRO-3, arXiv 1910.02054; FSDP, arXiv 2304.11277).

Where ranks exchange parameters with a few others (`CommTimes.exchange_s`), and each updates all of
its own:

- `decentralized`: the exchange beside everything that a rank computes, for what it brings is needed
  where the same parameters are updated next (Decent-DP). A link that is idle in some steps of the
  schedule may still carry what others have left.
- `beside_passes`: from the start of the forward pass to the update, in each step (AWC of BlueFog,
  arXiv 2111.04287).
- `after_update`: beside the update, from the first layer updated on, and the next forward pass
  (ATC, the same).
- `asynchronous`: a rank waits for nobody, and leaves out what its link cannot carry.
"""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one rank's compute in a step without communication."""

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    """The optimizer's step for all parameters."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            at_least(name, value, 0)


@dataclass(frozen=True, kw_only=True)
class CommTimes:
    """Seconds that the collectives of one step take alone, all messages together."""

    all_reduce_s: float = 0.0
    reduce_scatter_s: float = 0.0
    all_gather_s: float = 0.0
    exchange_s: tuple[float, ...] = ()
    """Of what a host exchanges with a few others, in each step of a period."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for seconds in value if name == "exchange_s" else [value]:
                at_least(name, seconds, 0)


def comm_times(nbytes: float, costs: Mapping[str, AlphaBeta], messages: int = 1) -> CommTimes:
    """What a model of `nbytes` of gradients (or parameters) costs by the fits of its collectives.

    Args:
        costs: by operation (`all_reduce`, `reduce_scatter`, `all_gather`); one that is missing
            costs nothing, so give those that the bound reads.
        messages: per collective; 1 gives the least, which a bound wants.
    """
    return CommTimes(
        **{
            f"{name}_s": cost.total_s(nbytes, messages)
            for name, cost in costs.items()
            if name != EXCHANGE
        }
    )


def exchange_times(
    nbytes: float,
    loads: Iterable[Sequence[Load]],
    costs: Mapping[str, AlphaBeta],
    ranks_per_host: int = 1,
) -> list[CommTimes]:
    """What a schedule's exchanges cost each host, in messages of a step at once.

    Args:
        nbytes: of all parameters.
        loads: by host and step (`Traffic.loads`).
        costs: fits of `exchange`, measured with as many ranks per host, all at once, each sending
            to another host; and of `all_reduce`, if there are means over all ranks.
    """

    def seconds(load: Load) -> float:
        exchanged = max(load.sent, load.received) * nbytes / ranks_per_host
        found = costs[EXCHANGE](exchanged) if exchanged else 0.0
        return found + (costs["all_reduce"](load.reduced * nbytes) if load.reduced else 0.0)

    return [CommTimes(exchange_s=tuple(map(seconds, host))) for host in loads]


def step_bound_s(kind: Bound, compute: StepTimes, comm: CommTimes, world_size: int = 1) -> float:
    """The least seconds per step of an algorithm of this `kind`.

    Args:
        world_size: ranks that share the update, where the kind shares it; an algorithm of the kind
            whose ranks update everything has a longer step, never a shorter one.

    Raises:
        UserError: an unknown kind, or a world without ranks.
    """
    at_least("world_size", world_size, 1)
    forward, backward, update = compute.forward_s, compute.backward_s, compute.update_s
    reduce, scatter, gather = comm.all_reduce_s, comm.reduce_scatter_s, comm.all_gather_s
    share = update / world_size
    exchanges = comm.exchange_s or (0.0,)
    if kind == "sequential":
        return forward + backward + reduce + statistics.fmean(exchanges) + update
    if kind == "wfbp":
        return forward + max(backward, reduce) + update
    if kind in ("cross_iteration", "delayed"):
        return max(forward + backward + update, reduce)
    if kind == "dear":
        return max(forward, gather) + max(backward + share, scatter)
    if kind == "sharded":
        return max(forward, gather) + max(backward, gather + scatter) + share
    if kind == "decentralized":
        return max(forward + backward + update, statistics.fmean(exchanges))
    if kind == "beside_passes":
        return statistics.fmean(max(forward + backward, each) for each in exchanges) + update
    if kind == "after_update":
        return statistics.fmean(max(update + forward, each) for each in exchanges) + backward
    if kind == "asynchronous":
        return forward + backward + update
    raise unknown("bound", kind, get_args(Bound))


def compute_limit_s(compute: StepTimes, world_size: int = 1) -> float:
    """Seconds per step if communication were free: no synchronous algorithm is faster.

    Args:
        world_size: ranks that could share the update.
    """
    at_least("world_size", world_size, 1)
    return compute.forward_s + compute.backward_s + compute.update_s / world_size


def wire_limit_s(nbytes: float, world_size: int, bytes_per_s: float) -> float:
    """Seconds to average `nbytes` of gradients over links of `bytes_per_s` each way, at least.

    Every rank must send and receive 2 (P-1)/P of the bytes (Patarasuk and Yuan, JPDC 2009, for
    reductions without help of the network); no synchronous algorithm that sends every byte of the
    gradients has shorter steps.
    """
    return half_wire_limit_s(nbytes, world_size, bytes_per_s) * 2


def half_wire_limit_s(nbytes: float, world_size: int, bytes_per_s: float) -> float:
    """The same for a reduce-scatter or an all-gather of a buffer of `nbytes`: (P-1)/P of it."""
    at_least("nbytes", nbytes, 0)
    at_least("world_size", world_size, 1)
    positive("bytes_per_s", bytes_per_s)
    return nbytes * (world_size - 1) / world_size / bytes_per_s


def exchange_wire_limit_s(
    nbytes: float, loads: Sequence[Sequence[Load]], bytes_per_s: float
) -> float:
    """Seconds per step that a schedule keeps the busiest host's link busy, at least.

    Args:
        nbytes: of all parameters.
        loads: by host and step (`Traffic.loads`).
    """
    hosts = len(loads)

    def busy_s(load: Load) -> float:
        everybody = wire_limit_s(load.reduced * nbytes, hosts, bytes_per_s)
        return max(load.sent, load.received) * nbytes / bytes_per_s + everybody

    return max(statistics.fmean(map(busy_s, host)) for host in loads)


def reached(bound_s: float, measured_s: float) -> float:
    """The share of its bound that a measured step reaches: 1 at the bound, 0.5 at twice it."""
    positive("measured_s", measured_s)
    at_least("bound_s", bound_s, 0)
    return bound_s / measured_s
