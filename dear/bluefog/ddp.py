"""Asyncddp's model wrapper: `from dear.bluefog.ddp import DecentralizedDataParallel`.

    bf.init()
    model = DecentralizedDataParallel(model, optim_fn, lr_scheduler_fn, sync=False)
    model.set_topology({"topology": bf.topology_util.RingGraph(bf.size()), "name": "ring"})
    for x, y in batches:
        criterion(model(x), y).backward()  # also updates; each rank runs at its own pace
    model.global_avg()

This module replaces `bluefog.torch.ddp`, which exists in Asyncddp's fork of BlueFog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter

from dear.algorithms.asynchronous.asyncddp import AsyncDdp, AsyncExchange
from dear.bluefog import job
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage, Round
from dear.errors import UserError
from dear.lazy import nx
from dear.optimizer import broadcast_parameters
from dear.options import positive
from dear.training.engine import Replica, refuse_copy
from dear.training.pace import LocalStepRandomBatchSampler
from dear.training.parameters.bucketwise import BucketOptimizers, OptimFn, SchedulerFn
from dear.training.parameters.exchange import BucketExchange, GraphExchange, always
from dear.training.parameters.overlapped import OverlappedInBackward

__all__ = ["DecentralizedDataParallel", "LocalStepRandomBatchSampler"]


class DecentralizedDataParallel(Module):
    """Model wrapper that trains in the backward pass and averages with the neighbours in a graph.

    A step is one backward pass. When the last gradient of a bucket of parameters is ready, three
    things happen. The bucket is averaged with the values received from the neighbours. Its
    optimizer updates it with this rank's own gradients. It is sent to the neighbours. All ranks
    start with rank 0's parameters and buffers.

    Args:
        model: already on its device; it is trained in place.
        optim_fn: makes the optimizer of one bucket from its (name, parameter) pairs.
        lr_scheduler_fn: makes the schedule of an optimizer, which advances once per step; None: no
            schedule.
        topology: as for `set_topology`; None: the topology of `bf.set_topology`.
        sync: True: all ranks make the same number of steps, and average the values of the previous
            step. False: no rank waits; each rank averages the latest values that have arrived (the
            algorithm `asyncddp`).
        scaler: scales the loss in the script. This class calls its `unscale_`, `step` and `update`.
        grad_clip_norm: largest norm of all gradients of this rank; 0.0: no limit. With a limit or a
            scaler, all updates are made at the end of the backward pass.
        param_as_bucket_view: must be True, since parameters are always views of the buckets.
        sync_buffer_in_global_avg: `global_avg` averages floating-point buffers, too.
        bucket_size_in_mb: upper limit of a bucket's size, in MB of 2^20 bytes.

    Raises:
        UserError: bad arguments, or no parameter to train.
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
            raise UserError(
                "param_as_bucket_view=False is not supported, since parameters are always views of "
                "buckets; leave it out"
            )
        communicator = runtime.communicator()
        self._model = model
        averaged: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        if not averaged:
            raise UserError("nothing to train: no parameter of the model requires a gradient")
        averaged += list(model.buffers()) if sync_buffer_in_global_avg else []
        self._average = GlobalAverage(communicator, averaged)
        self._sync = sync
        options = AsyncDdp.Options(bucket_mb=bucket_size_in_mb)
        self._replica = Replica(model, None, communicator, options)
        self._updater = BucketOptimizers(model, optim_fn, lr_scheduler_fn, scaler, grad_clip_norm)
        self._graph: nx.DiGraph | None = None
        self._engine: OverlappedInBackward | None = None
        if topology is not None:
            self.set_topology(topology)
        broadcast_parameters(model.state_dict())

    def set_topology(self, topology: nx.DiGraph | Mapping[str, Any]) -> None:
        """Sets which ranks average with each other; collective, only before the first step.

        Args:
            topology: a graph of all ranks, or `{"topology": graph, ...}`. If every edge has a
                weight, these are used; otherwise a rank and its sources get equal weights.

        Raises:
            UserError: training has begun, or the graph is not valid.
        """
        if self._engine is not None:
            raise UserError(
                "the topology cannot change after training has begun, since messages that are "
                "being sent depend on it; set it before the first step"
            )
        graph = topology["topology"] if isinstance(topology, Mapping) else topology
        if not isinstance(graph, nx.DiGraph):
            raise UserError(f"topology must be a networkx.DiGraph, got {type(graph).__name__}")
        weighted = all("weight" in edge for _, _, edge in graph.edges(data=True))
        self._graph = job.weighed(graph, runtime.size(), weighted)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None and torch.is_grad_enabled():
            self._begin()
        return self._model(*args, **kwargs)

    def _begin(self) -> None:
        graph = job.job().weights if self._graph is None else self._graph
        part = Round.of(graph, runtime.rank())
        exchange: BucketExchange = GraphExchange(always(part))
        if not self._sync:
            exchange = AsyncExchange(graph, part, self._replica.options)
        self._engine = OverlappedInBackward(self._replica, exchange, self._updater)

    def global_avg(self) -> None:
        """Sets all replicas to their mean; training continues from it. A collective call."""
        if self._engine is not None:
            self._engine.exchange.wait()
        self._average.apply(keep=False, measure=False)
        if self._engine is not None:
            self._engine.drop()  # pending averages use the old values

    def get_lr(self) -> float:
        """Returns the learning rate of the first bucket; 0.0 before the first step."""
        return self._updater.learning_rate()

    def statistics(self) -> dict[str, Any]:
        """Returns the staleness of the averaged values by neighbour; {} with `sync=True`."""
        return {} if self._engine is None else self._engine.statistics()

    __reduce_ex__ = refuse_copy

    def state_dict(  # type: ignore[override]  # passes torch's overloads on
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the state dict of the wrapped model, with its own parameter names."""
        return self._model.state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Yields the named parameters of the wrapped model."""
        return self._model.named_parameters(*args, **kwargs)

    def close(self) -> None:
        """Removes the engine from the model; waits for the living ranks that still train."""
        if self._engine is not None:
            self._engine.close()
