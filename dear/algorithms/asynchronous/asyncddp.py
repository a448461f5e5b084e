"""Asynchronous decentralized training: averaging with what neighbours have sent so far."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dear.buckets.flat import Bucket
from dear.comm.neighbors import core_module
from dear.cost.bounds import Bound
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import nx
from dear.options import at_least, positive
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica
from dear.training.one_sided import WindowEngine
from dear.training.parameters import GraphAlgorithm, GraphOptions, UpdateIn

POLL_S = (0.0005, 0.02)
"""Shortest and longest pause between two looks at a neighbour that is too far behind, on the
communicator's clock."""
DEFAULT_PATIENCE_S = 120.0


class AsyncEngine(WindowEngine):
    """In the order `overlapped`: each bucket, as soon as its last gradient is there,

    - is averaged with what is in its slots;
    - is updated with this rank's own gradient;
    - is put into the neighbours' slots.

    A neighbour that has died is left out; the others' weights and the own one take its share.
    """

    order = "overlapped"
    apart = True

    def __init__(self, replica: Replica, graph: nx.DiGraph | None = None) -> None:
        self._max_staleness = replica.options.max_staleness
        core_module()  # before anything is changed; windows are made in the first step
        super().__init__(replica, graph)

    def lay_out(self, members: Any) -> None:
        super().lay_out(members)
        self._refill = False  # neighbours may have put something since the slots were filled

    def waits(self) -> bool:
        return self._max_staleness is not None

    def meet(self) -> None:
        """Nobody waits for all ranks."""

    def begin(self) -> None:
        super().begin()
        if self._max_staleness is not None:
            for source in self.peers.sources:
                self._catch_up(source, self.steps - 1 - self._max_staleness)

    def mix(self, bucket: Bucket) -> None:
        # The step under way is not in the values yet.
        own, sources = self.mix_weights()
        self.windows[bucket].collect(bucket.values, own, sources, steps=self.steps - 1)
        bucket.touched()

    def release(self) -> None:
        if self.windows:
            self.peers.leave(self.options.finish_timeout_s)
        super().release()

    def _catch_up(self, source: int, least: int) -> None:
        """Waits until the last bucket from `source` has at least so many steps in it."""
        *_, last = self.windows.values()
        clock, pause = self.communicator.clock, POLL_S[0]
        began = clock()
        limit = self.communicator.timeout
        patience_s = DEFAULT_PATIENCE_S if limit is None else limit.total_seconds()
        while True:
            steps = last.steps_in(source)
            if steps is None or steps >= least or self.peers.departures.gone(source):
                break
            if clock() - began > patience_s:
                raise RuntimeError(
                    f"rank {source} is {self.steps - 1 - steps} steps behind, more than "
                    f"max_staleness={self._max_staleness}, and has not moved on within "
                    f"{patience_s:g} s"
                )
            self.communicator.pause(pause)
            pause = min(2 * pause, POLL_S[1])
        self.communicator.held_up(began, reported=False)


class AsyncDdp(GraphAlgorithm):
    """Asynchronous data parallelism over one-sided windows (after the asyncddp fork of BlueFog).

        x <- w x + sum of w_j (what j has put last) - update(gradient at x)

    Invariant: a rank's step is this, with its own gradient; a slot that nothing has come to holds
    this rank's own start. No rank waits for another one, except in the first step, where windows
    are made, and in `close()`. Ranks may make different numbers of steps.
    `optimizer.statistics()` tells how stale what was used was.
    Bytes move: each bucket of parameters as soon as it is updated; the receiver's program takes no
    part.
    Cost per step and rank: one put of the model to each out-neighbour.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """Who sends to whom, and how far apart ranks may drift."""

        update: UpdateIn = "backward"
        """`backward`: each bucket is updated as soon as its last gradient is there; `step`: in
        `step()`, so that gradients can be clipped or unscaled before."""
        max_staleness: int | None = None
        """Steps that a neighbour's values may be behind before a step waits for it (and puts wait
        for the ones before); None: any number, and never wait."""
        finish_timeout_s: float = 3600.0
        """Longest that `close()` waits for ranks that still train, in seconds."""

        def __post_init__(self) -> None:
            super().__post_init__()
            positive("option of asyncddp 'finish_timeout_s'", self.finish_timeout_s)
            at_least("option of asyncddp 'max_staleness'", self.max_staleness, 0)

    capabilities = Capabilities(consistency="asynchronous")

    @classmethod
    def bound_of(cls, options: Options) -> Bound:
        # Where neighbours are waited for, puts are, too.
        return "asynchronous" if options.max_staleness is None else "decentralized"

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        at = "gradient" if options.update == "backward" else "step"
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
            return "networkx is not installed, which topologies are made of"
        core = importlib.util.find_spec("comm_core")
        built = core is not None and Path(core.origin or "").with_name("_built_for.json").exists()
        return None if built else "the comm core is not built: build it with scripts/build.sh"

    engine = AsyncEngine

    def alone(self, options: Options) -> bool:
        return False
