"""Stochastic gradient push: asynchronous averaging that keeps the mean over directed graphs."""

from __future__ import annotations

from dataclasses import dataclass

from dear.training.algorithm import Capabilities
from dear.training.one_sided import PushSumEngine
from dear.training.window_algorithm import WindowAlgorithm, WindowOptions


class PushSum(WindowAlgorithm):
    """Stochastic gradient push (Assran, Loizou, Ballas and Rabbat, ICML 2019, arXiv 1811.10792).

    Ranks share their parameters out, together with a weight p that undoes what uneven graphs and
    late messages do to the shares; the model holds the quotient. With `barrier` this is the
    published method; where ranks run freely, updates are weighted by p too (PushSumEngine says
    why).
    Invariant: sums over all ranks and messages under way are kept, those of p at the world size.
    Bytes move: from the update on, for as long as it takes; each step collects what has arrived.
    Cost per step and rank: the parameters at most once to each neighbour; one more copy in memory.
    """

    engine = PushSumEngine

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """The topology, of which only the edges count, and its timing."""

    capabilities = Capabilities(consistency="asynchronous", needs_topology=True)
    bound = "asynchronous"
    barrier_bound = "sequential"
