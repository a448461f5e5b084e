"""Asynchronous decentralized training: ranks average with the values received so far."""

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
"""Shortest and longest pause between two checks of a neighbour that is too far behind, in seconds
on the communicator's clock."""
DEFAULT_PATIENCE_S = 120.0


class AsyncEngine(WindowEngine):
    """Engine with the order `overlapped`. As soon as a bucket's last gradient arrives, the bucket

    - is averaged with the values in its slots;
    - is updated with this rank's own gradient;
    - is put into the neighbours' slots.

    A neighbour that has died is left out, and the remaining weights are scaled to sum to 1.
    """

    order = "overlapped"
    apart = True

    def __init__(self, replica: Replica, graph: nx.DiGraph | None = None) -> None:
        self._max_staleness = replica.options.max_staleness
        core_module()  # raises before the model is changed; the first step makes the windows
        super().__init__(replica, graph)

    def lay_out(self, members: Any) -> None:
        super().lay_out(members)
        self._refill = False  # a refill would overwrite what neighbours have put already

    def waits(self) -> bool:
        return self._max_staleness is not None

    def meet(self) -> None:
        """Does nothing: no rank waits for all ranks."""

    def begin(self) -> None:
        super().begin()
        if self._max_staleness is not None:
            for source in self.peers.sources:
                self._catch_up(source, self.steps - 1 - self._max_staleness)

    def mix(self, bucket: Bucket) -> None:
        # The values do not include the current step yet.
        self_weight, sources = self.mix_weights()
        self.windows[bucket].collect(bucket.values, self_weight, sources, steps=self.steps - 1)
        bucket.touched()

    def release(self) -> None:
        if self.windows:
            self.peers.leave(self.options.finish_timeout_s)
        super().release()

    def _catch_up(self, source: int, least: int) -> None:
        """Waits until the last bucket from `source` contains at least `least` of its steps."""
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
                    f"max_staleness={self._max_staleness}, and has made no progress within "
                    f"{patience_s:g} s"
                )
            self.communicator.pause(pause)
            pause = min(2 * pause, POLL_S[1])
        self.communicator.held_up(began, reported=False)


class AsyncDdp(GraphAlgorithm):
    """Asynchronous data parallelism over one-sided windows (after the asyncddp fork of BlueFog).

        x <- w x + sum of w_j (what j has put last) - update(gradient at x)

    Invariant: each step of a rank is this update, with its own gradient. A slot that no neighbour
    has written holds this rank's own start values. Without `max_staleness` a rank waits for others
    only in the first step, which makes the windows, and in `close()`. Ranks may make different
    numbers of steps. `optimizer.statistics()` reports how stale the averaged values were.
    Bytes move: each bucket of parameters as soon as it is updated, without the receiver's help.
    Cost per step and rank: one put of the model to each out-neighbour.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """Topology, time of the update, and how far apart ranks may drift."""

        update: UpdateIn = "backward"
        """`backward`: updates each bucket as soon as its last gradient arrives; `step`: updates in
        `step()`, so that gradients can be clipped or unscaled before."""
        max_staleness: int | None = None
        """Steps that a neighbour's values may be behind before a step waits for it. Each put then
        also waits for the previous one. None: no limit, and no waiting."""
        finish_timeout_s: float = 3600.0
        """Longest time that `close()` waits for ranks that still train, in seconds."""

        def __post_init__(self) -> None:
            super().__post_init__()
            positive("option of asyncddp 'finish_timeout_s'", self.finish_timeout_s)
            at_least("option of asyncddp 'max_staleness'", self.max_staleness, 0)

    capabilities = Capabilities(consistency="asynchronous")

    @classmethod
    def bound_of(cls, options: Options) -> Bound:
        # A rank that waits for its neighbours also waits for its puts.
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
            return "networkx is not installed; topologies need it"
        core = importlib.util.find_spec("comm_core")
        built = core is not None and Path(core.origin or "").with_name("_built_for.json").exists()
        return None if built else "the comm core is not built: build it with scripts/build.sh"

    engine = AsyncEngine

    def alone(self, options: Options) -> bool:
        return False
