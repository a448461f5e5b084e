"""PowerSGD: matrices of gradients as products of two narrow ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dear.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dear.comm.communicator import Communicator, Work


class PowerSgd:
    """A communication hook for DDP (Vogels et al. 2019, arXiv 1905.13727), with error feedback.

    A matrix M becomes P = M Q, whose mean is made orthogonal, and Q = M' P, whose mean starts the
    next pass; P Q' stands for the mean of M. What is too small for that travels as it is. The first
    halves overlap the backward pass, the second ones follow it, bucket by bucket: so all ranks
    start them in one order, and no collective waits in another one's callback, which torch's own
    hook does and which only NCCL bears.

    Args:
        rank: columns of P and Q.
        start: passes that are sent in full before; DDP makes its buckets anew after the first.
    """

    def __init__(self, communicator: Communicator, rank: int, start: int) -> None:
        self._communicator = communicator
        self._rank = rank
        self._start = start
        self._passes = 0
        self._buckets: dict[int, _Bucket] = {}
        self._running: list[tuple[_Bucket, torch.futures.Future, Tensor]] = []

    def carry(self, bucket: Any) -> torch.futures.Future:
        """A future of the bucket's buffer with what stands for the mean over ranks."""
        buffer, last = bucket.buffer(), bucket.is_last()
        if self._passes < self._start:
            self._passes += last
            work = self._communicator.all_reduce(buffer, op="mean")
            return work.future().then(lambda _: buffer)
        if bucket.index() not in self._buckets:
            self._buckets[bucket.index()] = _Bucket(bucket.gradients(), self._rank)
        known = self._buckets[bucket.index()]
        known.send_left(bucket.gradients(), self._communicator)
        cuda = buffer.device.type == "cuda"
        future = torch.futures.Future(devices=[buffer.device] if cuda else None)
        self._running.append((known, future, buffer))
        if last:
            self._end()
        return future

    def _end(self) -> None:
        for bucket, _, _ in self._running:
            bucket.send_right(self._communicator)
        for bucket, future, buffer in self._running:
            bucket.finish()
            future.set_result(buffer)
        self._running.clear()


class _Bucket:
    """The factors of the matrices of one bucket, and what they have not carried yet."""

    def __init__(self, gradients: list[Tensor], rank: int) -> None:
        self._rank = rank
        self._large = [_worth(gradient, rank) for gradient in gradients]
        # The same on all ranks.
        generator = torch.Generator().manual_seed(0)
        self._right, self._errors = [], []
        for matrix in self._matrices(gradients):
            start = torch.randn(matrix.shape[1], rank, generator=generator)
            self._right.append(start.to(matrix.device, matrix.dtype))
            self._errors.append(torch.zeros_like(matrix))
        self._left: list[Tensor] = []
        self._work: Work | None = None

    def send_left(self, gradients: list[Tensor], communicator: Communicator) -> None:
        self._found = self._matrices(gradients)
        self._small = [g for g, large in zip(gradients, self._large, strict=True) if not large]
        self._whole = [m + e for m, e in zip(self._found, self._errors, strict=True)]
        left = [m @ q for m, q in zip(self._whole, self._right, strict=True)]
        self._sent = _joined(left + self._small)
        self._work = communicator.all_reduce(self._sent, op="mean")

    def send_right(self, communicator: Communicator) -> None:
        self._work.wait()
        shapes = [(matrix.shape[0], self._rank) for matrix in self._found]
        means = _split(self._sent, shapes + [gradient.shape for gradient in self._small])
        for gradient, mean in zip(self._small, means[len(shapes) :], strict=True):
            gradient.copy_(mean)
        self._left = [_orthogonal(mean) for mean in means[: len(shapes)]]
        right = [m.t() @ p for m, p in zip(self._whole, self._left, strict=True)]
        self._sent = _joined(right) if right else self._sent.new_zeros(0)
        self._work = communicator.all_reduce(self._sent, op="mean") if right else None

    def finish(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._right = [
            mean.clone() for mean in _split(self._sent, [right.shape for right in self._right])
        ]
        for i, gradient in enumerate(self._found):
            stands = self._left[i] @ self._right[i].t()
            error = self._whole[i] - stands
            # A gradient that has overflowed must not stay for ever.
            self._errors[i] = torch.where(torch.isfinite(error).all(), error, self._errors[i])
            gradient.copy_(stands)
            if not torch.isfinite(self._right[i]).all():
                self._right[i] = torch.ones_like(self._right[i])
        self._whole.clear()

    def _matrices(self, gradients: list[Tensor]) -> list[Tensor]:
        pairs = zip(gradients, self._large, strict=True)
        return [gradient.view(gradient.shape[0], -1) for gradient, large in pairs if large]


def _worth(gradient: Tensor, rank: int) -> bool:
    """True if the factors have less than half as many elements."""
    if gradient.dim() < 2 or not gradient.numel() or not gradient.is_contiguous():
        return False
    rows = gradient.shape[0]
    return 2 * rank * (rows + gradient.numel() // rows) < gradient.numel()


def _orthogonal(matrix: Tensor) -> Tensor:
    wide = matrix.dtype if matrix.dtype == torch.float64 else torch.float32
    return torch.linalg.qr(matrix.to(wide)).Q.to(matrix.dtype)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: Tensor, shapes: list[Any]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
