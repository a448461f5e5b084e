"""Asynchronous decentralized SGD: ranks put parameters into the memory of their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from dear.training.algorithm import Capabilities
from dear.training.parameters.windows import WindowAlgorithm, WindowOptions


class WinPut(WindowAlgorithm["WinPut.Options"]):
    """Averages with the latest parameters that each neighbour has put; waits for no rank.

    The win-put optimizer of BlueFog (Ying et al. 2021, arXiv 2111.04287): asynchronous
    decentralized SGD in the order AWC, with one-sided communication.

        x <- w x + sum of w_j (what j has put last) - update(gradient at x)

    Here x are parameters, w weights. The engine is `CombineThenAdapt`: before a training forward
    pass it puts each bucket into this rank's slots at the neighbours, and in `step()` it averages
    with the values in its own slots.
    Invariant: if parameters are equal on all ranks and updates are zero, nothing changes. Until a
    neighbour has put values, its slot holds this rank's own start values. With `barrier` it is
    decentralized SGD (`neighbor`, combine=awc).
    Bytes move: during both passes and, if these are too short, during later steps. A neighbour gets
    no new message until it has collected the last one.
    Cost per step and rank: the parameters at most once to each neighbour; memory for one copy of
    the parameters on their way, and for one slot per neighbour.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """Topology and timing."""

    capabilities = Capabilities(consistency="asynchronous")
    candidates = ({"topology": "ring"},)
    bound = "asynchronous"
    barrier_bound = "beside_passes"
    puts = "model"
