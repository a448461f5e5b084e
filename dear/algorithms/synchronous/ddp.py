"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dear.algorithms.synchronous._ddp_hooks import add_hook
from dear.algorithms.synchronous._zero import ZeroUpdate
from dear.buckets.compression import CompressedOptions, refuse_types
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least, only_with, option_of, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Engine, distribute, trained_parameters

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class Ddp(Algorithm):
    """PyTorch DDP (Li et al., VLDB 2020, arXiv 2006.15704): bucketed all-reduce in the backward.

    The real DDP reducer, attached to the model in place (its own steps before and after a forward,
    as hooks), so that the training script keeps using its model.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, bucket by bucket; buffers are broadcast before a forward.
    Cost per step and rank: one all-reduce per bucket, 2 (P-1)/P of the model's bytes in a ring.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """DDP's own arguments, with its own defaults; how buckets are compressed; ZeRO-1."""

        compression: Literal[
            "none",
            "fp16",
            "bf16",
            "topk",
            "eftopk",
            "gaussian",
            "signum",
            "efsignum",
            "powersgd",
        ] = "none"
        """As elsewhere, by bucket, as communication hooks: all but fp16 and bf16 start after the
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
        bucket_cap_mb: float = 25.0
        """Size at which a bucket is closed, in MB of 2^20 bytes."""
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

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        refuse_types(trained_parameters(model, optimizer), options)
        zero = None
        if options.zero and communicator.size > 1:
            zero = ZeroUpdate(optimizer, communicator)
        engine = _DdpEngine(model, optimizer, communicator, options, zero)
        return model, distribute(optimizer, engine)


class _DdpEngine(Engine):
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        options: Ddp.Options,
        zero: ZeroUpdate | None,
    ) -> None:
        super().__init__(model, communicator)
        self._optimizer: Any = optimizer
        self._zero = zero
        # torch 2.13 renames this argument; 2.11 has the old name only.
        known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
        new = "forward_sync_buffers"
        buffers = {new if new in known else "broadcast_buffers": options.broadcast_buffers}
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

        def after_forward(output: Any) -> Any:
            if model.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
                self._unsent = False
                self._learning = False
            return ddp._post_forward(output)

        self.hooks.around_forward(
            model,
            before=lambda args, kwargs: ddp._pre_forward(*args, **kwargs),
            after=after_forward,
        )

    def step(self, update: Callable[[], Any]) -> Any:
        self._refuse_unsent()
        return update() if self._zero is None else self._zero.step()

    def step_closure(self, update: Callable[[Callable[[], Any]], Any], closure: Any) -> Any:
        if self._zero is None:
            return update(closure)
        return self.step_after_closure(update, closure)

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self._zero is None:
            return plain()
        kept = self._optimizer.state
        self._optimizer.state = {**kept, **self._zero.whole_state()}
        try:
            return plain()
        finally:
            self._optimizer.state = kept

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        plain()
        if self._zero is not None:
            self._zero.take_state()

    def synchronize(self) -> None:
        """Nothing to do: gradients are averages when `backward()` returns."""
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
        if self._zero is not None:
            self._optimizer.state.update(self._zero.whole_state())
            self._zero = None
        del self._ddp  # the reducer takes out its autograd hooks when it is destroyed
