"""Asynchronous decentralized SGD: parameters are read from the memory of the neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from dear.training.algorithm import Capabilities
from dear.training.one_sided import PullGetEngine
from dear.training.window_algorithm import WindowAlgorithm, WindowOptions


class PullGet(WindowAlgorithm):
    """Averages with what each neighbour shows, read while both passes run.

    The pull-get optimizer of BlueFog (Ying et al. 2021, arXiv 2111.04287): every rank shows the
    parameters that its step starts from, and reads its neighbours' without their help.
    Invariant: with equal parameters everywhere and zero steps nothing changes.
    Bytes move: beside both passes; the step waits for the reads, not for the neighbours' steps.
    Cost per step and rank: the parameters once from each neighbour.
    """

    engine = PullGetEngine

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """The topology and its timing."""

    capabilities = Capabilities(consistency="asynchronous", needs_topology=True)
    bound = "beside_passes"
    barrier_bound = "beside_passes"
