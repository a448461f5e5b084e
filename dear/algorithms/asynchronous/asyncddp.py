"""Asynchronous decentralized training: ranks average with the values received so far."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from dear.buckets.flat import Bucket
from dear.comm.backends import missing_comm_core
from dear.comm.communicator import Communicator
from dear.comm.neighbors import Round
from dear.cost.bounds import Bound
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import nx, torch
from dear.options import at_least
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica
from dear.training.parameters.options import GraphAlgorithm
from dear.training.parameters.overlapped import Overlapped, UpdateIn, overlapped
from dear.training.parameters.windows import OneSidedOptions, Policy, WindowExchange

POLL_S = (0.0005, 0.02)
"""Shortest and longest pause between two checks of a neighbour that is too far behind, in seconds
on the communicator's clock."""
DEFAULT_PATIENCE_S = 120.0


class AsyncExchange(WindowExchange):
    """Exchange of `asyncddp`: waits for no rank, except for a rank that is too far behind.

    A neighbour that has died is left out, and the other weights are scaled to a sum of 1.

    Args:
        part: this rank's part in averaging over the graph.
    """

    apart = True
    refills_at_first = False  # a refill would overwrite values that neighbours have put

    def __init__(self, graph: nx.DiGraph, part: Round, options: AsyncDdp.Options) -> None:
        self._max_staleness = options.max_staleness
        policy = Policy(part, waits=options.max_staleness is not None)
        super().__init__(graph, policy, options.finish_timeout_s)

    def open(self, communicator: Communicator, device: torch.device) -> None:
        super().open(communicator, device)
        communicator.core()  # raises before the model is changed; the first step makes the windows

    def meet(self) -> None:
        """Does nothing: no rank waits for all ranks."""

    def begin(self, steps: int) -> None:
        super().begin(steps)
        if self._max_staleness is not None:
            for source in self.peers.sources:
                self._catch_up(source, steps, self._max_staleness)

    def mix(self, bucket: Bucket, steps: int) -> None:
        super().mix(bucket, steps - 1)  # the values do not include the current step yet

    def _catch_up(self, source: int, steps: int, limit: int) -> None:
        """Waits until the last bucket from `source` is at most `limit` steps behind."""
        *_, last = self.windows.values()
        clock, pause = self.communicator.clock, POLL_S[0]
        began = clock()
        timeout = self.communicator.timeout
        patience_s = DEFAULT_PATIENCE_S if timeout is None else timeout.total_seconds()
        while True:
            source_steps = last.steps_in(source)
            if source_steps is None or steps - source_steps <= limit:
                break
            if self.peers.departures.gone(source):
                break
            if clock() - began > patience_s:
                raise RuntimeError(
                    f"rank {source} is {steps - source_steps} steps behind, more than "
                    f"max_staleness={limit}, and has made no progress within "
                    f"{patience_s:g} s"
                )
            self.communicator.pause(pause)
            pause = min(2 * pause, POLL_S[1])
        self.communicator.held_up(began, reported=False)


class AsyncDdp(GraphAlgorithm["AsyncDdp.Options"]):
    """Asynchronous data parallelism over one-sided windows (after the asyncddp fork of BlueFog).

        x <- w x + sum of w_j (what j has put last) - update(gradient at x)

    Here x are a rank's parameters, w its weight and w_j the weight of neighbour j.
    Invariant: each step of a rank is this update, with its own gradient. A slot that no neighbour
    has written holds this rank's own start values. Without `max_staleness` a rank waits for others
    only in the first step, which makes the windows, and in `close()`. Ranks may make different
    numbers of steps. `optimizer.statistics()` reports how stale the averaged values were.
    Bytes move: each bucket of parameters as soon as it is updated, without the receiver's help.
    Cost per step and rank: one put of the model to each out-neighbour.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(OneSidedOptions):
        """Topology, time of the update, and limits of staleness and of waiting."""

        update: UpdateIn = "backward"
        """`backward`: updates each bucket as soon as its last gradient arrives. `step`: updates in
        `step()`, so that gradients can be clipped or unscaled before."""
        max_staleness: int | None = None
        """Largest number of steps by which a neighbour's values may be behind: a step waits for
        newer values, and a put for the previous put. None: no limit, and nothing waits."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("asyncddp option 'max_staleness'", self.max_staleness, 0)

    capabilities = Capabilities(consistency="asynchronous")
    candidates = ({"topology": "ring"},)

    @classmethod
    def bound_of(cls, options: Options) -> Bound:
        # A rank that waits for its neighbours also waits for its puts.
        return "asynchronous" if options.max_staleness is None else "decentralized"

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        at: Literal["gradient", "step"] = "gradient" if options.update == "backward" else "step"
        follows = options.max_staleness is not None
        sent = Transfer(
            kind="put",
            carries=("parameters",),
            starts=at,
            awaited=at if follows else None,
            steps_later=int(follows),
        )
        return Overlap(transfers=(sent,), updates=at)

    @classmethod
    def unavailable(cls) -> str | None:
        if importlib.util.find_spec("networkx") is None:
            return "networkx is not installed; topologies need it"
        return missing_comm_core()

    def engine(self, replica: Replica[Options]) -> Overlapped:
        options, communicator = replica.options, replica.communicator
        graph = options.graph(communicator)
        part = Round.of(graph, communicator.rank)
        return overlapped(replica, AsyncExchange(graph, part, options), options.update)

    def alone(self, options: Options) -> bool:
        return False
