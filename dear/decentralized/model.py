"""Decent-DP's model wrapper; it updates the model during the backward pass."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter

from dear.algorithms.decentralized.decentralized import GroupExchange
from dear.buckets.flat import Bucket
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage
from dear.errors import UserError
from dear.optimizer import broadcast_parameters
from dear.options import positive
from dear.topology.schedules import Topology, TopologyReg
from dear.training.engine import Replica, refuse_copy
from dear.training.parameters.bucketwise import BucketOptimizers, OptimFn, SchedulerFn
from dear.training.parameters.options import LocalOptions
from dear.training.parameters.overlapped import OverlappedInBackward


def initialize_dist() -> tuple[int, int]:
    """Joins the job as `dear.init()` does; returns this rank and the world size."""
    runtime.init()
    return runtime.rank(), runtime.size()


class _Exchange(GroupExchange):
    """Averages in groups; before each, the bucket's optimizer may run `pre_average_hook`."""

    def __init__(
        self, topology: Topology, updater: BucketOptimizers, average: GlobalAverage, views: bool
    ) -> None:
        super().__init__(topology, views=views)
        self._updater = updater
        self._average = average

    def begin(self, steps: int) -> None:
        if self._average.applied:
            raise UserError("training on the average: call revert_global_avg() first")
        super().begin(steps)

    def mix(self, bucket: Bucket, steps: int) -> None:
        edge = self.upcoming(bucket, steps)
        hook = getattr(self._updater.optimizers[bucket], "pre_average_hook", None)
        if edge is not None and hook is not None:
            hook(edge, edge.weight)
        super().mix(bucket, steps)


class DecentralizedDataParallel(Module):
    """Model wrapper that trains in the backward pass and averages in small groups (Decent-DP).

    Rank i computes x_i(t+1) = sum_j W_ij(t) x_j(t) - update(g_i(x_i(t))), where x are parameters, g
    gradients and W weights. A step is one backward pass, except while gradients accumulate. All
    ranks make the same number of steps. When the last gradient of a bucket of parameters is ready,
    three things happen. The bucket takes in the average that was started in the last step. Its
    optimizer updates it with this rank's own gradients. It is sent again.

    The first pass lays out the buckets in the order in which gradients arrived. It averages
    nothing, since all ranks start with rank 0's parameters and buffers. A pass leaves no gradients
    behind, so calls of `zero_grad()` are harmless.

    Args:
        model: already on its device; it is trained in place.
        optim_fn: makes the optimizer of one bucket from its (name, parameter) pairs.
        lr_scheduler_fn: makes the schedule of an optimizer, which advances once per step; None: no
            schedule.
        topology: `complete`, `ring`, `one-peer-exp`, `alternating-exp-ring`, or a registered name.
        scaler: scales the loss in the script. This class calls its `unscale_`, `step` and `update`.
            Each rank has its own scale. If a gradient of a rank is not finite, the rank leaves out
            its whole update, but still averages.
        grad_clip_norm: largest norm of all gradients of this rank; 0.0: no limit. With a limit or a
            scaler, all updates are made at the end of the backward pass.
        param_as_bucket_view: parameters are views of the buckets; False costs two more copies.
        sync_buffer_in_global_avg: `global_avg` averages floating-point buffers, too.
        bucket_size_in_mb: upper limit of a bucket's size, in MB of 2^20 bytes.
        _local_world_size: ranks per node; None: as the launcher reports.

    Raises:
        UserError: bad arguments, or a topology that does not fit the world.
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
            runtime.init()  # uses the process group of the script
        positive("bucket_size_in_mb", bucket_size_in_mb)
        communicator = runtime.communicator()
        self._model = model
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._named:
            raise UserError("nothing to train: no parameter of the model requires a gradient")
        self._topology_name = topology
        averaged: list[torch.Tensor] = list(self._named.values())
        averaged += list(model.buffers()) if sync_buffer_in_global_avg else []
        self._average = GlobalAverage(communicator, averaged)
        schedule = TopologyReg.make(
            topology,
            world_size=communicator.size,
            rank=communicator.rank,
            local_world_size=_local_world_size
            or partial(runtime.ranks_per_machine, communicator, "_local_world_size"),
        )
        self._updater = BucketOptimizers(model, optim_fn, lr_scheduler_fn, scaler, grad_clip_norm)
        self._exchange = _Exchange(schedule, self._updater, self._average, param_as_bucket_view)
        replica = Replica(model, None, communicator, LocalOptions(bucket_mb=bucket_size_in_mb))
        self._engine = OverlappedInBackward(replica, self._exchange, self._updater)
        broadcast_parameters(model.state_dict())
        self._accumulating = contextlib.ExitStack()
        self._closed = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._closed and self.training and torch.is_grad_enabled():
            warnings.warn(
                "this DecentralizedDataParallel is closed: its backward passes update nothing",
                stacklevel=2,
            )
        return self._model(*args, **kwargs)

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Makes backward passes only accumulate; disable this before the last pass of a step."""
        self._accumulating.close()
        if enable:
            self._accumulating.enter_context(self._engine.no_sync())

    def set_adaptive_factor(self, factor: float) -> None:
        """Sets the weight of averages, 0 .. 1: x <- (1 - factor) x + factor * average.

        The factor applies from the next step on. Initially it is 1.
        """
        self._exchange.set_factor(factor)

    def get_lr(self) -> float:
        """Returns the learning rate of the first bucket; 0.0 before the first step."""
        return self._updater.learning_rate()

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Sets all replicas to their mean; a collective call.

        Args:
            will_revert: True keeps a copy of this rank's values for `revert_global_avg`. With
                False, training continues from the mean.
            return_d2c: return this rank's distance to the mean (norm of the difference).
        """
        self._exchange.wait()
        distance = self._average.apply(keep=will_revert, measure=return_d2c)
        if not will_revert:
            self._engine.drop()  # pending averages use the old values
        return distance

    def revert_global_avg(self) -> None:
        """Restores this rank's own values; raises `UserError` if no copy was kept."""
        self._average.revert()
        self._engine.note_sent(self._exchange.pending)  # the same values again

    def checkpoint(self) -> dict[str, Any]:
        """Returns the state from which this rank can continue exactly; each rank saves its own.

        Call it between steps. `state_dict()` returns only the model, with the model's own names.

        Raises:
            UserError: the parameters are the average of all ranks.
        """
        if self._average.applied:
            raise UserError(
                "the parameters are the average of all ranks, not this rank's own: call "
                "revert_global_avg() before checkpoint()"
            )
        buckets = self._exchange.buckets
        names = {param: name for name, param in self._named.items()}
        return {
            "model": self._model.state_dict(),
            "world_size": self._engine.communicator.size,
            "topology": self._topology_name,
            "factor": self._exchange.factor,
            "buckets": [[names[param] for param in bucket.params] for bucket in buckets],
            "training": self._updater.state_dict(),
            **self._engine.saved(),
        }

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continues from a result of `checkpoint()` of this rank and an equal model; collective.

        An average of `global_avg` ends; it cannot be reverted afterwards.
        """
        for field, here in (
            ("world_size", self._engine.communicator.size),
            ("topology", self._topology_name),
        ):
            if checkpoint[field] != here:
                raise UserError(
                    f"the checkpoint was made with {field} {checkpoint[field]!r}, but this job has "
                    f"{here!r}; load_state_dict(checkpoint['model']) loads only the model"
                )
        names = [name for bucket in checkpoint["buckets"] for name in bucket]
        if names and set(names) != set(self._named):
            raise UserError("the checkpoint is of a model with other trainable parameters")
        self._average.forget()
        self._exchange.take_down()
        self._model.load_state_dict(checkpoint["model"])
        if names:
            buckets = checkpoint["buckets"]
            self._engine.set_up([[self._named[name] for name in bucket] for bucket in buckets])
            self._updater.load_state_dict(checkpoint["training"])
        self._exchange.set_factor(checkpoint["factor"])
        self._engine.restore(checkpoint)

    __reduce_ex__ = refuse_copy

    def state_dict(  # type: ignore[override]  # passes torch's overloads on
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the state dict of the wrapped model, with its own parameter names."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict of the wrapped model, and drops pending averages; all ranks load."""
        return self._model.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Yields the named parameters of the wrapped model."""
        return self._model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the named buffers of the wrapped model."""
        return self._model.named_buffers(*args, **kwargs)

    def close(self) -> None:
        """Removes the hooks and gives parameters their own memory; a collective call."""
        self._accumulating.close()
        self._engine.close()
        self._closed = True
