"""Asynchronous decentralized SGD: parameters are put into the memory of the neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from dear.training.algorithm import Capabilities
from dear.training.one_sided import WindowAlgorithm, WindowEngine, WindowOptions


class WinPutEngine(WindowEngine):
    """The moments of `WindowEngine` as they are, in the order `combine-then-adapt`.

    - before a training forward: each bucket is put into this rank's slot at its neighbours;
    - `step()`: averages with what is in the slots by then, then updates.
    """


class WinPut(WindowAlgorithm):
    """Averages with the latest parameters that each neighbour has put; waits for nobody.

    The win-put optimizer of BlueFog (Ying et al. 2021, arXiv 2111.04287): asynchronous
    decentralized SGD in the order of AWC, one-sided.

        x <- w x + sum of w_j (what j has put last) - update(gradient at x)

    Invariant: with equal parameters everywhere and zero steps nothing changes; until a neighbour
    has put something its slot holds this rank's own start. With `barrier` it is decentralized SGD
    (`neighbor`, combine=awc).
    Bytes move: beside both passes and, if that is not enough, beside later steps; a neighbour that
    has not taken the last message yet gets none.
    Cost per step and rank: the parameters at most once to each neighbour; one copy of them in
    memory for what is under way, and a slot for each neighbour.
    """

    engine = WinPutEngine

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """The topology and its timing."""

    capabilities = Capabilities(consistency="asynchronous")
    bound = "asynchronous"
    barrier_bound = "beside_passes"
    puts = "model"
