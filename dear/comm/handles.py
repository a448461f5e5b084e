"""Handles for transfers that are not collectives: a send/receive pair, and a logged external one.

`dear.comm.communicator.Work` accepts an `Exchange` in place of torch's work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dear.errors import UserError
from dear.lazy import dist, torch


@dataclass(frozen=True, kw_only=True)
class WorkTimes:
    """Times at which a collective was queued, could start, and ended, in seconds on `clock`."""

    enqueued_s: float
    started_s: float
    """Not before the end of the channel's preceding collective. A backend that runs several at a
    time (Gloo: two) may have started earlier."""
    finished_s: float


class DeviceClock:
    """Times of GPU transfers on the host's clock.

    NCCL's futures complete when a transfer is queued, so they cannot tell its end. A separate
    stream waits for each transfer and then records an event, which gives the end. An event on the
    stream that made the input gives the earliest start.

    Args:
        clock: clock of the host, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._aside = torch.cuda.Stream()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_s = clock()
        self._last: dict[int, torch.cuda.Event] = {}
        """Event after the last transfer of each channel."""

    def follow(self, handle: Any, channel: int, enqueued_s: float) -> Callable[[], WorkTimes]:
        """Starts to time a transfer that was just queued; returns a function for its times.

        That function waits for the end of the transfer.
        """
        ready = torch.cuda.Event(enable_timing=True)
        ready.record()
        with torch.cuda.stream(self._aside):
            handle.wait()
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
        before, self._last[channel] = self._last.get(channel), ended

        def times() -> WorkTimes:
            ended.synchronize()
            starts_s = [self._at_s(event) for event in (ready, before) if event is not None]
            started_s = max(enqueued_s, *starts_s)
            return WorkTimes(
                enqueued_s=enqueued_s, started_s=started_s, finished_s=self._at_s(ended)
            )

        return times

    def _at_s(self, event: torch.cuda.Event) -> float:
        return self._origin_s + float(self._origin.elapsed_time(event)) / 1e3


class Exchange:
    """A send of `send` to rank `peer` of the job and a receive of `recv` from it.

    It has the methods of torch's works, but no times.
    """

    def __init__(
        self, send: torch.Tensor, recv: torch.Tensor, peer: int, group: dist.ProcessGroup
    ) -> None:
        self._tensors = send, recv
        self._works: list[Any] = []
        self._ended: set[Any] = set()
        """Works that were waited for; empty on CUDA, where each waiting stream must wait."""
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

    def is_completed(self) -> bool:
        """Returns True once send and receive have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
        """Returns a future that completes with both; raises on Gloo, whose messages have none."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Noted:
    """A transfer logged by `Communicator.note`; like a work that only has times."""

    def __init__(self, nbytes: int, enqueued_s: float) -> None:
        self.nbytes, self._enqueued_s = nbytes, enqueued_s
        self.finished_s: float | None = None

    def times(self) -> WorkTimes:
        """Returns its times; raises `UserError` until the transfer has been waited for."""
        if self.finished_s is None:
            raise UserError("no times: the transfer has not been waited for yet")
        began_s = self._enqueued_s
        return WorkTimes(enqueued_s=began_s, started_s=began_s, finished_s=self.finished_s)
