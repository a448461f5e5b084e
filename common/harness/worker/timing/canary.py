"""Canary: the time of a fixed workload, before and after the timed steps.

Another load on a shared host or another clock frequency makes all work slower, and no counter of
this machine shows it. So one rank of each machine runs the workload on one core while the others
wait, and the record has its times.
"""

from __future__ import annotations

import time

import torch

from common.harness.worker.timing.strain import machine_id
from dear.comm.communicator import Communicator

PIECES = 48
_SIDE, _PRODUCTS = 192, 12
_COPY_FLOATS, _COPIES = 1 << 20, 2
"""Sizes of a piece of about 2 ms: products that stay in a core's cache, and copies that do not."""


def canary_s(communicator: Communicator) -> float:
    """Returns the time on the slowest machine, in seconds; all ranks call it with nothing under
    way."""
    first = first_of_machine(communicator)
    communicator.barrier()
    took_s = work_s() if first else 0.0
    communicator.barrier()
    return max(communicator.gather_objects(took_s))


def first_of_machine(communicator: Communicator) -> bool:
    """Returns whether this rank runs the workload for its machine; all ranks call it."""
    machines = communicator.gather_objects(machine_id())
    return machines.index(machine_id()) == communicator.rank


def work_s() -> float:
    """Runs the workload; returns the time of all pieces at the pace of the faster half.

    A piece that another process interrupts does not show the machine's pace.
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
