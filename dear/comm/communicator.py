"""Collectives over a torch.distributed process group, as the algorithms see them.

Algorithms use tensors, channels and `Work`. The process group decides which backend moves the
bytes, and between which hosts. Times come from `Communicator.clock`, never from a wall clock.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

from dear.comm.backends import backend_of
from dear.comm.handles import DeviceClock, Exchange, Noted, WorkTimes
from dear.errors import UserError, one_of
from dear.lazy import LazyModule, dist, torch

Op = Literal["mean", "sum", "min", "max"]
T = TypeVar("T")
comm_core = LazyModule("comm_core")  # imported on first use; other backends do not need it

CALLBACK_S = 5.0


class Work:
    """A collective under way; after `wait` its tensors may be read or written again."""

    def __init__(
        self,
        communicator: Communicator,
        handle: Any,
        channel: int,
        nbytes: int,
        on_gpu: bool = False,
    ) -> None:
        self._communicator = communicator
        self._handle = handle
        self._channel = channel
        self._callbacks: list[Callable[[], None]] = []
        self._times: WorkTimes | None = None
        self.nbytes = nbytes
        """Payload in bytes: the larger of input and output on this rank."""
        self._recorded: threading.Event | None = None
        self._device_times: Callable[[], WorkTimes] | None = None
        if communicator.record_times and not communicator.native and on_gpu:
            device_clock = communicator.device_clock()
            self._device_times = device_clock.follow(handle, channel, communicator.clock())
        elif communicator.record_times and not communicator.native:
            with contextlib.suppress(RuntimeError):  # Gloo's reduce-scatter has no future
                future, recorded = handle.get_future(), threading.Event()
                self._recorded, enqueued = recorded, communicator.clock()
                future.add_done_callback(lambda _: self._finished(enqueued))

    def wait(self) -> None:
        """Blocks until the result may be used (on CUDA: by the current stream).

        Raises RuntimeError if a peer died, made another call, or exceeded the group's timeout.
        """
        began_s = self._communicator.clock()
        self.join()
        self._communicator.held_up(began_s)

    def join(self) -> None:
        """Waits in a helper thread; the time does not count as exposed communication."""
        self._handle.wait()

    def done(self) -> bool:
        """Returns True once the collective has ended; never blocks."""
        return self._handle.is_completed()

    def on_complete(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the collective has ended, from a thread of the backend."""
        self._handle.get_future().add_done_callback(lambda _: callback())

    def future(self) -> torch.futures.Future:
        """Returns a future that completes with the collective; torch's own code chains on it."""
        return self._handle.get_future()

    def times(self) -> WorkTimes:
        """Returns the times of a finished collective; raises `UserError` if there are none."""
        if self._communicator.native and self._handle.is_completed():
            return self._handle.times()
        if self._device_times is not None and self._handle.is_completed():
            return self._device_times()
        if self._recorded is not None and self._handle.is_completed():
            self._recorded.wait(CALLBACK_S)  # the callback may run shortly after the end
        if self._times is None:
            raise UserError("no times: the collective is running, or record_times is off")
        return self._times

    def _finished(self, enqueued_s: float) -> None:
        now_s = self._communicator.clock()
        before_s = self._communicator.channel_free_s.get(self._channel, enqueued_s)
        self._communicator.channel_free_s[self._channel] = now_s
        self._times = WorkTimes(
            enqueued_s=enqueued_s, started_s=max(enqueued_s, before_s), finished_s=now_s
        )
        self._recorded.set()


@dataclass
class Log:
    """Events on this rank while the log was active."""

    started: list[tuple[str, int, Work | Noted]] = field(default_factory=list)
    """Name of the call, its channel (for a sub-group, that of the sub-group), and the work."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each wait for communication, in seconds on `Communicator.clock`."""


class Communicator:
    """The ranks of one job (or of a sub-group) and the collectives between them.

    All ranks must make the same calls in the same order on each channel. Tensors must be dense and
    non-overlapping in memory. A dtype or device that the backend lacks raises the backend's error.

    Args:
        group: a torch.distributed process group.
        channels: number of independent queues. Each further channel is a process group of its own,
            so a constructor call with more than one is collective.
        record_times: keep `Work.times()`; costs a callback per collective.
        timeout_s: time limit in seconds of a collective on a further channel; None means torch's
            default. The first channel has the time limit of `group`.
    """

    _log: Log | None = None
    """The active log, or None."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        channels: int = 1,
        record_times: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend = backend_of(group)
        """Name as users choose it."""
        self.native = self.backend == "comm_core"
        """True for `comm_core`, which has priorities and takes times on `clock` (on Linux)."""
        self.record_times = record_times
        self.clock, self.pause = time.perf_counter, time.sleep
        """Clock in seconds, and sleep; all code that measures or waits uses these two."""
        self.channel_free_s: dict[int, float] = {}
        self._device_clock: DeviceClock | None = None
        self.blocked_s = 0.0
        """Exposed communication: seconds for which `Work.wait` blocked its callers."""
        self.held_up_until_s = -math.inf
        """End on `clock` of the last wait for an operation that does not report its own end."""
        self.burst_bytes = 0
        """Payload bytes that each host's link passes at once after a rest, since an emulated link
        is a token bucket; fits of collective costs subtract them."""
        self.wire_bytes_per_s: float | None = None
        """Payload bytes per second of each rank's link, each way; None if unknown."""
        self.bytes_sent = 0
        """Payload bytes handed to collectives so far (input tensors of this rank)."""
        self._counting = threading.Lock()
        """Lock of `bytes_sent`: threads of algorithms and backends start collectives, too."""
        self.groups = [group]
        self.ensure_channels(channels)

    @contextlib.contextmanager
    def logged(self) -> Iterator[Log]:
        """Logs the events on this rank within the context, and records `Work.times()` there."""
        before, self._log = self.record_times, Log()
        self.record_times = True
        try:
            yield self._log
        finally:
            self.record_times, self._log = before, None

    def note(self, name: str, nbytes: int) -> Callable[[], None]:
        """Logs a transfer that starts now outside this class; returns a function that ends it.

        The caller calls that function after the wait, which may be later than the true end.
        """
        if self._log is None:
            return lambda: None
        noted = Noted(nbytes, self.clock())
        self._log.started.append((name, 0, noted))

        def ended() -> None:
            noted.finished_s = noted.finished_s or self.clock()

        return ended

    def held_up(self, since_s: float, *, reported: bool = True) -> None:
        """Counts a wait of the caller for communication, from `since_s` on `clock` until now.

        Args:
            reported: True for an operation of the backend, which may report its own end. Without
                such a report, the end of the wait is the best known value.
        """
        now_s = self.clock()
        self.blocked_s += now_s - since_s
        if not (reported and self.native):
            self.held_up_until_s = now_s
        if self._log is not None:
            self._log.waits.append((since_s, now_s))

    def note_all_awaited(self) -> None:
        """Records a wait for all started transfers by torch's code, which reports no waits."""
        if self.native:
            comm_core.note_all_awaited()
        else:
            self.held_up_until_s = self.clock()

    def ensure_channels(self, count: int) -> None:
        """Adds channels until there are `count`; a collective call if any is missing."""
        ranks = dist.get_process_group_ranks(self.groups[0])
        while len(self.groups) < count:
            self.groups.append(dist.new_group(ranks, timeout=self.timeout))

    def all_reduce(
        self, tensor: torch.Tensor, *, op: Op, channel: int = 0, priority: int = 0
    ) -> Work:
        """Reduces `tensor` (any shape) over all ranks, in place; every rank gets the result."""
        queue, kind = self._queue(channel, priority), _reduce_op(op)
        return self._start(queue, dist.all_reduce, self._summand(flat_view(tensor), op), op=kind)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: Op,
        channel: int = 0,
        priority: int = 0,
    ) -> Work:
        """Reduces `input` `[size * n]`; rank r receives slice r in `output` `[n]`.

        Both must be contiguous. The call may overwrite `input` (`mean` scales it in place).
        """
        queue, kind = self._queue(channel, priority), _reduce_op(op)
        if input.numel() != output.numel() * self.size:
            raise UserError(
                f"reduce_scatter: input has {input.numel()} elements, must be {self.size} x "
                f"{output.numel()}"
            )
        call = _renamed("reduce_scatter_tensor", "reduce_scatter_single")
        return self._start(queue, call, output, self._summand(input, op), op=kind)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, channel: int = 0, priority: int = 0
    ) -> Work:
        """Concatenates every rank's `input` `[n]` into `output` `[size * n]`, in rank order."""
        queue = self._queue(channel, priority)
        if output.numel() != input.numel() * self.size:
            raise UserError(
                f"all_gather: output has {output.numel()} elements, must be {self.size} x "
                f"{input.numel()}"
            )
        call = _renamed("all_gather_into_tensor", "all_gather_single")
        return self._start(queue, call, output, input)

    def reduce(
        self, tensor: torch.Tensor, *, root: int, op: Op, channel: int = 0, priority: int = 0
    ) -> Work:
        """Reduces `tensor` over all ranks, in place on rank `root`; scratch on other ranks."""
        queue, kind = self._queue(channel, priority), _reduce_op(op)
        flat, target = flat_view(tensor), self._global_rank(root)
        return self._start(queue, dist.reduce, self._summand(flat, op), dst=target, op=kind)

    def broadcast(
        self, tensor: torch.Tensor, *, root: int, channel: int = 0, priority: int = 0
    ) -> Work:
        """Copies rank `root`'s `tensor` to all ranks, in place."""
        queue, source = self._queue(channel, priority), self._global_rank(root)
        return self._start(queue, dist.broadcast, flat_view(tensor), src=source)

    def exchange(
        self, recv: torch.Tensor, send: torch.Tensor, *, peer: int, channel: int = 0
    ) -> Work:
        """Sends `send` to rank `peer`, and receives that rank's `send` in `recv`.

        Both must be contiguous, with the same size and dtype on both ranks. Other ranks take no
        part. Exchanges of two ranks on one channel run in the order of the calls.
        """
        self._queue(channel, 0)
        handle = Exchange(send, recv, self._global_rank(peer), self.groups[channel])
        return self._work(
            "exchange", handle, channel, recv.nbytes, send.nbytes, on_gpu=send.is_cuda
        )

    def regimes(self, operation: str) -> tuple[tuple[str, int], ...] | None:
        """Returns the engine's algorithms for an operation: names, and first message size in bytes.

        None: the engine does not report them, or it has only one.
        """
        if not self.native or self.size == 1:
            return None
        backend = self.groups[0]._get_backend(torch.device("cpu"))
        return tuple((name, first) for name, first, _ in backend.regimes(operation))

    def broadcast_object(self, value: T, *, root: int = 0) -> T:
        """Returns rank `root`'s picklable `value` on every rank; blocks, for set-up only."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=self._global_rank(root), group=self.groups[0])
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Returns every rank's picklable `value`, in rank order, on every rank; blocks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.groups[0])
        return values

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        dist.barrier(group=self.groups[0])

    def close(self) -> None:
        """Releases the process groups; no call is possible afterwards."""
        self.groups.clear()

    def _queue(self, channel: int, priority: int) -> tuple[int, int]:
        if not self.groups:
            raise UserError("this communicator is closed: the job has been left by shutdown()")
        if not 0 <= channel < len(self.groups):
            raise UserError(
                f"channel {channel} does not exist: this communicator has {len(self.groups)}"
            )
        if priority and not self.native:
            raise UserError(f"backend {self.backend} has no priorities; use priority=0")
        return channel, priority

    def _global_rank(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise UserError(f"root: must be a rank below {self.size}, got {root}")
        return dist.get_global_rank(self.groups[0], root)

    def _summand(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        # Division before the sum, as in DDP: the sum of half-precision gradients then overflows
        # no sooner than the gradient itself.
        if op != "mean":
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise UserError(
                f"op 'mean' needs a floating-point tensor, got {tensor.dtype}; use 'sum'"
            )
        return tensor.div_(self.size) if self.size > 1 else tensor

    def _start(
        self, queue: tuple[int, int], call: Callable[..., Any], *tensors: torch.Tensor, **extra: Any
    ) -> Work:
        """Starts `call` on `tensors`: the output, if it is separate, and the input."""
        channel, priority = queue
        with _at(priority):
            handle = call(*tensors, group=self.groups[channel], async_op=True, **extra)
        nbytes = max(tensor.nbytes for tensor in tensors)
        sent, on_gpu = tensors[-1].nbytes, tensors[-1].is_cuda
        return self._work(call.__name__, handle, channel, nbytes, sent, on_gpu=on_gpu)

    def device_clock(self) -> DeviceClock:
        """Returns the clock that times NCCL's transfers; creates it on the first call."""
        if self._device_clock is None:
            self._device_clock = DeviceClock(self.clock)
        return self._device_clock

    def _work(
        self, name: str, handle: Any, channel: int, nbytes: int, sent: int, *, on_gpu: bool
    ) -> Work:
        with self._counting:
            self.bytes_sent += sent
        work = Work(self, handle, channel, nbytes, on_gpu)
        if self._log is not None:
            self._log.started.append((name, channel, work))
        return work


@functools.cache
def _renamed(former: str, name: str) -> Callable[..., Any]:
    """Returns the collective `name` of torch 2.13, or its `former` name in older versions."""
    return getattr(dist, name, None) or getattr(dist, former)


def _at(priority: int) -> contextlib.AbstractContextManager[None]:
    return comm_core.priority(priority) if priority else contextlib.nullcontext()


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D view of a dense tensor in memory order (so channels_last needs no copy).

    Raises:
        UserError: the tensor is sparse, or has gaps or overlaps in memory.
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


def padded(numel: int, step: int) -> int:
    """Rounds `numel` up to a multiple of `step`."""
    return -(-numel // step) * step


def buffer(like: torch.Tensor, numel: int, communicator: Communicator) -> torch.Tensor:
    """Allocates a zeroed 1-D tensor like `like`, in memory that the backend reads in place."""
    if communicator.native and like.device.type == "cpu":
        return comm_core.empty(numel, dtype=like.dtype)
    return torch.zeros(numel, dtype=like.dtype, device=like.device)


def _reduce_op(op: Op) -> Any:
    kinds = dist.ReduceOp
    ops = {"mean": kinds.SUM, "sum": kinds.SUM, "min": kinds.MIN, "max": kinds.MAX}
    return one_of("op", op, ops)


class SubCommunicator(Communicator):
    """A communicator of some ranks of a parent; bytes and waits count on the parent."""

    def __init__(self, parent: Communicator, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._parent = parent

    def _work(
        self, name: str, handle: Any, channel: int, nbytes: int, sent: int, *, on_gpu: bool
    ) -> Work:
        return self._parent._work(name, handle, channel, nbytes, sent, on_gpu=on_gpu)

    def close(self) -> None:
        """Destroys the process group, which belongs to this communicator."""
        for group in self.groups:
            dist.destroy_process_group(group)
        super().close()


def sub_communicators(
    parent: Communicator, members: Iterable[Sequence[int]]
) -> dict[tuple[int, ...], SubCommunicator]:
    """Makes a communicator for each list of ranks; returns those of this rank, by their ranks.

    A collective call of all ranks of `parent`, with the same lists in the same order.
    """
    parent_ranks = dist.get_process_group_ranks(parent.groups[0])
    result: dict[tuple[int, ...], SubCommunicator] = {}
    for ranks in dict.fromkeys(tuple(ranks) for ranks in members):
        group = dist.new_group([parent_ranks[rank] for rank in ranks], timeout=parent.timeout)
        if parent.rank in ranks:
            result[ranks] = SubCommunicator(parent, group)
    return result
