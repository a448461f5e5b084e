"""`DecentralizedDataParallel`: a model whose backward pass trains it, decentralized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter

from dear.algorithms.decentralized._group_mixing import GroupMixing
from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.comm.consensus import GlobalAverage
from dear.decentralized.bucket_optimizers import BucketOptimizers, OptimFn, SchedulerFn
from dear.errors import UserError
from dear.optimizer import broadcast_parameters
from dear.options import positive
from dear.topology.schedules import TopologyReg
from dear.training.backward import BackwardSchedule
from dear.training.hooks import Hooks
from dear.training.neighborhood import bucketed


def initialize_dist() -> tuple[int, int]:
    """Joins the job as `dear.init()` does; returns rank and world size."""
    runtime.init()
    return runtime.rank(), runtime.size()


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
        self._names = {param: name for name, param in self._named.items()}
        self._communicator = communicator
        self._topology_name = topology
        self._bucket_bytes = bucket_size_in_mb * MIB
        self._optimizers = BucketOptimizers(optim_fn, lr_scheduler_fn, scaler, grad_clip_norm)
        made = TopologyReg.make(
            topology,
            world_size=communicator.size,
            rank=communicator.rank,
            local_world_size=_local_world_size or runtime.local_size(),
        )
        self._mixing = GroupMixing(communicator, made, views=param_as_bucket_view)
        averaged = list(self._named.values())
        averaged += list(model.buffers()) if sync_buffer_in_global_avg else []
        self._average = GlobalAverage(communicator, averaged)
        broadcast_parameters(model.state_dict())
        self._arrived: dict[Parameter, None] = {}
        self._accumulating = contextlib.ExitStack()
        self._hooks = Hooks()
        self._schedule = BackwardSchedule(
            self._hooks,
            [list(self._named.values())],
            communicator,
            launch=self._launch,
            finish=self._end_pass,
            arrived=self._arrive,
            learn=False,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """While enabled, backward passes only add up gradients; disable before the last one."""
        self._accumulating.close()
        if enable:
            self._accumulating.enter_context(self._schedule.paused())

    def set_adaptive_factor(self, factor: float) -> None:
        """x <- (1 - factor) x + factor * average, from the next step on; 0 .. 1, 1 at first."""
        self._mixing.set_factor(factor)

    def get_lr(self) -> float:
        """The learning rate of the first bucket; 0.0 before the first step."""
        return self._optimizers.lr()

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Gives everybody the mean of all models; a collective call.

        Args:
            will_revert: keep the own values for `revert_global_avg`. Without it training goes on
                from the mean.
            return_d2c: return how far this rank was from the mean (norm of the difference).
        """
        self._mixing.wait()
        distance = self._average.apply(keep=will_revert, measure=return_d2c)
        if not will_revert:
            self._mixing.forget()  # averages of values that are no more
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
            "world_size": self._communicator.size,
            "topology": self._topology_name,
            "factor": self._mixing.factor,
            "steps": self._mixing.steps,
            "buckets": [[self._names[p] for p in b.params] for b in self._mixing.buckets],
            "training": self._optimizers.state_dict(),
        }

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on from this rank's `checkpoint()`; all ranks do so.

        Raises:
            UserError: it is from another world, topology or model.
        """
        for field, here in (
            ("world_size", self._communicator.size),
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
        self._mixing.release()
        self._model.load_state_dict(checkpoint["model"])
        if names:
            self._make([[self._named[name] for name in b] for b in checkpoint["buckets"]])
            self._optimizers.load_state_dict(checkpoint["training"])
        self._mixing.set_factor(checkpoint["factor"])
        self._mixing.resume(checkpoint["steps"])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The plain model's."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the plain model's; all ranks load, since averages under way are dropped."""
        self._mixing.forget()
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
        self._hooks.remove()
        self._mixing.close()

    def _arrive(self, param: Parameter) -> None:
        if not self._mixing.laid_out:
            self._arrived.setdefault(param)

    def _launch(self, index: int) -> None:
        if not self._mixing.laid_out:
            return  # the order is not known before the pass has ended
        if index == 0:
            self._begin()
        if self._optimizers.needs_all_gradients:
            self._update(range(len(self._mixing.buckets)))
        else:
            self._update([index])

    def _end_pass(self) -> None:
        if not self._mixing.laid_out:
            params = list(self._named.values())
            self._make(
                bucketed(params, list(self._arrived), self._bucket_bytes, self._communicator)
            )
            self._begin()
            self._update(range(len(self._mixing.buckets)))
        self._schedule.restart()

    def _make(self, members: Sequence[Sequence[Parameter]]) -> None:
        self._mixing.lay_out(members)
        self._arrived.clear()
        self._optimizers.make([[(self._names[p], p) for p in params] for params in members])
        units = [list(self._named.values())]
        if not self._optimizers.needs_all_gradients:
            units = [list(params) for params in members]
        self._schedule.regroup(units, range(len(units)))

    def _begin(self) -> None:
        if self._average.applied:
            raise UserError("call revert_global_avg() before training goes on")
        self._mixing.begin_step()

    @torch.no_grad()
    def _update(self, indices: Sequence[int]) -> None:
        if self._optimizers.needs_all_gradients:
            self._optimizers.prepare()
        if self._optimizers.scaled:
            for index in indices:
                self._mix(index)
            self._optimizers.step_all()
        for index in indices:
            if not self._optimizers.scaled:
                self._mix(index)
                self._optimizers.step(index)
            self._optimizers.end(index)
            self._mixing.share(index)

    def _mix(self, index: int) -> None:
        edge = self._mixing.upcoming(index)
        hook = getattr(self._optimizers.optimizers[index], "pre_average_hook", None)
        if edge is not None and hook is not None:
            hook(edge, edge.weight)
        self._mixing.mix(index)
