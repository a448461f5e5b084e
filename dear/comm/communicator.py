"""Collectives over a torch.distributed process group, as the algorithms see them.

Algorithms use only tensors, channels and `Work`. The process group decides which backend moves the
bytes and which hosts take part. Times come from `Communicator.clock`, never from a wall clock.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal, TypeVar

from dear.comm.backends import backend_for, backend_of, core_module
from dear.comm.handles import Exchange
from dear.comm.work import Account, Work
from dear.errors import UserError, one_of
from dear.lazy import comm_core, dist, torch

Op = Literal["mean", "sum", "min", "max"]
HELD, HELD_BYTES = 256, 4096
"""Small all-reduces (at most `HELD_BYTES`) wake the comm core's thread only once per `HELD` calls.
While that thread runs, each start of a transfer must wait for a lock."""
T = TypeVar("T")


class Communicator(Account):
    """Ranks of one job (or of a sub-group), and the collectives between them.

    All ranks must make the same calls in the same order on each channel. Tensors must be dense and
    non-overlapping in memory. A dtype or device that the backend lacks raises the backend's error.

    Args:
        group: a torch.distributed process group.
        channels: number of independent queues. Each channel after the first has its own process
            group, so a constructor call with more than one is collective.
        record_times: keep `Work.times()`; costs a callback per collective.
        timeout_s: time limit in seconds of a collective on channels after the first; None means
            torch's default. The first channel has the time limit of `group`.
    """

    _backends: Sequence[Any] = ()
    """The groups' backends for CPU tensors, if these backends are the comm core's."""
    _parent: Communicator | None = None
    """Communicator on which bytes and waits are counted. One with a parent owns its groups."""
    _more_follow = False
    _held = 0
    window_backend = "comm_core"
    """Backend of torch.distributed whose groups windows can use."""
    core: Callable[[], Any] = staticmethod(core_module)
    """Function that returns the module with neighbour collectives and windows, which is
    `comm_core`; it raises `Unavailable` if the comm core is not built."""
    worker: Callable[[str], Any] = staticmethod(functools.partial(ThreadPoolExecutor, 1))
    """Function from a name to a pool of one thread, which runs calls one after another."""

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
        """Name of the backend, as users choose it."""
        names = {device: backend_for(self.backend, device) for device in ("cpu", "cuda")}
        super().__init__(
            native=frozenset(device for device, name in names.items() if name == "comm_core"),
            streamed=frozenset(device for device, name in names.items() if "nccl" in name),
            record_times=record_times,
        )
        self.burst_bytes = 0
        """Payload bytes that a host's idle link passes at once (an emulated link is a token
        bucket). Fits of collectives' costs subtract them."""
        self.wire_bytes_per_s: float | None = None
        """Payload bytes per second of each rank's link, each way; None if unknown."""
        self.time_scale = 1.0
        """Factor by which everything runs slower than in real time, as on an emulated cluster.
        Measurements may take so many times longer."""
        self.groups = [group]
        self.ensure_channels(channels)

    def ensure_channels(self, count: int) -> None:
        """Adds channels until there are `count`; a collective call if any is missing."""
        ranks = dist.get_process_group_ranks(self.groups[0])
        while len(self.groups) < count:
            self.groups.append(dist.new_group(ranks, timeout=self.timeout))
        if "cpu" in self.native:
            self._backends = [group._get_backend(torch.device("cpu")) for group in self.groups]

    def all_reduce(
        self, tensor: torch.Tensor, *, op: Op, channel: int = 0, priority: int = 0
    ) -> Work:
        """Reduces `tensor` (any shape) over all ranks, in place; every rank gets the result."""
        queue, flat = self._queue(channel, priority, tensor), self._summand(flat_view(tensor), op)
        backend, wakes = None, True
        if self._backends and flat.is_cpu:
            backend, wakes = self._backends[channel], self._wakes(flat)
        options = _all_reduce_options(op, wakes)
        return self._start(queue, all_reduce, flat, options=options, backend=backend)

    def follow(self, more: bool) -> None:
        """Says whether the caller starts more transfers soon, as in a backward pass.

        A call that wakes the comm core's thread takes about 6 us. So while more transfers follow,
        small all-reduces wake the thread together. `wait` or `done` of such an all-reduce starts it
        at once.
        """
        self._more_follow = more
        if not more and self._backends:
            self._backends[0].announce()

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
        queue, kind = self._queue(channel, priority, input), _reduce_op(op)
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
        queue = self._queue(channel, priority, input)
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
        queue, kind = self._queue(channel, priority, tensor), _reduce_op(op)
        flat, target = flat_view(tensor), _global_rank(self, root)
        return self._start(queue, dist.reduce, self._summand(flat, op), dst=target, op=kind)

    def broadcast(
        self, tensor: torch.Tensor, *, root: int, channel: int = 0, priority: int = 0
    ) -> Work:
        """Copies rank `root`'s `tensor` to all ranks, in place."""
        queue, source = self._queue(channel, priority, tensor), _global_rank(self, root)
        return self._start(queue, dist.broadcast, flat_view(tensor), src=source)

    def exchange(
        self, recv: torch.Tensor, send: torch.Tensor, *, peer: int, channel: int = 0
    ) -> Work:
        """Sends `send` to rank `peer`, and receives the tensor that `peer` sends into `recv`.

        Both tensors must be contiguous and have the same size and dtype on both ranks. Other ranks
        need no call. Exchanges of two ranks on one channel run in the order of the calls.
        """
        self._queue(channel, 0, send)
        group, kind = self.groups[channel], send.device.type
        staged = send.is_cuda and kind not in self.native and kind not in self.streamed
        handle = Exchange(send, recv, _global_rank(self, peer), group, staged)
        return self._work("exchange", handle, channel, group, recv, send)

    def allocate(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Allocates a zeroed 1-D tensor like `like`, in memory that the backend reads in place."""
        if like.device.type == "cpu" and "cpu" in self.native:
            return comm_core.empty(numel, dtype=like.dtype)
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    def connect(self, device: torch.device, channel: int = 0) -> None:
        """Prepares a channel for exchanges in which only some of the ranks take part; collective.

        NCCL's first call on a group must involve all ranks of the group. The barrier needs the
        GPU's number; without it, torch uses the CPU's backend.
        """
        if device.type in self.streamed:
            dist.barrier(self.groups[channel], device_ids=[torch.cuda.current_device()])

    def regimes(self, operation: str, device: torch.device) -> tuple[tuple[str, int], ...] | None:
        """Returns the regimes of an operation: (algorithm, first message size in bytes), ascending.

        None: the engine does not report its algorithms, or it has only one.
        """
        if device.type not in self.native or self.size == 1:
            return None
        backend: Any = self.groups[0]._get_backend(device)
        return tuple((name, first) for name, first, _ in backend.regimes(operation))

    def broadcast_object(self, value: T, *, root: int = 0) -> T:
        """Returns rank `root`'s picklable `value` on every rank; blocks, for set-up only."""
        box: list[T] = [value]
        dist.broadcast_object_list(box, src=_global_rank(self, root), group=self.groups[0])
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Returns every rank's picklable `value`, in rank order, on every rank; blocks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.groups[0])
        return values

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        dist.barrier(group=self.groups[0])

    def _work(
        self, name: str, handle: Any, channel: int, queue: object, *tensors: torch.Tensor
    ) -> Work:
        count = super()._work if self._parent is None else self._parent._work
        return count(name, handle, channel, queue, *tensors)

    def close(self) -> None:
        """Releases the process groups; no call is possible afterwards."""
        if self._parent is not None:
            for group in self.groups:
                dist.destroy_process_group(group)
        self.groups.clear()
        self._backends = ()

    def _queue(self, channel: int, priority: int, tensor: torch.Tensor) -> tuple[int, int]:
        if not self.groups:
            raise UserError("this communicator is closed: shutdown() has left the job; call init()")
        if not 0 <= channel < len(self.groups):
            raise UserError(
                f"channel {channel} does not exist: allowed are 0..{len(self.groups) - 1}; "
                "ensure_channels() adds more"
            )
        if priority and tensor.device.type not in self.native:
            raise UserError(f"backend {self.backend} has no priorities; use priority=0")
        return channel, priority

    def _wakes(self, tensor: torch.Tensor) -> bool:
        if not self._more_follow or tensor.nbytes > HELD_BYTES:
            return True
        self._held += 1
        return self._held % HELD == 0

    def _summand(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        # The division comes before the sum, as in DDP, so that the sum of half-precision gradients
        # overflows no sooner than the gradient itself.
        if op != "mean":
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise UserError(
                f"op 'mean' needs a floating-point tensor, got {tensor.dtype}; use 'sum'"
            )
        if self._backends and tensor.is_cpu:
            comm_core.divide(tensor, self.size)
            return tensor
        return tensor.div_(self.size) if self.size > 1 else tensor

    def _start(
        self, queue: tuple[int, int], call: Callable[..., Any], *tensors: torch.Tensor, **extra: Any
    ) -> Work:
        """Starts `call` on `tensors`: the output (if there is a separate one) and the input."""
        channel, priority = queue
        group = self.groups[channel]
        if priority:
            with comm_core.priority(priority):
                handle = call(*tensors, group=group, async_op=True, **extra)
        else:
            handle = call(*tensors, group=group, async_op=True, **extra)
        return self._work(call.__name__, handle, channel, group, *tensors)


def _global_rank(communicator: Communicator, root: int) -> int:
    if not 0 <= root < communicator.size:
        raise UserError(f"root: must be a rank in 0..{communicator.size - 1}, got {root}")
    return dist.get_global_rank(communicator.groups[0], root)


class Batch:
    """Averages over all ranks that start one by one and are awaited together.

    On the comm core, a batch costs less than one `Work` per average.
    """

    def __init__(self, communicator: Communicator, channel: int = 0, priority: int = 0) -> None:
        communicator._queue(channel, priority, torch.empty(0))
        self._communicator, self._channel, self._priority = communicator, channel, priority
        self._core: Any = None
        if communicator._backends:
            self._core = comm_core.Batch(communicator._backends[channel], priority)
        self._works: list[Work] = []

    def start(self, tensor: torch.Tensor) -> None:
        """Starts to average `tensor` (dense, any shape) in place."""
        communicator = self._communicator
        plain = tensor.is_cpu and tensor.is_contiguous() and communicator._log is None
        if self._core is None or not plain or tensor.is_complex():
            queue = {"channel": self._channel, "priority": self._priority}
            self._works.append(communicator.all_reduce(tensor, op="mean", **queue))
            return
        with communicator._counting:
            communicator.bytes_sent += tensor.nbytes
        self._core.start(communicator._summand(tensor, "mean"), communicator._wakes(tensor))

    def wait(self) -> None:
        """Blocks until all averages have ended, as `Work.wait` does; the batch is then empty."""
        if self._core is not None and self._core.done():  # then the wait holds nothing up
            self._core.wait()
        elif self._core is not None:
            began_s = self._communicator.clock()
            self._core.wait()
            self._communicator.held_up(began_s)
        while self._works:
            self._works.pop(0).wait()

    def done(self) -> bool:
        """Returns True once all averages have ended; never blocks."""
        ended = self._core is None or self._core.done()
        return ended and all(work.done() for work in self._works)


def all_reduce(
    tensor: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    options: Any,
    backend: Any,
    async_op: bool,
) -> Any:
    """Starts torch's all-reduce without the slow checks of torch's function of this name.

    Args:
        backend: the group's backend for the tensor, which leaves out torch's dispatcher, too; None
            uses `group`.
    """
    if backend is not None:
        return backend.allreduce([tensor], options)
    if tensor.is_complex():
        return dist.all_reduce(tensor, group=group, op=options.reduceOp, async_op=async_op)
    return group.allreduce([tensor], options)


@functools.cache
def _all_reduce_options(op: Op, wakes: bool) -> Any:
    options: Any = dist.AllreduceOptions()
    options.asyncOp = wakes
    options.reduceOp = _reduce_op(op)
    return options


@functools.cache
def _renamed(former: str, name: str) -> Callable[..., Any]:
    """Returns the collective `name` of torch 2.13, or of older versions under its `former` name."""
    collective: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, former)
    return collective


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D view of a dense tensor in memory order (so channels_last needs no copy).

    Raises:
        UserError: the tensor is sparse, or has gaps or overlaps in memory.
    """
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
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


def mark(marks: torch.Tensor, present: Sequence[bool]) -> torch.Tensor:
    """Sets `marks` `[len(present)]` to 1 or 0 and returns it; does not wait for a GPU."""
    if all(present):
        return marks.fill_(1)
    host = torch.tensor(present, dtype=marks.dtype, pin_memory=marks.is_cuda)
    return marks.copy_(host, non_blocking=True)


@functools.cache
def _reduce_op(op: Op) -> Any:
    kinds = dist.ReduceOp
    ops = {"mean": kinds.SUM, "sum": kinds.SUM, "min": kinds.MIN, "max": kinds.MAX}
    return one_of("op", op, ops)


class SubCommunicator(Communicator):
    """Communicator of some ranks of a parent; bytes and waits are counted on the parent."""

    _parent: Communicator

    def __init__(self, parent: Communicator, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._parent = parent
        self.clock, self.pause = parent.clock, parent.pause
        self.burst_bytes, self.wire_bytes_per_s = parent.burst_bytes, parent.wire_bytes_per_s
        self.time_scale = parent.time_scale


def apart(parent: Communicator) -> Communicator:
    """Returns a communicator of the same ranks with a queue in which nothing else starts.

    For transfers that a backend's thread starts: this may be at other moments on each rank, so
    other transfers would come between them. Bytes and waits are counted on the parent. Collective.
    """
    ranks, queue = dist.get_process_group_ranks(parent.groups[0]), copy.copy(parent)
    queue.groups, queue._parent = [dist.new_group(ranks, timeout=parent.timeout)], parent
    queue._more_follow = False
    queue.ensure_channels(1)
    return queue


def sub_communicators(
    parent: Communicator, members: Iterable[Sequence[int]]
) -> dict[tuple[int, ...], SubCommunicator]:
    """Makes a communicator per list of ranks; returns those that contain this rank, by ranks.

    All ranks of `parent` must call it, with the same lists in the same order.
    """
    parent_ranks = dist.get_process_group_ranks(parent.groups[0])
    result: dict[tuple[int, ...], SubCommunicator] = {}
    for ranks in dict.fromkeys(tuple(ranks) for ranks in members):
        group = dist.new_group([parent_ranks[rank] for rank in ranks], timeout=parent.timeout)
        if parent.rank in ranks:
            result[ranks] = SubCommunicator(parent, group)
    return result
