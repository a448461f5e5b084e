"""Asynchronous decentralized training: averaging with what neighbours have sent so far."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dear.cost.bounds import Bound
from dear.options import at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.alone import AloneEngine
from dear.training.engine import distribute, trained_parameters
from dear.training.graph_options import GraphOptions
from dear.training.local_updates import LocalUpdateEngine, UpdateIn

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator
    from dear.topology.traffic import Traffic


class AsyncDdp(Algorithm):
    """Asynchronous data parallelism over one-sided windows (after the asyncddp fork of BlueFog).

    Invariant: a rank's step is x <- w_self x + sum_j w_j (what j put last) - update(g(x)), with its
    own gradient; a slot that nothing has come to holds this rank's own start. No rank waits for
    another one, except in the first step, where windows are made, and in `close()`. Ranks may make
    different numbers of steps. `optimizer.statistics()` tells how stale what was used was.
    Bytes move: each bucket of parameters as soon as it is updated; the receiver's program takes no
    part.
    Cost per step and rank: one put of the model to each out-neighbour.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """Who sends to whom, and how far apart ranks may drift."""

        update: UpdateIn = "backward"
        """`backward`: each bucket is updated as soon as its last gradient is there; `step`: in
        `step()`, so that gradients can be clipped or unscaled before."""
        max_staleness: int | None = None
        """Steps that a neighbour's values may be behind before a step waits for it (and puts wait
        for the ones before); None: any number, and never wait."""
        finish_timeout_s: float = 3600.0
        """Longest that `close()` waits for ranks that still train, in seconds."""

        def __post_init__(self) -> None:
            super().__post_init__()
            positive("option of asyncddp 'finish_timeout_s'", self.finish_timeout_s)
            if self.max_staleness is not None:
                at_least("option of asyncddp 'max_staleness'", self.max_staleness, 0)

    capabilities = Capabilities(consistency="asynchronous", needs_topology=True)

    @classmethod
    def bound_of(cls, options: Options) -> Bound:
        # Where neighbours are waited for, puts are, too.
        return "asynchronous" if options.max_staleness is None else "decentralized"

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic:
        return options.along_graph(world_size)

    @classmethod
    def unavailable(cls) -> str | None:
        if importlib.util.find_spec("networkx") is None:
            return "networkx is not installed, which topologies are made of"
        core = importlib.util.find_spec("comm_core")
        built = core is not None and Path(core.origin or "").with_name("_built_for.json").exists()
        return None if built else "the comm core is not built: build it with scripts/build.sh"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        params = trained_parameters(model, optimizer)
        if communicator.size == 1:
            return model, distribute(optimizer, AloneEngine(model, communicator))
        from dear.algorithms.asynchronous._window_mixing import WindowMixing  # needs torch

        mixing = WindowMixing(
            communicator,
            options.graph(communicator),
            max_staleness=options.max_staleness,
            finish_timeout_s=options.finish_timeout_s,
        )
        engine = LocalUpdateEngine(
            model, optimizer, params, mixing, bucket_mb=options.bucket_mb, update=options.update
        )
        return model, distribute(optimizer, engine)
