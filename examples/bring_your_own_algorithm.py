"""Example of a user's algorithm; docs/bring_your_own.md explains it.

python benchmarks.py run --plugin examples/bring_your_own_algorithm.py
pytest tests/contract --plugin examples/bring_your_own_algorithm.py -k bring-your-own

Every message has a start-up cost. For small tensors (biases, norms), this is almost the whole cost.
So their gradients travel together in one message. The gradient of each large tensor is sent as soon
as it is ready.
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
    """One all-reduce per large tensor, and one for all small tensors together.

    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass. A large gradient is sent as soon as it is ready; the small
    ones are sent when the last of them is ready.
    Cost per step and rank: one all-reduce per large tensor, and one per dtype of small tensors.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """Options: the size of small tensors, and those of compression (from the base class)."""

        small_kb: float = 64.0
        """Tensors up to this size travel together, in KB of 1024 bytes."""

        def __post_init__(self) -> None:
            at_least("bring-your-own-algorithm option 'small_kb'", self.small_kb, 0)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    # `traffic` stays None: all ranks take part in the same collectives in every step.

    def engine(self, replica: Replica) -> SmallOnesTogetherEngine:
        return SmallOnesTogetherEngine(replica)


class SmallOnesTogetherEngine(GradientEngine):
    """Averages groups of gradients: one large tensor each, or all small tensors of one dtype."""

    def __init__(self, replica: Replica) -> None:
        groups: list[list[Any]] = []
        small: dict[Any, list[Any]] = {}
        for param in replica.params:
            if param.nbytes > replica.options.small_kb * KB:
                groups.append([param])
            else:
                small.setdefault((param.dtype, param.device), []).append(param)
        groups += small.values()
        communicator, options = replica.communicator, replica.options
        self._exchanges = [Exchange(group, communicator, options) for group in groups]
        self._started: list[Exchange] = []
        super().__init__(replica, groups, learn=True)

    def ready(self, unit: int) -> None:
        """Starts the transfer of a group; all its gradients are ready."""
        self._exchanges[unit].start()
        self._started.append(self._exchanges[unit])

    def passed(self) -> None:
        """Waits for the averages at the end of the pass, and writes them to `p.grad`."""
        for exchange in self._started:
            exchange.finish()
        self._started.clear()

    def drop(self) -> None:
        """Ends all transfers after an error in the backward pass."""
        while self._started:
            self._started.pop().drop()


CONTRACT = {"options": [{"small_kb": 0.0}, {}]}
"""Options that `tests/contract` uses: the first in all tests. A key `lacks` would name the features
that the algorithm does not support."""


def reference(ranks: Any, options: Any) -> Iterator[None]:
    """Serial reference with all ranks in one process: x <- x - update(mean of all g)."""
    while True:
        ranks.g = ranks.g.mean(0)
        ranks.update()
        yield
