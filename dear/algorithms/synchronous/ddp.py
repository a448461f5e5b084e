"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dear.buckets.compressors import CompressedOptions, Compression
from dear.buckets.grouping import MIB, Arrived, Cost, Groups, by_total
from dear.buckets.updates import WatchedState, beside, is_untouched, run_hooks
from dear.comm.backends import mismatch_errors
from dear.comm.communicator import Communicator
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import MOST_LIBRARY_MB, at_least, only_with, option_of, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import (
    TAKES_SCALE,
    Closure,
    ClosureUpdate,
    Engine,
    Replica,
    Update,
    held,
    step_after_closure,
)
from dear.training.gradients import refuse_graph, refuse_sparse
from dear.training.hooks import at_end_of_backward
from dear.training.wrapped.ddp import UNFINISHED, BucketPayloads, Passes, PowerSgd

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch._C._distributed_c10d import GradBucket
    from torch.optim.optimizer import StateDict

    from dear.training.wrapped.ddp import FutureTensor

DEFAULT_CAP_MB, DEFAULT_FIRST_MB = 25.0, 1.0
"""Torch's sizes in MB of 2^20 bytes at which it closes a bucket, and the first bucket."""

_PLAIN = (int, float, complex, str, bytes, type(None))
"""Types of attributes that ZeRO copies between the script's optimizer and its own."""


class Ddp(Algorithm["Ddp.Options"]):
    """PyTorch DDP (Li et al., VLDB 2020, arXiv 2006.15704): all-reduces of buckets of gradients.

    This runs DDP's own reducer. Hooks of the model do what DDP does before and after a forward
    pass, so the training script keeps using its own model.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, bucket by bucket; buffers are broadcast before a forward.
    Cost per step and rank: one all-reduce per bucket, 2 (P-1)/P of the model's bytes in a ring.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """DDP's own arguments with DDP's defaults; compression of buckets; ZeRO-1."""

        compression: Literal[Compression, "powersgd"] = "none"  # type: ignore[assignment]  # one more
        """Compression of each bucket, by communication hooks. All but fp16 and bf16 start only
        after the first passes, which make the buckets. `powersgd`: PowerSGD (Vogels et al. 2019,
        arXiv 1905.13727), which sends matrices of low rank, with error feedback."""
        powersgd_rank: int = 1
        """PowerSGD: rank of the matrices that travel."""
        powersgd_start_step: int = 10
        """PowerSGD: number of first backward passes without compression, at least 2."""
        static_graph: bool = False
        """Promise that every pass uses the same parameters in the same way. DDP then need not
        search for unused parameters."""
        zero: bool = False
        """Torch's ZeroRedundancyOptimizer (ZeRO-1, Rajbhandari et al. 2020, arXiv 1910.02054): each
        rank updates whole tensors with about 1/P of the elements, holds their optimizer state, and
        broadcasts them. Every rank must then call the optimizer's `state_dict()`."""
        bucket_cap_mb: float | None = None
        """Size in MB of 2^20 bytes at which a bucket is closed, also the first. None: torch's
        default, which is 1 MB for the first bucket and 25 MB for the others."""
        find_unused_parameters: bool = False
        """Search the graph for parameters without a gradient; otherwise DDP raises if there are
        any."""
        broadcast_buffers: bool = True
        """Send rank 0's buffers (batch-norm statistics) to all ranks before each forward."""
        gradient_as_bucket_view: bool = False
        """Let `p.grad` be a view of the bucket, which saves a copy and memory."""

        def __post_init__(self) -> None:
            super().__post_init__()
            positive("ddp option 'bucket_cap_mb'", self.bucket_cap_mb, MOST_LIBRARY_MB)
            at_least(option_of(self, "powersgd_rank"), self.powersgd_rank, 1)
            at_least(option_of(self, "powersgd_start_step"), self.powersgd_start_step, 2)
            only_with(self, "powersgd_rank", "compression", ["powersgd"])
            only_with(self, "powersgd_start_step", "compression", ["powersgd"])

        def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
            """Returns the gradient in the `wire` dtype, undivided: torch divides after rounding."""
            return gradient.to(self.wire) / size

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    candidates = (
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 5.0},
        {"bucket_cap_mb": 50.0},
        {"bucket_cap_mb": 100.0},
    )
    unfused: ClassVar[Mapping[str, object]] = {"bucket_cap_mb": 1e-6}

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        sent = Transfer(kind="average", starts="gradient", awaited="pass")
        updated = Transfer(kind="gather", carries=("parameters",), starts="step", awaited="step")
        return Overlap(transfers=(sent, *[updated] * options.zero))

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        """Returns the buckets that torch makes after the first pass. If torch searches for unused
        parameters, it keeps its first buckets, which start at the front of the model."""
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
        native = self.params[0].device.type in communicator.native
        self._dense_only = native or options.compression != "none"
        self._zero: ZeroUpdate | None = None
        if options.zero and communicator.size > 1:
            self._zero = ZeroUpdate(self.optimizer, communicator)
        # torch 2.13 renames this argument; 2.11 has the old name only.
        known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        new = "forward_sync_buffers"
        buffers: dict[str, Any] = {
            new if new in known else "broadcast_buffers": options.broadcast_buffers
        }
        self.hooks.on_gradient(self.params, self._arrived)
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
        for part in (ddp.reducer, ddp.logger):
            # A group's destructor waits for Gloo's threads, and they may wait for the interpreter.
            # Python lets go of the interpreter when its own reference is the last one, and the
            # reducer does not. So Python's reference must outlive the reducer.
            weakref.finalize(part, _outlived, communicator.groups[0]).atexit = False
        shared = communicator.size > 1 or options.alone
        hook = bucket_hook(communicator, options) if shared else None
        if hook is not None:
            # DDP reads the annotations, which are strings here. A lambda has none.
            ddp.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
        # A static graph is learnt in the first pass, which must not be under `no_sync()`.
        self._learning = options.static_graph
        self._passes = Passes(self.params, ddp.reducer, self.hooks)
        self._watch_passes()

    def _watch_passes(self) -> None:
        """Runs DDP's parts before and after each forward pass of the model."""
        model, communicator, ddp = self.model, self.communicator, self._ddp

        def before_forward(args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
            trains = model.training and torch.is_grad_enabled()
            with self._whole_passes(), self._same_passes():
                if not trains and communicator.size > 1 and ddp.will_sync_module_buffers():
                    # A rank that evaluates alone must not exchange buffers with ranks that train.
                    # In eval mode, too, a model may be trained: all ranks then meet here.
                    communicator.barrier()
                return ddp._pre_forward(*args, **kwargs)

        def after_forward(output: object) -> object:
            if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
                self._passes.arm()
                self._learning = False
                self._watch(output)
            with self._whole_passes():
                return ddp._post_forward(output)

        self.hooks.around_forward(
            model,
            before=before_forward,
            after=after_forward,
        )

    @contextlib.contextmanager
    def _same_passes(self) -> Iterator[None]:
        """Returns a context that explains the error if the ranks run different passes."""
        try:
            yield
        except mismatch_errors() as error:
            raise UserError(
                f"ddp: {error}. Each forward pass broadcasts the model's buffers (e.g. of batch "
                "normalization) from rank 0, so every rank must run the same forward passes; "
                "evaluate on every rank, or use the option broadcast_buffers=False"
            ) from None

    @contextlib.contextmanager
    def _whole_passes(self) -> Iterator[None]:
        """Returns a context that explains torch's error after a pass that did not end."""
        try:
            yield
        except RuntimeError:
            if not self._passes.unfinished():
                raise
            raise UserError(UNFINISHED) from None

    def _arrived(self, param: torch.nn.Parameter) -> None:
        gradient = param.grad
        if gradient is None:  # left to a later pass of the same forward pass
            return
        if gradient.requires_grad:
            refuse_graph()
        if gradient.layout is not torch.strided and self._dense_only:
            refuse_sparse(param)

    def _watch(self, output: object) -> None:
        """Notes in the communicator, after the next backward pass, that DDP has waited.

        DDP's reducer waits in a callback that autograd runs at the end of the pass. If a callback
        queues another one, this runs after all of them.
        """
        from torch.utils._pytree import tree_leaves

        def begun(gradient: torch.Tensor) -> None:
            at_end_of_backward(lambda: at_end_of_backward(self.communicator.note_all_awaited))

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(begun)

    def step(self, update: Update) -> object:
        self._passes.check(stepping=True)
        result = update() if self._zero is None else self._zero.step()
        self._passes.stepped()
        return result

    def step_closure(self, update: ClosureUpdate, closure: Closure) -> object:
        if self._zero is not None:
            return step_after_closure(self, update, closure)

        def checked() -> float:
            loss = closure()
            self._passes.check(stepping=True)
            return loss

        result = update(checked)
        self._passes.stepped()
        return result

    def whole_state(self) -> Mapping[torch.Tensor, dict[str, object]]:
        kept = self.optimizer.state
        return kept if self._zero is None else {**kept, **self._zero.whole_state()}

    def resume(self, state: StateDict) -> None:
        if self._zero is not None:
            self._zero.take_state()

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns the bytes of each bucket, as DDP reports them after its first pass."""
        logged = self._ddp._get_ddp_logging_data()
        sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
        return [(int(size), ()) for size in sizes.split(",") if size.strip()]

    def synchronize(self) -> None:
        """Does nothing: gradients are averages when `backward()` returns."""
        self._passes.check()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self._learning:
            yield
            return
        with self._ddp.no_sync():
            yield

    def close(self) -> None:
        super().close()
        self.optimizer.state = defaultdict(dict, self.whole_state())
        if self._zero is not None:
            self._zero.close()
        self._zero = None
        # The reducer takes out its autograd hooks when it is destroyed.
        self._passes.close()
        del self._ddp


def _outlived(group: dist.ProcessGroup) -> None:
    """Does nothing; until it is called, its argument stays alive."""


def bucket_hook(
    communicator: Communicator, options: Ddp.Options
) -> Callable[[GradBucket], FutureTensor] | None:
    """Returns the communication hook that `options.compression` names."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if options.compression == "powersgd":
        rank, start = options.powersgd_rank, options.powersgd_start_step
        return PowerSgd(communicator, rank=rank, start=start)
    if options.gathers:
        return BucketPayloads(communicator, options)
    # DDP recognizes torch's bf16 hook, and accepts it with NCCL only; the hook runs anywhere.
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    hook = hooks.get(options.compression)
    return None if hook is None else partial(hook, communicator.groups[0])


class ZeroUpdate:
    """Updates of ZeRO-1: each rank updates some parameters, holds their state, and sends results.

    Each step uses the current hyper-parameters of the script's optimizer. The optimizer's own
    `state` holds this rank's part meanwhile; `whole_state` collects all parts.

    Args:
        optimizer: the script's optimizer, before `distribute` changes its class.

    Raises:
        UserError: ZeRO cannot split the optimizer or its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "ddp option 'zero' does not support LBFGS, which needs all parameters at "
                "once; use zero=False"
            )
        self._optimizer = optimizer
        self._communicator = communicator
        self._usual: set[str] | None = None
        """Attributes that every optimizer has; needed only for optimizers that are not torch's."""
        if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
            self._usual = {"step", *vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))}
            for name, value in vars(optimizer).items():
                if name not in self._usual and not isinstance(value, _PLAIN):
                    raise UserError(
                        f"ddp option 'zero': {type(optimizer).__name__} keeps a "
                        f"{type(value).__name__} in its attribute {name!r}, which cannot be split "
                        "among the ranks; keep it in `state` or `param_groups`, or use zero=False"
                    )
        self._loaded: dict[torch.Tensor, dict[str, object]] = {}
        self._params = held(optimizer)
        try:
            self._zero = ZeroRedundancyOptimizer(
                [dict(group) for group in optimizer.param_groups],
                optimizer_class=self._local,  # type: ignore[arg-type]  # called like a class
                process_group=communicator.groups[0],
            )
        except ValueError as error:
            raise UserError(
                f"ddp option 'zero': torch's ZeroRedundancyOptimizer refuses this "
                f"optimizer: {error}"
            ) from None
        self.take_state()
        # A scaler gives its scale to the script's optimizer, which does not update. So it must
        # unscale gradients and skip steps itself.
        self._takes_scale = getattr(optimizer, TAKES_SCALE, False)
        for each in (optimizer, self._zero.optim):
            vars(each)[TAKES_SCALE] = False

    def close(self) -> None:
        """Restores what the optimizer declared before."""
        vars(self._optimizer)[TAKES_SCALE] = self._takes_scale

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
        """Updates from the current gradients, and runs the optimizer's step hooks."""
        return run_hooks(self._optimizer, self._step)

    def _step(self) -> object:
        ours, given = self._zero.param_groups, self._optimizer.param_groups
        if _members(self._zero) != _members(self._optimizer):
            raise UserError(
                "ddp option 'zero': parameters were moved between groups, or taken out of one, "
                "after the optimizer was distributed; close() it, change its groups, and wrap it "
                "again"
            )
        self._zero.optim.state = self._optimizer.state  # the script may have reset it
        _copy_settings(given, ours)
        self._copy_attributes(self._optimizer, self._zero.optim)
        self._loaded = {}
        result = self._zero.step()
        _copy_settings(ours, given)  # some optimizers count there
        self._copy_attributes(self._zero.optim, self._optimizer)  # and here
        return result

    def _copy_attributes(self, source: torch.optim.Optimizer, to: torch.optim.Optimizer) -> None:
        if self._usual is not None:
            for name in vars(source).keys() - self._usual:
                if isinstance(value := vars(source)[name], _PLAIN):
                    vars(to)[name] = value

    def take_state(self) -> None:
        """Takes this rank's part of the optimizer's whole state. Keeps the rest until a step: if
        only this rank has loaded the state, it may broadcast it next."""
        mine = {param for group in self._zero.optim.param_groups for param in group["params"]}
        self._loaded = dict(self._optimizer.state)
        part = {param: state for param, state in self._loaded.items() if param in mine}
        state = WatchedState(part)
        self._optimizer.state = self._zero.optim.state = state

    def whole_state(self) -> dict[torch.Tensor, dict[str, object]]:
        """Returns the state of all ranks; a collective call."""
        params = self._params
        place: dict[torch.Tensor, int] = {param: i for i, param in enumerate(params)}
        mine = {
            place[param]: state
            for param, state in self._optimizer.state.items()
            if state and param in place
        }
        result: dict[torch.Tensor, dict[str, object]] = {}
        for part in self._communicator.gather_objects(mine):
            for index, state in part.items():
                result[params[index]] = {
                    key: beside(value, params[index]) for key, value in state.items()
                }
        return self._loaded if self._loaded and is_untouched(self._optimizer) else result


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def _copy_settings(source: Sequence[dict[str, object]], to: Sequence[dict[str, object]]) -> None:
    for group, other in zip(source, to, strict=True):
        other.update({key: value for key, value in group.items() if key != "params"})
