"""Decentralized SGD over static or changing topologies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dear.comm.communicator import Communicator
from dear.comm.neighbors import Machines, Round
from dear.comm.runtime import ranks_per_machine
from dear.cost.bounds import Bound, Traffic
from dear.cost.overlap import Overlap
from dear.errors import UserError
from dear.options import at_least, option_of
from dear.topology import check_graph, graph
from dear.topology.schedules import DynamicName, one_peer_machines, schedule
from dear.training.algorithm import Capabilities
from dear.training.engine import Replica
from dear.training.parameters.engine import ParameterEngine
from dear.training.parameters.exchange import GraphExchange, Rounds, always
from dear.training.parameters.options import (
    GraphAlgorithm,
    GraphOptions,
    adapt_then_combine,
    combine_then_adapt,
)
from dear.training.parameters.stepped import AdaptThenCombine, CombineThenAdapt


class Neighbor(GraphAlgorithm["Neighbor.Options"]):
    """Decentralized SGD: each rank steps with its own gradient and averages with its neighbours.

    D-PSGD (Lian et al., NeurIPS 2017, arXiv 1705.09056) in two orders of BlueFog (Ying et al. 2021,
    arXiv 2111.04287), also over one-peer exponential graphs (Ying et al., NeurIPS 2021, arXiv
    2110.13363). For parameters x, gradients g and weights W:
    awc: `x <- W x - update(g(x))`; atc: `x <- W (x - update(g(x)))`.
    Invariant: replicas differ. Their mean moves by the mean gradient. Each round multiplies their
    distances by at most the topology's mixing rate.
    Bytes move: awc, during both passes; atc, from the update until a layer is needed again.
    Cost per step and rank: the parameters once to each neighbour (exp2: log2 P, one-peer: 1).
    Overridden methods: none; the options choose the order and the peers of each round.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(GraphOptions):
        """Order, topology and frequency of the averaging."""

        combine: Literal["atc", "awc"] = "awc"
        """`awc` averages the parameters at which the gradient was computed; `atc` averages after
        the update."""
        dynamic: DynamicName = "none"
        """Topology that changes from step to step, in place of `topology`. `one-peer-exp`: one peer
        at distance 1, 2, 4, ... in turn. `inner-outer-ring`, `inner-outer-exp2`: in each machine,
        one rank in turn exchanges with another machine, and the others among themselves."""
        hierarchical: bool = False
        """True: averages exactly in each machine. Between machines it averages over `topology` or,
        with `dynamic=one-peer-exp`, with one machine in turn."""
        local_size: int | None = None
        """Ranks per machine, for `hierarchical` and the inner-outer topologies; None: as many as
        the launcher started."""
        every: int = 1
        """Period of the averaging in steps; the last step of each period averages."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(option_of(self, "every"), self.every, 1)
            at_least(option_of(self, "local_size"), self.local_size, 1)
            inner_outer = self.dynamic.startswith("inner-outer")
            if self.hierarchical and inner_outer:
                raise UserError(
                    f"{option_of(self, 'dynamic', self.dynamic)} cannot be used with "
                    "hierarchical, since it already averages by machines; leave one of them out"
                )
            if self.dynamic != "none" and self.topology != GraphOptions.topology:
                raise UserError(
                    f"{option_of(self, 'topology')} is not used with dynamic={self.dynamic}"
                )
            if self.local_size is not None and not (self.hierarchical or inner_outer):
                raise UserError(
                    f"{option_of(self, 'local_size')} needs hierarchical or an inner-outer topology"
                )

    capabilities = Capabilities(consistency="decentralized")
    candidates = ({"dynamic": "one-peer-exp"}, {"topology": "ring"})

    @classmethod
    def bound_of(cls, options: Options) -> Bound:
        return "beside_passes" if options.combine == "awc" else "after_update"

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        sent = combine_then_adapt if options.combine == "awc" else adapt_then_combine
        return Overlap(transfers=(sent("parameters"),))

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic:
        return _traffic(options, world_size, options.local_size or local_size).every(options.every)

    def engine(self, replica: Replica[Options]) -> ParameterEngine:
        options, communicator = replica.options, replica.communicator
        machines = None
        if options.hierarchical:
            machines = Machines(communicator, options.local_size or ranks_per_machine(communicator))
            rounds = _machine_rounds(options, machines)
        else:
            rounds = _rounds(options, communicator)
        kind = AdaptThenCombine if options.combine == "atc" else CombineThenAdapt
        return kind(replica, GraphExchange(rounds, machines), every=options.every)


def _rounds(options: Neighbor.Options, communicator: Communicator) -> Rounds:
    if options.dynamic == "none":
        return always(Round.of(options.graph(communicator), communicator.rank))
    local_size = 1
    if options.dynamic != "one-peer-exp":
        local_size = options.local_size or ranks_per_machine(communicator)
    peers = schedule(options.dynamic, communicator.size, communicator.rank, local_size)
    return lambda steps: Round.uniform(*peers(steps // options.every))


def _machine_rounds(options: Neighbor.Options, machines: Machines) -> Rounds:
    if machines.count == 1:
        return always(Round(self_weight=1.0))
    if options.dynamic == "one-peer-exp":
        peers = one_peer_machines(machines.count, machines.machine)
        return lambda steps: Round.uniform(*peers(steps // options.every))
    between = graph(options.topology, machines.count)
    check_graph(between, machines.count)
    return always(Round.of(between, machines.machine))


def _traffic(options: Neighbor.Options, size: int, local_size: int) -> Traffic:
    if options.hierarchical:
        return _traffic(
            dataclasses.replace(options, hierarchical=False, local_size=None), size // local_size, 1
        ).between_machines(local_size)
    if options.dynamic == "none":
        return Traffic.along(graph(options.topology, size))
    ranks = range(size)
    return Traffic.scheduled([schedule(options.dynamic, size, r, local_size) for r in ranks])
