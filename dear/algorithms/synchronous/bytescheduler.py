"""Priority scheduling of partitioned gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.algorithms.synchronous._partitioned import PartitionedEngine, Queues
from dear.buckets.compression import HalfOptions, refuse_types
from dear.buckets.grouping import MIB, fuse, layers
from dear.errors import UserError
from dear.options import at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.alone import AloneEngine
from dear.training.engine import distribute, refuse_lbfgs, trained_parameters

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator

CREDIT_MB = 16.0
LEVELS = 4


class ByteScheduler(Algorithm):
    """ByteScheduler (Peng et al., SOSP 2019): partitions, sent in the order in which layers run.

    The gradients of each layer are cut into partitions. Those of layers that run first in a forward
    pass overtake the others: in mid-flight where the backend has priorities; elsewhere a credit
    limits what is under way. The next forward pass starts at once, and each of its layers waits
    only for its own tensors, which are updated just before it runs.
    Horovod is neither needed nor patched. Where the original's rank 0 negotiates every start, here
    it plays its scheduler through once, with measured times, and all ranks keep to that order.
    Invariant: whoever reads parameters by a forward or a state dict sees those after the last
    `step()`; between `backward()` and `step()` `p.grad` is still this rank's own gradient.
    Bytes move: from the backward pass, as layers are complete, into the next forward pass.
    Cost per step and rank: one all-reduce per partition.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """How gradients are cut, in which type they travel, and how many bytes are under way."""

        partition_mb: float = 4.0
        """Largest partition, in MB of 2^20 bytes as they travel."""
        credit_mb: float | None = None
        """Bytes under way at which no further partition starts, in MB of 2^20 bytes. None: no limit
        where the backend has priorities, else 16. (NCCL does not tell when a collective ends: there
        the order holds, but not the limit.)"""
        levels: int | None = None
        """Priority levels, each a channel of its own, where the backend has priorities and there is
        no `credit_mb`; None: 4."""
        profile_steps: int = 2
        """Steps that are measured before the order is made; they do not overlap anything."""

        def __post_init__(self) -> None:
            positive("option of bytescheduler 'partition_mb'", self.partition_mb)
            at_least("option of bytescheduler 'profile_steps'", self.profile_steps, 1)
            if self.credit_mb is not None:
                positive("option of bytescheduler 'credit_mb'", self.credit_mb)
            if self.levels is not None:
                at_least("option of bytescheduler 'levels'", self.levels, 1)
                if self.credit_mb is not None:
                    raise UserError(
                        "options of bytescheduler 'levels' and 'credit_mb' exclude each other: "
                        "with a credit there is one queue"
                    )

        def settling_steps(self) -> int:
            return self.profile_steps

    capabilities = Capabilities(consistency="synchronous")
    bound = "cross_iteration"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        refuse_lbfgs(optimizer, "bytescheduler")
        params = trained_parameters(model, optimizer)
        refuse_types(params, options)
        queues = _queues(options, communicator)
        if communicator.size == 1:
            return model, distribute(optimizer, AloneEngine(model, communicator))
        engine = PartitionedEngine(
            model,
            optimizer,
            communicator,
            fuse(layers(model, params), threshold=0),
            partition_bytes=options.partition_mb * MIB,
            queues=queues,
            options=options,
            profile_steps=options.profile_steps,
        )
        return model, distribute(optimizer, engine)


def _queues(options: ByteScheduler.Options, communicator: Communicator) -> Queues:
    if options.credit_mb is not None:
        return Queues(credit=options.credit_mb * MIB)
    if communicator.native:
        return Queues(levels=options.levels or LEVELS)
    if options.levels is not None:
        raise UserError(
            f"option of bytescheduler 'levels'={options.levels}: backend {communicator.backend} "
            "has no priorities; use credit_mb"
        )
    return Queues(credit=CREDIT_MB * MIB)
