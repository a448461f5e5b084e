"""Times of collectives where the job runs, under any launcher or in processes started here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.launch.ranks import Ranks, rank_env
from common.profiling.calibration import fitted
from dear.comm.environment import rank_facts
from dear.cost.calibrated import NetworkCosts
from dear.cost.collectives import measure_collective
from dear.cost.measurement import MEASURABLE
from dear.errors import UserError

SMALLEST, LARGEST = 4 << 10, 256 << 20
"""Sizes of the smallest and of the largest buffer, in bytes."""
SECONDS = 50.0
"""Longest time of all measurements, in seconds; start and end of the ranks come on top of it."""
START_S = 180.0


def in_job() -> bool:
    """Returns True if a launcher started this process as a rank."""
    return rank_facts().launcher != "none"


def start_ranks(command: Sequence[str], ranks: int) -> int:
    """Runs a command as `ranks` processes of one job on this machine; returns its exit status."""
    with tempfile.TemporaryDirectory() as folder, Ranks() as started:
        for rank in range(ranks):
            started.command(command, env=rank_env(rank, ranks, store=Path(folder, "store")))
        started.wait(grace_s=START_S)  # rank 0 reports errors
        failed = started.first_failure
        return 0 if failed is None else abs(started.codes[failed])


def measure(
    backend: str | None = None,
    *,
    ranks: int | None = None,
    largest: int = LARGEST,
    seconds: float = SECONDS,
) -> NetworkCosts | None:
    """Measures all collectives as one rank of a job; returns None on other ranks than 0.

    Args:
        backend: as for `dear.init`.
        ranks: expected number of ranks; None: any.
        largest: bytes of the largest buffer.
        seconds: longest time of all measurements; larger sizes are left out when it ends.

    Raises:
        UserError: the job has one rank, or not the expected number.
    """
    import torch

    import dear
    from dear.comm import runtime
    from dear.comm.backends import backend_for

    facts = rank_facts()
    if facts.world_size == 1 or ranks not in (None, facts.world_size):
        wanted = "at least 2" if ranks is None else f"--ranks {ranks}"
        raise UserError(f"{facts.launcher} started {facts.world_size} rank(s), not {wanted}")
    torch.set_num_threads(1)
    dear.init(backend=backend, timeout_s=START_S)
    communicator = runtime.communicator()
    device = dear.device() if "nccl" in communicator.backend else torch.device("cpu")
    sizes = [1 << power for power in range(SMALLEST.bit_length() - 1, largest.bit_length())]
    budget_s = seconds / len(MEASURABLE)
    results = [
        measure_collective(communicator, name, device, sizes=sizes, budget_s=budget_s)
        for name in MEASURABLE
    ]
    per_host = set(communicator.gather_objects(runtime.local_size()))
    costs = fitted(
        results,
        engine=backend_for(communicator.backend, device.type),
        world_size=communicator.size,
        ranks_per_host=per_host.pop() if len(per_host) == 1 else None,
    )
    rank = communicator.rank
    dear.shutdown()
    return costs if rank == 0 else None
