"""An algorithm of your own, beside the others: docs/bring_your_own.md.

python benchmarks.py run --plugin examples/bring_your_own_algorithm.py
pytest tests/contract --plugin examples/bring_your_own_algorithm.py -k bring-your-own

Its idea: a message costs a start-up whatever its size, which for small tensors (biases, norms) is
all that it costs. So they travel together in one message at the end of the backward pass, while
every large tensor leaves as soon as its gradient is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dear.algorithms.synchronous.mgwfbp import Exchange
from dear.buckets.compressors import HalfOptions
from dear.cost.overlap import Overlap, Transfer
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica
from dear.training.gradients import GradientEngine

KB = 1024


class SmallOnesTogether(Algorithm):
    """One all-reduce per large tensor at once, and one for all small ones.

    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, large tensors each with its gradient, small ones together
    with the last of theirs.
    Cost per step and rank: one all-reduce per large tensor, and one per type of the small ones.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """Which tensors are small, and whether gradients travel in 16 bits."""

        small_kb: float = 64.0
        """Tensors up to this size travel together, in KB of 1024 bytes."""

        def __post_init__(self) -> None:
            at_least("option of bring-your-own-algorithm 'small_kb'", self.small_kb, 0)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    # `traffic` stays as it is, None: in every step all ranks take part in the same collectives.

    def engine(self, replica: Replica) -> SmallOnesTogetherEngine:
        return SmallOnesTogetherEngine(replica)


class SmallOnesTogetherEngine(GradientEngine):
    """Averages groups of gradients: a group is one large tensor, or small ones of one type."""

    def __init__(self, replica: Replica) -> None:
        groups: list[list[Any]] = []
        small: dict[Any, list[Any]] = {}
        for param in replica.params:
            if param.nbytes > replica.options.small_kb * KB:
                groups.append([param])
            else:
                small.setdefault((param.dtype, param.device), []).append(param)
        groups += small.values()
        self._exchanges = [Exchange(one, replica.communicator, replica.options) for one in groups]
        self._started: list[Exchange] = []
        super().__init__(replica, groups, learn=True)

    def ready(self, unit: int) -> None:
        """All gradients of a group are there: it leaves."""
        self._exchanges[unit].start()
        self._started.append(self._exchanges[unit])

    def passed(self) -> None:
        """The pass is over, and all groups have left: `p.grad` becomes what they bring."""
        for exchange in self._started:
            exchange.finish()
        self._started.clear()

    def drop(self) -> None:
        """A pass has ended in an error: nothing of it may be left under way."""
        while self._started:
            self._started.pop().drop()


CONTRACT = {"options": [{"small_kb": 0.0}, {}]}
"""Settings that `tests/contract` tries, the first in everything; with what it `lacks`, if it does.
"""


def reference(ranks: Any, options: Any) -> Iterator[None]:
    """What it must equal, all ranks in one process: x <- x - update(mean of all g)."""
    while True:
        ranks.g = ranks.g.mean(0)
        ranks.update()
        yield
