"""Thread that finds out, once per cycle, which collectives all ranks have requested, and runs them.

A request of a collective is this rank's part in it. Ranks may make requests in any order.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import torch

from dear.buckets.carriers import SparseSum, gather_entries
from dear.buckets.grouping import by_buffer
from dear.comm.communicator import Communicator
from dear.comm.work import Work
from dear.errors import UserError

LEAST_PAUSE_S = 0.001
ROOT = 0

Key = tuple[int, int, str]

COO_ALL_REDUCE, ALL_REDUCE, BROADCAST = 3, 2, 1
"""Priority of operations that are ready together: by this number, then by id, highest first."""

NAMES = {COO_ALL_REDUCE: "coo_all_reduce", ALL_REDUCE: "all_reduce", BROADCAST: "broad_cast"}


class Request:
    """One rank's request of one collective: a copy of its tensor, and later the result.

    Requests of different ranks belong together if their `key` is equal (number of the operation, id
    and form of the call).

    Raises:
        UserError: the id is not a whole number, or the tensor does not have the operation's layout.
    """

    def __init__(self, key: Key, tensor: torch.Tensor, clock: Callable[[], float]) -> None:
        kind, number, form = key
        call = NAMES[kind] + form
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise UserError(f"{call}: the id must be a whole number from 0 up, got {number!r}")
        if not torch.is_tensor(tensor):
            raise UserError(f"{call} needs a tensor, got {type(tensor).__name__}")
        sparse = kind == COO_ALL_REDUCE
        if tensor.layout is not (torch.sparse_coo if sparse else torch.strided):
            wanted = "a sparse COO tensor" if sparse else "a dense tensor"
            raise UserError(f"{call} needs {wanted}, got layout {tensor.layout}")
        self.name = f"{call}(id {number})"
        """Name for messages."""
        self.key = key
        self._clock = clock
        plain = tensor.detach()
        dense = {} if sparse else {"memory_format": torch.contiguous_format}
        self.tensor = (plain.coalesce() if sparse else plain).clone(**dense)
        self.written = torch.cuda.Event() if plain.is_cuda else None
        if self.written is not None:
            self.written.record()
        self._answer: futures.Future[torch.Tensor] = futures.Future()
        self._read: Any = None
        self.missing: list[int] = []
        """Ranks that have not requested this collective, as far as is known."""
        self.moments: list[tuple[str, float]] = [("StayInQueue", clock())]
        """Phases of the request with their start times on the communicator's clock."""

    @property
    def signature(self) -> tuple[str, tuple[int, ...], str, int]:
        """Properties that must be equal on all ranks."""
        tensor = self.tensor
        places = tensor.sparse_dim() if tensor.is_sparse else 0
        return str(tensor.dtype), tuple(tensor.shape), tensor.device.type, places

    def enter(self, phase: str) -> None:
        """Notes that a phase begins now."""
        self.moments.append((phase, self._clock()))

    def finish(self, result: torch.Tensor) -> None:
        """Sets the result; on CUDA, it is complete once the current stream gets here."""
        if result.is_cuda:
            self._read = torch.cuda.Event()
            self._read.record()
        self.enter("WaitForFetch")
        self._answer.set_result(result)

    def fail(self, error: Exception) -> None:
        """Sets an error in place of the result, if there is no result yet."""
        if not self._answer.done():
            self._answer.set_exception(error)

    def wait(self, timeout_s: float) -> torch.Tensor:
        """Waits for the result and returns it, the caller's own tensor; raises the error of `fail`.

        Raises RuntimeError after `timeout_s` seconds, with the ranks that lack such a request.
        """
        if not futures.wait([self._answer], timeout_s).done:
            asked = f"; ranks {self.missing} have not asked for it" if self.missing else ""
            raise RuntimeError(f"{self.name}: no result within {timeout_s:g} s{asked}")
        result = self._answer.result()
        if self._read is not None:
            self._read.wait()
            held = [result._indices(), result._values()] if result.is_sparse else [result]
            for part in held:
                part.record_stream(torch.cuda.current_stream(part.device))
        self.enter("Fetched")
        return result


class Execution:
    """Runs batches of requests on one thread; all ranks give the same batches.

    Args:
        communicator: for the collectives; nothing else uses it.
        broadcasts: the same for broadcasts; may be `communicator`.
        buffer_bytes: largest buffer in which all-reduces of one dtype travel together. A tensor of
            this size or larger travels alone.
    """

    def __init__(
        self, communicator: Communicator, broadcasts: Communicator, buffer_bytes: float
    ) -> None:
        self._communicator, self._broadcasts = communicator, broadcasts
        self._buffer_bytes = buffer_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, batch: Sequence[Request]) -> None:
        """Ends each request of `batch` with its result, or with the error of its group."""
        running: list[tuple[list[Request], Work | None, Callable[[], None]]] = []
        for group in self._groups(batch):
            with self._working_on(group):
                running.append((group, *self._start(group)))
        for group, work, finish in running:
            with self._working_on(group):
                if work is not None:
                    work.wait()
                finish()

    def _groups(self, batch: Sequence[Request]) -> list[list[Request]]:
        groups: list[list[Request]] = []
        fusible: dict[tuple[object, ...], list[Request]] = {}
        for request in batch:
            if request.key[0] == ALL_REDUCE:
                kind = (request.tensor.dtype, request.tensor.device)
                fusible.setdefault(kind, []).append(request)
            else:
                groups.append([request])
        for alike in fusible.values():
            sizes = [request.tensor.nbytes for request in alike]
            groups += [[alike[i] for i in g] for g in by_buffer(sizes, self._buffer_bytes)]
        return sorted(groups, key=lambda group: group[0].key, reverse=True)

    def _start(self, group: list[Request]) -> tuple[Work | None, Callable[[], None]]:
        kind, first = group[0].key[0], group[0]
        flat = first.tensor
        if kind == COO_ALL_REDUCE:
            first.enter("DoAllReduce")
            (entries,) = gather_entries([flat], flat.device, self._communicator)
            total = SparseSum(flat, flat, entries, self._communicator)

            def finish_sum() -> None:
                result = total.result()
                assert result is not None  # every rank gave a tensor
                first.finish(result)

            return total.work, finish_sum
        if kind == BROADCAST:
            first.enter("DoBroadCast")
            work = self._broadcasts.broadcast(flat, root=ROOT)
        else:
            for request in group:
                request.enter("CopyToMidWay")
            if len(group) > 1:
                flat = torch.cat([request.tensor.view(-1) for request in group])
            for request in group:
                request.enter("DoAllReduce")
            work = self._communicator.all_reduce(flat, op="sum")

        def finish() -> None:
            if len(group) > 1:
                sizes = [request.tensor.numel() for request in group]
                for request, piece in zip(group, flat.split(sizes), strict=True):
                    request.tensor.view(-1).copy_(piece)
            for request in group:
                request.finish(request.tensor)

        return work, finish

    @contextlib.contextmanager
    def _working_on(self, group: list[Request]) -> Iterator[None]:
        """Gives errors to the requests of the group. On CUDA, uses a stream of this thread, after
        the operations that wrote the tensors."""
        device = group[0].tensor.device
        try:
            if device.type != "cuda":
                yield
                return
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for request in group:
                    assert request.written is not None  # the tensor is on a GPU
                    stream.wait_event(request.written)
                    if not request.tensor.is_sparse:
                        request.tensor.record_stream(stream)
                yield
        except Exception as error:  # each caller raises it from its own `wait`
            for request in group:
                request.fail(error)


class Cycles:
    """Lets ranks request collectives in any order.

    In each cycle the ranks exchange lists of their requests. Requests that all ranks have made run,
    by operation and id, highest first. A rank without any request does not take part in the
    exchange, and the others wait for it. So nothing is sent while no rank has a request.

    Args:
        control: for the exchange of lists; nothing else uses it.
        cycle_s: least time between two cycles in seconds, in which requests gather.
    """

    def __init__(self, control: Communicator, execution: Execution, cycle_s: float) -> None:
        self._control = control
        self._execution = execution
        self._cycle_s = cycle_s
        self._changed = threading.Condition()
        self._arriving: deque[Request] = deque()
        self._closing = False
        self._dead: Exception | None = None
        self.error: Exception | None = None
        """Error that ended the thread, if `close` did not end it."""
        self._waiting: dict[Key, deque[Request]] = {}
        self._thread = threading.Thread(target=self._run, name="dadt-cycles", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Adds a request. It runs when all ranks have submitted one with the same key.

        Raises `UserError` after `close`, and the error that ended the thread, if there was one.
        """
        with self._changed:
            if self._dead is not None:
                raise self._dead
            if self._closing:
                raise UserError(f"{request.name}: called after shutdown(); call dadt.init() again")
            self._arriving.append(request)
            self._changed.notify()

    def close(self) -> None:
        """Waits until every rank has called it; requests that some rank did not make fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._cycle():
                pass
            reason: Exception = UserError("not all ranks asked for it before shutdown()")
        except Exception as error:  # `wait` of each request raises it, and `close`
            self.error = reason = error
        with self._changed:
            self._dead = reason
            self._collect()
        for requests in self._waiting.values():
            for request in requests:
                request.fail(reason)

    def _cycle(self) -> bool:
        """Exchanges lists once and runs what is ready; returns False after the last cycle."""
        with self._changed:
            while not (self._arriving or self._waiting or self._closing):
                self._changed.wait()
            self._collect()
            closing = self._closing
        began = self._control.clock()
        mine = {key: requests[0].signature for key, requests in self._waiting.items()}
        everybody = self._control.gather_objects((mine, closing))
        lists = [signatures for signatures, _ in everybody]
        ready = sorted(set.intersection(*map(set, lists)), reverse=True)
        batch = [request for key in ready for request in self._accepted(key, lists)]
        self._execution.run(batch)
        self._fail_lost(everybody)
        if not ready and all(left for _, left in everybody):
            return False
        self._pause(began, idle=not ready)
        return True

    def _collect(self) -> None:
        while self._arriving:
            request = self._arriving.popleft()
            request.enter("StayInWaitingRequestPool")
            self._waiting.setdefault(request.key, deque()).append(request)

    def _take(self, key: Key) -> Request:
        requests = self._waiting[key]
        request = requests.popleft()
        if not requests:
            del self._waiting[key]
        return request

    def _accepted(self, key: Key, lists: list[dict[Key, Any]]) -> list[Request]:
        """Returns the next request of `key`; fails it and returns [] if ranks' tensors differ."""
        request, first = self._take(key), lists[0][key]
        for rank, signatures in enumerate(lists):
            if signatures[key] != first:
                request.fail(
                    UserError(
                        f"{request.name}: rank 0 gave {_shown(first)}, but rank {rank} gave "
                        f"{_shown(signatures[key])}; all ranks must give the same kind of tensor"
                    )
                )
                return []
        return [request]

    def _fail_lost(self, everybody: list[tuple[dict[Key, Any], bool]]) -> None:
        """Fails the requests that a leaving rank has not made, since they can never run."""
        for key in list(self._waiting):
            request = self._waiting[key][0]
            request.missing = [r for r, (asked, _) in enumerate(everybody) if key not in asked]
            left = [r for r in request.missing if everybody[r][1]]
            if left:
                self._take(key).fail(
                    UserError(f"{request.name}: ranks {left} shut down without asking for it")
                )

    def _pause(self, began: float, *, idle: bool) -> None:
        """Waits for the rest of the cycle; if idle, first for a new request, at least briefly."""
        clock, ends = self._control.clock, began + self._cycle_s
        with self._changed:
            if idle and not (self._arriving or self._closing):
                self._changed.wait(max(ends - clock(), LEAST_PAUSE_S))
            self._changed.wait_for(lambda: self._closing, timeout=ends - clock())


def _shown(signature: tuple[str, tuple[int, ...], str, int]) -> str:
    dtype, shape, device, _ = signature
    return f"{dtype} {shape} on {device}"
