"""What DDP does with a full bucket, other than an all-reduce in its own type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dear.algorithms.synchronous._powersgd import PowerSgd
from dear.buckets.carriers import Payloads
from dear.buckets.compressors import make_compressor
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.algorithms.synchronous.ddp import Ddp
    from dear.comm.communicator import Communicator

FIRST = 2
"""Passes after which buckets stay what they are: DDP makes them anew after the first."""


def add_hook(ddp: Any, communicator: Communicator, options: Ddp.Options) -> None:
    """Registers with `ddp` what `options.compression` names."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    group = communicator.groups[0]
    if options.compression == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif options.compression == "bf16":
        # DDP knows this hook by name, and takes it with NCCL only; the hook itself runs anywhere.
        ddp.register_comm_hook(
            group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
        )
    elif options.compression == "powersgd":
        ddp.register_comm_hook(
            PowerSgd(communicator, options.powersgd_rank, options.powersgd_start_step), _carry
        )
    elif options.gathers:
        ddp.register_comm_hook(BucketPayloads(communicator, options), _carry)


class BucketPayloads:
    """Buckets as payloads that are all-gathered; dense until the buckets stay what they are."""

    def __init__(self, communicator: Communicator, options: Ddp.Options) -> None:
        self._communicator = communicator
        self._options = options
        self._passes = 0
        self._carriers: dict[int, tuple[list[Parameter], Payloads]] = {}

    def carry(self, bucket: Any) -> torch.futures.Future:
        """A future of the bucket's buffer with what stands for the mean over ranks."""
        buffer, dense = bucket.buffer(), self._passes < FIRST
        self._passes += bucket.is_last()
        if dense:
            work = self._communicator.all_reduce(buffer, op="mean")
            return work.future().then(lambda _: buffer)
        params = bucket.parameters()
        carrier = self._carrier(bucket.index(), params, buffer)
        work = carrier.send(buffer, [param.grad is not None for param in params])

        def received(_: Any) -> torch.Tensor:
            carrier.receive(buffer)
            return buffer

        return work.future().then(received)

    def _carrier(self, index: int, params: list[Parameter], buffer: torch.Tensor) -> Payloads:
        if index not in self._carriers or not _same(self._carriers[index][0], params):
            compressor = make_compressor(self._options, buffer.numel(), buffer.dtype, buffer.device)
            sizes = [param.numel() for param in params]
            self._carriers[index] = params, Payloads(self._communicator, compressor, sizes)
        return self._carriers[index][1]


def _carry(state, bucket):  # DDP looks at the annotations, which must not be texts
    return state.carry(bucket)


def _same(some: list[Parameter], others: list[Parameter]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
