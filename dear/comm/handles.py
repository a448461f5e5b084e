"""Handles for transfers that are not collectives: an exchange of two ranks, and a logged transfer.

`dear.comm.work.Work` accepts an `Exchange` in place of torch's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dear.errors import UserError
from dear.lazy import dist, torch


@dataclass(frozen=True, kw_only=True)
class WorkTimes:
    """Times of a collective in seconds on `Communicator.clock`: queued, able to start, ended."""

    enqueued_s: float
    started_s: float
    """Start, assumed not before the end of the channel's previous collective. If a backend runs
    several at a time (Gloo runs two), the true start may be earlier."""
    finished_s: float


class DeviceClock:
    """Times of a GPU's streams on the host's clock.

    NCCL's futures complete when a transfer is queued, so they do not tell its end. Each queue of
    transfers therefore has a separate stream, which waits for each transfer and then records an
    event. An event on the stream that made the input gives the earliest start.

    Args:
        clock: clock of the host, in seconds.
        device: the GPU.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self._device = device
        self._origin = self._event()
        self._origin.synchronize()
        self._origin_s = clock()
        self._aside: dict[object, torch.cuda.Stream] = {}
        """Stream that waits for the transfers of each queue."""
        self._last: dict[object, torch.cuda.Event] = {}
        """Event after the last transfer of each queue."""

    def mark(self) -> Callable[[], float]:
        """Records an event on the current stream. Returns a function that waits for the event and
        returns its time in seconds."""
        event = self._event()

        def passed_s() -> float:
            event.synchronize()
            return self.at_s(event)

        return passed_s

    def follow(
        self, handle: Any, queue: object, enqueued_s: float, tensors: Sequence[torch.Tensor]
    ) -> Callable[[], WorkTimes]:
        """Times a transfer of `tensors` that was just queued; transfers of a queue run in order.

        Returns a function that waits for the end of the transfer and returns its times.
        """
        ready = self._event()
        aside = self._aside.get(queue)
        if aside is None:
            aside = self._aside[queue] = torch.cuda.Stream(self._device)
        for tensor in tensors:
            # torch holds the tensors only until the first wait for the transfer, which is below.
            tensor.record_stream(aside)
        with torch.cuda.stream(aside):
            handle.wait()
            ended = self._event()
        before, self._last[queue] = self._last.get(queue), ended

        def times() -> WorkTimes:
            ended.synchronize()
            starts_s = [self.at_s(event) for event in (ready, before) if event is not None]
            started_s = max(enqueued_s, *starts_s)
            return WorkTimes(
                enqueued_s=enqueued_s, started_s=started_s, finished_s=self.at_s(ended)
            )

        return times

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # The current device of a thread may differ from the tensors' device.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def at_s(self, event: torch.cuda.Event) -> float:
        """Returns the time in seconds of an event that has passed."""
        return self._origin_s + float(self._origin.elapsed_time(event)) / 1e3


class Exchange:
    """Send of `send` to rank `peer` of the job, and receive of `recv` from that rank.

    Has the methods of torch's works except for times.

    Args:
        staged: True sends through host memory. Gloo and MPI need this for CUDA tensors, since they
            would use a GPU's addresses as the host's.
    """

    def __init__(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        peer: int,
        group: dist.ProcessGroup,
        staged: bool = False,
    ) -> None:
        self._works: list[Any] = []
        self._ended: set[Any] = set()
        """Works that were waited for; stays empty if each stream must wait by itself (CUDA)."""
        self._target = recv if staged else None
        if staged:
            send, recv = send.cpu(), torch.empty_like(recv, device="cpu")
        self._tensors = send, recv
        if recv.is_cuda:
            # NCCL makes progress on a send only with a matching receive in the same group call.
            ops = [dist.P2POp(dist.irecv, recv, peer, group)]
            ops.append(dist.P2POp(dist.isend, send, peer, group))
            self._works += dist.batch_isend_irecv(ops)
        else:
            self._works += [dist.irecv(recv, peer, group), dist.isend(send, peer, group)]

    def wait(self) -> None:
        """Blocks until send and receive have ended (CUDA: the current stream waits)."""
        for work in self._works:
            if work not in self._ended:
                work.wait()
                if not self._tensors[0].is_cuda:
                    self._ended.add(work)  # Gloo allows only one wait per message
        if self._target is not None:
            self._target.copy_(self._tensors[1])  # from pageable memory: ends before it returns
            self._target = None

    def is_completed(self) -> bool:
        """Returns True once send and receive have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
        """Returns a future that completes with both; raises on Gloo, whose messages have none."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Noted:
    """Transfer that was logged by `Communicator.note`; of a work's methods it has only `times`."""

    def __init__(self, nbytes: int, enqueued_s: float) -> None:
        self.nbytes, self._enqueued_s = nbytes, enqueued_s
        self.finished_s: float | None = None

    def times(self) -> WorkTimes:
        """Returns the times; raises `UserError` until the transfer has been waited for."""
        if self.finished_s is None:
            raise UserError("no times: the transfer has not been waited for yet")
        began_s = self._enqueued_s
        return WorkTimes(enqueued_s=began_s, started_s=began_s, finished_s=self.finished_s)
