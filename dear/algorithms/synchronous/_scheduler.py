"""Partitions of tensors, and which goes next: by priority, within a credit of bytes under way."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from dear.buckets.merging import Cost

Task = TypeVar("Task")


def slices(numel: int, limit: int) -> list[tuple[int, int]]:
    """Cuts `numel` elements into the fewest parts of at most `limit`: (offset, length) of each.

    Lengths differ by one at most, the longer ones last.
    """
    count = max(1, -(-numel // limit))
    short, longer = divmod(numel, count)
    parts = []
    offset = 0
    for index in range(count):
        length = short + (index >= count - longer)
        parts.append((offset, length))
        offset += length
    return parts


class CreditScheduler(Generic[Task]):
    """ByteScheduler's rule (SOSP 2019): the most urgent task that is ready, while credit lasts.

    A task starts if any credit is left, which may so fall below 0; its size is taken then and given
    back at its end. Small numbers are urgent; among equals the first that was ready goes first.
    """

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self._ready: list[tuple[float, int, float, Task]] = []
        self._count = 0

    def ready(self, task: Task, priority: float, size: float) -> None:
        """`task` may start from now on."""
        heapq.heappush(self._ready, (priority, self._count, size, task))
        self._count += 1

    def start(self) -> list[Task]:
        """Takes the tasks that start now, in order."""
        started = []
        while self._ready and self.credit > 0:
            _, _, size, task = heapq.heappop(self._ready)
            self.credit -= size
            started.append(task)
        return started

    def finished(self, size: float) -> None:
        """A started task of this size has ended."""
        self.credit += size


def planned_order(
    arrivals: Sequence[float],
    priorities: Sequence[float],
    sizes: Sequence[float],
    *,
    credit: float,
    cost: Cost,
) -> list[int]:
    """The order in which `CreditScheduler` would start tasks on a link that serves one at a time.

    The rule's choices depend on when tasks are ready and when others end, which no two ranks see
    alike; but collectives must start in one order everywhere. So the rule is played through once,
    on measured times, and every rank keeps to the order that comes out.

    Args:
        arrivals: when each task is ready, in seconds.
        cost: seconds of a task by its size.
    """
    scheduler: CreditScheduler[int] = CreditScheduler(credit)
    coming = sorted(range(len(arrivals)), key=lambda task: arrivals[task])
    order: list[int] = []
    ends: list[tuple[float, int]] = []  # of started tasks, ascending: the link is a queue
    free = now = 0.0
    next_end = next_task = 0
    while next_task < len(coming) or next_end < len(ends):
        times = []
        if next_task < len(coming):
            times.append(arrivals[coming[next_task]])
        if next_end < len(ends):
            times.append(ends[next_end][0])
        now = min(times)
        while next_end < len(ends) and ends[next_end][0] <= now:
            scheduler.finished(sizes[ends[next_end][1]])
            next_end += 1
        while next_task < len(coming) and arrivals[coming[next_task]] <= now:
            task = coming[next_task]
            scheduler.ready(task, priorities[task], sizes[task])
            next_task += 1
        for task in scheduler.start():
            free = max(free, now) + cost(sizes[task])
            ends.append((free, task))
            order.append(task)
    return order


class OrderedIssuer(Generic[Task]):
    """Starts tasks in a fixed order, each once it is ready and credit is left.

    Any thread may report: the training thread that tasks are ready, a backend's that one has ended.

    Args:
        issue: starts a task; called by one thread at a time, in the fixed order.
        credit: infinite if only the order matters; else see to it that `finished` is called.
    """

    def __init__(self, issue: Callable[[Task], None], credit: float = math.inf) -> None:
        self._issue = issue
        self._credit = credit
        self._order: Sequence[Task] = ()
        self._sizes: Mapping[Task, float] = {}
        self._next = 0
        self._ready: set[Task] = set()
        self._started: set[Task] = set()
        self._issuing = False
        self._error: BaseException | None = None
        # Reentrant: what `issue` starts may end, and report, before it returns.
        self._changed = threading.Condition(threading.RLock())

    def begin(self, order: Sequence[Task], sizes: Mapping[Task, float]) -> None:
        """The tasks of the next pass; those of the last have been started, or dropped."""
        with self._changed:
            if self._next < len(self._order):
                raise RuntimeError(f"{len(self._order) - self._next} tasks were never started")
            self._order, self._sizes, self._next = order, sizes, 0
            self._ready.clear()
            self._started.clear()

    def ready(self, task: Task) -> None:
        """`task` may start from now on."""
        with self._changed:
            self._ready.add(task)
            self._start()
            self._raise()

    def finished(self, size: float) -> None:
        """A task of this size has ended; errors of what starts now go to who waits for it."""
        with self._changed:
            self._credit += size
            self._start()

    def wait_started(self, task: Task) -> None:
        """Blocks until `task` has been started; raises what went wrong with starting."""
        with self._changed:
            self._changed.wait_for(lambda: task in self._started or self._error is not None)
            if task not in self._started:
                self._raise()

    def drop(self) -> None:
        """Forgets the tasks that have not been started."""
        with self._changed:
            self._order = self._order[: self._next]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._issuing or self._error is not None:
            return
        self._issuing = True
        try:
            while (
                self._next < len(self._order)
                and self._credit > 0
                and self._order[self._next] in self._ready
            ):
                task = self._order[self._next]
                self._next += 1
                self._credit -= self._sizes[task]
                self._issue(task)
                self._started.add(task)
        except Exception as error:
            self._error = error
        finally:
            self._issuing = False
            self._changed.notify_all()
