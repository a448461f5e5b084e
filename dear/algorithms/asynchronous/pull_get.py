"""Asynchronous decentralized SGD: ranks read parameters from the memory of their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dear.buckets.flat import Bucket
from dear.comm.neighbors import timed
from dear.cost.overlap import Overlap, Transfer
from dear.training.algorithm import Capabilities
from dear.training.one_sided import WindowAlgorithm, WindowEngine, WindowOptions


class PullGetEngine(WindowEngine):
    """Engine with the order `combine-then-adapt`, in which the receiver reads from the sender.

    - before a training forward: shows this rank's buckets and starts to read the neighbours' ones;
    - `step()`: waits for these reads, averages, then updates.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._reading: dict[Bucket, list[Any]] = {}
        super().__init__(*args, **settings)

    def refill(self) -> None:
        """Does nothing: no rank puts values into slots."""

    def share(self, bucket: Bucket) -> None:
        self.windows[bucket].show(bucket.values, steps=self.steps)

    def shared(self) -> None:
        self.meet()
        for bucket, window in self.windows.items():
            self._reading[bucket] = window.fetch(self.part.sources)

    def mix(self, bucket: Bucket) -> None:
        reading = self._reading.pop(bucket)

        def wait() -> None:
            for _, _, work in reading:
                work.wait()

        timed(self.communicator, wait)()
        rows = {source: row for source, row, _ in reading}
        self.windows[bucket].collect(bucket.values, *self.mix_weights(), rows, steps=self.steps)
        bucket.touched()


class PullGet(WindowAlgorithm):
    """Averages with the parameters that each neighbour shows, read while both passes run.

    The pull-get optimizer of BlueFog (Ying et al. 2021, arXiv 2111.04287): every rank shows the
    parameters that its step starts from, and reads those of its neighbours without their help.

        x <- w x + sum of w_j (what j shows) - update(gradient at x)

    Invariant: if parameters are equal on all ranks and updates are zero, nothing changes. With
    `barrier` it is decentralized SGD (`neighbor`, combine=awc).
    Bytes move: beside both passes; the step waits for the reads, not for the neighbours' steps.
    Cost per step and rank: the parameters once from each neighbour; memory for the shown copy and
    for the parameters being read.
    """

    engine = PullGetEngine

    @dataclass(frozen=True, kw_only=True)
    class Options(WindowOptions):
        """Topology and timing."""

    capabilities = Capabilities(consistency="asynchronous")
    bound = "beside_passes"
    barrier_bound = "beside_passes"

    @classmethod
    def overlap_of(cls, options: WindowOptions) -> Overlap:
        sent = Transfer(kind="get", carries=("parameters",), starts="model", awaited="step")
        return Overlap(transfers=(sent,), meetings=("model", "step") if options.barrier else ())
