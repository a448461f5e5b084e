"""Network as a virtual rank sees it, its transfers, and their costs."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from common.models.replay.plan import Unit, Work
from common.virtual.costs.parts import CostsOf, Shape
from common.virtual.world.marks import Parts
from common.virtual.world.trace import Recorder
from dear.comm.handles import WorkTimes
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import Cost, Sending, occupancy_s
from dear.cost.fit import CollectiveCost
from dear.errors import UserError

Place = Literal["inside", "between"]
"""Kind of link: inside a host, or between hosts."""
Values = Callable[[], torch.Tensor]
"""Function that returns the carried values (`marks.carried`) of a message that ends now."""
Effect = Callable[[torch.Tensor], Any]
"""Function that takes carried values."""


@dataclass(frozen=True)
class Group:
    """Ranks that make the same calls in the same order."""

    name: str
    """Name that no other group of the job has; the same on all its ranks."""
    ranks: tuple[int, ...] = field(compare=False)


class Transfer:
    """Transfer that has started; has what `dear.comm.work.Work` and torch need of a handle."""

    def __init__(self, network: Network, name: str, nbytes: int) -> None:
        self.name, self.nbytes = name, nbytes
        self.enqueued_s = network.events.now_s
        self.finished_s: float | None = None
        self._network = network
        self._callbacks: list[Callable[[], object]] = []
        self.sending: Sending | None = None
        """First message of the transfer on a link."""

    def end(self, effect: Callable[[], Any] | None = None) -> None:
        """Ends the transfer now, and calls what waits for it.

        Args:
            effect: writes the values that have arrived.
        """
        self.finished_s = self._network.events.now_s
        if effect is not None:
            apply(effect)
        if not self._callbacks:
            return
        self._network.watched -= len(self._callbacks)
        self._network.take_turn()
        recorder = self._network.recorder
        with contextlib.nullcontext() if recorder is None else recorder.because_of(self):
            for callback in self._callbacks:
                callback()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the transfer ends; at once if it has ended."""
        if self._over():
            callback()
        else:
            self._network.watched += 1
            self._callbacks.append(callback)

    def wait(self, timeout: object = None) -> bool:
        """Lets the clock run until the transfer has ended; returns True."""
        self._network.wait([self])
        return True

    def is_completed(self) -> bool:
        """Returns True once the transfer has ended."""
        self._network.look()
        return self._over()

    def _over(self) -> bool:
        self._network.catch_up()
        return self.ended()

    def ended(self) -> bool:
        return self.finished_s is not None

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future that completes when the transfer ends."""
        self._network.look()
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.on_end(lambda: future.set_result(None))
        return future

    def times(self) -> WorkTimes:
        """Returns the times of a transfer that has ended."""
        assert self.finished_s is not None, "the transfer has not ended"
        self._network.look()
        began_s = self.sending.began_s if self.sending is not None else None
        started_s = self.enqueued_s if began_s is None else began_s
        return WorkTimes(
            enqueued_s=self.enqueued_s, started_s=started_s, finished_s=self.finished_s
        )


def apply(effect: Callable[[], Any]) -> None:
    """Writes values that have arrived; takes no time, in whatever context the thread is."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        effect()


class Network(ABC):
    """Network as a virtual rank sees it.

    While nothing else can see what the rank does, its own clock runs ahead of the common clock. It
    waits for the common clock before it starts or looks at a transfer (`catch_up`).

    Args:
        costs: costs of messages without a disturbance.
        priorities: the engine lets urgent messages overtake others.
        engine: name of what sends (`comm_core`, `nccl`, ...), for algorithms that ask.
    """

    def __init__(
        self,
        rank: int,
        shape: Shape,
        events: Events,
        *,
        costs: Costs,
        engine: str,
        priorities: bool,
    ) -> None:
        self.rank, self.shape, self.events, self.costs = rank, shape, events, costs
        self.engine, self.priorities = engine, priorities
        self.transfers: list[Transfer] = []
        """Transfers that have started since the list was emptied."""
        self.waits: list[tuple[float, float]] = []
        """Start and end of each wait of the device for transfers, since the list was emptied."""
        self.recorder: Recorder | None = None
        """Recorder of what this rank does; None: nothing is recorded."""
        self._thread = threading.local()
        self.inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Context of every thread; set by the device."""
        self.take_turn: Callable[[], None] = lambda: None
        """Makes this rank the one whose code runs; set by who runs several ranks."""
        self.watched = 0
        """Number of what may look at the rank at any time: callbacks, and other threads."""
        self._ahead_s = 0.0
        self._under_way: list[Transfer] = []

    def regimes(self, operation: str, group: Group) -> tuple[tuple[str, int], ...] | None:
        """Returns the regimes of an operation among the ranks of a group (`Costs.regimes`)."""
        return self.costs.regimes(operation, shape_of(group.ranks, self.shape.ranks_per_host))

    def clock(self) -> float:
        """Returns the virtual time in seconds."""
        return max(self._ahead_s, self.events.now_s)

    def read(self) -> Any:
        """Returns the virtual time in seconds, for the rank's program."""
        return self.clock()

    def look(self) -> None:
        """Notes that what the rank's program does next may depend on times."""
        return

    def mark(self) -> float:
        """Returns the virtual time in seconds; a phase of a step begins or ends."""
        return self.clock()

    def slowdown(self, now_s: float) -> float:
        """Returns the factor by which compute of this rank takes longer at a time."""
        return 1.0

    def compute(self, seconds: float, part: Work | Unit | None = None) -> None:
        """Lets the rank compute for `seconds`.

        Args:
            part: part of the replayed model that takes this time; None: its profile does not say.
        """
        now_s = max(self._ahead_s, self.events.now_s)
        end_s = now_s + seconds * self.slowdown(now_s)
        if self.watched:
            self.events.run_to(end_s)
        else:
            self._ahead_s = end_s

    def catch_up(self) -> None:
        """Lets the common clock run until the time of this rank."""
        if self._ahead_s > self.events.now_s:
            end_s, self._ahead_s = self._ahead_s, 0.0
            self.events.run_to(end_s)

    def pause(self, seconds: float) -> None:
        """Lets the clock run for `seconds`."""
        self.look()
        self.catch_up()
        self.events.run_to(self.events.now_s + seconds)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Lets the clock run until all `transfers` have ended."""
        self.catch_up()
        began_s = self.events.now_s
        for transfer in transfers:
            self.events.run_until(transfer.ended, transfer.name)
        self.waited(began_s)
        if self.recorder is not None:
            self.recorder.learn(self.recorder.of(transfers))

    def waited(self, since_s: float) -> None:
        """Counts a wait of this thread that ends now, unless the training goes on beside it."""
        if self.events.now_s > since_s and not getattr(self._thread, "aside", False):
            self.waits.append((since_s, self.events.now_s))

    def thread(self, call: Callable[[], None]) -> None:
        """Runs `call` in another thread of this rank, which shares the clock."""
        self.look()

        def run() -> None:
            self._thread.aside = True
            with self.inside():
                call()
            self.watched -= 1

        self.catch_up()
        self.watched += 1
        self.events.start(run)

    def transfer(self, name: str, nbytes: int) -> Transfer:
        """Returns a transfer that starts now."""
        self.catch_up()
        transfer = Transfer(self, name, nbytes)
        self.transfers.append(transfer)
        self._under_way.append(transfer)
        return transfer

    def ages_s(self) -> tuple[float, ...]:
        """Returns for how many seconds each transfer that has not ended is under way."""
        self.catch_up()
        self._under_way = [each for each in self._under_way if not each.ended()]
        return tuple(self.events.now_s - each.enqueued_s for each in self._under_way)

    @abstractmethod
    def meet(
        self,
        operation: str,
        group: Group,
        nbytes: int,
        given: torch.Tensor,
        effect: Callable[[Parts], Any],
        *,
        priority: int = 0,
    ) -> Transfer:
        """Starts a collective of `nbytes`; the operations of a group run one after another.

        Args:
            given: carried values of this rank (`marks.carried`).
            effect: takes the values of all ranks when the collective ends.
        """

    @abstractmethod
    def swap(
        self,
        queue: Hashable,
        nbytes: int,
        given: Mapping[int, torch.Tensor],
        sources: Iterable[int],
        effect: Callable[[Mapping[int, torch.Tensor]], Any],
    ) -> Transfer:
        """Starts to exchange messages of `nbytes` each with a few ranks.

        Messages of two ranks in a queue run in the order of the calls.

        Args:
            given: carried values for each target.
            sources: ranks that send to this one.
            effect: takes the carried values of each source when all messages have ended.
        """

    @abstractmethod
    def reach(
        self, source: int, target: int, nbytes: int, values: Values, effect: Effect
    ) -> Transfer:
        """Starts a one-sided message; one of the two is this rank, the other does nothing."""

    @abstractmethod
    def agree(self, group: Group, value: Any, call: str) -> list[Any]:
        """Returns the values of all ranks in `call`; takes no time but for the last rank."""

    @abstractmethod
    def windows(self, group: Group, window: Any) -> Mapping[int, Sequence[Any]]:
        """Adds a window of this rank; returns, by rank, the windows to write to in its place.

        All ranks of the group add their windows in the same order. The result is complete when all
        of them have.
        """


class _Known:
    """Cost that remembers its results."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self._seconds: dict[float, tuple[float, float]] = {}

    def __call__(self, nbytes: float) -> float:
        return self._of(nbytes)[0]

    def occupancy_s(self, nbytes: float) -> float:
        return self._of(nbytes)[1]

    def _of(self, nbytes: float) -> tuple[float, float]:
        if nbytes not in self._seconds:
            self._seconds[nbytes] = self.cost(nbytes), occupancy_s(self.cost, nbytes)
        return self._seconds[nbytes]


class Costs:
    """Costs of an engine by operation, and shape of the group.

    Args:
        costs: cost of each operation in a group of some hosts and ranks per host.
    """

    def __init__(self, costs: CostsOf, engine: str) -> None:
        self._costs, self._engine = costs, engine
        self._known: dict[Shape, dict[str, _Known]] = {}

    def of(self, operation: str, shape: Shape) -> Cost:
        """Returns a cost; raises `UserError` if the engine has none of the operation."""
        if shape not in self._known:
            costs = self._costs(shape.hosts, shape.ranks_per_host)
            self._known[shape] = {name: _Known(cost) for name, cost in costs.items()}
        if operation not in self._known[shape]:
            names = ", ".join(sorted(self._known[shape]))
            raise UserError(
                f"engine {self._engine} has no cost of {operation}; its costs are of {names}"
            )
        return self._known[shape][operation]

    def regimes(self, operation: str, shape: Shape) -> tuple[tuple[str, int], ...] | None:
        """Returns the regimes of an operation: (algorithm, first message size in bytes), ascending.

        None: the cost has one line, or lines whose algorithms are unknown.
        """
        cost = self.of(operation, shape)
        while not isinstance(cost, CollectiveCost):
            cost = getattr(cost, "cost", None)
            if cost is None:
                return None
        starts = [0, *(int(line.below_bytes) for line in cost.smaller)]
        names = [line.name for line in (*cost.smaller, cost) if line.name is not None]
        known = len(starts) > 1 and len(names) == len(starts)
        return tuple(zip(names, starts, strict=True)) if known else None


def shape_of(ranks: Sequence[int], ranks_per_host: int) -> Shape:
    """Returns the hosts and ranks of a group.

    Raises:
        UserError: the group has different numbers of ranks on its hosts.
    """
    count = Counter(rank // ranks_per_host for rank in ranks)
    if len(set(count.values())) > 1:
        raise UserError(
            f"a group of ranks {list(ranks)} has {sorted(set(count.values()))} ranks per host; "
            "predictions need groups with equally many ranks on each of their hosts"
        )
    return Shape(hosts=len(count), ranks_per_host=next(iter(count.values())))
