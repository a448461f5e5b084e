"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dear.algorithm import Algorithm, Capabilities
from dear.algorithm import Options as AlgorithmOptions
from dear.engine import Engine, distribute, trained_parameters
from dear.errors import UserError
from dear.lazy import torch
from dear.options import positive

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.communicator import Communicator


class Ddp(Algorithm):
    """PyTorch DDP (Li et al., VLDB 2020, arXiv 2006.15704): bucketed all-reduce in the backward.

    The real DDP reducer, attached to the model in place (its own steps before and after a forward,
    as hooks), so that the training script keeps using its model.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, bucket by bucket; buffers are broadcast before a forward.
    Cost per step and rank: one all-reduce per bucket, 2 (P-1)/P of the model's bytes in a ring.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(AlgorithmOptions):
        """DDP's own arguments, with its own defaults."""

        bucket_cap_mb: float = 25.0
        """Size at which a bucket is closed, in MB of 2^20 bytes."""
        find_unused_parameters: bool = False
        """Search the graph for parameters without a gradient; DDP raises on them otherwise."""
        broadcast_buffers: bool = True
        """Give every rank rank 0's buffers (batch-norm statistics) before each forward."""
        gradient_as_bucket_view: bool = False
        """Let `p.grad` be a view of the bucket, which saves a copy and memory."""

        def __post_init__(self) -> None:
            positive("option of ddp 'bucket_cap_mb'", self.bucket_cap_mb)

    capabilities = Capabilities(consistency="synchronous")

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        trained_parameters(model, optimizer)
        return model, distribute(optimizer, _DdpEngine(model, communicator, options))


class _DdpEngine(Engine):
    def __init__(self, model: Module, communicator: Communicator, options: Ddp.Options) -> None:
        super().__init__(model, communicator)
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
            **buffers,
        )
        ddp = self._ddp
        self._unsent = False

        def after_forward(output: Any) -> Any:
            if model.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
                self._unsent = False
            return ddp._post_forward(output)

        self.hooks.around_forward(
            model,
            before=lambda args, kwargs: ddp._pre_forward(*args, **kwargs),
            after=after_forward,
        )

    def step(self, update: Callable[[], Any]) -> Any:
        self._refuse_unsent()
        return update()

    def synchronize(self) -> None:
        """Nothing to do: gradients are averages when `backward()` returns."""
        self._refuse_unsent()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
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
        del self._ddp  # the reducer takes out its autograd hooks when it is destroyed
