"""Stochastic gradient push: asynchronous averaging that keeps the mean over directed graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dear.buckets.flat import Bucket
from dear.lazy import torch
from dear.training.algorithm import Capabilities
from dear.training.one_sided import WindowAlgorithm, WindowEngine, WindowOptions

LEAST_P = 1 / 16
"""Below it a free-running rank gives nothing away."""


class PushSumEngine(WindowEngine):
    """In the order `adapt-then-combine`, over numerators u and weights p instead of parameters.

    - `step()`: updates, makes numerators of the parameters, adds each rank's equal share to the
      slots of those targets that are not busy with its last message, collects what has arrived,
      and lets the model hold u / p.

    Where ranks run freely (no barrier), one that is faster than its sources gives p away and gets
    none back. The published step would divide its updates by a p near 0. So there the update is
    weighted by p, `u <- C (u + p update)`, and a rank whose p is below `LEAST_P` keeps it.
    """

    order = "adapt-then-combine"
    weighted = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._numerators: dict[Bucket, torch.Tensor] = {}
        self._kept: dict[Bucket, float] = {}
        """This rank's own share in what is being averaged."""
        super().__init__(*args, **settings)
        self._refill = False  # slots are zeros, and what has come already must be kept
        self.hooks.remove()  # all is averaged in `step()`: no forward has anything to wait for

    def lay_out(self, members: Any) -> None:
        super().lay_out(members)
        self._numerators = {bucket: torch.zeros_like(bucket.values) for bucket in self.buckets}

    def refill(self) -> None:
        """After a state was loaded: forgets what others had sent before."""
        for window in self.windows.values():
            window.clear()
        self.meet()

    def adapt(self, update: Callable[[], Any]) -> Any:
        """Makes numerators of the parameters, updated."""
        if not self.due():
            return super().adapt(update)
        with torch.no_grad():
            if not self.waits():
                result = super().adapt(update)
                for bucket, numerator in self._numerators.items():
                    torch.mul(bucket.values, self.windows[bucket].p, out=numerator)
                return result
            # x * p + (x after - x before), without a copy of x.
            for bucket, numerator in self._numerators.items():
                torch.mul(bucket.values, self.windows[bucket].p - 1, out=numerator)
            result = super().adapt(update)
            for bucket, numerator in self._numerators.items():
                numerator.add_(bucket.values)
        return result

    def share(self, bucket: Bucket) -> None:
        window = self.windows[bucket]
        targets = window.idle(wait=self.waits())
        if window.p < LEAST_P and not self.waits():
            targets = []
        share = self._kept[bucket] = 1.0 / (len(targets) + 1)
        weights = dict.fromkeys(targets, share)
        window.put(self._numerators[bucket], weights, add=True, steps=self.steps + 1)

    def shared(self) -> None:
        self.combine()

    def mix(self, bucket: Bucket) -> None:
        window, numerator = self.windows[bucket], self._numerators[bucket]
        everything = dict.fromkeys(self.part.sources, 1.0)
        window.collect(numerator, self._kept[bucket], everything, reset=True, steps=self.steps + 1)
        torch.div(numerator, window.p, out=bucket.values)
        bucket.touched()

    def statistics(self) -> dict[str, Any]:
        """See `Peers.statistics`; by bucket also this rank's `p`, and `p_arrived`, what of the
        others' lies in its slots. With nothing under way all of both are the world size."""
        windows = self.windows.values()
        return super().statistics() | {
            "p": [window.p for window in windows],
            "p_arrived": [window.p_arrived() for window in windows],
        }

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"p": [window.p for window in self.windows.values()]}

    def restore(self, saved: dict[str, Any] | None) -> None:
        super().restore(saved)
        for index, window in enumerate(self.windows.values()):
            window.p = 1.0 if saved is None else saved["p"][index]


class PushSum(WindowAlgorithm):
    """Stochastic gradient push (Assran, Loizou, Ballas and Rabbat, ICML 2019, arXiv 1811.10792).

    Ranks share their parameters out, together with a weight p that undoes what uneven graphs and
    late messages do to the shares; the model holds the quotient. With `barrier` this is the
    published method; where ranks run freely, updates are weighted by p too (PushSumEngine says
    why).

        u <- C (u + update), p <- C p, x = u / p

    C shares a rank out equally to itself and its targets.
    Invariant: sums over all ranks and messages under way are kept, those of p at the world size.
    Bytes move: from the update on, for as long as it takes; each step collects what has arrived.
    Cost per step and rank: the parameters at most once to each neighbour; one more copy in memory.
    """

    engine = PushSumEngine

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """The topology, of which only the edges count, and its timing."""

    capabilities = Capabilities(consistency="asynchronous")
    bound = "asynchronous"
    barrier_bound = "sequential"
    puts = "step"
