"""Decentralized training under the names that users of Decent-DP know.

    import dear
    from dear.decentralized import DecentralizedDataParallel, optim_fn_adamw

    dear.init()
    model = DecentralizedDataParallel(model, optim_fn_adamw, topology="one-peer-exp")
    for x, y in batches:
        criterion(model(x), y).backward()  # updates, too

`dear.DistributedOptimizer(..., algorithm="decentralized")` does the same behind the ordinary loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter

from dear.algorithms.decentralized.decentralized import GroupEngine
from dear.buckets.flat import Bucket
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage
from dear.decentralized.optim import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from dear.errors import UserError
from dear.optimizer import broadcast_parameters
from dear.options import positive
from dear.topology.schedules import Edge, Topology, TopologyReg
from dear.training.bucketwise import BucketOptimizers, OptimFn, SchedulerFn
from dear.training.engine import Replica
from dear.training.parameters import LocalOptions

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "DecentralizedDataParallel",
    "Edge",
    "Topology",
    "TopologyReg",
    "initialize_dist",
    "lr_scheduler_fn_cosine_with_warmup",
    "optim_fn_accum_adam",
    "optim_fn_accum_adamw",
    "optim_fn_adam",
    "optim_fn_adamw",
]


def initialize_dist() -> tuple[int, int]:
    """Joins the job as `dear.init()` does; returns rank and world size."""
    runtime.init()
    return runtime.rank(), runtime.size()


class _Engine(BucketOptimizers, GroupEngine):
    """`decentralized` with an optimizer and a learning-rate schedule for each bucket."""

    def __init__(
        self,
        replica: Replica,
        topology: Topology,
        average: GlobalAverage,
        *,
        views: bool,
        **training: Any,
    ) -> None:
        self._average = average
        super().__init__(replica, topology, views=views, **training)

    def begin(self) -> None:
        if self._average.applied:
            raise UserError("call revert_global_avg() before training goes on")
        super().begin()

    def mix(self, bucket: Bucket) -> None:
        edge = self.upcoming(bucket)
        hook = getattr(self.optimizers[bucket], "pre_average_hook", None)
        if edge is not None and hook is not None:
            hook(edge, edge.weight)
        super().mix(bucket)

    def saved(self) -> dict[str, Any]:
        return super().saved() | {
            "factor": self.factor,
            "buckets": [[self.names[p] for p in bucket.params] for bucket in self.buckets],
            "training": {
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers.values()],
                "schedulers": [scheduler.state_dict() for scheduler in self.schedulers.values()],
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
            },
        }

    def restore(self, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            named = {name: param for param, name in self.names.items()}
            if saved["buckets"]:
                self.set_up([[named[name] for name in names] for names in saved["buckets"]])
                self._load(saved["training"])
            self.set_factor(saved["factor"])
        super().restore(saved)

    def _load(self, state: dict[str, Any]) -> None:
        kinds = (("optimizers", self.optimizers), ("schedulers", self.schedulers))
        for name, here in kinds:
            if len(state[name]) != len(here):
                raise UserError(
                    f"the checkpoint has the state of {len(state[name])} {name}, here are "
                    f"{len(here)}; make the model with the same arguments as then"
                )
        if (state["scaler"] is None) != (self.scaler is None):
            raise UserError("the checkpoint was made with a scaler and this model without, or vice "
                            "versa")  # fmt: skip
        for name, here in kinds:
            for one, saved in zip(here.values(), state[name], strict=True):
                one.load_state_dict(saved)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])


class DecentralizedDataParallel(Module):
    """Trains `model` in its backward passes, averaging with a few ranks at a time (Decent-DP).

    A step is one backward pass, except while gradients accumulate; all ranks make as many. Each
    bucket of parameters, once its last gradient is there, takes the average that has been under way
    since the last step, then its optimizer's update with this rank's own gradient, and is sent on:
    x_i(t+1) = sum_j W_ij(t) x_j(t) - update(g_i(x_i(t))). The first pass ends with the buckets
    being made, in the order in which gradients came, and updated; nothing is averaged in it, since
    all ranks start with rank 0's parameters and buffers. Forward passes do nothing.

    Gradients are gone after a pass; a call of `zero_grad()`, wherever it stands, does no harm.

    Args:
        model: on its device already; it is trained in place.
        optim_fn: makes the optimizer of one bucket from its (name, parameter) pairs.
        lr_scheduler_fn: makes its schedule, which advances once per step; None: none.
        topology: `complete`, `ring`, `one-peer-exp`, `alternating-exp-ring`, or one registered.
        scaler: scale the loss with it, and leave `unscale_`, `step` and `update` to this class.
            Each rank has its own scale, and leaves a whole step out if a gradient is not finite;
            averaging goes on. Updates then wait for the end of the pass.
        grad_clip_norm: largest norm of this rank's whole gradient; 0.0: any. Updates then wait for
            the end of the pass.
        param_as_bucket_view: parameters are views of the buckets; False costs two more copies.
        sync_buffer_in_global_avg: `global_avg` averages floating-point buffers, too.
        bucket_size_in_mb: buckets stay below it, in MB of 2^20 bytes.
        _local_world_size: ranks per node; default: as the launcher says.

    Raises:
        UserError: bad arguments, or a topology that this world cannot have.
    """

    def __init__(
        self,
        model: Module,
        optim_fn: OptimFn,
        lr_scheduler_fn: SchedulerFn | None = None,
        topology: str = "complete",
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        _local_world_size: int | None = None,
    ) -> None:
        super().__init__()
        if dist.is_initialized():
            runtime.init()  # takes the process group that the script has made
        positive("bucket_size_in_mb", bucket_size_in_mb)
        communicator = runtime.communicator()
        self._model = model
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._named:
            raise UserError("nothing to train: no parameter of the model requires a gradient")
        self._topology_name = topology
        averaged = list(self._named.values())
        averaged += list(model.buffers()) if sync_buffer_in_global_avg else []
        self._average = GlobalAverage(communicator, averaged)
        self._engine = _Engine(
            Replica(model, None, communicator, LocalOptions(bucket_mb=bucket_size_in_mb)),
            TopologyReg.make(
                topology,
                world_size=communicator.size,
                rank=communicator.rank,
                local_world_size=_local_world_size or runtime.local_size(),
            ),
            self._average,
            optim_fn=optim_fn,
            lr_scheduler_fn=lr_scheduler_fn,
            scaler=scaler,
            clip_norm=grad_clip_norm,
            views=param_as_bucket_view,
        )
        broadcast_parameters(model.state_dict())
        self._accumulating = contextlib.ExitStack()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """While enabled, backward passes only add up gradients; disable before the last one."""
        self._accumulating.close()
        if enable:
            self._accumulating.enter_context(self._engine.no_sync())

    def set_adaptive_factor(self, factor: float) -> None:
        """x <- (1 - factor) x + factor * average, from the next step on; 0 .. 1, 1 at first."""
        self._engine.set_factor(factor)

    def get_lr(self) -> float:
        """The learning rate of the first bucket; 0.0 before the first step."""
        optimizer = next(iter(self._engine.optimizers.values()), None)
        return 0.0 if optimizer is None else float(optimizer.param_groups[0]["lr"])

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Gives everybody the mean of all models; a collective call.

        Args:
            will_revert: keep the own values for `revert_global_avg`. Without it training goes on
                from the mean.
            return_d2c: return how far this rank was from the mean (norm of the difference).
        """
        self._engine.wait()
        distance = self._average.apply(keep=will_revert, measure=return_d2c)
        if not will_revert:
            self._engine.drop()  # averages of values that are no more
        return distance

    def revert_global_avg(self) -> None:
        """Gives this rank its own values back; raises `UserError` if none were kept."""
        self._average.revert()

    def checkpoint(self) -> dict[str, Any]:
        """All that this rank needs to go on exactly from here: each rank saves its own.

        Call it between steps. `state_dict()` is the model alone, with the plain model's names.
        """
        return {
            "model": self._model.state_dict(),
            "world_size": self._engine.communicator.size,
            "topology": self._topology_name,
            **self._engine.saved(),
        }

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on from this rank's `checkpoint()` of such a model and world; all ranks do so."""
        for field, here in (
            ("world_size", self._engine.communicator.size),
            ("topology", self._topology_name),
        ):
            if checkpoint[field] != here:
                raise UserError(
                    f"the checkpoint was made with {field} {checkpoint[field]!r}, this is "
                    f"{here!r}; load_state_dict(checkpoint['model']) takes the model alone"
                )
        names = [name for bucket in checkpoint["buckets"] for name in bucket]
        if names and set(names) != set(self._named):
            raise UserError("the checkpoint is of a model with other trainable parameters")
        self._engine.take_down()
        self._model.load_state_dict(checkpoint["model"])
        self._engine.restore(checkpoint)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The plain model's."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the plain model's; all ranks load, since averages under way are dropped."""
        return self._model.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The plain model's."""
        return self._model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The plain model's."""
        return self._model.named_buffers(*args, **kwargs)

    def close(self) -> None:
        """Leaves the model to itself: no hooks, memory of its own; a collective call."""
        self._accumulating.close()
        self._engine.close()
