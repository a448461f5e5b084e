"""Parts of a tensor: their lengths, the order in which they start, and a queue with a credit."""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from dear.buckets.grouping import Cost

Task = TypeVar("Task")


def lengths(numel: int, limit: int) -> list[int]:
    """Returns the lengths of the fewest parts of at most `limit` elements, longer parts last.

    Lengths differ by 1 at most.
    """
    count = max(1, -(-numel // limit))
    short, longer = divmod(numel, count)
    return [short] * (count - longer) + [short + 1] * longer


def planned_order(
    arrivals: Sequence[float],
    priorities: Sequence[float],
    sizes: Sequence[float],
    *,
    credit: float,
    cost: Cost,
) -> list[int]:
    """Returns the order in which ByteScheduler's rule (SOSP 2019) starts tasks on a link.

    The rule starts the most urgent task that is ready, while credit lasts. A task starts if any
    credit is left, so the credit may fall below 0. The task's size is taken from the credit at its
    start and given back at its end. The link runs one task after another.

    The rule's choices depend on when tasks are ready and when others end. Ranks see different
    times, but collectives must start in the same order on all ranks. Therefore the rule is
    simulated once, on measured times, and every rank keeps the resulting order.

    Args:
        arrivals: seconds at which each task is ready.
        priorities: small numbers are urgent; among equals the task that was ready first starts.
        credit: in the unit of `sizes`.
        cost: seconds of a task by its size.
    """
    coming = deque(sorted(range(len(arrivals)), key=lambda task: arrivals[task]))
    ready: list[tuple[float, int, int]] = []  # priority, order of arrival, task
    order: list[int] = []
    ends: deque[tuple[float, int]] = deque()  # end and task of started tasks, ascending
    free = 0.0
    while coming or ends:
        now = min(arrivals[coming[0]] if coming else math.inf, ends[0][0] if ends else math.inf)
        while ends and ends[0][0] <= now:
            credit += sizes[ends.popleft()[1]]
        while coming and arrivals[coming[0]] <= now:
            task = coming.popleft()
            heapq.heappush(ready, (priorities[task], -len(coming), task))
        while ready and credit > 0:
            *_, task = heapq.heappop(ready)
            credit -= sizes[task]
            free = max(free, now) + cost(sizes[task])
            ends.append((free, task))
            order.append(task)
    return order


class OrderedIssuer(Generic[Task]):
    """Starts tasks in a fixed order, each once it is ready and credit is left.

    Safe for several threads: the training thread reports ready tasks, a backend's thread ended
    ones.

    Args:
        issue: starts a task; called by one thread at a time, in the fixed order.
        credit: infinite if only the order matters; otherwise the caller must call `finished`.
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
        # Reentrant: a task may end and call `finished` before `issue` returns.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        """Number of threads in `wait_started`."""

    def begin(self, order: Sequence[Task], sizes: Mapping[Task, float]) -> None:
        """Sets the tasks of the next pass; all tasks of the last one must be started or dropped."""
        with self._lock:
            if self._next < len(self._order):
                raise RuntimeError(f"{len(self._order) - self._next} tasks were never started")
            self._order, self._sizes, self._next = order, sizes, 0
            self._ready.clear()
            self._started.clear()

    def ready(self, task: Task) -> None:
        """Allows `task` to start from now on."""
        with self._lock:
            self._ready.add(task)
            self._start()
            self._raise()

    def finished(self, size: float) -> None:
        """Gives back the credit of an ended task of this size.

        Errors in starting further tasks are raised by `ready` and `wait_started`.
        """
        with self._lock:
            self._credit += size
            self._start()

    def wait_started(self, task: Task) -> None:
        """Blocks until `task` has been started; raises the error that prevented the start."""
        with self._lock:
            self._waiting += 1
            self._changed.wait_for(lambda: task in self._started or self._error is not None)
            self._waiting -= 1
            if task not in self._started:
                self._raise()

    def drop(self) -> None:
        """Starts the tasks that lack only credit, and discards those after them.

        How many have started depends on when others ended, and differs between ranks. How many may
        start depends on what is ready, which all ranks have in common.
        """
        with self._lock:
            self._start(limited=False)
            self._order = self._order[: self._next]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self, *, limited: bool = True) -> None:
        if self._issuing or self._error is not None:
            return
        self._issuing = True
        try:
            while self._next < len(self._order) and (self._credit > 0 or not limited):
                task = self._order[self._next]
                if task not in self._ready:
                    break
                self._next += 1
                self._credit -= self._sizes[task]
                self._issue(task)
                self._started.add(task)
        except Exception as error:
            self._error = error
        finally:
            self._issuing = False
            if self._waiting:
                self._changed.notify_all()
