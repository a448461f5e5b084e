"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dear.buckets.carriers import Carrier, make_carrier
from dear.buckets.compressors import CompressedOptions, Compression
from dear.buckets.grouping import MIB, Arrived, Cost, Groups, by_total
from dear.buckets.updates import beside, run_hooks
from dear.comm.communicator import Communicator
from dear.comm.work import Work
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least, only_with, option_of, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import (
    Closure,
    ClosureUpdate,
    Engine,
    Replica,
    Update,
    step_after_closure,
)
from dear.training.hooks import at_end_of_backward

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.optim.optimizer import StateDict

    FutureTensor = torch.futures.Future[torch.Tensor]

DEFAULT_CAP_MB, DEFAULT_FIRST_MB = 25.0, 1.0
"""Torch's sizes at which a bucket and the first bucket are closed, in MB of 2^20 bytes."""


class Ddp(Algorithm["Ddp.Options"]):
    """PyTorch DDP (Li et al., VLDB 2020, arXiv 2006.15704): bucketed all-reduce in the backward.

    This runs DDP's own reducer. Its steps before and after a forward are hooks of the model, so the
    training script keeps using its model.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, bucket by bucket; buffers are broadcast before a forward.
    Cost per step and rank: one all-reduce per bucket, 2 (P-1)/P of the model's bytes in a ring.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """DDP's own arguments, with its own defaults; compression of buckets; ZeRO-1."""

        compression: Literal[Compression, "powersgd"] = "none"  # type: ignore[assignment]  # one more
        """Compression of each bucket, by communication hooks. All but fp16 and bf16 start after the
        first passes, which make the buckets. `powersgd`: PowerSGD (Vogels et al. 2019, arXiv
        1905.13727), matrices of low rank with error feedback."""
        powersgd_rank: int = 1
        """PowerSGD: rank of the matrices that travel."""
        powersgd_start_step: int = 10
        """PowerSGD: backward passes that are sent in full before it starts, at least 2."""
        static_graph: bool = False
        """Promise that every pass uses the same parameters in the same way: DDP then needs no
        search for unused ones."""
        zero: bool = False
        """Torch's ZeroRedundancyOptimizer (ZeRO-1, Rajbhandari et al. 2020, arXiv 1910.02054): each
        rank updates whole tensors of about 1/P of the elements, holds their optimizer state, and
        broadcasts them. `state_dict()` of the optimizer then is a call for every rank."""
        bucket_cap_mb: float | None = None
        """Size at which a bucket is closed, in MB of 2^20 bytes, the first one too. None: torch's
        default, 25 MB, but 1 MB for the first bucket, which any number switches off."""
        find_unused_parameters: bool = False
        """Search the graph for parameters without a gradient; DDP raises on them otherwise."""
        broadcast_buffers: bool = True
        """Give every rank rank 0's buffers (batch-norm statistics) before each forward."""
        gradient_as_bucket_view: bool = False
        """Let `p.grad` be a view of the bucket, which saves a copy and memory."""

        def __post_init__(self) -> None:
            super().__post_init__()
            positive("option of ddp 'bucket_cap_mb'", self.bucket_cap_mb)
            at_least(option_of(self, "powersgd_rank"), self.powersgd_rank, 1)
            at_least(option_of(self, "powersgd_start_step"), self.powersgd_start_step, 2)
            only_with(self, "powersgd_rank", "compression", ["powersgd"])
            only_with(self, "powersgd_start_step", "compression", ["powersgd"])

        def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
            """Returns the gradient as it travels; torch's hooks divide after rounding."""
            return gradient.to(self.wire) / size

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        sent = Transfer(kind="average", starts="gradient", awaited="pass")
        updated = Transfer(kind="gather", carries=("parameters",), starts="step", awaited="step")
        return Overlap(transfers=(sent, *[updated] * options.zero))

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        """Returns the buckets that torch makes after the first pass. If it searches for unused
        parameters, it keeps its first buckets, made from the front of the model."""
        cap_mb, first = options.bucket_cap_mb, None
        if cap_mb is None:
            cap_mb, first = DEFAULT_CAP_MB, DEFAULT_FIRST_MB * MIB
        if options.static_graph or not options.find_unused_parameters:
            return by_total(arrived.sizes, cap_mb * MIB, first=first)
        last = len(arrived.sizes) - 1
        groups = by_total(arrived.sizes[::-1], cap_mb * MIB, first=first)
        return [[last - place for place in reversed(group)] for group in reversed(groups)]

    def alone(self, options: Options) -> bool:
        return True  # DDP's reducer also runs then

    def engine(self, replica: Replica[Options]) -> _DdpEngine:
        return _DdpEngine(replica)


class _DdpEngine(Engine[Ddp.Options]):
    def __init__(self, replica: Replica[Ddp.Options]) -> None:
        super().__init__(replica)
        model, communicator, options = self.model, self.communicator, self.options
        self._zero: ZeroUpdate | None = None
        if options.zero and communicator.size > 1:
            self._zero = ZeroUpdate(self.optimizer, communicator)
        # torch 2.13 renames this argument; 2.11 has the old name only.
        known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        new = "forward_sync_buffers"
        buffers: dict[str, Any] = {
            new if new in known else "broadcast_buffers": options.broadcast_buffers
        }
        self._ddp = torch.nn.parallel.DistributedDataParallel(
            model,
            process_group=communicator.groups[0],
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            **buffers,
        )
        ddp = self._ddp
        if communicator.size > 1:
            add_hook(ddp, communicator, options)
        # A static graph is learnt in the first pass, which must be a whole one.
        self._learning = options.static_graph
        self._unsent = False

        def after_forward(output: object) -> object:
            if model.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
                self._unsent = False
                self._learning = False
                self._watch(output)
            return ddp._post_forward(output)

        self.hooks.around_forward(
            model,
            before=lambda args, kwargs: ddp._pre_forward(*args, **kwargs),
            after=after_forward,
        )

    def _watch(self, output: object) -> None:
        """Notes in the communicator, after the next backward pass, that DDP has waited.

        DDP's reducer waits in a callback that autograd runs at the end of the pass. A callback that
        another callback queues runs after all of those.
        """
        from torch.utils._pytree import tree_leaves

        def begun(gradient: torch.Tensor) -> None:
            at_end_of_backward(lambda: at_end_of_backward(self.communicator.note_all_awaited))

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(begun)

    def step(self, update: Update) -> object:
        self._refuse_unsent()
        return update() if self._zero is None else self._zero.step()

    def step_closure(self, update: ClosureUpdate, closure: Closure) -> object:
        if self._zero is None:
            return update(closure)
        return step_after_closure(self, update, closure)

    def whole_state(self) -> Mapping[torch.Tensor, dict[str, object]]:
        kept = self.optimizer.state
        return kept if self._zero is None else {**kept, **self._zero.whole_state()}

    def resume(self, state: StateDict) -> None:
        if self._zero is not None:
            self._zero.take_state()

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns the bytes of the buckets, which DDP reports after its first pass."""
        logged = self._ddp._get_ddp_logging_data()
        sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
        return [(int(size), ()) for size in sizes.split(",") if size.strip()]

    def synchronize(self) -> None:
        """Does nothing: gradients are averages when `backward()` returns."""
        self._refuse_unsent()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._learning:
            yield
            return
        with self._ddp.no_sync():
            self._unsent = True
            yield

    def _refuse_unsent(self) -> None:
        if self._unsent:
            raise UserError(
                "gradients were accumulated under no_sync() and never sent: DDP sends them in the "
                "next forward and backward pass outside it, which must come before step()"
            )

    def close(self) -> None:
        self._unsent = False
        super().close()
        self.optimizer.state.update(self.whole_state())
        self._zero = None
        del self._ddp  # the reducer takes out its autograd hooks when it is destroyed


FIRST = 2
"""Passes after which buckets stay the same: DDP makes them again after the first."""


def add_hook(
    ddp: torch.nn.parallel.DistributedDataParallel,
    communicator: Communicator,
    options: Ddp.Options,
) -> None:
    """Registers the communication hook that `options.compression` names."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    group = communicator.groups[0]
    if options.compression == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif options.compression == "bf16":
        # DDP recognizes this hook, and accepts it with NCCL only; the hook itself runs anywhere.
        ddp.register_comm_hook(
            group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
        )
    elif options.compression == "powersgd":
        _register(ddp, PowerSgd(communicator, options))
    elif options.gathers:
        _register(ddp, BucketPayloads(communicator, options))


def _register(ddp: torch.nn.parallel.DistributedDataParallel, hook: BucketHook) -> None:
    # DDP reads annotations, which are texts here. A lambda has none.
    ddp.register_comm_hook(hook, lambda hook, bucket: hook.average(bucket))


class BucketHook(ABC):
    """Communication hook that averages whole buckets in the first `start` passes."""

    start = FIRST

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.passes = 0

    def average(self, bucket: GradBucket) -> FutureTensor:
        """Returns a future of the bucket's buffer with the mean over ranks."""
        buffer, dense = bucket.buffer(), self.passes < self.start
        self.passes += bucket.is_last()
        if dense:
            future = self.communicator.all_reduce(buffer, op="mean").future()
            return future.then(lambda _: buffer)
        return self.carry(bucket, buffer)

    @abstractmethod
    def carry(self, bucket: GradBucket, buffer: torch.Tensor) -> FutureTensor:
        """Returns a future of the bucket's buffer with an approximation of the mean."""


class BucketPayloads(BucketHook):
    """Hook that all-gathers the payloads of buckets."""

    def __init__(self, communicator: Communicator, options: Ddp.Options) -> None:
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


class ZeroUpdate:
    """Updates in which each rank updates some of the parameters, holds their state, and sends them.

    Hyper-parameters are those of the script's optimizer at the time of each step. Its own `state`
    is empty meanwhile; `whole_state` collects it.

    Args:
        optimizer: before `distribute` changes its class.

    Raises:
        UserError: ZeRO cannot split the optimizer or its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "option of ddp 'zero' cannot be had with LBFGS, which needs all parameters at "
                "once; use zero=False"
            )
        self._optimizer = optimizer
        self._communicator = communicator
        try:
            self._zero = ZeroRedundancyOptimizer(
                [dict(group) for group in optimizer.param_groups],
                optimizer_class=self._local,  # type: ignore[arg-type]  # called like a class
                process_group=communicator.groups[0],
            )
        except ValueError as error:
            raise UserError(
                f"option of ddp 'zero': torch's ZeroRedundancyOptimizer refuses this "
                f"optimizer: {error}"
            ) from None
        self.take_state()

    def _local(self, groups: Sequence[dict[str, object]], **_: object) -> torch.optim.Optimizer:
        """Returns an optimizer of the same class, without a call of its constructor."""
        local = object.__new__(type(self._optimizer))
        # A scheduler's wrapper of `step` belongs to the script's optimizer, and so do its hooks.
        local.__dict__.update({k: v for k, v in vars(self._optimizer).items() if k != "step"})
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(local, name, OrderedDict())
        local.param_groups = [dict(group) for group in groups]
        local.state = defaultdict(dict)
        return local

    def step(self) -> object:
        """Updates from the present gradients, with the optimizer's step hooks around."""
        return run_hooks(self._optimizer, self._step)

    def _step(self) -> object:
        ours, given = self._zero.param_groups, self._optimizer.param_groups
        _copy_settings(given, ours)
        result = self._zero.step()
        _copy_settings(ours, given)  # some optimizers count there
        return result

    def take_state(self) -> None:
        """Takes this rank's part of the optimizer's whole state, and drops the rest."""
        mine = {param for group in self._zero.optim.param_groups for param in group["params"]}
        whole = self._optimizer.state
        self._zero.optim.state.update({p: state for p, state in whole.items() if p in mine})
        whole.clear()

    def whole_state(self) -> dict[torch.Tensor, dict[str, object]]:
        """Returns the state of all ranks; a collective call."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        place = {param: i for i, param in enumerate(params)}
        mine = {place[param]: state for param, state in self._zero.optim.state.items() if state}
        result = {}
        for part in self._communicator.gather_objects(mine):
            for index, state in part.items():
                result[params[index]] = {
                    key: beside(value, params[index]) for key, value in state.items()
                }
        return result


def _copy_settings(source: Sequence[dict[str, object]], to: Sequence[dict[str, object]]) -> None:
    for group, other in zip(source, to, strict=True):
        other.update({key: value for key, value in group.items() if key != "params"})


class PowerSgd(BucketHook):
    """PowerSGD hook (Vogels et al. 2019, arXiv 1905.13727), with error feedback.

    A matrix M becomes P = M Q, whose mean is made orthogonal, and Q = M' P, whose mean starts the
    next pass; P Q' approximates the mean of M. Small gradients travel whole. The messages with P
    overlap the backward pass. Those with Q follow it, bucket by bucket, so that all ranks start
    them in the same order. No collective waits in the callback of another one, as in torch's own
    hook, which only NCCL supports. The futures of a pass end together, with its last bucket.
    """

    def __init__(self, communicator: Communicator, options: Ddp.Options) -> None:
        super().__init__(communicator)
        self.start = options.powersgd_start_step
        self._rank = options.powersgd_rank
        """Columns of P and Q."""
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
    """Factors of the matrices of one bucket, and the errors of the approximation."""

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
    """Returns True if the factors have less than half as many elements."""
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
