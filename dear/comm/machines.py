"""Hierarchical averaging: exactly inside a machine, with weights between machines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dear.comm.communicator import padded
from dear.comm.neighbors import Exchange, Pending, Round, timed
from dear.errors import UserError
from dear.lazy import torch

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator


class Machines:
    """Ranks in blocks of `local_size`, each block a machine.

    A round averages over the machine by a reduce-scatter, lets every rank exchange its share with
    the rank of its place on the neighbouring machines, and gathers the shares again. So one tensor
    per neighbour leaves a machine, spread over its ranks, and all of them get the same bits.

    Making one is a collective call.

    Raises:
        UserError: the world is no multiple of `local_size`, or the communicator is not of the
            whole job.
        Unavailable: the comm core is not built.
    """

    def __init__(self, communicator: Communicator, local_size: int) -> None:
        import torch.distributed as dist

        from dear.comm.communicator import Communicator as Collectives

        size = communicator.size
        if local_size < 1 or size % local_size:
            raise UserError(
                f"hierarchical averaging: {size} ranks are no whole number of machines of "
                f"{local_size} ranks each"
            )
        if size != dist.get_world_size():
            raise UserError("hierarchical averaging needs a communicator of all ranks of the job")
        self.local_size = local_size
        self.count = size // local_size
        self.machine, self._local_rank = divmod(communicator.rank, local_size)
        self._communicator = communicator
        blocks = [range(first, first + local_size) for first in range(0, size, local_size)]
        groups = [dist.new_group(block, timeout=communicator.timeout) for block in blocks]
        self._group = groups[self.machine]
        self.local = Collectives(self._group, clock=communicator.clock, pause=communicator.pause)
        """The ranks of this machine."""
        self._between = Exchange(communicator)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dear machines")

    def start(self, values: torch.Tensor, part: Round) -> Pending:
        """Starts a round over flat `values`; the ranks of `part` are numbers of machines."""
        mixed = values.new_zeros(padded(values.numel(), self.local_size))
        mixed[: values.numel()] = values
        share = mixed.nbytes // self.local_size
        # Scattered and gathered inside the machine, and sent to each neighbouring one.
        self._communicator.bytes_sent += mixed.nbytes + share * (1 + len(part.destinations))

        def combine(target: torch.Tensor) -> None:
            target.copy_(mixed[: target.numel()])

        if values.is_cuda:
            self._run(mixed, part)  # queued on the device
            return Pending(combine=combine)
        future = self._worker.submit(self._run, mixed, part)
        return Pending(timed(self._communicator, future.result), future.done, combine)

    def _run(self, mixed: torch.Tensor, part: Round) -> None:
        with torch.no_grad():
            shard = mixed.new_empty(mixed.numel() // self.local_size)
            self.local.reduce_scatter(shard, mixed, op="mean").wait()
            handle = self._between.core.neighbor_all_reduce(
                shard,
                self._places(part.sources),
                self._places(part.destinations),
                self_weight=part.self_weight,
                check=False,
            )
            self._between.core.sync_stream(handle)
            self.local.all_gather(mixed, shard).wait()

    def _places(self, machines: dict[int, float]) -> dict[int, float]:
        """The ranks of this rank's place on other machines."""
        return {m * self.local_size + self._local_rank: weight for m, weight in machines.items()}

    def close(self) -> None:
        """Waits for what is under way and lets go of the process groups."""
        import torch.distributed as dist

        self._worker.shutdown(wait=True)
        self._between.close()
        self.local.close()
        dist.destroy_process_group(self._group)
