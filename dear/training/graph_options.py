"""Options of the algorithms that average over a graph, and what they make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dear.comm.neighbors import Round
from dear.errors import unknown
from dear.options import option_of, positive
from dear.topology.graphs import TOPOLOGIES, Name, check_graph, graph
from dear.topology.traffic import Traffic
from dear.training.algorithm import Options

if TYPE_CHECKING:
    import networkx as nx

    from dear.comm.communicator import Communicator

BUCKET_MB = 25.0


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Options):
    """Who averages with whom, and in what portions."""

    topology: Name = "exp2"
    """Static graph of the ranks, a name from `dear.topology`. `complete`: everybody with everybody.
    `ring`: both neighbours on a circle (`ring-left`, `ring-right`: one direction only). `star`:
    rank 0 with all. `mesh`: a 2-D grid. `exp2`: rank r sends to r + 1, 2, 4, ...; `symmetric-exp`:
    r exchanges with r +- 1, 4, 16, ..."""
    bucket_mb: float = BUCKET_MB
    """Parameters travel in buffers of about so many MiB."""

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise unknown(option_of(self, "topology"), self.topology, TOPOLOGIES)
        positive(option_of(self, "bucket_mb"), self.bucket_mb)

    def graph(self, communicator: Communicator, **needs: Any) -> nx.DiGraph:
        """The static graph of all ranks, checked; `needs` as in `mixing.check_graph`."""
        made = graph(self.topology, communicator.size)
        check_graph(made, communicator.size, **needs)
        return made

    def along_graph(self, world_size: int) -> Traffic:
        """All parameters once along each edge of the static graph."""
        return Traffic.along(graph(self.topology, world_size))


def always(part: Round) -> Any:
    """The same round at every step."""
    return lambda step: part
