"""Process group of a virtual cluster, on which torch's own algorithms (DDP, FSDP) run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from common.virtual.costs.parts import Shape
from common.virtual.world.network import Network, Transfer
from dear.training.hooks import at_end_of_backward

NAME = "virtual"
"""Backend of torch.distributed."""
_networks: list[Network] = []
"""The network of the job that runs; the last one counts."""


class _Work(dist.Work):
    """Transfer as torch's C++ sees it: DDP's reducer waits for the future, not by `wait`."""

    def __init__(self, group: VirtualGroup, transfer: Transfer, result: Any) -> None:
        super().__init__()
        self._group, self._transfer, self._result = group, transfer, result

    def wait(self, timeout: Any = None) -> bool:
        return self._transfer.wait()

    def is_completed(self) -> bool:
        return self._transfer.is_completed()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        self._transfer.on_end(lambda: future.set_result(self._result))
        self._group.await_in_backward(self._transfer)
        return future


class VirtualGroup(dist.ProcessGroup):
    """Group of `ranks` of a virtual cluster, whose other ranks do the same as this one."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._network = _networks[-1]
        self._awaited: list[Transfer] = []
        """Transfers that torch's C++ waits for at the end of the current backward pass."""
        self._shape: Shape | None = None
        self._ranks: list[int] = []

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def ranks(self) -> list[int]:
        """Ranks of the group, in order."""
        if not self._ranks:
            self._ranks = sorted(dist.get_process_group_ranks(self))
        return self._ranks

    @property
    def shape(self) -> Shape:
        """Hosts and ranks of the group."""
        if self._shape is None:
            self._shape = self._network.group(self.ranks)
        return self._shape

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def await_in_backward(self, transfer: Transfer) -> None:
        """Waits for `transfer` at the end of the backward pass, if one runs.

        DDP queues a callback for the end of the pass, and blocks in it, in C++, until the futures
        of all buckets are complete. The wait here is queued before that callback.
        """
        if not self._awaited:
            try:
                at_end_of_backward(self._await_all)
            except RuntimeError:  # no backward pass runs
                return
        self._awaited.append(transfer)

    def _await_all(self) -> None:
        transfers, self._awaited = self._awaited, []
        self._network.wait(transfers)

    def start(
        self,
        operation: str,
        nbytes: int,
        effect: Any,
        result: Any,
        output: torch.Tensor | None = None,
        **queue: Any,
    ) -> _Work:
        """Starts a transfer; returns the handle that torch expects."""
        transfer = self._network.start(
            operation,
            nbytes,
            effect,
            output,
            legs=(self.shape,),
            ranks=self.ranks,
            channel=id(self),
            **queue,
        )
        return _Work(self, transfer, result)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        (tensor,) = tensors
        effect = reduced(tensor, tensor, op, self.size())
        return self.start("all_reduce", tensor.nbytes, effect, tensors, output=tensor)

    def reduce(self, tensors: Any, options: Any) -> Any:
        (tensor,) = tensors
        effect = reduced(tensor, tensor, options.reduceOp, self.size())
        return self.start("reduce", tensor.nbytes, effect, tensors, output=tensor)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return self.start("broadcast", nbytes, lambda: None, tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        def effect() -> None:
            for output in outputs[0]:
                output.copy_(inputs[0])

        return self.start("all_gather", inputs[0].nbytes * self.size(), effect, outputs)

    def _allgather_base(self, output: Any, part: Any, options: Any = None) -> Any:
        effect = gathered(output, part)
        return self.start("all_gather", output.nbytes, effect, output, output=output)

    def _reduce_scatter_base(self, output: Any, whole: Any, options: Any = None) -> Any:
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        effect = reduced(output, whole, op, self.size())
        return self.start("reduce_scatter", whole.nbytes, effect, output, output=output)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    """Names since torch 2.13."""

    def barrier(self, opts: Any = None) -> Any:
        return self.start("all_reduce", 4, lambda: None, [])


def reduced(output: torch.Tensor, whole: torch.Tensor, op: Any, size: int) -> Any:
    """Returns the effect of a reduction over `size` ranks that all have the same `whole`."""

    def effect() -> None:
        if output is not whole:
            output.copy_(whole.view(-1)[: output.numel()].view(output.shape))
        if op == dist.ReduceOp.SUM:
            output.mul_(size)

    return effect


def gathered(output: torch.Tensor, part: torch.Tensor) -> Any:
    """Returns the effect of an all-gather of the same `part` from all ranks."""
    rows = output.view(-1, part.numel()) if part.numel() else output
    return lambda: rows.copy_(part.view(1, -1).expand_as(rows)) if part.numel() else None


@contextlib.contextmanager
def job(network: Network) -> Iterator[dist.ProcessGroup]:
    """Makes this process rank 0 of a torch.distributed job on `network`; yields its group."""
    if NAME.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(
            NAME, lambda store, rank, size, timeout: VirtualGroup(rank, size), devices=["cpu"]
        )
    _networks.append(network)
    hook = sys.excepthook  # torch puts the rank before every line of later errors
    try:
        dist.init_process_group(
            NAME, rank=0, world_size=network.shape.ranks, store=dist.HashStore()
        )
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _networks.pop()
        sys.excepthook = hook
