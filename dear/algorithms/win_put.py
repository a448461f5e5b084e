"""Asynchronous decentralized SGD: parameters are put into the memory of the neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithm import Algorithm, Capabilities
from dear.engine import distribute
from dear.window_engines import WinPutEngine
from dear.window_options import WindowOptions

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.communicator import Communicator


class WinPut(Algorithm):
    """Averages with the latest parameters that each neighbour has put; waits for nobody.

    The win-put optimizer of BlueFog (Ying et al. 2021, arXiv 2111.04287): asynchronous
    decentralized SGD in the order of AWC, one-sided.
    Invariant: with equal parameters everywhere and zero steps nothing changes; until a neighbour
    has put something its slot holds this rank's own start.
    Bytes move: beside both passes and, if that is not enough, beside later steps; a neighbour that
    has not taken the last message yet gets none.
    Cost per step and rank: the parameters at most once to each neighbour.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """The topology and its timing."""

    capabilities = Capabilities(consistency="asynchronous", needs_topology=True)

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        engine = WinPutEngine(
            model,
            optimizer,
            communicator,
            options.graph(communicator),
            bucket_mb=options.bucket_mb,
            barrier=options.barrier,
            every=options.every,
        )
        return model, distribute(optimizer, engine)
