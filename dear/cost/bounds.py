"""What passes between ranks in each step, and how short a step can be.

That is, what an algorithm's idea allows, and what the hardware allows: pure functions of seconds
and bytes. An algorithm says what it sends (`Algorithm.traffic`) and names its formula
(`Algorithm.bound`); a measured step divided into its bound says how much of the idea the program
reaches.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dear.cost.fit import AlphaBeta
from dear.cost.measurement import EXCHANGE
from dear.errors import one_of
from dear.lazy import nx
from dear.options import at_least, positive
from dear.topology.schedules import Schedule, Topology

Bound = Literal[
    "sequential",
    "wfbp",
    "legs",
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
- `legs`: the same with all-reduces among some ranks after others (arXiv 1811.05233), whose times
  are those of an exchange (`CommTimes.exchange_s`); without one, among all.
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
class Message:
    """From one rank to another."""

    source: int
    target: int
    share: float = 1.0
    """Its size, in units of all parameters."""


@dataclass(frozen=True, kw_only=True)
class GroupMean:
    """An all-reduce among some ranks, or all."""

    ranks: tuple[int, ...]
    share: float = 1.0
    """The buffer of each rank, in units of all parameters."""


Part = Message | GroupMean


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one host's link carries in one step, in units of all parameters."""

    sent: float = 0.0
    received: float = 0.0
    reduced: float = 0.0
    """What is all-reduced by all ranks of the job, in buffers, besides."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One period of a schedule: the parts of each of its steps."""

    world_size: int
    steps: tuple[tuple[Part, ...], ...]

    @classmethod
    def along(cls, graph: nx.DiGraph) -> Traffic:
        """All parameters along each edge of a graph of ranks, in each step."""
        edges = sorted((source, target) for source, target in graph.edges if source != target)
        messages = tuple(Message(source=source, target=target) for source, target in edges)
        return cls(world_size=graph.number_of_nodes(), steps=(messages,))

    @classmethod
    def in_groups(cls, topology: Topology, world_size: int) -> Traffic:
        """Two ranks exchange all parameters; larger groups all-reduce them."""
        steps = map(topology.edges_at, range(topology.period))
        parts = (tuple(part for edge in edges for part in _group(edge.ranks)) for edges in steps)
        return cls(world_size=world_size, steps=tuple(parts))

    @classmethod
    def scheduled(cls, schedules: Sequence[Schedule]) -> Traffic:
        """All parameters to whom each rank's schedule says, for one period."""

        def sent(step: int) -> tuple[Part, ...]:
            edges = [(rank, to) for rank, at in enumerate(schedules) for to in at(step)[0]]
            return tuple(Message(source=rank, target=to) for rank, to in edges)

        steps = map(sent, range(schedules[0].period))
        return cls(world_size=len(schedules), steps=tuple(steps))

    def between_machines(self, local_size: int) -> Traffic:
        """The same between machines of `local_size` ranks each, for which this traffic is meant.

        Each machine averages all parameters; each of its ranks exchanges its share of them with the
        ranks of its place on other machines.
        """
        at_least("local_size", local_size, 1)
        size = self.world_size * local_size
        blocks = [range(first, first + local_size) for first in range(0, size, local_size)]
        inside = [GroupMean(ranks=tuple(block)) for block in blocks if local_size > 1]

        def spread(part: Message) -> list[Message]:
            return [
                Message(
                    source=part.source * local_size + place,
                    target=part.target * local_size + place,
                    share=part.share / local_size,
                )
                for place in range(local_size)
            ]

        steps = [(*inside, *(m for part in step for m in spread(part))) for step in self.steps]
        return Traffic(world_size=size, steps=tuple(steps))

    def times(self, factor: float) -> Traffic:
        """The same with `factor` times as many bytes."""
        replace = dataclasses.replace
        steps = [tuple(replace(p, share=p.share * factor) for p in step) for step in self.steps]
        return replace(self, steps=tuple(steps))

    def every(self, count: int) -> Traffic:
        """The same with nothing in all but the last of each `count` steps."""
        at_least("count", count, 1)
        steps = [part for step in self.steps for part in (*[()] * (count - 1), step)]
        return dataclasses.replace(self, steps=tuple(steps))

    def loads(self, ranks_per_host: int = 1) -> list[list[Load]]:
        """What the links carry, by host and step; hosts hold neighbouring ranks.

        What passes inside a host loads no link. A mean over a group takes at least 2 (h-1)/h of the
        buffer each way at each of its h hosts; one over all ranks is told apart, since its time can
        be measured as it is.
        """
        at_least("ranks_per_host", ranks_per_host, 1)

        def load(step: Sequence[Part], host: int) -> Load:
            sent = received = reduced = 0.0
            for part in step:
                if isinstance(part, Message):
                    source, target = part.source // ranks_per_host, part.target // ranks_per_host
                    sent += part.share * (source == host != target)
                    received += part.share * (target == host != source)
                elif len(part.ranks) == self.world_size:
                    reduced += part.share
                elif host in (group := {rank // ranks_per_host for rank in part.ranks}):
                    carried = part.share * 2 * (len(group) - 1) / len(group)
                    sent += carried
                    received += carried
            return Load(sent=sent, received=received, reduced=reduced)

        hosts = range(-(-self.world_size // ranks_per_host))
        return [[load(step, host) for step in self.steps] for host in hosts]


def _group(ranks: Sequence[int]) -> list[Part]:
    if len(ranks) == 2:
        one, other = ranks
        return [Message(source=one, target=other), Message(source=other, target=one)]
    return [GroupMean(ranks=tuple(ranks))] if len(ranks) > 2 else []


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


def comm_times(nbytes: float, costs: Mapping[str, AlphaBeta]) -> CommTimes:
    """What `nbytes` of gradients (or parameters) cost in one message by the fits of collectives.

    Args:
        costs: by operation (`all_reduce`, `reduce_scatter`, `all_gather`); one that is missing
            costs nothing, so give those that the bound reads.
    """
    fits = [(name, cost) for name, cost in costs.items() if name != EXCHANGE]
    return CommTimes(**{f"{name}_s": cost(nbytes) for name, cost in fits})


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
    mean = statistics.fmean
    computed = forward + backward + update
    bounds = {
        "sequential": forward + backward + reduce + mean(exchanges) + update,
        "wfbp": forward + max(backward, reduce) + update,
        "legs": forward + max(backward, mean(comm.exchange_s or (reduce,))) + update,
        "cross_iteration": max(computed, reduce),
        "delayed": max(computed, reduce),
        "dear": max(forward, gather) + max(backward + share, scatter),
        "sharded": max(forward, gather) + max(backward, gather + scatter) + share,
        "decentralized": max(computed, mean(exchanges)),
        "beside_passes": mean(max(forward + backward, each) for each in exchanges) + update,
        "after_update": mean(max(update + forward, each) for each in exchanges) + backward,
        "asynchronous": computed,
    }
    return one_of("bound", kind, bounds)


def compute_limit_s(compute: StepTimes, world_size: int = 1) -> float:
    """Seconds per step if communication were free: no synchronous algorithm is faster.

    `world_size` ranks could share the update.
    """
    at_least("world_size", world_size, 1)
    return compute.forward_s + compute.backward_s + compute.update_s / world_size


def wire_limit_s(nbytes: float, world_size: int, bytes_per_s: float) -> float:
    """Seconds to average `nbytes` of gradients over links of `bytes_per_s` of payload each way, at
    least.

    Every rank must send and receive 2 (P-1)/P of the bytes (Patarasuk and Yuan, JPDC 2009, for
    reductions without help of the network); no synchronous algorithm that sends every byte of the
    gradients has shorter steps.
    """
    at_least("nbytes", nbytes, 0)
    at_least("world_size", world_size, 1)
    positive("bytes_per_s", bytes_per_s)
    return nbytes * (world_size - 1) / world_size / bytes_per_s * 2


def exchange_wire_limit_s(
    nbytes: float, loads: Sequence[Sequence[Load]], bytes_per_s: float
) -> float:
    """Seconds per step that a schedule keeps the busiest host's link busy, at least.

    `nbytes` is of all parameters, `loads` are by host and step (`Traffic.loads`).
    """
    hosts = len(loads)

    def busy_s(load: Load) -> float:
        everybody = wire_limit_s(load.reduced * nbytes, hosts, bytes_per_s)
        return max(load.sent, load.received) * nbytes / bytes_per_s + everybody

    return max(statistics.fmean(map(busy_s, host)) for host in loads)
