"""Topologies that change from step to step: whom a rank sends to and receives from at step t.

Every schedule is a function of the step number, so that a run can go on where it stopped; what one
rank expects is what another sends. `forever` makes a generator of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dear.errors import UserError, unknown
from dear.topology.graphs import exponential, out_neighbors, powers

if TYPE_CHECKING:
    import networkx as nx

Peers = tuple[list[int], list[int]]
"""Ranks to send to, ranks to receive from."""
Schedule = Callable[[int], Peers]
"""Step number -> peers of this rank."""


def one_peer(graph: nx.DiGraph, rank: int) -> Schedule:
    """Each rank sends to one of its destinations in turn, nearest first (going upwards).

    In an irregular graph a rank may receive from several or from nobody.
    """
    world_size = graph.number_of_nodes()
    turns = {
        other: sorted(out_neighbors(graph, other), key=lambda to: (to - other) % world_size)
        for other in graph.nodes
    }

    def at(step: int) -> Peers:
        target = {r: turn[step % len(turn)] for r, turn in turns.items() if turn}
        send = [target[rank]] if rank in target else []
        return send, sorted(other for other, to in target.items() if to == rank)

    return at


def one_peer_machines(machines: int, machine: int) -> Schedule:
    """Machines exchange at distance 1, 2, 4, ... in turn; numbers of machines, not of ranks."""
    if machines < 2:
        raise UserError(f"an exchange between machines needs at least 2, there is {machines}")
    distances = powers(2, machines)

    def at(step: int) -> Peers:
        distance = distances[step % len(distances)]
        return [(machine + distance) % machines], [(machine - distance) % machines]

    return at


def inner_outer_ring(world_size: int, local_size: int, rank: int) -> Schedule:
    """One rank of each machine in turn exchanges with the next machine, the others in a ring.

    The others' ring leaves out the one that is away.
    """
    return _inner_outer(world_size, local_size, rank, outer=[1], inner=[1])


def inner_outer_exp2(world_size: int, local_size: int, rank: int) -> Schedule:
    """The same with distances 1, 2, 4, ... in turn, between machines and inside them."""
    machines = _machines(world_size, local_size)
    return _inner_outer(
        world_size, local_size, rank, outer=powers(2, machines), inner=powers(2, local_size - 1)
    )


def _inner_outer(
    world_size: int, local_size: int, rank: int, outer: list[int], inner: list[int]
) -> Schedule:
    machines = _machines(world_size, local_size)
    machine, local = divmod(rank, local_size)

    def at(step: int) -> Peers:
        away = step % local_size
        if local == away:
            distance = outer[step % len(outer)]
            to, source = (machine + distance) % machines, (machine - distance) % machines
            return [to * local_size + local], [source * local_size + local]
        at_home = [other for other in range(local_size) if other != away]
        place, distance = at_home.index(local), inner[step % len(inner)]
        to = at_home[(place + distance) % len(at_home)]
        source = at_home[(place - distance) % len(at_home)]
        return [machine * local_size + to], [machine * local_size + source]

    return at


def _machines(world_size: int, local_size: int) -> int:
    if local_size < 3:
        raise UserError(
            f"inner-outer topologies need at least 3 ranks per machine, got {local_size}"
        )
    if world_size % local_size or world_size // local_size < 2:
        raise UserError(
            f"inner-outer topologies need at least 2 machines of {local_size} ranks each, got "
            f"{world_size} ranks"
        )
    return world_size // local_size


DYNAMIC = ("one-peer-exp", "inner-outer-ring", "inner-outer-exp2")
"""Schedules by the names that options and experiments use."""


def schedule(name: str, world_size: int, rank: int, local_size: int) -> Schedule:
    """The schedule `name` for one rank.

    Args:
        local_size: ranks per machine; `one-peer-exp` has no use for it.

    Raises:
        UserError: an unknown name, or a world that the schedule does not fit.
    """
    if name == "one-peer-exp":
        return one_peer(exponential(world_size), rank)
    if name == "inner-outer-ring":
        return inner_outer_ring(world_size, local_size, rank)
    if name == "inner-outer-exp2":
        return inner_outer_exp2(world_size, local_size, rank)
    raise unknown("dynamic topology", name, DYNAMIC)


def period(name: str, world_size: int, local_size: int) -> int:
    """Steps after which `schedule(name, ...)` starts again; arguments as there."""
    if name == "one-peer-exp":
        return max(1, len(powers(2, world_size)))
    if name == "inner-outer-ring":
        return local_size
    if name == "inner-outer-exp2":
        outer, inner = powers(2, _machines(world_size, local_size)), powers(2, local_size - 1)
        return math.lcm(local_size, len(outer), len(inner))
    raise unknown("dynamic topology", name, DYNAMIC)


def forever(schedule: Schedule) -> Iterator[Peers]:
    """The peers of step 0, 1, 2, ... without end."""
    return map(schedule, itertools.count())
