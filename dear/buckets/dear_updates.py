"""What DeAR does between its two halves: update the part that this rank owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dear.buckets.flat import adopt
from dear.buckets.halves import Decoupled
from dear.buckets.sharding import ShardedUpdate, has_hooks, run_hooks

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class Update(ABC):
    """What `step()` does with the groups whose first half is under way.

    Groups are numbered in the order in which the next forward pass needs them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plain: type[Optimizer],
        parts: Sequence[Decoupled],
        communicator: Communicator,
        *,
        frozen: bool,
    ) -> None:
        self.optimizer: Any = optimizer
        self.plain = plain
        """The optimizer's own class."""
        self.parts = parts
        self.communicator = communicator
        self.frozen = frozen
        """Leave updates and second halves out: wrong on purpose."""
        self.unused: set[Parameter] = set()

    @abstractmethod
    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        """Starts second halves; returns the groups that `finish` must be called for.

        Args:
            update: the optimizer's own step, with its hooks.
            arrival: groups in the order in which their first halves end.
        """

    @abstractmethod
    def step_averaged(self, update: Callable[[], Any]) -> Any:
        """Updates from gradients that are averages already; returns with nothing in flight."""

    @abstractmethod
    def finish(self, index: int) -> None:
        """Makes the parameters of group `index` current."""

    def idle(self, index: int) -> bool:
        """True if no rank has a gradient for anything in the group: nothing to update."""
        return bool(self.unused) and self.unused.issuperset(self.parts[index].group.params)


class Sharded(Update):
    """Each rank updates the part it owns; the second half carries parameters."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.update = ShardedUpdate(self.optimizer, self.plain, self.parts)

    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        # Second halves start in one order on all ranks, as soon as it allows. Until then a rank
        # updates what has arrived; it waits for the oldest transfer only.
        started: set[int] = set()
        waiting = list(range(len(self.parts)))
        done: set[int] = set()
        following = 0
        oldest = iter(arrival)
        while waiting:
            ready = next((i for i in waiting if self.parts[i].reduced()), None)
            while ready is None:
                candidate = next(oldest)
                ready = None if candidate in done else candidate
            waiting.remove(ready)
            done.add(ready)
            self.parts[ready].finish_reduce()
            if not self.frozen and not self.idle(ready):
                self.update.run(ready, self.unused)
            while following in done:
                if not self.frozen and not self.idle(following):
                    self._start(following)
                    started.add(following)
                following += 1
        return started

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        if has_hooks(self.optimizer):
            return run_hooks(self.optimizer, self._all)
        return self._all()

    def finish(self, index: int) -> None:
        part = self.parts[index]
        part.finish_gather()
        part.group.touched()

    def _all(self) -> None:
        if self.frozen:
            return
        for part in self.parts:
            for param, view in zip(part.group.params, part.group.gradient_views, strict=True):
                if param.grad is not None:
                    adopt(param, view)
            if part.shard is not part.group.gradients:
                part.shard.copy_(part.group.gradients[part.owned])
        missing = {p for part in self.parts for p in part.group.params if p.grad is None}
        for index, part in enumerate(self.parts):
            if not missing.issuperset(part.group.params):
                self.update.run(index, missing)
                self._start(index)
        for index in range(len(self.parts)):
            self.finish(index)

    def _start(self, index: int) -> None:
        part = self.parts[index]
        part.start_gather(part.group.values)
        part.group.touched()
