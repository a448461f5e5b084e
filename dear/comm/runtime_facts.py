"""What the ranks of a communicator know of each other's machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dear.errors import UserError

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator


def ranks_per_machine(communicator: Communicator) -> int:
    """How many ranks each machine runs; a blocking collective call.

    Raises:
        UserError: machines run different numbers of ranks, or not neighbouring ones.
    """
    from dear.comm import runtime

    found = communicator.gather_objects((runtime.local_rank(), runtime.local_size()))
    sizes = {size for _, size in found}
    if len(sizes) > 1:
        raise UserError(
            f"machines run different numbers of ranks ({', '.join(map(str, sorted(sizes)))}); "
            "hierarchical topologies need the same on all; give local_size to choose blocks"
        )
    size = sizes.pop()
    for rank, (local, _) in enumerate(found):
        if local != rank % size:
            raise UserError(
                f"rank {rank} is number {local} of its machine; hierarchical topologies need the "
                f"ranks of a machine side by side ({rank % size})"
            )
    return size
