"""Traffic between ranks in each step, and lower bounds of the step time.

These functions of seconds and bytes give the limits of an algorithm's idea and of the hardware. An
algorithm declares what it sends (`Algorithm.traffic`) and names its formula (`Algorithm.bound`).
The bound divided by the measured step time says how close the program comes to its idea.
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
"""Formula of the shortest step; formulas differ in what may overlap:

- `sequential`: forward, backward, communication and update run one after another (bulk-synchronous
  SGD).
- `wfbp`: communication overlaps the backward pass, then comes the update (Poseidon, arXiv
  1706.03292).
- `legs`: as `wfbp`, but with consecutive all-reduces among subsets of the ranks (arXiv 1811.05233).
  Their times are in `CommTimes.exchange_s`; if this is empty, all ranks all-reduce.
- `cross_iteration`: one all-reduce overlaps all compute of a rank, because each layer is updated
  just before it runs again (ByteScheduler, SOSP 2019).
- `delayed`: one all-reduce overlaps all compute of a rank, because nothing waits for it before a
  later step (Pipe-SGD, NeurIPS 2018). The bound is that of `cross_iteration`.
- `dear`: the reduce-scatter overlaps the backward pass and the update of what has arrived, the
  all-gather overlaps the next forward pass (DeAR, arXiv 2302.12445, section III). Each rank updates
  its own share.
- `sharded`: all-gathers of parameters overlap both passes, and reduce-scatters of gradients overlap
  the backward pass. Then each rank updates its own share (ZeRO-3, arXiv 1910.02054; FSDP, arXiv
  2304.11277).

In the other kinds each rank exchanges parameters with a few others (`CommTimes.exchange_s`) and
updates all of its own:

- `decentralized`: the exchange overlaps all compute of a rank, because its result is needed when
  the same parameters are updated next (Decent-DP). If the schedule leaves a link idle in some
  steps, the link may still carry messages of earlier steps.
- `beside_passes`: the exchange of each step runs from the start of the forward pass to the update
  (AWC of BlueFog, arXiv 2111.04287).
- `after_update`: the exchange overlaps the update, from the first updated layer on, and the next
  forward pass (ATC, same paper).
- `asynchronous`: a rank waits for no other rank, and skips messages that its link cannot carry.
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Message from one rank to another."""

    source: int
    target: int
    share: float = 1.0
    """Size, in units of all parameters."""


@dataclass(frozen=True, kw_only=True)
class GroupMean:
    """All-reduce among some ranks or all ranks."""

    ranks: tuple[int, ...]
    share: float = 1.0
    """Size of the buffer, in units of all parameters."""


Part = Message | GroupMean


@dataclass(frozen=True, kw_only=True)
class Load:
    """Traffic of one host's link in one step, in units of all parameters."""

    sent: float = 0.0
    received: float = 0.0
    reduced: float = 0.0
    """Size of the buffers that all ranks of the job all-reduce; not part of the other fields."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One period of a schedule: the messages and group means of each of its steps."""

    world_size: int
    steps: tuple[tuple[Part, ...], ...]

    @classmethod
    def along(cls, graph: nx.DiGraph) -> Traffic:
        """Returns traffic in which all parameters travel along each edge of a graph, every step."""
        edges = sorted((source, target) for source, target in graph.edges if source != target)
        messages = tuple(Message(source=source, target=target) for source, target in edges)
        return cls(world_size=graph.number_of_nodes(), steps=(messages,))

    @classmethod
    def in_groups(cls, topology: Topology, world_size: int) -> Traffic:
        """Returns a topology's traffic: pairs exchange all parameters, larger groups all-reduce."""
        steps = map(topology.edges_at, range(topology.period))
        parts = (tuple(part for edge in edges for part in _group(edge.ranks)) for edges in steps)
        return cls(world_size=world_size, steps=tuple(parts))

    @classmethod
    def scheduled(cls, schedules: Sequence[Schedule]) -> Traffic:
        """Returns one period of traffic in which each rank sends all parameters to its targets."""

        def sent(step: int) -> tuple[Part, ...]:
            edges = [(rank, to) for rank, at in enumerate(schedules) for to in at(step)[0]]
            return tuple(Message(source=rank, target=to) for rank, to in edges)

        steps = map(sent, range(schedules[0].period))
        return cls(world_size=len(schedules), steps=tuple(steps))

    def between_machines(self, local_size: int) -> Traffic:
        """Returns this traffic with a machine of `local_size` ranks in place of each rank.

        The ranks of a machine average all parameters. Then each of them exchanges an equal share
        with the ranks of the same local rank on other machines.
        """
        at_least("local_size", local_size, 1)
        size = self.world_size * local_size
        blocks = [range(first, first + local_size) for first in range(0, size, local_size)]
        inside = [GroupMean(ranks=tuple(block)) for block in blocks if local_size > 1]

        def spread(part: Part) -> list[Part]:
            assert isinstance(part, Message), "machines exchange messages"
            return [
                Message(
                    source=part.source * local_size + local_rank,
                    target=part.target * local_size + local_rank,
                    share=part.share / local_size,
                )
                for local_rank in range(local_size)
            ]

        steps: list[tuple[Part, ...]] = [
            (*inside, *(m for part in step for m in spread(part))) for step in self.steps
        ]
        return Traffic(world_size=size, steps=tuple(steps))

    def times(self, factor: float) -> Traffic:
        """Returns this traffic with `factor` times as many bytes."""
        replace = dataclasses.replace
        steps = [tuple(replace(p, share=p.share * factor) for p in step) for step in self.steps]
        return replace(self, steps=tuple(steps))

    def every(self, count: int) -> Traffic:
        """Returns this traffic in the last of each `count` steps, and none in the others."""
        at_least("count", count, 1)
        steps = [part for step in self.steps for part in (*[()] * (count - 1), step)]
        return dataclasses.replace(self, steps=tuple(steps))

    def alike(self, ranks_per_host: int = 1) -> bool:
        """Returns True if all ranks exchange as much, and as far, in each step."""

        def host(rank: int) -> int:
            return rank // ranks_per_host

        for step in self.steps:
            shares: list[list[tuple[str, int, int, float]]] = [[] for _ in range(self.world_size)]
            for part in step:
                if isinstance(part, Message):
                    far = host(part.source) != host(part.target)
                    shares[part.source].append(("sent", far, 2, part.share))
                    shares[part.target].append(("received", far, 2, part.share))
                    continue
                hosts = len(set(map(host, part.ranks)))
                for rank in part.ranks:
                    shares[rank].append(("mean", hosts, len(part.ranks), part.share))
            if len({tuple(sorted(each)) for each in shares}) > 1:
                return False
        return True

    def loads(self, ranks_per_host: int = 1) -> list[list[Load]]:
        """Returns the loads of the links by host and step; each host has consecutive ranks.

        Messages inside a host load no link. A mean over a group with ranks on h hosts takes at
        least 2 (h-1)/h of the buffer each way at each host. A mean over all ranks is counted
        separately (`Load.reduced`), because its time can be measured directly.
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
        first, second = ranks
        return [Message(source=first, target=second), Message(source=second, target=first)]
    return [GroupMean(ranks=tuple(ranks))] if len(ranks) > 2 else []


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Compute times of one rank in a step without communication, in seconds."""

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    """Seconds of the optimizer's step for all parameters."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            at_least(name, value, 0)


@dataclass(frozen=True, kw_only=True)
class CommTimes:
    """Seconds of the collectives of one step without compute, all messages together."""

    all_reduce_s: float = 0.0
    reduce_scatter_s: float = 0.0
    all_gather_s: float = 0.0
    exchange_s: tuple[float, ...] = ()
    """Seconds of a host's exchanges with a few other hosts, for each step of a period."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for seconds in value if name == "exchange_s" else [value]:
                at_least(name, seconds, 0)


def comm_times(nbytes: float, costs: Mapping[str, AlphaBeta]) -> CommTimes:
    """Returns the seconds of each collective for `nbytes` of gradients (or parameters) at once.

    Args:
        costs: fits by operation (`all_reduce`, `reduce_scatter`, `all_gather`). A missing operation
            counts as free, so give every operation that the bound uses.
    """
    seconds = {name: cost(nbytes) for name, cost in costs.items()}
    return CommTimes(
        all_reduce_s=seconds.get("all_reduce", 0.0),
        reduce_scatter_s=seconds.get("reduce_scatter", 0.0),
        all_gather_s=seconds.get("all_gather", 0.0),
    )


def exchange_times(
    nbytes: float,
    loads: Iterable[Sequence[Load]],
    costs: Mapping[str, AlphaBeta],
    ranks_per_host: int = 1,
) -> list[CommTimes]:
    """Returns the seconds of a schedule's exchanges on each host, all messages of a step at once.

    Args:
        nbytes: size of all parameters.
        loads: by host and step (`Traffic.loads`).
        costs: fitted cost of `exchange`. It must be measured while all ranks send at once, each to
            another host, with the same number of ranks per host. If the schedule averages over all
            ranks, the cost of `all_reduce` as well.
    """

    def seconds(load: Load) -> float:
        exchanged = max(load.sent, load.received) * nbytes / ranks_per_host
        exchange_s = costs[EXCHANGE](exchanged) if exchanged else 0.0
        return exchange_s + (costs["all_reduce"](load.reduced * nbytes) if load.reduced else 0.0)

    return [CommTimes(exchange_s=tuple(map(seconds, host))) for host in loads]


def step_bound_s(kind: Bound, compute: StepTimes, comm: CommTimes, world_size: int = 1) -> float:
    """Returns the lower bound of the seconds per step for an algorithm of this `kind`.

    Args:
        world_size: number of ranks that share the update, in kinds where ranks share it. If all
            ranks update everything, a step takes longer.

    Raises:
        UserError: an unknown kind, or a world size below 1.
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
    """Returns the seconds per step with free communication; no synchronous algorithm is faster.

    The update is divided by `world_size`, because ranks could share it.
    """
    at_least("world_size", world_size, 1)
    return compute.forward_s + compute.backward_s + compute.update_s / world_size


def wire_limit_s(nbytes: float, world_size: int, bytes_per_s: float) -> float:
    """Returns the least seconds to average `nbytes` of gradients over the ranks' links.

    Every rank must send and receive 2 (P-1)/P of the bytes (Patarasuk and Yuan, JPDC 2009, for
    reductions without help of the network). A synchronous algorithm that sends every byte of the
    gradients cannot have shorter steps.

    Args:
        bytes_per_s: payload that a link carries each way.
    """
    at_least("nbytes", nbytes, 0)
    at_least("world_size", world_size, 1)
    positive("bytes_per_s", bytes_per_s)
    return nbytes * (world_size - 1) / world_size / bytes_per_s * 2


def exchange_wire_limit_s(
    nbytes: float, loads: Sequence[Sequence[Load]], bytes_per_s: float
) -> float:
    """Returns the seconds per step for which a schedule keeps the busiest host's link busy.

    `nbytes` is the size of all parameters; `loads` are by host and step (`Traffic.loads`).
    """
    hosts = len(loads)

    def busy_s(load: Load) -> float:
        all_reduce_s = wire_limit_s(load.reduced * nbytes, hosts, bytes_per_s)
        return max(load.sent, load.received) * nbytes / bytes_per_s + all_reduce_s

    return max(statistics.fmean(map(busy_s, host)) for host in loads)
