"""Communication hooks of DDP that average compressed buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.buckets.carriers import Carrier, make_carrier
from dear.buckets.compressors import CompressedOptions
from dear.comm.communicator import Communicator
from dear.comm.work import Work
from dear.errors import UserError
from dear.lazy import torch
from dear.training.hooks import Hooks, at_end_of_backward

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket, Reducer

    FutureTensor = torch.futures.Future[torch.Tensor]

UNFINISHED = (
    "ddp: the last backward pass ended with an error, or did not reach all parameters, so DDP "
    "cannot continue; call backward() once, on all that a forward pass returns (with "
    "find_unused_parameters=True if some parameters are not used), or use algorithm='wfbp'"
)
"""Error after a pass whose gradients are not all averages."""
FIRST = 2
"""Number of backward passes after which buckets are fixed; DDP rebuilds them after the first."""


class Passes:
    """Record of the backward passes in which DDP averages, and of gradients from other passes.

    After each forward pass of the model, DDP's reducer averages all gradients once. In later
    backward passes, or passes through parts of the model only, gradients are not averaged. If the
    script sets a gradient itself, DDP must still have averaged in a pass since the last step.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], reducer: Reducer, hooks: Hooks
    ) -> None:
        # The smallest comes first, since `stepped` keeps a reference to one gradient.
        self._params = sorted(params, key=torch.Tensor.numel)
        self._reducer = reducer
        self._armed = self._running = self._averaged = self._unsent = False
        self._last: tuple[torch.Tensor, int] | None = None
        self._nodes = {param: self._node(param) for param in params}
        """Nodes of the graph that have DDP's hooks."""
        self._strides = {param: param.stride() for param in params}
        self._moved: torch.nn.Parameter | None = None
        """Parameter whose gradient DDP did not see in this pass, or averages wrongly."""
        hooks.on_gradient(params, self._accumulated)

    def close(self) -> None:
        """Drops the reference to the reducer."""
        del self._reducer

    def arm(self) -> None:
        """Notes a forward pass of the model, after which DDP averages one backward pass."""
        self._armed, self._running = True, False

    @staticmethod
    def _node(param: torch.Tensor) -> torch.autograd.graph.Node:
        with torch.enable_grad():
            return torch.autograd.graph.get_gradient_edge(param).node

    def _accumulated(self, param: torch.nn.Parameter) -> None:
        # `.to()` and `set_()` give a parameter another node. DDP takes other strides for its own.
        node = torch._C._current_autograd_node()
        if node is not self._nodes[param] or param.stride() != self._strides[param]:
            self._moved = param
        if self._running:
            return
        self._running = True
        at_end_of_backward(self._ended)
        if self._armed:
            self._armed, self._averaged, self._unsent = False, True, False
        elif not self.unfinished():
            self._unsent = True

    def _ended(self) -> None:
        self._running = False
        param, self._moved = self._moved, None
        if param is not None:
            raise UserError(
                f"ddp no longer averages the gradient of a parameter of shape {tuple(param.shape)},"
                " because the model was moved or converted by .to() or the like, or because set_() "
                "was called on the parameter, as register_parametrization does; close() the "
                "optimizer before, and wrap again, or use another algorithm, such as allreduce"
            )

    def unfinished(self) -> bool:
        """Returns True if a pass left out some parameters, so that the reducer waits for them."""
        try:
            self._reducer._check_reducer_finalized()
        except RuntimeError:
            return True
        return False

    def check(self, stepping: bool = False) -> None:
        """Raises `UserError` if DDP has not averaged all gradients.

        Args:
            stepping: True if the optimizer is about to use the gradients.
        """
        if stepping and self.unfinished():
            raise UserError(UNFINISHED)
        alone = self._unsent
        if stepping and not self._averaged:
            alone = alone or not self._same()
        if alone and self._smallest() is not None:
            raise UserError(
                "ddp has not averaged all gradients: DDP averages only in the first backward pass "
                "after a call of model(...), outside no_sync(); call model(...) before the last "
                "backward pass, or use algorithm='allreduce', which averages in step()"
            )

    def stepped(self) -> None:
        """Notes the gradients at the end of a step; another step may use the same gradients."""
        self._averaged, self._last = False, self._smallest()

    def _same(self) -> bool:
        last, now = self._last, self._smallest()
        return last is not None and now is not None and last[0] is now[0] and last[1] == now[1]

    def _smallest(self) -> tuple[torch.Tensor, int] | None:
        grads = (param.grad for param in self._params)
        return next(((grad, grad._version) for grad in grads if grad is not None), None)


class BucketHook(ABC):
    """Communication hook of DDP; averages buckets without compression in the first passes."""

    start = FIRST

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.passes = 0

    def __call__(self, bucket: GradBucket) -> FutureTensor:
        """Returns a future of the bucket's buffer, which holds the mean over ranks once done."""
        buffer, dense = bucket.buffer(), self.passes < self.start
        self.passes += bucket.is_last()
        if dense:
            future = self.communicator.all_reduce(buffer, op="mean").future()
            return future.then(lambda _: buffer)
        return self.carry(bucket, buffer)

    @abstractmethod
    def carry(self, bucket: GradBucket, buffer: torch.Tensor) -> FutureTensor:
        """Returns a future of the bucket's buffer, which approximates the mean once done."""


class BucketPayloads(BucketHook):
    """Hook that all-gathers compressed payloads of buckets."""

    def __init__(self, communicator: Communicator, options: CompressedOptions) -> None:
        super().__init__(communicator)
        self._options = options
        self._carriers: dict[tuple[int, ...], Carrier] = {}

    def carry(self, bucket: GradBucket, buffer: torch.Tensor) -> FutureTensor:
        params = bucket.parameters()
        key = tuple(id(param) for param in params)
        if key not in self._carriers:
            sizes = [param.numel() for param in params]
            self._carriers[key] = make_carrier(self._options, self.communicator, buffer, sizes)
        carrier = self._carriers[key]
        work = carrier.send(buffer, [param.grad is not None for param in params])

        def received(_: object) -> torch.Tensor:
            carrier.receive(buffer)
            return buffer

        return work.future().then(received)


class PowerSgd(BucketHook):
    """PowerSGD hook (Vogels et al. 2019, arXiv 1905.13727), with error feedback.

    A gradient M, as a matrix, is approximated by P Q'. First P = M Q is averaged and made
    orthogonal. Then Q = M' P is averaged; it also starts the next pass. Small gradients are sent
    uncompressed. Messages with P overlap the backward pass. Messages with Q follow the pass, bucket
    by bucket, so that all ranks start them in the same order. No collective waits in the callback
    of another collective, as in torch's own hook, which only NCCL supports. All futures of a pass
    end with its last bucket.

    Args:
        rank: number of columns of P and Q.
        start: number of first passes without compression.
    """

    def __init__(self, communicator: Communicator, *, rank: int, start: int) -> None:
        super().__init__(communicator)
        self.start = start
        self._rank = rank
        self._buckets: dict[int, _Bucket] = {}
        self._running: list[tuple[_Bucket, FutureTensor, torch.Tensor]] = []

    def carry(self, bucket: GradBucket, buffer: torch.Tensor) -> FutureTensor:
        if bucket.index() not in self._buckets:
            self._buckets[bucket.index()] = _Bucket(bucket.gradients(), self._rank)
        known = self._buckets[bucket.index()]
        known.send_left(bucket.gradients(), self.communicator)
        cuda = buffer.device.type == "cuda"
        future: FutureTensor = torch.futures.Future(devices=[buffer.device] if cuda else None)
        self._running.append((known, future, buffer))
        if bucket.is_last():
            self._end()
        return future

    def _end(self) -> None:
        for bucket, _, _ in self._running:
            bucket.send_right(self.communicator)
        for bucket, future, buffer in self._running:
            bucket.finish()
            future.set_result(buffer)
        self._running.clear()


class _Bucket:
    """Factors P and Q of one bucket's matrices, and the errors of the approximation."""

    def __init__(self, gradients: list[torch.Tensor], rank: int) -> None:
        self._rank = rank
        self._large = [_worth(gradient, rank) for gradient in gradients]
        # The same on all ranks.
        generator = torch.Generator().manual_seed(0)
        self._right: list[torch.Tensor] = []
        self._errors: list[torch.Tensor] = []
        for matrix in self._matrices(gradients):
            start = torch.randn(matrix.shape[1], rank, generator=generator)
            self._right.append(start.to(matrix.device, matrix.dtype))
            self._errors.append(torch.zeros_like(matrix))
        self._left: list[torch.Tensor] = []
        self._work: Work | None = None

    def send_left(self, gradients: list[torch.Tensor], communicator: Communicator) -> None:
        self._present = self._matrices(gradients)
        self._small = [g for g, large in zip(gradients, self._large, strict=True) if not large]
        self._whole = [m + e for m, e in zip(self._present, self._errors, strict=True)]
        left = [m @ q for m, q in zip(self._whole, self._right, strict=True)]
        self._sent = _joined(left + self._small)
        self._work = communicator.all_reduce(self._sent, op="mean")

    def send_right(self, communicator: Communicator) -> None:
        assert self._work is not None, "send_left has started it"
        self._work.wait()
        shapes: list[tuple[int, ...]] = [(matrix.shape[0], self._rank) for matrix in self._present]
        means = _split(self._sent, [*shapes, *(gradient.shape for gradient in self._small)])
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
        for i, gradient in enumerate(self._present):
            approximation = self._left[i] @ self._right[i].t()
            error = self._whole[i] - approximation
            # A gradient that has overflowed must not stay for ever.
            self._errors[i] = torch.where(torch.isfinite(error).all(), error, self._errors[i])
            gradient.copy_(approximation)
            if not torch.isfinite(self._right[i]).all():
                self._right[i] = torch.ones_like(self._right[i])
        self._whole.clear()

    def _matrices(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(gradients, self._large, strict=True)
        return [gradient.view(gradient.shape[0], -1) for gradient, large in pairs if large]


def _worth(gradient: torch.Tensor, rank: int) -> bool:
    """Returns True if P and Q together have less than half as many elements as the gradient."""
    if gradient.dim() < 2 or not gradient.numel() or not gradient.is_contiguous():
        return False
    rows = gradient.shape[0]
    return 2 * rank * (rows + gradient.numel() // rows) < gradient.numel()


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix.dtype if matrix.dtype == torch.float64 else torch.float32
    q: torch.Tensor = torch.linalg.qr(matrix.to(wide)).Q
    return q.to(matrix.dtype)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
