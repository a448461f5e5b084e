"""Collectives over a torch.distributed process group, as the algorithms see them.

Algorithms know tensors, channels and `Work`; which backend moves the bytes, between which hosts, is
decided where the process group is made. Time, too, comes from here, never from a wall clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from dear.comm.backends import shown
from dear.comm.pairwise import Exchange
from dear.errors import UserError, unknown

Op = Literal["mean", "sum", "min", "max"]
T = TypeVar("T")

CALLBACK_S = 5.0

# torch 2.13 renames these two; 2.11 has the old names only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class WorkTimes:
    """When a collective was queued, could start, and ended; seconds on the communicator's clock."""

    enqueued_s: float
    started_s: float
    """Not before the last collective of the channel that had ended when this one ended; a backend
    that runs several at a time (Gloo: two) may really have begun earlier."""
    finished_s: float


class Work:
    """One collective under way. Its tensors may be read or written again after `wait`."""

    def __init__(self, communicator: Communicator, handle: Any, channel: int, nbytes: int) -> None:
        self._communicator = communicator
        self._handle = handle
        self._channel = channel
        self._callbacks: list[Callable[[], None]] = []
        self._times: WorkTimes | None = None
        self.nbytes = nbytes
        """Payload in bytes: the larger of input and output on this rank."""
        self._recorded: threading.Event | None = None
        if communicator.record_times and not communicator.native_times:
            self._recorded = threading.Event()
            enqueued = communicator.clock()
            handle.get_future().add_done_callback(lambda _: self._finished(enqueued))

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the result may be used (on CUDA: by the current stream).

        Args:
            timeout_s: longest wait in seconds; None means the process group's own timeout.

        Raises:
            RuntimeError: a peer died, disagreed, or did not answer in time.
        """
        began = self._communicator.clock()
        if timeout_s is None:
            self._handle.wait()
        else:
            self._handle.wait(timedelta(seconds=timeout_s))
        self._communicator.blocked_s += self._communicator.clock() - began

    def done(self) -> bool:
        """True once the collective has ended; never blocks."""
        return self._handle.is_completed()

    def on_complete(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the collective has ended, from a thread of the backend."""
        self._handle.get_future().add_done_callback(lambda _: callback())

    def future(self) -> torch.futures.Future:
        """Completes with the collective; for torch's own machinery, which chains on it."""
        return self._handle.get_future()

    def times(self) -> WorkTimes:
        """The three times of a finished collective.

        Raises:
            UserError: the communicator was not made with `record_times`, or it is still running.
        """
        if self._communicator.native_times and self._handle.is_completed():
            times = self._handle.times()
            return WorkTimes(
                enqueued_s=times.enqueued_s,
                started_s=times.started_s,
                finished_s=times.finished_s,
            )
        if self._recorded is not None and self._handle.is_completed():
            self._recorded.wait(CALLBACK_S)  # the callback may be a moment behind the end
        if self._times is None:
            raise UserError("no times: the collective is running, or record_times is off")
        return self._times

    def _finished(self, enqueued_s: float) -> None:
        now = self._communicator.clock()
        before = self._communicator.channel_free_s.get(self._channel, enqueued_s)
        self._communicator.channel_free_s[self._channel] = now
        self._times = WorkTimes(
            enqueued_s=enqueued_s, started_s=max(enqueued_s, before), finished_s=now
        )
        self._recorded.set()


class Communicator:
    """The ranks of one job (or of a sub-group) and the collectives between them.

    All ranks must make the same calls in the same order on each channel. Tensors are dense and
    non-overlapping in memory; a dtype or device that the backend lacks raises its error.

    Args:
        group: a torch.distributed process group.
        channels: number of independent queues; each further one is a process group of its own, so
            constructing with more than one is itself a collective call.
        record_times: keep `Work.times()`; costs a callback per collective.
        clock: returns seconds; the virtual fabric passes its own,
        pause: and what lets so many seconds of it pass.
        timeout_s: the longest that a collective of a further channel may take; None: torch's
            default. (Those of the first have the limit that `group` was made with.)
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channels: int = 1,
        record_times: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
        timeout_s: float | None = None,
    ) -> None:
        self.timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend = shown(dist.get_backend(group))
        self.native = self.backend == "comm_core"
        """The backend knows priorities."""
        # It also takes times, on the clock that time.perf_counter reads on Linux.
        self.native_times = self.native and clock is time.perf_counter
        self.record_times = record_times
        self.clock = clock
        self.pause = pause
        self.channel_free_s: dict[int, float] = {}
        self.blocked_s = 0.0
        """Seconds that callers of `Work.wait` were held up: exposed communication."""
        self.bytes_sent = 0
        """Payload bytes handed to collectives so far (input tensors of this rank)."""
        self.groups = [group]
        self.ensure_channels(channels)

    def ensure_channels(self, count: int) -> None:
        """Makes the missing ones of `count` channels; then it is a collective call."""
        ranks = dist.get_process_group_ranks(self.groups[0])
        while len(self.groups) < count:
            self.groups.append(dist.new_group(ranks, timeout=self.timeout))

    def all_reduce(
        self, tensor: torch.Tensor, *, op: Op, channel: int = 0, priority: int = 0
    ) -> Work:
        """Reduces `tensor` (any shape) over all ranks, in place; every rank gets the result."""
        group, reduce_op = self._queue(channel, priority), _reduce_op(op)
        flat = flat_view(tensor)
        if op == "mean":
            flat = _scaled(flat, self.size)
        with _at(priority):
            handle = dist.all_reduce(flat, op=reduce_op, group=group, async_op=True)
        return self._work(handle, channel, tensor.nbytes, tensor.nbytes)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: Op,
        channel: int = 0,
        priority: int = 0,
    ) -> Work:
        """Rank r gets slice r of the reduced `input`.

        Args:
            output: contiguous, `[n]`.
            input: contiguous, `[size * n]`; scratch afterwards (`mean` scales it in place).
        """
        group, reduce_op = self._queue(channel, priority), _reduce_op(op)
        if input.numel() != output.numel() * self.size:
            raise UserError(
                f"reduce_scatter: input has {input.numel()} elements, must be {self.size} x "
                f"{output.numel()}"
            )
        if op == "mean":
            input = _scaled(input, self.size)
        with _at(priority):
            handle = _reduce_scatter(output, input, op=reduce_op, group=group, async_op=True)
        return self._work(handle, channel, input.nbytes, input.nbytes)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, channel: int = 0, priority: int = 0
    ) -> Work:
        """Concatenates every rank's `input` `[n]` into `output` `[size * n]`, in rank order."""
        group = self._queue(channel, priority)
        if output.numel() != input.numel() * self.size:
            raise UserError(
                f"all_gather: output has {output.numel()} elements, must be {self.size} x "
                f"{input.numel()}"
            )
        with _at(priority):
            handle = _all_gather(output, input, group=group, async_op=True)
        return self._work(handle, channel, output.nbytes, input.nbytes)

    def reduce(
        self, tensor: torch.Tensor, *, root: int, op: Op, channel: int = 0, priority: int = 0
    ) -> Work:
        """Rank `root` gets the reduction of everybody's `tensor`, in place; scratch elsewhere."""
        group, reduce_op = self._queue(channel, priority), _reduce_op(op)
        flat, target = flat_view(tensor), self._global_rank(root)
        if op == "mean":
            flat = _scaled(flat, self.size)
        with _at(priority):
            handle = dist.reduce(flat, dst=target, op=reduce_op, group=group, async_op=True)
        return self._work(handle, channel, tensor.nbytes, tensor.nbytes)

    def broadcast(
        self, tensor: torch.Tensor, *, root: int, channel: int = 0, priority: int = 0
    ) -> Work:
        """Copies rank `root`'s `tensor` into everybody's, in place."""
        group = self._queue(channel, priority)
        source = self._global_rank(root)
        with _at(priority):
            handle = dist.broadcast(flat_view(tensor), src=source, group=group, async_op=True)
        return self._work(handle, channel, tensor.nbytes, tensor.nbytes)

    def exchange(
        self, recv: torch.Tensor, send: torch.Tensor, *, peer: int, channel: int = 0
    ) -> Work:
        """Sends `send` to rank `peer` and gets its `send` in `recv`; nobody else takes part.

        Both are contiguous, of the same size and dtype on both ranks. Exchanges of two ranks on one
        channel go in the order of the calls.
        """
        group = self._queue(channel, 0)
        handle = Exchange(send, recv, self._global_rank(peer), group)
        return self._work(handle, channel, recv.nbytes, send.nbytes)

    def broadcast_object(self, value: T, *, root: int = 0) -> T:
        """Returns rank `root`'s picklable `value` on every rank; blocking, for set-up only."""
        box: list[Any] = [value]
        group = self.groups[0]
        dist.broadcast_object_list(box, src=self._global_rank(root), group=group)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Returns every rank's picklable `value`, in rank order, on every rank; blocking."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.groups[0])
        return values

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        dist.barrier(group=self.groups[0])

    def close(self) -> None:
        """Lets go of the process groups; no call is possible afterwards."""
        self.groups.clear()

    def _queue(self, channel: int, priority: int) -> dist.ProcessGroup:
        if not self.groups:
            raise UserError("this communicator is closed: the job has been left by shutdown()")
        if not 0 <= channel < len(self.groups):
            raise UserError(
                f"channel {channel} does not exist: this communicator has {len(self.groups)}"
            )
        if priority and not self.native:
            raise UserError(f"backend {self.backend} has no priorities; use priority=0")
        return self.groups[channel]

    def _global_rank(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise UserError(f"root {root} is no rank of a world of {self.size}")
        return dist.get_global_rank(self.groups[0], root)

    def _work(self, handle: Any, channel: int, nbytes: int, sent: int) -> Work:
        self.bytes_sent += sent
        return Work(self, handle, channel, nbytes)


def _at(priority: int) -> contextlib.AbstractContextManager[None]:
    if not priority:
        return contextlib.nullcontext()
    import comm_core  # not at the top: other backends do without it

    return comm_core.priority(priority)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a dense tensor in memory order (so channels_last needs no copy).

    Raises:
        UserError: the tensor is sparse, has gaps or overlaps in memory.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.layout is torch.strided and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    raise UserError(
        f"a collective needs a dense tensor; got layout {tensor.layout}, shape "
        f"{tuple(tensor.shape)}"
        + (f", strides {tensor.stride()}" if tensor.layout is torch.strided else "")
    )


def _scaled(tensor: torch.Tensor, size: int) -> torch.Tensor:
    # Dividing before the sum, as DDP does: the sum of a half-precision gradient then overflows no
    # sooner than the gradient itself.
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UserError(f"op 'mean' needs a floating-point tensor, got {tensor.dtype}; use 'sum'")
    return tensor.div_(size) if size > 1 else tensor


def _reduce_op(op: Op) -> Any:
    kinds = dist.ReduceOp
    known = {"mean": kinds.SUM, "sum": kinds.SUM, "min": kinds.MIN, "max": kinds.MAX}
    if op not in known:
        raise unknown("op", op, known)
    return known[op]
