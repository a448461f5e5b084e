"""Decentralized data-parallel training: averaging with a few peers, beside the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithms.decentralized._group_mixing import GroupMixing
from dear.errors import UserError
from dear.options import at_least, positive
from dear.topology.schedules import TopologyReg
from dear.topology.traffic import Traffic
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.algorithm import Options as AlgorithmOptions
from dear.training.alone import AloneEngine
from dear.training.engine import distribute, trained_parameters
from dear.training.local_updates import LocalUpdateEngine, UpdateIn

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class Decentralized(Algorithm):
    """D-PSGD (Lian et al., NeurIPS 2017, arXiv 1705.09056), overlapped with both passes as in
    Decent-DP.

    Invariant: x_i(t+1) = sum_j W_ij(t) x_j(t) - update(g_i(x_i(t))): each rank applies its own
    gradient, at its own parameters, to the average over its group. Models of different ranks
    differ; `dear.comm.consensus` averages them. `p.grad` is always the rank's own.
    Bytes move: each bucket of parameters from its update until its update in the next step.
    Cost per step and rank: one exchange of the model with one peer (`ring`, `one-peer-exp`), or an
    all-reduce of it in the group (`complete`: all ranks; `alternating-exp-ring`: a node or two).
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(AlgorithmOptions):
        """Who averages with whom, and when each bucket is updated."""

        topology: str = "complete"
        """`complete` (any world), `ring` (even worlds), `one-peer-exp` (2^k ranks),
        `alternating-exp-ring` (2^k nodes), or a name registered with
        `dear.topology.schedules.TopologyReg`."""
        bucket_mb: float = 25.0
        """Parameters travel in buckets below so many MB of 2^20 bytes."""
        update: UpdateIn = "backward"
        """`backward`: each bucket is updated as soon as its last gradient is there; `step`: in
        `step()`, so that gradients can be clipped or unscaled before."""
        adaptive_factor: float = 1.0
        """How much of the average is taken: x <- (1 - a) x + a (W x); 0 .. 1."""
        ranks_per_node: int | None = None
        """For `alternating-exp-ring`; None: as many as the launcher started on this host."""

        def __post_init__(self) -> None:
            TopologyReg.check_name(self.topology)
            positive("option of decentralized 'bucket_mb'", self.bucket_mb)
            at_least("option of decentralized 'adaptive_factor'", self.adaptive_factor, 0)
            if self.adaptive_factor > 1:
                raise UserError(
                    "option of decentralized 'adaptive_factor' must be at most 1, got "
                    f"{self.adaptive_factor}"
                )
            if self.ranks_per_node is not None:
                at_least("option of decentralized 'ranks_per_node'", self.ranks_per_node, 1)

    capabilities = Capabilities(consistency="decentralized", needs_topology=True)
    bound = "decentralized"

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic:
        topology = TopologyReg.make(
            options.topology,
            world_size=world_size,
            rank=0,
            local_world_size=options.ranks_per_node or local_size,
        )
        return Traffic.in_groups(topology, world_size)

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        params = trained_parameters(model, optimizer)
        if communicator.size == 1:
            return model, distribute(optimizer, AloneEngine(model, communicator))
        topology = TopologyReg.make(
            options.topology,
            world_size=communicator.size,
            rank=communicator.rank,
            local_world_size=options.ranks_per_node or _ranks_per_node(),
        )
        mixing = GroupMixing(communicator, topology)
        mixing.set_factor(options.adaptive_factor)
        engine = LocalUpdateEngine(
            model, optimizer, params, mixing, bucket_mb=options.bucket_mb, update=options.update
        )
        return model, distribute(optimizer, engine)


def _ranks_per_node() -> int:
    from dear.comm import runtime  # needs torch

    return runtime.local_size() if runtime.is_initialized() else 1
