"""Asyncddp's wrapper: `from dear.bluefog.ddp import DecentralizedDataParallel`.

    bf.init()
    model = DecentralizedDataParallel(model, optim_fn, lr_scheduler_fn, sync=False)
    model.set_topology({"topology": bf.topology_util.RingGraph(bf.size()), "name": "ring"})
    for x, y in batches:
        criterion(model(x), y).backward()  # updates, too; each rank at its own pace
    model.global_avg()

In place of `from bluefog.torch.ddp import ...`, the module of that fork of BlueFog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter

from dear.algorithms.asynchronous.asyncddp import AsyncDdp, AsyncEngine
from dear.bluefog import job
from dear.buckets.flat import Bucket
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage, Round
from dear.errors import UserError
from dear.lazy import nx
from dear.optimizer import broadcast_parameters
from dear.options import positive
from dear.training.bucketwise import BucketOptimizers, OptimFn, SchedulerFn
from dear.training.engine import Replica
from dear.training.pace import LocalStepRandomBatchSampler
from dear.training.parameters import LocalOptions, ParameterEngine, always

__all__ = ["DecentralizedDataParallel", "LocalStepRandomBatchSampler"]


class _Asynchronous(BucketOptimizers, AsyncEngine):
    """`asyncddp` with an optimizer for each bucket."""


class _Synchronous(BucketOptimizers, ParameterEngine):
    """Averages over the graph, one step behind, with an optimizer for each bucket."""

    order = "overlapped"

    def mix(self, bucket: Bucket) -> None:
        if bucket in self.pending:  # not in the first step
            super().mix(bucket)


class DecentralizedDataParallel(Module):
    """Trains `model` in its backward passes, averaging with the neighbours in a graph.

    A step is one backward pass. Each bucket of parameters, once its last gradient is there, is
    averaged with what the neighbours have sent, updated by its optimizer with this rank's own
    gradient, and sent on. All ranks start with rank 0's parameters and buffers.

    Args:
        model: on its device already; it is trained in place.
        optim_fn: makes the optimizer of one bucket from its (name, parameter) pairs.
        lr_scheduler_fn: makes its schedule, which advances once per step; None: none.
        topology: as `set_topology` takes it; None: that of `bf.set_topology`.
        sync: all ranks make the same steps, and average what was sent after the last one; False:
            nobody waits, each averages with what has come so far (the algorithm `asyncddp`).
        scaler: scale the loss with it, and leave `unscale_`, `step` and `update` to this class.
        grad_clip_norm: largest norm of this rank's whole gradient; 0.0: any. With it, or a scaler,
            updates wait for the end of the pass.
        param_as_bucket_view: parameters are views of the buckets, the only way here.
        sync_buffer_in_global_avg: `global_avg` averages floating-point buffers, too.
        bucket_size_in_mb: buckets stay below it, in MB of 2^20 bytes.

    Raises:
        UserError: bad arguments, or nothing to train.
        Unavailable: `sync=False` needs the comm core.
    """

    def __init__(
        self,
        model: Module,
        optim_fn: OptimFn,
        lr_scheduler_fn: SchedulerFn | None = None,
        topology: nx.DiGraph | Mapping[str, Any] | None = None,
        sync: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
    ) -> None:
        super().__init__()
        positive("bucket_size_in_mb", bucket_size_in_mb)
        if not param_as_bucket_view:
            raise UserError("param_as_bucket_view=False: parameters are views of buckets here")
        communicator = runtime.communicator()
        self._model = model
        averaged = [param for param in model.parameters() if param.requires_grad]
        if not averaged:
            raise UserError("nothing to train: no parameter of the model requires a gradient")
        averaged += list(model.buffers()) if sync_buffer_in_global_avg else []
        self._average = GlobalAverage(communicator, averaged)
        self._sync = sync
        options = LocalOptions if sync else AsyncDdp.Options
        self._replica = Replica(model, None, communicator, options(bucket_mb=bucket_size_in_mb))
        self._training = {
            "optim_fn": optim_fn,
            "lr_scheduler_fn": lr_scheduler_fn,
            "scaler": scaler,
            "clip_norm": grad_clip_norm,
        }
        self._graph: nx.DiGraph | None = None
        self._engine: ParameterEngine | None = None
        if topology is not None:
            self.set_topology(topology)
        broadcast_parameters(model.state_dict())

    def set_topology(self, topology: nx.DiGraph | Mapping[str, Any]) -> None:
        """Chooses who averages with whom; a collective call, before the first step.

        Args:
            topology: a graph of all ranks, or `{"topology": graph, ...}`. Its weights are used if
                every edge has one, else each source and the rank itself count the same.

        Raises:
            UserError: training has begun, or it is no such graph.
        """
        if self._engine is not None:
            raise UserError("the topology stays once training has begun: what was sent is of it")
        graph = topology["topology"] if isinstance(topology, Mapping) else topology
        if not isinstance(graph, nx.DiGraph):
            raise UserError(f"topology must be a networkx.DiGraph, got {type(graph).__name__}")
        weighted = all("weight" in edge for _, _, edge in graph.edges(data=True))
        self._graph = job.weighed(graph, runtime.size(), weighted)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None and self.training and torch.is_grad_enabled():
            self._begin()
        return self._model(*args, **kwargs)

    def _begin(self) -> None:
        graph = job.job().weights if self._graph is None else self._graph
        if self._sync:
            part = always(Round.of(graph, runtime.rank()))
            self._engine = _Synchronous(self._replica, part, **self._training)
        else:
            self._engine = _Asynchronous(self._replica, graph, **self._training)

    def global_avg(self) -> None:
        """Gives everybody the mean of all models; a collective call. Training goes on from it."""
        if self._engine is not None:
            self._engine.wait()
        self._average.apply(keep=False, measure=False)
        if self._engine is not None:
            self._engine.drop()  # averages of values that are no more

    def get_lr(self) -> float:
        """The learning rate of the first bucket; 0.0 before the first step."""
        made = () if self._engine is None else self._engine.optimizers.values()
        optimizer = next(iter(made), None)
        return 0.0 if optimizer is None else float(optimizer.param_groups[0]["lr"])

    def statistics(self) -> dict[str, Any]:
        """With `sync=False`: how stale what was averaged was, by neighbour."""
        return {} if self._engine is None else self._engine.statistics()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The plain model's."""
        return self._model.state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The plain model's."""
        return self._model.named_parameters(*args, **kwargs)

    def close(self) -> None:
        """Leaves the model to itself; waits for ranks that still train, unless they are dead."""
        if self._engine is not None:
            self._engine.close()
