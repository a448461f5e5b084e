"""Predicted training of ranks that may differ: each is a thread, and one of them runs at a time."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from common.virtual.setting import Setting, Several, Step
from common.virtual.world.cluster import Cluster, Rank
from common.virtual.world.communicator import VirtualCommunicator
from common.virtual.world.seat import Seat, kept
from dear.cost.event_model.step import State, longest, second_half, settled
from dear.errors import UserError

STEPS = 100
"""Measured steps of the fastest rank if ranks make steps at their own pace."""
WARM_UP = 3
"""Steps before the measured ones, if these are not to repeat."""


class Training(Protocol):
    """Training of one rank."""

    def step(self) -> State: ...

    def mean(self, steps: int) -> Step: ...

    def statistics(self) -> Mapping[str, Any]: ...


class _Rule:
    """Rule for when ranks end.

    Ranks at their own pace end at the same time: the budget is over, or one of them has made
    `STEPS` steps. Ranks that wait for each other end after the same step: the budget is over, or
    the steps of all ranks have repeated.
    """

    def __init__(self, setting: Setting, period: int, own_pace: bool) -> None:
        self.steps: list[list[State]] = [[] for _ in range(setting.shape.ranks)]
        """Steps of each rank."""
        self.counted: int | None = None
        """Number of last steps that count; None: all."""
        self._own_pace, self._budget_s = own_pace, setting.budget_s
        self._period = period
        self._most = 0
        """Steps that some rank has begun."""
        self._over = False

    def goes_on(self, rank: int, at_s: float) -> bool:
        """Returns True if a rank may begin another step now."""
        begun = len(self.steps[rank])
        if self._budget_s is not None and self._own_pace:
            return at_s < self._budget_s
        if begun < self._most and not self._own_pace:
            return True
        self._over = self._over or self._ends(begun, at_s)
        if not self._over:
            self._most = max(self._most, begun + 1)
        return not self._over

    def _ends(self, begun: int, at_s: float) -> bool:
        if self._budget_s is not None:
            return at_s >= self._budget_s
        if self._own_pace:
            return begun >= STEPS
        common = min(map(len, self.steps))
        counts = [settled(steps[:common], self._period) for steps in self.steps]
        if all(counts):
            # The steps that came since belong to the next period.
            self.counted = math.lcm(*(count for count in counts if count is not None))
        elif common >= longest(self._period):
            self.counted = second_half(common, self._period)
        return self.counted is not None


@contextlib.contextmanager
def _rarely_collected() -> Iterator[None]:
    """Returns a context in which Python seldom looks for garbage among the objects of all ranks."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def train(
    setting: Setting,
    period: int,
    own_pace: bool,
    start: Callable[[Seat, VirtualCommunicator], Training],
) -> Several:
    """Trains on all ranks of a cluster that may differ.

    Args:
        period: number of steps after which what a rank does repeats.
        own_pace: no rank waits for another.
        start: prepares the training of a rank.

    Raises:
        UserError: the algorithm refuses the setting, or a rank makes no step within the budget.
    """
    cluster = Cluster(
        setting.shape,
        setting.costs,
        setting.disturbances,
        engine=setting.engine,
        priorities=setting.engine == "comm_core",
    )
    timed = own_pace or setting.budget_s is not None
    if timed:
        cluster.began_s = math.inf
    rule = _Rule(setting, period, own_pace)
    results: dict[int, tuple[Step, Mapping[str, Any]]] = {}

    def run(rank: int, seat: Seat) -> None:
        with seat.joined() as communicator:
            training = start(seat, communicator)
            for _ in range(setting.options.settling_steps() + (WARM_UP if timed else 0)):
                training.step()
            if timed:
                communicator.barrier()
                cluster.began_s = cluster.events.now_s
            while rule.goes_on(rank, seat.network.clock() - cluster.began_s):
                rule.steps[rank].append(training.step())
            count = rule.counted or len(rule.steps[rank])
            if not count:
                raise UserError(
                    f"learn.budget_s: rank {rank} makes no step in {setting.budget_s:g} s; give "
                    "it more time"
                )
            results[rank] = training.mean(count), training.statistics()

    memory_bytes_per_s = setting.profile.memory_bytes_per_s
    seats = [Seat(Rank(cluster, rank), memory_bytes_per_s) for rank in range(setting.shape.ranks)]
    # The mode of this thread begins first and ends last, because torch notes modes in variables of
    # the process, in the order in which they begin.
    with kept(), _rarely_collected(), seats[0].network.inside():
        for rank, seat in enumerate(seats):
            cluster.events.start(partial(run, rank, seat), seat)
        cluster.events.run_until(lambda: len(results) == setting.shape.ranks, "a rank")
    ordered = [results[rank] for rank in range(setting.shape.ranks)]
    return Several(
        steps=tuple(step for step, _ in ordered),
        statistics=tuple(counters for _, counters in ordered),
    )
