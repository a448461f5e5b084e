"""What stands for a transfer that is no collective: a message each way, a note of another one.

`dear.comm.communicator.Work` takes them as it takes torch's works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dear.errors import UserError
from dear.lazy import dist, torch


@dataclass(frozen=True, kw_only=True)
class WorkTimes:
    """When a collective was queued, could start, and ended; seconds on the communicator's clock."""

    enqueued_s: float
    started_s: float
    """Not before the last collective of the channel that had ended when this one ended; a backend
    that runs several at a time (Gloo: two) may really have begun earlier."""
    finished_s: float


class DeviceClock:
    """When a GPU has ended transfers, on the clock of the host.

    NCCL's futures complete when a transfer is queued. So a stream of its own waits for each, and an
    event behind that tells when it had ended; another one, on the stream that has made the input,
    when it could begin.

    Args:
        clock: of the host, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._aside = torch.cuda.Stream()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_s = clock()
        self._last: dict[int, Any] = {}
        """By channel, the event behind the last transfer."""

    def follow(self, handle: Any, channel: int, enqueued_s: float) -> Callable[[], WorkTimes]:
        """To be called when the transfer has just been queued; what is returned tells its times
        once it has ended, and waits for that."""
        ready = torch.cuda.Event(enable_timing=True)
        ready.record()
        with torch.cuda.stream(self._aside):
            handle.wait()
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
        before, self._last[channel] = self._last.get(channel), ended

        def times() -> WorkTimes:
            ended.synchronize()
            could = [self._at_s(event) for event in (ready, before) if event is not None]
            started_s = max(enqueued_s, *could)
            return WorkTimes(
                enqueued_s=enqueued_s, started_s=started_s, finished_s=self._at_s(ended)
            )

        return times

    def _at_s(self, event: Any) -> float:
        return self._origin_s + self._origin.elapsed_time(event) / 1e3


class Exchange:
    """Sends `send` to rank `peer` of the job, which sends as much; like a work of torch's,
    but without times."""

    def __init__(
        self, send: torch.Tensor, recv: torch.Tensor, peer: int, group: dist.ProcessGroup
    ) -> None:
        self._tensors = send, recv
        self._works: list[Any] = []
        self._ended: set[Any] = set()
        """Those that have been waited for; CUDA: none, as each stream that asks must wait."""
        if recv.is_cuda:
            # NCCL makes progress on a send only beside the receive that its peer waits for.
            ops = [dist.P2POp(dist.irecv, recv, peer, group)]
            ops.append(dist.P2POp(dist.isend, send, peer, group))
            self._works += dist.batch_isend_irecv(ops)
        else:
            self._works += [dist.irecv(recv, peer, group), dist.isend(send, peer, group)]

    def wait(self) -> None:
        """Blocks until both have ended (CUDA: makes the current stream wait)."""
        for work in self._works:
            if work not in self._ended:
                work.wait()
                if not self._tensors[0].is_cuda:
                    self._ended.add(work)  # Gloo's messages can be waited for only once

    def is_completed(self) -> bool:
        """True once both have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future:
        """Completes with both; Gloo has none for messages and raises."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Noted:
    """For `Communicator.note`: like a work that may be asked for its times only."""

    def __init__(self, nbytes: int, enqueued_s: float) -> None:
        self.nbytes, self._enqueued_s = nbytes, enqueued_s
        self.finished_s: float | None = None

    def times(self) -> WorkTimes:
        """Raises `UserError` as long as nobody has waited for it."""
        if self.finished_s is None:
            raise UserError("no times: nobody has waited for it yet")
        began = self._enqueued_s
        return WorkTimes(enqueued_s=began, started_s=began, finished_s=self.finished_s)
