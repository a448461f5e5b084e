"""What passes between ranks in each step of a schedule, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dear.lazy import nx
from dear.options import at_least
from dear.topology.schedules import Schedule, Topology


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
        return cls(
            world_size=world_size,
            steps=tuple(
                tuple(part for edge in topology.edges_at(step) for part in _group(edge.ranks))
                for step in range(topology.period)
            ),
        )

    @classmethod
    def scheduled(cls, schedules: Sequence[Schedule]) -> Traffic:
        """All parameters to whom each rank's schedule says, for one period."""
        steps = [
            tuple(
                Message(source=rank, target=target)
                for rank, schedule in enumerate(schedules)
                for target in schedule(step)[0]
            )
            for step in range(schedules[0].period)
        ]
        return cls(world_size=len(schedules), steps=tuple(steps))

    def between_machines(self, local_size: int) -> Traffic:
        """The same between machines of `local_size` ranks each, for which this traffic is meant.

        Each machine averages all parameters; each of its ranks exchanges its share of them with the
        ranks of its place on other machines.
        """
        at_least("local_size", local_size, 1)
        inside = tuple(
            GroupMean(ranks=tuple(range(first, first + local_size)))
            for first in range(0, self.world_size * local_size, local_size)
            if local_size > 1
        )

        def spread(part: Message) -> list[Message]:
            return [
                Message(
                    source=part.source * local_size + place,
                    target=part.target * local_size + place,
                    share=part.share / local_size,
                )
                for place in range(local_size)
            ]

        return Traffic(
            world_size=self.world_size * local_size,
            steps=tuple(
                (*inside, *(message for part in step for message in spread(part)))
                for step in self.steps
            ),
        )

    def times(self, factor: float) -> Traffic:
        """The same with `factor` times as many bytes."""
        return dataclasses.replace(
            self,
            steps=tuple(
                tuple(dataclasses.replace(part, share=part.share * factor) for part in step)
                for step in self.steps
            ),
        )

    def every(self, count: int) -> Traffic:
        """The same with nothing in all but the last of each `count` steps."""
        at_least("count", count, 1)
        quiet: tuple[tuple[Part, ...], ...] = ((),) * (count - 1)
        return dataclasses.replace(
            self, steps=tuple(s for step in self.steps for s in (*quiet, step))
        )

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
