"""A send and a receive as one operation under way."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """Sends `send` to a rank that sends as much into `recv`; like a work of torch.distributed.

    Args:
        peer: its rank in the whole job.
    """

    def __init__(
        self, send: torch.Tensor, recv: torch.Tensor, peer: int, group: dist.ProcessGroup
    ) -> None:
        self._tensors = send, recv
        self._ended: set[int] = set()  # places in the list of works
        if recv.is_cuda:
            # NCCL makes progress on a send only beside the receive that its peer waits for.
            ops = [dist.P2POp(dist.irecv, recv, peer, group)]
            ops.append(dist.P2POp(dist.isend, send, peer, group))
            self._works: list[Any] = dist.batch_isend_irecv(ops)
        else:
            self._works = [dist.irecv(recv, peer, group), dist.isend(send, peer, group)]

    def wait(self, timeout: timedelta | None = None) -> None:
        """Blocks until both have ended (CUDA: makes the current stream wait)."""
        for place, work in enumerate(self._works):
            if place in self._ended:
                continue  # Gloo's messages can be waited for only once
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
            if not self._tensors[0].is_cuda:  # there each stream that asks must wait
                self._ended.add(place)

    def is_completed(self) -> bool:
        """True once both have ended."""
        works = enumerate(self._works)
        return all(place in self._ended or work.is_completed() for place, work in works)

    def get_future(self) -> torch.futures.Future:
        """Completes with both; Gloo has none for messages and raises."""
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def times(self) -> Any:
        """From the first one's start to the last one's end, where the backend takes times."""
        times = [work.times() for work in self._works]
        return SimpleNamespace(
            enqueued_s=min(t.enqueued_s for t in times),
            started_s=min(t.started_s for t in times),
            finished_s=max(t.finished_s for t in times),
        )
