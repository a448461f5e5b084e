"""All-reduce after the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.buckets.compressors import CompressedOptions
from dear.buckets.grouping import Arrived, Cost, Groups, by_count
from dear.cost.overlap import Overlap, Transfer
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica


class AllReduce(Algorithm["AllReduce.Options"]):
    """Plain bulk-synchronous SGD: averages every gradient when the backward pass has ended.

    This is the readable reference that every synchronous algorithm must match.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: after the backward pass; nothing overlaps.
    Cost per step and rank: one all-reduce per parameter tensor, 2 (P-1)/P of the model's bytes in
    a ring (Patarasuk and Yuan 2009); one all-gather per tensor if elements or signs travel.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Compression of each gradient."""

    capabilities = Capabilities(consistency="synchronous")
    bound = "sequential"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="pass", awaited="pass"),))

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        return by_count(len(arrived.sizes), 1)

    def engine(self, replica: Replica[Options]) -> AveragingEngine:
        return AveragingEngine(replica, replica.params, overlap=False)
