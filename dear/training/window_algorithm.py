"""What the algorithms that exchange through one-sided windows have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dear.cost.bounds import Bound
from dear.options import at_least, option_of
from dear.training.algorithm import Algorithm
from dear.training.engine import distribute
from dear.training.graph_options import GraphOptions
from dear.training.one_sided import WindowEngine

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator
    from dear.topology.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class WindowOptions(GraphOptions):
    """The topology, and how asynchronous it is."""

    barrier: bool = False
    """Waits for all ranks in each step that exchanges, so that results do not depend on timing; for
    comparisons."""
    every: int = 1
    """Exchanges in each so many steps only, the last of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(option_of(self, "every"), self.every, 1)

    def in_step(self) -> bool:
        return self.barrier


class WindowAlgorithm(Algorithm):
    """Base: trains with `engine`."""

    engine: ClassVar[type[WindowEngine]]
    barrier_bound: ClassVar[Bound]
    """As `bound`, where all ranks wait for each other."""

    @classmethod
    def bound_of(cls, options: WindowOptions) -> Bound | None:
        return cls.barrier_bound if options.barrier else cls.bound

    @classmethod
    def traffic(cls, options: WindowOptions, world_size: int, local_size: int) -> Traffic:
        return options.along_graph(world_size).every(options.every)

    def wrap(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        options: WindowOptions,
    ) -> tuple[Module, Optimizer]:
        engine = self.engine(
            model,
            optimizer,
            communicator,
            options.graph(communicator),
            bucket_mb=options.bucket_mb,
            barrier=options.barrier,
            every=options.every,
        )
        return model, distribute(optimizer, engine)
