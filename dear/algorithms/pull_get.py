"""Asynchronous decentralized SGD: parameters are read from the memory of the neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithm import Algorithm, Capabilities
from dear.engine import distribute
from dear.window_engines import PullGetEngine
from dear.window_options import WindowOptions

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.communicator import Communicator


class PullGet(Algorithm):
    """Averages with what each neighbour shows, read while both passes run.

    The pull-get optimizer of BlueFog (Ying et al. 2021, arXiv 2111.04287): every rank shows the
    parameters that its step starts from, and reads its neighbours' without their help.
    Invariant: with equal parameters everywhere and zero steps nothing changes.
    Bytes move: beside both passes; the step waits for the reads, not for the neighbours' steps.
    Cost per step and rank: the parameters once from each neighbour.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """The topology and its timing."""

    capabilities = Capabilities(consistency="asynchronous", needs_topology=True)

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        engine = PullGetEngine(
            model,
            optimizer,
            communicator,
            options.graph(communicator),
            bucket_mb=options.bucket_mb,
            barrier=options.barrier,
            every=options.every,
        )
        return model, distribute(optimizer, engine)
