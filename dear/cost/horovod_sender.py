"""Times single all-reduces of Horovod in a running job."""

from __future__ import annotations

from collections.abc import Callable

from dear.comm.communicator import Communicator
from dear.lazy import torch


class HorovodSender:
    """Measures how long Horovod's thread takes to all-reduce one buffer.

    A caller would also wait for the next cycle to begin and for the ranks to agree, which takes as
    long as a small message. Therefore a small tensor (a mark) of another dtype precedes each buffer
    in the same cycle. Horovod cannot fuse the two, so its thread sends one after the other. The
    measured time runs from the end of the mark to the end of the buffer. In a few calls a cycle
    begins between the two. These take longer; the lower quartile of the times leaves them out.

    Args:
        send: starts an all-reduce of a tensor under a name, as for gradients; returns its handle.
        dtype: dtype in which gradients travel.
        poll_s: seconds between two checks whether an all-reduce has ended.
    """

    def __init__(
        self,
        communicator: Communicator,
        send: Callable[[torch.Tensor, str], int],
        *,
        name: str,
        fusion_bytes: float,
        dtype: torch.dtype,
        device: torch.device,
        poll_s: float,
    ) -> None:
        import horovod.torch as hvd

        self.name, self.fusion_bytes = name, fusion_bytes
        self._hvd, self._communicator, self._send = hvd, communicator, send
        self._dtype, self._device, self._poll_s = dtype, device, poll_s

    def timed(self, nbytes: int, tensors: int) -> Callable[[], float]:
        hvd = self._hvd
        count = nbytes // self._dtype.itemsize // tensors
        parts = [torch.zeros(count, dtype=self._dtype, device=self._device) for _ in range(tensors)]
        mark = torch.zeros(1, dtype=torch.int32, device=self._device)

        def timed() -> float:
            first = hvd.allreduce_async_(mark, op=hvd.Sum, name="sender.mark")
            rest = [self._send(part, f"sender.{index}") for index, part in enumerate(parts)]
            began_s = self._end_s(first)
            return max(self._end_s(handle) for handle in rest) - began_s

        return timed

    def _end_s(self, handle: int) -> float:
        while not self._hvd.poll(handle):
            self._communicator.pause(self._poll_s)
        ended_s = self._communicator.clock()
        self._hvd.synchronize(handle)
        return ended_s
