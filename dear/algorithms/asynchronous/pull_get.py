"""Asynchronous decentralized SGD: ranks read parameters from the memory of their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.buckets.flat import Bucket
from dear.comm.neighbors import timed
from dear.comm.windows import NEVER
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import dist, torch
from dear.training.algorithm import Capabilities
from dear.training.parameters.windows import WindowAlgorithm, WindowExchange, WindowOptions

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


class PullExchange(WindowExchange):
    """Exchange in which the receiver reads from the sender.

    `share` publishes a bucket. When all are published, the rank starts to read its neighbours'
    buckets. If a neighbour has not published new parameters yet, this rank's own values replace its
    values.
    """

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        super().lay_out(members, NEVER)
        self._reading: dict[Bucket, list[tuple[int, torch.Tensor, dist.Work]]] = {}
        self._published = False

    def refill(self, steps: int) -> None:
        """Does nothing: no rank puts values into slots."""

    def drop(self) -> None:
        super().drop()
        for reading in self._reading.values():
            for _, _, work in reading:
                work.wait()
        self._reading.clear()
        self._hide()

    def restore(self, saved: StateDict | None) -> None:
        super().restore(saved)
        self._hide()

    def _hide(self) -> None:
        """Tells readers that this rank's parameters are being replaced."""
        if not self._published:
            return
        self._published = False
        for bucket, window in self.windows.items():
            window.show(bucket.values, steps=NEVER)

    def share(self, bucket: Bucket, steps: int) -> None:
        self.windows[bucket].show(bucket.values, steps=steps)
        self._published = True

    def shared(self) -> None:
        self.meet()
        for bucket, window in self.windows.items():
            self._reading[bucket] = window.fetch(self.policy.part.sources)

    def mix(self, bucket: Bucket, steps: int) -> None:
        window, reading = self.windows[bucket], self._reading.pop(bucket)

        def wait() -> None:
            for _, _, work in reading:
                work.wait()

        timed(self.communicator, wait)()
        rows = {source: row for source, row, _ in reading}
        for row in rows.values():
            if window.tag(row).item() == NEVER:
                row[: bucket.values.numel()].copy_(bucket.values)
                window.tag(row).fill_(steps)
        window.collect(bucket.values, *self.policy.mix_weights(), rows, steps=steps)
        bucket.touched()


class PullGet(WindowAlgorithm["PullGet.Options"]):
    """Averages with the parameters that each neighbour publishes, read while both passes run.

    The pull-get optimizer of BlueFog (Ying et al. 2021, arXiv 2111.04287): every rank publishes the
    parameters that its step starts from, and reads its neighbours' parameters without their help.

        x <- w x + sum of w_j (what j publishes) - update(gradient at x)

    Invariant: if parameters are equal on all ranks and updates are zero, nothing changes. With
    `barrier` it is decentralized SGD (`neighbor`, combine=awc).
    Bytes move: during both passes; the step waits for the reads, not for the neighbours' steps.
    Cost per step and rank: the parameters once from each neighbour; memory for the published copy
    and for the parameters being read.
    """

    exchange = PullExchange

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """Topology and timing."""

    capabilities = Capabilities(consistency="asynchronous")
    candidates = ({"topology": "ring"},)
    bound = "beside_passes"
    barrier_bound = "beside_passes"

    @classmethod
    def overlap_of(cls, options: WindowOptions) -> Overlap:
        sent = Transfer(kind="get", carries=("parameters",), starts="model", awaited="step")
        return Overlap(transfers=(sent,), meetings=("model", "step") if options.barrier else ())
