"""Process group of a virtual cluster, on which torch's own algorithms (DDP, FSDP) run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from common.virtual.world.marks import Parts, carried
from common.virtual.world.network import Group, Network, Transfer
from dear.training.hooks import at_end_of_backward

NAME = "virtual"
"""Backend of torch.distributed."""
_networks: list[Network] = []
"""Network of the rank whose code runs, to which new groups belong."""


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
        future = _Future(self._group.network.look)
        self._transfer.on_end(lambda: future.set_result(self._result))
        self._group.await_in_backward(self._transfer)
        return future


class _Future(torch.futures.Future[Any]):
    """Future of a transfer that notes when Python looks at it; torch's C++ just waits for it."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def done(self) -> bool:
        self._look()
        return super().done()

    def value(self) -> Any:
        self._look()
        return super().value()

    def then(self, callback: Callable[..., Any]) -> Any:
        self._look()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        self._look()
        super().add_done_callback(callback)


class VirtualGroup(dist.ProcessGroup):
    """Group of ranks of a virtual cluster, as one of them sees it."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.network = _networks[-1]
        self._awaited: list[Transfer] = []
        """Transfers that torch's C++ waits for at the end of the current backward pass."""
        self._members: Group | None = None

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name  # the base class asks a backend, which there is none of

    @property
    def members(self) -> Group:
        if self._members is None:
            ranks = dist.get_process_group_ranks(self)
            self._members = Group(self.group_name, tuple(ranks))
        return self._members

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
        self.network.wait(transfers)

    def reduced(
        self, output: torch.Tensor, whole: torch.Tensor, operation: str, op: Any, priority: int = 0
    ) -> Transfer:
        """Starts a reduction of `whole`, which becomes `output`: all of it, or this rank's part."""
        rows = self.size() if operation == "reduce_scatter" else 1
        place, target = self.rank() if rows > 1 else 0, carried(output, whole)
        return self._meet(
            operation,
            whole,
            target if output is whole and rows == 1 else carried(whole, whole, rows),
            lambda parts: target.copy_(parts.reduced(op)[place]),
            priority,
        )

    def gathered(self, output: torch.Tensor, part: torch.Tensor, priority: int = 0) -> Transfer:
        """Starts an all-gather of every rank's `part` into `output`."""
        rows = carried(output, output, self.size())
        return self._meet(
            "all_gather",
            output,
            carried(part, output),
            lambda parts: rows.copy_(parts.joined),
            priority,
        )

    def sent(self, tensor: torch.Tensor, root: int, priority: int = 0) -> Transfer:
        """Starts a broadcast of the tensor of the rank at place `root`."""
        target = carried(tensor, tensor)
        return self._meet(
            "broadcast", tensor, target, lambda parts: target.copy_(parts.of(root)), priority
        )

    def _meet(
        self, operation: str, full: torch.Tensor, given: torch.Tensor, effect: Any, priority: int
    ) -> Transfer:
        return self.network.meet(
            operation, self.members, full.nbytes, given, effect, priority=priority
        )

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = tensors
        return _Work(self, self.reduced(tensor, tensor, "all_reduce", _op(options)), tensors)

    def reduce(self, tensors: Any, options: Any) -> Any:
        (tensor,) = tensors
        return _Work(self, self.reduced(tensor, tensor, "reduce", _op(options)), tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        (tensor,) = tensors
        root = 0 if options is None else options.rootRank
        return _Work(self, self.sent(tensor, root), tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        given, rows = inputs[0], [carried(output, inputs[0]) for output in outputs[0]]

        def effect(parts: Parts) -> None:
            for place, row in enumerate(rows):
                row.copy_(parts.of(place))

        transfer = self.network.meet(
            "all_gather", self.members, given.nbytes * self.size(), carried(given, given), effect
        )
        return _Work(self, transfer, outputs)

    def _allgather_base(self, output: Any, part: Any, options: Any = None) -> Any:
        return _Work(self, self.gathered(output, part), output)

    def _reduce_scatter_base(self, output: Any, whole: Any, options: Any = None) -> Any:
        return _Work(self, self.reduced(output, whole, "reduce_scatter", _op(options)), output)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    """Names since torch 2.13."""

    def barrier(self, opts: Any = None) -> Any:
        nothing = torch.zeros(1)
        return _Work(self, self.reduced(nothing, nothing, "all_reduce", dist.ReduceOp.SUM), [])


def use(network: Network) -> None:
    """Lets new groups belong to `network`."""
    _networks[:] = [network]


def _op(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else options.reduceOp


def group_of(group: dist.ProcessGroup) -> Group:
    """Returns the ranks of a virtual group."""
    assert isinstance(group, VirtualGroup)
    return group.members
