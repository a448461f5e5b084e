"""Canary: a fixed computation that is timed before and after the timed steps.

Load by others on a shared host, or a lower clock frequency, makes all work slower, and no counter
of this machine shows it. So one rank of each machine runs the canary on one core while the other
ranks wait, and the record has its times.
"""

from __future__ import annotations

import time

import torch

from common.harness.worker.timing.strain import machine_id
from dear.comm.communicator import Communicator

PIECES = 48
_SIDE, _PRODUCTS = 192, 12
_COPY_FLOATS, _COPIES = 1 << 20, 2
"""Sizes for pieces of about 2 ms: matrices that fit into a core's cache, copies that do not."""


def canary_s(communicator: Communicator) -> float:
    """Returns the duration of the fixed test computation (canary) on the slowest machine.

    All ranks must call this together, while no communication is in flight.
    """
    first = first_of_machine(communicator)
    communicator.barrier()
    took_s = work_s() if first else 0.0
    communicator.barrier()
    return max(communicator.gather_objects(took_s))


def first_of_machine(communicator: Communicator) -> bool:
    """Returns True if this rank runs the canary for its machine. A collective call."""
    machines = communicator.gather_objects(machine_id())
    return machines.index(machine_id()) == communicator.rank


def work_s() -> float:
    """Runs the canary; returns its seconds, computed from the faster half of its pieces.

    Slower pieces may have been interrupted by other processes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix, product = torch.full((_SIDE, _SIDE), 0.01), torch.empty(_SIDE, _SIDE)
        source, target = torch.ones(_COPY_FLOATS), torch.empty(_COPY_FLOATS)
        times = [_piece_s(matrix, product, source, target) for _ in range(1 + PIECES)]
    finally:
        torch.set_num_threads(threads)
    faster = sorted(times[1:])[: PIECES // 2]  # the first piece touches new memory
    return sum(faster) * PIECES / len(faster)


def _piece_s(
    matrix: torch.Tensor, product: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> float:
    began = time.perf_counter()
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix, out=product)
    for _ in range(_COPIES):
        target.copy_(source)
    return time.perf_counter() - began
