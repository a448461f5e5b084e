"""Decentralized training over one-sided windows: nobody waits for anybody's step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dear.comm.neighbors import Round, timed
from dear.comm.windows import NeighborWindow
from dear.lazy import torch
from dear.training.combining import ReplicaEngine

if TYPE_CHECKING:
    import networkx as nx
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator

LEAST_P = 1 / 16
"""Below it a free-running rank of push-sum gives nothing away."""


class WindowEngine(ReplicaEngine):
    """Base of the engines whose groups of parameters have a window each.

    Args:
        graph: who sends to whom; where `weighted`, only its edges count.
        weighted: windows carry push-sum weights.
        barrier: wait for everybody's messages in each step, which makes the schedule that of a
            synchronous method.
        every: only each so many steps exchanges, the last of them.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        graph: nx.DiGraph,
        *,
        bucket_mb: float,
        weighted: bool = False,
        barrier: bool = False,
        every: int = 1,
    ) -> None:
        super().__init__(model, optimizer, communicator, bucket_mb)
        self.part = Round.of(graph, communicator.rank)
        self.windows = [
            NeighborWindow(communicator, graph, flat.values, zero_slots=weighted, weighted=weighted)
            for flat in self.flats
        ]
        self._barrier = barrier
        self._every = every
        self._refill = True
        self.works: dict[tuple[int, int], Any] = {}
        """The last message by window and target."""
        self.skipped = 0
        """Messages not sent, since the last one to that rank was still under way."""
        self.staleness = dict.fromkeys(self.part.sources, 0)
        """Source rank -> this rank's exchanges since anything of it has arrived."""

    def waits(self) -> bool:
        """Whether exchanges wait for all ranks."""
        return self._barrier

    def put_weights(self) -> dict[int, float]:
        """Target -> factor of what is put there."""
        return dict.fromkeys(self.part.destinations, 1.0)

    def mix_weights(self) -> tuple[float, dict[int, float]]:
        """The weight of this rank's own parameters, and those of its sources."""
        return self.part.self_weight, self.part.sources

    def due(self) -> bool:
        """True in steps that exchange."""
        return self.steps % self._every == self._every - 1

    def idle_targets(self, index: int) -> list[int]:
        """Targets that have taken the last message of a window; a message of theirs may follow.

        Raises:
            RuntimeError: a message has failed, for example since its target has died.
        """
        idle = []
        for target in self.windows[index].targets:
            work = self.works.get((index, target))
            if work is not None and (self.waits() or work.is_completed()):
                work.wait()
                work = None
            if work is None:
                idle.append(target)
            else:
                self.skipped += 1
        return idle

    def sent(self, index: int, targets: list[int], works: list[Any]) -> None:
        """Remembers the works of messages to `targets`."""
        self.works.update({(index, to): work for to, work in zip(targets, works, strict=True)})

    def meet(self) -> None:
        """With `barrier`: returns when all ranks' messages have arrived and all are here."""
        if self.waits():
            self.settle()
            timed(self.communicator, self.communicator.barrier)()

    def note_staleness(self) -> None:
        """Counts, just before slots are read, who has written since they were last read."""
        for source, writes in self.windows[0].versions().items():
            self.staleness[source] = 0 if writes else self.staleness[source] + 1

    def refill(self) -> None:
        """Before the first exchange, and after a state was loaded: fills slots with own values.

        So a rank's start counts as everybody's until something of the neighbours arrives.
        """
        if self._refill:
            self._refill = False
            for flat, window in zip(self.flats, self.windows, strict=True):
                window.fill(flat.values)
            self.meet()

    def settle(self) -> None:
        for work in self.works.values():
            work.wait()
        self.works.clear()

    def statistics(self) -> dict[str, Any]:
        """Messages not sent, and by source rank how long nothing has arrived, in exchanges."""
        staleness = {str(source): count for source, count in self.staleness.items()}
        return {"skipped": self.skipped, "staleness": staleness}

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        self._refill = True

    def release(self) -> None:
        for window in self.windows:
            window.free()


class WinPutEngine(WindowEngine):
    """`x <- w x + sum w_j (latest that j has put) - update`; x is put while both passes run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._put = False
        self.before_training_forward(self._start)

    def step(self, update: Callable[[], Any]) -> Any:
        self._start()
        if self._put:
            self.meet()
            self.note_staleness()
            for flat, window in zip(self.flats, self.windows, strict=True):
                window.collect_into(flat.values, *self.mix_weights())
                flat.touched()
            self.meet()
        self._put = False
        self.steps += 1
        return self.scaling.step(update)

    def _start(self) -> None:
        if self._put or not self.due():
            return
        self._put = True
        self.refill()
        for index, (flat, window) in enumerate(zip(self.flats, self.windows, strict=True)):
            flat.reclaim()
            idle, factors = self.idle_targets(index), self.put_weights()
            chosen = {target: factor for target, factor in factors.items() if target in idle}
            self.sent(index, list(chosen), window.put(flat.values, chosen))


class PullGetEngine(WindowEngine):
    """`x <- w x + sum w_j (what j shows) - update`; what others show is read during both passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fetched: list[Any] = []
        self.before_training_forward(self._start)

    def step(self, update: Callable[[], Any]) -> Any:
        self._start()
        for flat, window, fetched in zip(self.flats, self.windows, self._fetched, strict=False):
            weights = dict.fromkeys(self.part.sources, 1.0)
            timed(self.communicator, partial(window.store, fetched, weights))()
            window.collect_into(flat.values, *self.mix_weights())
            flat.touched()
        if self._fetched:
            self.meet()
        self._fetched = []
        self.steps += 1
        return self.scaling.step(update)

    def _start(self) -> None:
        if self._fetched or not self.due():
            return
        for flat, window in zip(self.flats, self.windows, strict=True):
            flat.reclaim()
            window.show(flat.values)
        self.meet()
        sources = dict.fromkeys(self.part.sources, 1.0)
        self._fetched = [window.fetch(sources) for window in self.windows]


class PushSumEngine(WindowEngine):
    """Stochastic gradient push: `u <- C (u + update)`, `p <- C p`, `x = u / p`.

    C shares a rank out equally to itself and those targets that are not busy with its last message,
    so that sums over the ranks, messages under way included, are kept.

    Where ranks run freely (no barrier), one that is faster than its sources gives p away and gets
    none back. The published step would divide its updates by a p near 0. So there the update is
    weighted by p, `u <- C (u + p update)`, and a rank whose p is below `LEAST_P` keeps it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, weighted=True, **kwargs)
        self._numerators = [flat.new() for flat in self.flats]
        self._refill = False  # slots are zeros, and what has come already must be kept

    def refill(self) -> None:
        """After a state was loaded: forgets what others had sent before."""
        if self._refill:
            self._refill = False
            for window in self.windows:
                window.clear()
            self.meet()

    def step(self, update: Callable[[], Any]) -> Any:
        if not self.due():
            self.steps += 1
            return self.scaling.step(update)
        self.refill()
        buffers = list(zip(self.flats, self.windows, self._numerators, strict=True))
        for flat in self.flats:
            flat.reclaim()
        result = self._update(update)
        shares = []
        with torch.no_grad():
            for index, (_, window, numerator) in enumerate(buffers):
                targets = self.idle_targets(index)
                if window.p < LEAST_P and not self.waits():
                    targets = []
                shares.append(1.0 / (len(targets) + 1))
                works = window.accumulate(numerator, dict.fromkeys(targets, shares[-1]))
                self.sent(index, targets, works)
            self.meet()
            self.note_staleness()
            everything = dict.fromkeys(self.part.sources, 1.0)
            for share, (flat, window, numerator) in zip(shares, buffers, strict=True):
                window.collect_into(numerator, share, everything, reset=True)
                torch.div(numerator, window.p, out=flat.values)
                flat.touched()
            self.meet()
        self.steps += 1
        return result

    def _update(self, update: Callable[[], Any]) -> Any:
        """Makes numerators of the parameters, updated."""
        buffers = list(zip(self.flats, self.windows, self._numerators, strict=True))
        with torch.no_grad():
            if not self.waits():
                result = self.scaling.step(update)
                for flat, window, numerator in buffers:
                    torch.mul(flat.values, window.p, out=numerator)
                return result
            # x * p + (x after - x before), without a copy of x.
            for flat, window, numerator in buffers:
                torch.mul(flat.values, window.p - 1, out=numerator)
            result = self.scaling.step(update)
            for flat, _, numerator in buffers:
                numerator.add_(flat.values)
        return result

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"p": [window.p for window in self.windows]}

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        for index, window in enumerate(self.windows):
            window.p = 1.0 if saved is None else saved["p"][index]
