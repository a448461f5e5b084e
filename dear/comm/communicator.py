"""Collectives over a torch.distributed process group, as the algorithms see them.

Algorithms know tensors, channels and `Work`; which backend moves the bytes, between which hosts, is
decided where the process group is made. Time, too, comes from here, never from a wall clock.
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
comm_core = LazyModule("comm_core")  # other backends do without it

CALLBACK_S = 5.0


class Work:
    """One collective under way. Its tensors may be read or written again after `wait`."""

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

        Raises RuntimeError if a peer died, disagreed, or did not answer in the time of the group.
        """
        began = self._communicator.clock()
        self.join()
        self._communicator.held_up(began)

    def join(self) -> None:
        """The same in a thread that nobody waits for: the time counts as nobody's."""
        self._handle.wait()

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
        """The times of a finished collective; raises `UserError` if they were not recorded."""
        if self._communicator.native and self._handle.is_completed():
            return self._handle.times()
        if self._device_times is not None and self._handle.is_completed():
            return self._device_times()
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


@dataclass
class Log:
    """What happened on this rank while it was kept."""

    started: list[tuple[str, int, Work | Noted]] = field(default_factory=list)
    """Name of the call, its channel (of a sub-group: its own), and the work."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each time that a caller waited for communication, on `Communicator.clock`.
    """


class Communicator:
    """The ranks of one job (or of a sub-group) and the collectives between them.

    All ranks must make the same calls in the same order on each channel. Tensors are dense and
    non-overlapping in memory; a dtype or device that the backend lacks raises its error.

    Args:
        group: a torch.distributed process group.
        channels: number of independent queues; each further one is a process group of its own, so
            constructing with more than one is itself a collective call.
        record_times: keep `Work.times()`; costs a callback per collective.
        timeout_s: the longest that a collective of a further channel may take; None: torch's
            default. (Those of the first have the limit that `group` was made with.)
    """

    _log: Log | None = None
    """What happens, while somebody wants to know."""

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
        """As users choose it."""
        self.native = self.backend == "comm_core"
        """The backend knows priorities, and takes times, on the same clock (on Linux)."""
        self.record_times = record_times
        self.clock, self.pause = time.perf_counter, time.sleep
        """In seconds; all that measures or waits uses these."""
        self.channel_free_s: dict[int, float] = {}
        self._device_clock: DeviceClock | None = None
        self.blocked_s = 0.0
        """Seconds that callers of `Work.wait` were held up: exposed communication."""
        self.held_up_until_s = -math.inf
        """When the last wait ended whose operation does not tell when it ended, on `clock`."""
        self.burst_bytes = 0
        """Payload that the link of each host passes at once after a rest, as a token bucket does
        that emulates a slower one; fits of what collectives cost leave it out."""
        self.wire_bytes_per_s: float | None = None
        """Payload that the link of each rank carries each way; None: nobody knows."""
        self.bytes_sent = 0
        """Payload bytes handed to collectives so far (input tensors of this rank)."""
        self._counting = threading.Lock()
        """Collectives are also started by threads of algorithms and of backends."""
        self.groups = [group]
        self.ensure_channels(channels)

    @contextlib.contextmanager
    def logged(self) -> Iterator[Log]:
        """Within it, `Work.times()` is kept, and the log gets what happens on this rank."""
        before, self._log = self.record_times, Log()
        self.record_times = True
        try:
            yield self._log
        finally:
            self.record_times, self._log = before, None

    def note(self, name: str, nbytes: int) -> Callable[[], None]:
        """Logs what is sent now past this class; to be called when it has been waited for.

        Its end is that of the waiting, which may be later than the true one.
        """
        if self._log is None:
            return lambda: None
        sent = Noted(nbytes, self.clock())
        self._log.started.append((name, 0, sent))

        def ended() -> None:
            sent.finished_s = sent.finished_s or self.clock()

        return ended

    def held_up(self, since_s: float, *, reported: bool = True) -> None:
        """Counts a wait of the caller for communication, from `since_s` on `clock` until now.

        Args:
            reported: it was an operation of the backend, which may tell when it ended. Where nobody
                does, the end of the wait is the best that is known of it.
        """
        now_s = self.clock()
        self.blocked_s += now_s - since_s
        if not (reported and self.native):
            self.held_up_until_s = now_s
        if self._log is not None:
            self._log.waits.append((since_s, now_s))

    def note_all_awaited(self) -> None:
        """The caller has waited for all that was started, in code that tells nobody (torch's)."""
        if self.native:
            comm_core.note_all_awaited()
        else:
            self.held_up_until_s = self.clock()

    def ensure_channels(self, count: int) -> None:
        """Makes the missing ones of `count` channels; then it is a collective call."""
        ranks = dist.get_process_group_ranks(self.groups[0])
        while len(self.groups) < count:
            self.groups.append(dist.new_group(ranks, timeout=self.timeout))

    def all_reduce(
        self, tensor: torch.Tensor, *, op: Op, channel: int = 0, priority: int = 0
    ) -> Work:
        """Reduces `tensor` (any shape) over all ranks, in place; every rank gets the result."""
        queue, how = self._queue(channel, priority), _reduce_op(op)
        return self._start(queue, dist.all_reduce, self._summand(flat_view(tensor), op), op=how)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: Op,
        channel: int = 0,
        priority: int = 0,
    ) -> Work:
        """Rank r gets slice r of the reduced `input` `[size * n]` as `output` `[n]`.

        Both are contiguous; `input` is scratch afterwards (`mean` scales it in place).
        """
        queue, how = self._queue(channel, priority), _reduce_op(op)
        if input.numel() != output.numel() * self.size:
            raise UserError(
                f"reduce_scatter: input has {input.numel()} elements, must be {self.size} x "
                f"{output.numel()}"
            )
        call = _renamed("reduce_scatter_tensor", "reduce_scatter_single")
        return self._start(queue, call, output, self._summand(input, op), op=how)

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
        """Rank `root` gets the reduction of everybody's `tensor`, in place; scratch elsewhere."""
        queue, how = self._queue(channel, priority), _reduce_op(op)
        flat, target = flat_view(tensor), self._global_rank(root)
        return self._start(queue, dist.reduce, self._summand(flat, op), dst=target, op=how)

    def broadcast(
        self, tensor: torch.Tensor, *, root: int, channel: int = 0, priority: int = 0
    ) -> Work:
        """Copies rank `root`'s `tensor` into everybody's, in place."""
        queue, source = self._queue(channel, priority), self._global_rank(root)
        return self._start(queue, dist.broadcast, flat_view(tensor), src=source)

    def exchange(
        self, recv: torch.Tensor, send: torch.Tensor, *, peer: int, channel: int = 0
    ) -> Work:
        """Sends `send` to rank `peer` and gets its `send` in `recv`; nobody else takes part.

        Both are contiguous, of the same size and dtype on both ranks. Exchanges of two ranks on one
        channel go in the order of the calls.
        """
        self._queue(channel, 0)
        handle = Exchange(send, recv, self._global_rank(peer), self.groups[channel])
        return self._work(
            "exchange", handle, channel, recv.nbytes, send.nbytes, on_gpu=send.is_cuda
        )

    def regimes(self, operation: str) -> tuple[tuple[str, int], ...] | None:
        """How the engine sends an operation by its size: a name, and from how many bytes on.

        None: the engine does not tell, or has one way for all.
        """
        if not self.native or self.size == 1:
            return None
        backend = self.groups[0]._get_backend(torch.device("cpu"))
        return tuple((name, first) for name, first, _ in backend.regimes(operation))

    def broadcast_object(self, value: T, *, root: int = 0) -> T:
        """Returns rank `root`'s picklable `value` on every rank; blocking, for set-up only."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=self._global_rank(root), group=self.groups[0])
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
            raise UserError(f"root {root} is no rank of a world of {self.size}")
        return dist.get_global_rank(self.groups[0], root)

    def _summand(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        # Dividing before the sum, as DDP does: the sum of a half-precision gradient then overflows
        # no sooner than the gradient itself.
        if op != "mean":
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise UserError(
                f"op 'mean' needs a floating-point tensor, got {tensor.dtype}; use 'sum'"
            )
        return tensor.div_(self.size) if self.size > 1 else tensor

    def _start(
        self, queue: tuple[int, int], call: Callable[..., Any], *tensors: torch.Tensor, **how: Any
    ) -> Work:
        """Starts `call` on `tensors`: the output where it is another one, and the input."""
        channel, priority = queue
        with _at(priority):
            handle = call(*tensors, group=self.groups[channel], async_op=True, **how)
        nbytes = max(tensor.nbytes for tensor in tensors)
        sent, on_gpu = tensors[-1].nbytes, tensors[-1].is_cuda
        return self._work(call.__name__, handle, channel, nbytes, sent, on_gpu=on_gpu)

    def device_clock(self) -> DeviceClock:
        """When the GPU ends what NCCL moves; made when it is first asked for."""
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
    """A collective that torch 2.13 has given a new name; 2.11 has the former one only."""
    return getattr(dist, name, None) or getattr(dist, former)


def _at(priority: int) -> contextlib.AbstractContextManager[None]:
    return comm_core.priority(priority) if priority else contextlib.nullcontext()


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


def padded(numel: int, step: int) -> int:
    """The least multiple of `step` that holds `numel` elements."""
    return -(-numel // step) * step


def buffer(like: torch.Tensor, numel: int, communicator: Communicator) -> torch.Tensor:
    """A zeroed flat buffer of the kind of `like`, in memory that the backend reads in place."""
    if communicator.native and like.device.type == "cpu":
        return comm_core.empty(numel, dtype=like.dtype)
    return torch.zeros(numel, dtype=like.dtype, device=like.device)


def _reduce_op(op: Op) -> Any:
    kinds = dist.ReduceOp
    known = {"mean": kinds.SUM, "sum": kinds.SUM, "min": kinds.MIN, "max": kinds.MAX}
    return one_of("op", op, known)


class SubCommunicator(Communicator):
    """A communicator of some ranks of another, which counts their bytes and waits as its own."""

    def __init__(self, parent: Communicator, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._parent = parent

    def _work(
        self, name: str, handle: Any, channel: int, nbytes: int, sent: int, *, on_gpu: bool
    ) -> Work:
        return self._parent._work(name, handle, channel, nbytes, sent, on_gpu=on_gpu)

    def close(self) -> None:
        """Lets go of the process group, which is this communicator's own."""
        for group in self.groups:
            dist.destroy_process_group(group)
        super().close()


def sub_communicators(
    parent: Communicator, members: Iterable[Sequence[int]]
) -> dict[tuple[int, ...], SubCommunicator]:
    """A communicator for each list of ranks that this rank is in, by that list.

    A collective call of all ranks of `parent`, with the same lists in the same order.
    """
    ours = dist.get_process_group_ranks(parent.groups[0])
    made: dict[tuple[int, ...], SubCommunicator] = {}
    for ranks in dict.fromkeys(tuple(ranks) for ranks in members):
        group = dist.new_group([ours[rank] for rank in ranks], timeout=parent.timeout)
        if parent.rank in ranks:
            made[ranks] = SubCommunicator(parent, group)
    return made
