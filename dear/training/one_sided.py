"""What the algorithms share that exchange parameters through one-sided windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dear.buckets.flat import Bucket
from dear.comm.neighbors import Round, timed
from dear.comm.peers import Peers
from dear.comm.windows import NeighborWindow
from dear.cost.bounds import Bound
from dear.cost.overlap import Moment, Overlap, Transfer
from dear.lazy import nx
from dear.training.engine import Replica
from dear.training.parameters import GraphAlgorithm, GraphOptions, ParameterEngine


class WindowEngine(ParameterEngine):
    """Each bucket has a window: `share` puts it there, `mix` takes what the others have put so far.

    A slot starts with this rank's own values, so its start counts as everybody's until something of
    the neighbours arrives; it does so again after a state was loaded. A message whose predecessor
    to the same neighbour is still under way is left out: the next one carries newer values.

    Args:
        graph: who sends to whom, with weights; None: as the options say.
    """

    sends_in_place = False
    weighted: ClassVar[bool] = False
    """True if windows carry push-sum weights; then slots start empty."""
    apart: ClassVar[bool] = False
    """True if training goes on when a neighbour has died."""

    def __init__(self, replica: Replica, graph: nx.DiGraph | None = None) -> None:
        communicator = replica.communicator
        self._graph = replica.options.graph(communicator) if graph is None else graph
        self.part = Round.of(self._graph, communicator.rank)
        self.windows: dict[Bucket, NeighborWindow] = {}
        self._refill = True
        super().__init__(replica)

    def waits(self) -> bool:
        """Whether exchanges wait for all ranks."""
        return self.options.barrier

    def put_weights(self) -> dict[int, float]:
        """Target -> factor of what is put there."""
        return dict.fromkeys(self.part.destinations, 1.0)

    def mix_weights(self) -> tuple[float, dict[int, float]]:
        """The weight of this rank's own parameters, and those of its sources."""
        return self.part.self_weight, self.part.sources

    def lay_out(self, members: Any) -> None:
        super().lay_out(members)
        self.peers = Peers(self.communicator, self._graph, apart=self.apart)
        self.windows = {
            bucket: NeighborWindow(
                self.peers,
                bucket.values,
                zero_slots=self.weighted,
                weighted=self.weighted,
                steps=self.steps,
            )
            for bucket in self.buckets
        }

    def begin(self) -> None:
        super().begin()
        if self._refill:
            self._refill = False
            self.refill()

    def refill(self) -> None:
        """Before the first exchange, and after a state was loaded: fills slots with own values."""
        for bucket, window in self.windows.items():
            window.fill(bucket.values, steps=self.steps)
        self.meet()

    def share(self, bucket: Bucket) -> None:
        window = self.windows[bucket]
        idle, factors = window.idle(wait=self.waits()), self.put_weights()
        chosen = {target: factor for target, factor in factors.items() if target in idle}
        window.put(bucket.values, chosen, steps=self.steps)

    def mix(self, bucket: Bucket) -> None:
        self.windows[bucket].collect(bucket.values, *self.mix_weights(), steps=self.steps)
        bucket.touched()

    def combine(self) -> None:
        if not self.unmixed:
            return
        self.meet()
        super().combine()
        self.meet()

    def meet(self) -> None:
        """With `barrier`: returns when all ranks' messages have arrived and all are here."""
        if self.waits():
            self.wait()
            timed(self.communicator, self.communicator.barrier)()

    def wait(self) -> None:
        for window in self.windows.values():
            window.wait()

    def drop(self) -> None:
        super().drop()
        self._refill = True

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        self._refill = True

    def statistics(self) -> dict[str, Any]:
        """See `Peers.statistics`."""
        return self.peers.statistics() if self.windows else {}

    def release(self) -> None:
        if self.windows:
            self.peers.close()


@dataclass(frozen=True, kw_only=True)
class WindowOptions(GraphOptions):
    """The topology, and how asynchronous it is."""

    barrier: bool = False
    """Waits for all ranks in each step that exchanges, so that results do not depend on timing; for
    comparisons."""
    every: int = 1
    """Exchanges in each so many steps only, the last of them."""

    def in_step(self) -> bool:
        return self.barrier


class WindowAlgorithm(GraphAlgorithm):
    """Base: over windows, with `WindowOptions`."""

    barrier_bound: ClassVar[Bound]
    """As `bound`, where all ranks wait for each other."""
    puts: ClassVar[Moment]
    """When buckets are put; what reads instead has an `overlap_of` of its own."""

    @classmethod
    def bound_of(cls, options: WindowOptions) -> Bound | None:
        return cls.barrier_bound if options.barrier else cls.bound

    @classmethod
    def overlap_of(cls, options: WindowOptions) -> Overlap:
        sent = Transfer(
            kind="put",
            carries=("parameters",),
            starts=cls.puts,
            awaited="step" if options.barrier else None,
        )
        return Overlap(transfers=(sent,), meetings=("step",) if options.barrier else ())
