"""What a `Communicator` stands on: its lanes, their life, waiting, and sending an operation off."""

# ruff: noqa: N815 - the seed systems' method names, kept beside the snake_case ones

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from . import collectives
from .collectives import Body, Channel
from .groups import copy_of
from .handles import Handles
from .lanes import Lane
from .operands import check_pair, check_tensor

log = logging.getLogger("comm_core")

_Self = TypeVar("_Self", bound="LaneCalls")


class LaneCalls:
    """The lanes of a `Communicator` and the operations under way on them.

    The arguments are those of `Communicator`.
    """

    def __init__(
        self,
        nstreams: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if not isinstance(nstreams, int) or isinstance(nstreams, bool):
            raise TypeError(f"nstreams must be an int, got {nstreams!r}")
        if nstreams < 1:
            raise ValueError(f"a Communicator needs at least 1 stream, got nstreams={nstreams}")
        self.nstreams = nstreams
        self._group = group
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._handles = Handles()
        self._lanes: list[Lane] = []
        self._open()

    def _open(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call comm_core.init() first")
        group = dist.group.WORLD if self._group is None else self._group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} of the job is not in the given group")
        self._lanes = [Lane(copy_of(group, self._timeout)) for _ in range(self.nstreams)]
        self._turn = 0
        self._pair_turns: dict[int, int] = {}
        if self._lanes[0].backends.get("cuda") == "nccl" and torch.cuda.is_available():
            # NCCL's first call on a group must be one of all its ranks; a sendrecv is not.
            for lane in self._lanes:
                dist.barrier(lane.channel.group, device_ids=[torch.cuda.current_device()])

    def destroy(self) -> None:
        """Waits for what is under way and lets go of the process groups. A second call is fine.

        Errors that nobody has waited for are logged as warnings.
        """
        if not self._lanes:
            return
        self._handles.settle_all()
        for error in self._handles.take_unreported():
            log.warning("nobody waited for an operation, and it failed: %s", error)
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()

    def reload(self) -> None:
        """Destroys the process groups and makes new ones; a collective call."""
        self.destroy()
        self._open()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

    def sync_stream(self, handle: int) -> None:
        """Waits for the operation that `handle` names. May be called any number of times.

        Raises:
            TypeError: `handle` is no int.
            ValueError: this communicator never returned `handle`.
            RuntimeError: the operation failed.
        """
        self._check_open()
        self._handles.wait(handle)

    def done(self, handle: int) -> bool:
        """True once the operation that `handle` names has ended; never blocks.

        Raises:
            TypeError, ValueError: as in `sync_stream`.
        """
        self._check_open()
        return self._handles.done(handle)

    def synchronize(self) -> None:
        """Waits for every operation so far.

        Raises:
            RuntimeError: one of them failed and has not been reported yet (the first such).
        """
        self._check_open()
        self._handles.wait_all()

    def barrier(self) -> None:
        """Returns once every rank has called it and, here, every operation so far has ended.

        Blocks the host, on CUDA too.
        """
        self.synchronize()
        self._handles.settle_all()  # CUDA: only the current stream has waited so far
        on_host = "cpu" in self._lanes[0].backends
        device_ids = None if on_host else [torch.cuda.current_device()]
        dist.barrier(self._lanes[0].channel.group, device_ids=device_ids)

    def num_free_streams(self) -> int:
        """Number of streams, 0 .. nstreams, with nothing queued or under way."""
        self._check_open()
        return sum(lane.idle() for lane in self._lanes)

    def _checked(self, name: str, tensor: torch.Tensor, written: bool = True) -> torch.Tensor:
        self._check_open()
        return check_tensor(name, tensor, self._lanes[0].backends, written)

    def _checked_pair(
        self, name: str, send: torch.Tensor, recv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        send, recv = self._checked(name, send, written=False), self._checked(name, recv)
        check_pair(name, send, recv)
        return send, recv

    def _check_open(self) -> None:
        if not self._lanes:
            raise RuntimeError("this Communicator has been destroyed; reload() brings it back")

    def _next_lane(self) -> Lane:
        self._check_open()
        lane = self._lanes[self._turn % self.nstreams]
        self._turn += 1
        return lane

    def _in_turn(
        self,
        name: str,
        body: Callable[[Channel], Body],
        tensors: Sequence[torch.Tensor],
        lone: bool,
    ) -> int:
        lane = self._next_lane()
        lone = lone and all(collectives.plain(tensor) for tensor in tensors)
        stream = lane.stream(tensors[0].device)
        return self._handles.new(
            stream.submit(name, body(lane.channel), tensors=tensors, lone=lone)
        )

    def _composed(
        self, name: str, body: Callable[[Channel], Body], tensor: torch.Tensor, lone: bool
    ) -> int:
        # Two collectives are as good as one where the backend itself keeps them in order.
        return self._in_turn(name, body, [tensor], lone and self._lanes[0].channel.ordered)

    syncStream = sync_stream
    getNumOfFreeStreams = num_free_streams
