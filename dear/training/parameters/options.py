"""Options, traffic and order of transfers of the algorithms that average parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from dear.comm.communicator import Communicator
from dear.cost.bounds import Traffic
from dear.cost.overlap import Content, Transfer
from dear.errors import unknown
from dear.lazy import nx
from dear.options import Options, option_of, positive
from dear.topology import TOPOLOGIES, Name, check_graph, graph
from dear.training.algorithm import Algorithm

BUCKET_MB = 25.0


@dataclass(frozen=True, kw_only=True)
class LocalOptions(Options):
    """Topology of the averages, and size of the buckets."""

    topology: str = "complete"
    bucket_mb: float = BUCKET_MB
    """Size of the buckets in which parameters travel, in MB of 2^20 bytes: an approximate size, and
    an upper limit for overlapped averages."""

    def __post_init__(self) -> None:
        positive(option_of(self, "bucket_mb"), self.bucket_mb)


@dataclass(frozen=True, kw_only=True)
class GraphOptions(LocalOptions):
    """Graph along whose edges ranks average."""

    topology: Name = "exp2"
    """Static graph of the ranks, a name from `dear.topology`. `complete`: all pairs. `ring`: both
    neighbours on a circle (`ring-left`, `ring-right`: one direction). `star`: rank 0 with all.
    `mesh`: a 2-D grid. `exp2`: rank r sends to r + 1, 2, 4, ...; `symmetric-exp`: r exchanges with
    r +- 1, 4, 16, ..."""

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise unknown(option_of(self, "topology"), self.topology, TOPOLOGIES)
        super().__post_init__()

    def graph(self, communicator: Communicator, **needs: bool) -> nx.DiGraph:
        """Returns the static graph of all ranks; `needs` are those of `topology.check_graph`."""
        chosen = graph(self.topology, communicator.size)
        check_graph(chosen, communicator.size, **needs)
        return chosen


GraphOptionsT = TypeVar("GraphOptionsT", bound=GraphOptions)


class GraphAlgorithm(Algorithm[GraphOptionsT]):
    """Base of the algorithms that average over the static graph of `GraphOptions`."""

    copies: ClassVar[int] = 1
    """Number of times that all parameters go along each edge per step."""

    @classmethod
    def traffic(cls, options: GraphOptionsT, world_size: int, local_size: int) -> Traffic:
        return Traffic.along(graph(options.topology, world_size)).times(cls.copies)

    def alone(self, options: GraphOptionsT) -> bool:
        return True  # averages with itself


def combine_then_adapt(*carries: Content) -> Transfer:
    """Returns the order of transfers of a `CombineThenAdapt` engine."""
    return Transfer(kind="exchange", carries=carries, starts="model", awaited="step")


def adapt_then_combine(*carries: Content) -> Transfer:
    """Returns the order of transfers of an `AdaptThenCombine` engine."""
    return Transfer(kind="exchange", carries=carries, starts="step", awaited="layer", steps_later=1)
