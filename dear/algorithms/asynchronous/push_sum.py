"""Stochastic gradient push: asynchronous averaging that keeps the mean over directed graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.buckets.flat import Bucket
from dear.errors import UserError
from dear.lazy import torch
from dear.training.algorithm import Capabilities
from dear.training.engine import Update
from dear.training.parameters.stepped import AdaptAndCombine
from dear.training.parameters.windows import WindowAlgorithm, WindowExchange, WindowOptions

LEAST_P = 1 / 16
"""Smallest weight p with which a rank still sends shares if there is no barrier."""

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


class PushSumExchange(WindowExchange):
    """Exchange of numerators u and weights p.

    After an update, the exchange turns the parameters into numerators. It adds an equal share to
    the slot of each target that has collected the last message. Then it collects the values that
    have arrived, and sets the parameters to u / p.

    Without a barrier, a rank that is faster than its sources gives p away and gets none back. The
    step of the paper would then divide updates by a p near 0. Therefore the update is weighted by
    p, `u <- C (u + p update)`, and a rank whose p is below `LEAST_P` sends nothing.
    """

    weighted = True
    refills_at_first = False  # slots start as zeros; a refill would lose values that have arrived

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, steps)
        self._numerators = {bucket: torch.zeros_like(bucket.values) for bucket in self.buckets}
        self._kept: dict[Bucket, float] = {}
        """Share of each bucket that this rank keeps in the current round."""

    def refill(self, steps: int) -> None:
        """Drops the values in the slots after a load; their weight now belongs to what was loaded.

        With `barrier`, waits for all ranks.
        """
        for window in self.windows.values():
            window.absorb()
        self.meet()

    def adapt(self, update: Update) -> object:
        """Updates the parameters, and computes the numerators."""
        with torch.no_grad():
            if not self.policy.waits():
                result = update()
                for bucket, numerator in self._numerators.items():
                    torch.mul(bucket.values, self.windows[bucket].p, out=numerator)
                return result
            # u = x * p + (x after - x before), without a copy of x.
            for bucket, numerator in self._numerators.items():
                torch.mul(bucket.values, self.windows[bucket].p - 1, out=numerator)
            result = update()
            for bucket, numerator in self._numerators.items():
                numerator.add_(bucket.values)
        return result

    def adapt_alone(self, update: Update) -> object:
        """Updates the parameters such that u changes as in steps that average."""
        # Without a barrier, updates of u are weighted by p, which cancels in x = u / p.
        windows = self.windows.items() if self.policy.waits() else ()
        uneven = {bucket: window.p for bucket, window in windows if window.p != 1}
        with torch.no_grad():
            for bucket in uneven:
                self._numerators[bucket].copy_(bucket.values)
        result = update()
        with torch.no_grad():
            for bucket, p in uneven.items():
                before = self._numerators[bucket]
                torch.lerp(before, bucket.values, 1 / p, out=bucket.values)
                bucket.touched()
        return result

    def share(self, bucket: Bucket, steps: int) -> None:
        window, waits = self.windows[bucket], self.policy.waits()
        targets = window.idle(wait=waits)
        if window.p < LEAST_P and not waits:
            targets = []
        share = self._kept[bucket] = 1.0 / (len(targets) + 1)
        weights = dict.fromkeys(targets, share)
        window.put(self._numerators[bucket], weights, add=True, steps=steps + 1)

    def mix(self, bucket: Bucket, steps: int) -> None:
        window, numerator = self.windows[bucket], self._numerators[bucket]
        weights = dict.fromkeys(self.policy.part.sources, 1.0)
        window.collect(numerator, self._kept[bucket], weights, reset=True, steps=steps + 1)
        torch.div(numerator, window.p, out=bucket.values)
        bucket.touched()

    def statistics(self) -> dict[str, object]:
        """Returns `Peers.statistics`, and per bucket this rank's weight `p` and the weight in its
        slots, `p_arrived`. While no message is on its way, the sum of both over all ranks is the
        world size."""
        windows = self.windows.values()
        return super().statistics() | {
            "p": [window.p for window in windows],
            "p_arrived": [window.p_arrived() for window in windows],
        }

    def saved(self) -> StateDict:
        # Without a barrier, weight is also in slots and messages, and would be lost in each resume.
        waits = self.policy.waits()
        return {"p": [window.p for window in self.windows.values()]} if waits else {}

    def check(self, saved: StateDict | None) -> None:
        weights = (saved or {}).get("p")
        if weights is not None and len(weights) != len(self.windows):
            raise UserError(
                f"the checkpoint has weights of {len(weights)} buckets, but there are "
                f"{len(self.windows)}; use the bucket_mb of the checkpoint"
            )

    def restore(self, saved: StateDict | None) -> None:
        """Continues with the saved weights, if there are any.

        Without a barrier, windows keep the weights that they have: 1 if they are new. Loaded
        parameters are u / p, so they are right with any weights.
        """
        super().restore(saved)
        weights = (saved or {}).get("p")
        for index, window in enumerate(self.windows.values()):
            if weights is not None:
                window.p = weights[index]
            elif self.policy.waits():
                window.p = 1.0


class PushSum(WindowAlgorithm["PushSum.Options"]):
    """Stochastic gradient push (Assran, Loizou, Ballas and Rabbat, ICML 2019, arXiv 1811.10792).

    Ranks send shares of their parameters together with a weight p. The model holds parameters / p,
    which corrects for uneven graphs and late messages. With `barrier` this is the published method.
    Without it, updates are also weighted by p (see `PushSumExchange`).

        u <- C (u + update), p <- C p, x = u / p

    Here x are parameters. C splits a rank's values equally among itself and its targets.
    Invariant: averaging keeps the sums of u and p over all ranks and all messages on their way; the
    sum of p is the world size.
    Bytes move: from the update on, for as long as they take; each step collects what has arrived.
    Cost per step and rank: the parameters at most once to each neighbour; one more copy in memory.
    """

    order = AdaptAndCombine
    exchange = PushSumExchange

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """Topology (only its edges count) and timing."""

    capabilities = Capabilities(consistency="asynchronous")
    candidates = ({"topology": "ring"},)
    bound = "asynchronous"
    barrier_bound = "sequential"
    puts = "step"
