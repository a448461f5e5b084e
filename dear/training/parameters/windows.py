"""One-sided exchanges: a rank writes to windows of its neighbours, whose programs do nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from dear.buckets.flat import Bucket
from dear.comm.neighbors import Round, timed
from dear.comm.peers import Peers
from dear.comm.windows import NeighborWindow
from dear.cost.bounds import Bound, Traffic
from dear.cost.overlap import Moment, Overlap, Transfer
from dear.lazy import nx, torch
from dear.options import LATER, at_least, option_of, positive
from dear.training.engine import Replica
from dear.training.parameters.engine import ParameterEngine
from dear.training.parameters.exchange import BucketExchange
from dear.training.parameters.options import GraphAlgorithm, GraphOptions
from dear.training.parameters.stepped import AdaptAndCombine, CombineThenAdapt

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


class Policy:
    """Weights of one rank's one-sided averages, and whether the exchanges wait."""

    def __init__(self, part: Round, *, waits: bool) -> None:
        self.part = part
        self._waits = waits

    def waits(self) -> bool:
        """Returns True if exchanges wait for other ranks."""
        return self._waits

    def put_weights(self) -> dict[int, float]:
        """Returns target -> factor of the values that this rank puts there."""
        return dict.fromkeys(self.part.destinations, 1.0)

    def mix_weights(self) -> tuple[float, dict[int, float]]:
        """Returns the weight of this rank's own parameters, and the weights of its sources."""
        return self.part.self_weight, self.part.sources


class WindowExchange(BucketExchange):
    """Exchange through one window per bucket: `share` puts values, `mix` averages received values.

    A slot starts with this rank's own values in place of the neighbour's, until the neighbour's
    first values arrive; also after a state was loaded. A message is left out while the previous
    message to the same neighbour has not ended; the next message carries newer values.

    Args:
        graph: edges from sender to receiver.
        finish_timeout_s: longest time that `release` waits for ranks that still train, in seconds.
        on_release: called with all windows before they are freed.
    """

    sends_in_place = False
    weighted: ClassVar[bool] = False
    """True if windows carry push-sum weights; slots then start empty."""
    apart: ClassVar[bool] = False
    """True if training continues after a neighbour has died."""
    refills_at_first: ClassVar[bool] = True
    """True if the first step fills the slots again, since parameters may have been broadcast."""

    def __init__(
        self,
        graph: nx.DiGraph,
        policy: Policy,
        finish_timeout_s: float,
        on_release: Callable[[Collection[NeighborWindow]], None] = lambda windows: None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.windows: dict[Bucket, NeighborWindow] = {}
        self._graph = graph
        self._finish_timeout_s = finish_timeout_s
        self._on_release = on_release
        self._begun = False
        self._refill = self.refills_at_first

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, steps)
        self.peers = Peers(self.communicator, self._graph, apart=self.apart)
        self.windows = {
            bucket: NeighborWindow(
                self.peers,
                bucket.values,
                zero_slots=self.weighted,
                weighted=self.weighted,
                steps=steps,
            )
            for bucket in self.buckets
        }

    def begin(self, steps: int) -> None:
        self._begun = True
        if self._refill:
            self._refill = False
            self.refill(steps)

    def refill(self, steps: int) -> None:
        """Fills this rank's slots with its own values."""
        for bucket, window in self.windows.items():
            window.fill(bucket.values, steps=steps)
        self.meet()

    def share(self, bucket: Bucket, steps: int) -> None:
        window = self.windows[bucket]
        idle, factors = window.idle(wait=self.policy.waits()), self.policy.put_weights()
        # `put` refuses ranks that are no targets.
        left_out = set(window.targets) - set(idle)
        chosen = {target: factor for target, factor in factors.items() if target not in left_out}
        window.put(bucket.values, chosen, steps=steps)

    def mix(self, bucket: Bucket, steps: int) -> None:
        self.windows[bucket].collect(bucket.values, *self.policy.mix_weights(), steps=steps)
        bucket.touched()

    def meet(self) -> None:
        """Waits for all ranks and messages if exchanges wait; otherwise returns immediately."""
        if self.policy.waits():
            self.wait()
            timed(self.communicator, self.communicator.barrier)()

    def wait(self) -> None:
        for window in self.windows.values():
            window.wait()

    def before_load(self) -> bool:
        if not self.policy.waits():  # otherwise every exchange brings new values of all ranks
            self.drop()
        return True

    def drop(self) -> None:
        super().drop()
        self._refill = self.refills_at_first or self._begun

    def restore(self, saved: StateDict | None) -> None:
        self._refill = self.refills_at_first or self._begun

    def statistics(self) -> dict[str, object]:
        """Returns the result of `Peers.statistics`, or {} before windows exist."""
        return self.peers.statistics() if self.windows else {}

    def release(self) -> None:
        if self.windows:
            # Freeing meets in a collective, whose time limit ranks that still train would exceed.
            self.peers.leave(self._finish_timeout_s)
            self._on_release(self.windows.values())
            self.peers.close()


@dataclass(frozen=True, kw_only=True)
class OneSidedOptions(GraphOptions):
    """Topology, and the limit of the wait at the end."""

    finish_timeout_s: float = 3600.0
    """Longest time that `close()` waits for ranks that still train, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(option_of(self, "finish_timeout_s"), self.finish_timeout_s)


@dataclass(frozen=True, kw_only=True)
class WindowOptions(OneSidedOptions):
    """Topology, and timing of the exchanges."""

    # Older records lack it; those of `asyncddp` have it.
    finish_timeout_s: float = field(default=OneSidedOptions.finish_timeout_s, metadata=LATER)
    barrier: bool = False
    """Waits for all ranks in each step that exchanges, so that results do not depend on timing; for
    comparisons."""
    every: int = 1
    """Period of the exchanges in steps; the last step of each period exchanges."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(option_of(self, "every"), self.every, 1)

    def in_step(self) -> bool:
        return self.barrier


WindowOptionsT = TypeVar("WindowOptionsT", bound=WindowOptions)


class WindowAlgorithm(GraphAlgorithm[WindowOptionsT]):
    """Base of the algorithms that average through windows, with `WindowOptions`."""

    order: ClassVar[type[CombineThenAdapt | AdaptAndCombine]] = CombineThenAdapt
    exchange: ClassVar[type[WindowExchange]] = WindowExchange
    barrier_bound: ClassVar[Bound]
    """Formula in place of `bound` if all ranks wait for each other."""
    puts: ClassVar[Moment]
    """Time at which buckets are put. Algorithms that read instead override `overlap_of`."""

    @classmethod
    def bound_of(cls, options: WindowOptionsT) -> Bound | None:
        return cls.barrier_bound if options.barrier else cls.bound

    @classmethod
    def overlap_of(cls, options: WindowOptionsT) -> Overlap:
        sent = Transfer(
            kind="put",
            carries=("parameters",),
            starts=cls.puts,
            awaited="step" if options.barrier else None,
        )
        return Overlap(transfers=(sent,), meetings=("step",) if options.barrier else ())

    @classmethod
    def traffic(cls, options: WindowOptionsT, world_size: int, local_size: int) -> Traffic:
        return super().traffic(options, world_size, local_size).every(options.every)

    def engine(self, replica: Replica[WindowOptionsT]) -> ParameterEngine:
        options, communicator = replica.options, replica.communicator
        graph = options.graph(communicator)
        policy = Policy(Round.of(graph, communicator.rank), waits=options.barrier)
        exchange = self.exchange(graph, policy, options.finish_timeout_s)
        return self.order(replica, exchange, every=options.every)
