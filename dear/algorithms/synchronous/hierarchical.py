"""Hierarchical all-reduce of merged gradients, in three phases (one collective each)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dear.algorithms.synchronous.mgwfbp import Exchange
from dear.buckets.compressors import HalfOptions
from dear.buckets.grouping import MIB, fuse
from dear.comm.communicator import Communicator
from dear.comm.hierarchy import blocks_of, in_blocks
from dear.comm.runtime import ranks_per_machine
from dear.cost.bounds import Bound, GroupMean, Traffic
from dear.cost.overlap import Overlap, Transfer
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica
from dear.training.gradients import GradientEngine


class Hierarchical(Algorithm["Hierarchical.Options"]):
    """Hierarchical all-reduce (Mikami et al. 2018, arXiv 1811.05233; Horovod has one, too).

    The ranks of a block, e.g. of a machine or a site, share a fast network. A group of gradients is
    reduce-scattered inside each block. The shares are all-reduced between blocks, and all-gathered
    inside each block (`dear.comm.hierarchy`).
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, each group when its last gradient is ready; its three
    phases overlap those of other groups.
    Cost per step and rank: per group of n bytes, in blocks of L ranks, a reduce-scatter and an
    all-gather of n inside the block, and an all-reduce of n / L between the B blocks. A block sends
    and receives 2 (B-1)/B of the model's bytes.
    With `local_size` no bound is known, since the network inside such a block is not known.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """Ranks of a block, gradients that share a message, and their dtype in the message."""

        local_size: int | None = None
        """Number of consecutive ranks in a block; None: the ranks of a machine."""
        threshold_mb: float = 25.0
        """Largest total size of neighbouring tensors in one message, in MB of 2^20 bytes; 0: each
        tensor has its own message."""

        def __post_init__(self) -> None:
            at_least("hierarchical option 'local_size'", self.local_size, 1)
            at_least("hierarchical option 'threshold_mb'", self.threshold_mb, 0)

    capabilities = Capabilities(consistency="synchronous")
    bound = "legs"
    candidates = ({"threshold_mb": 5.0}, {"threshold_mb": 100.0})
    unfused: ClassVar[Mapping[str, object]] = {"threshold_mb": 0.0}
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    @classmethod
    def bound_of(cls, options: Options) -> Bound | None:
        return cls.bound if options.local_size is None else None

    @classmethod
    def traffic(cls, options: Options, world_size: int, local_size: int) -> Traffic | None:
        blocks, places = blocks_of(world_size, options.local_size or local_size)
        if 1 in (len(blocks), len(places)):
            return None
        inside = [GroupMean(ranks=tuple(ranks)) for ranks in blocks]
        between = [GroupMean(ranks=tuple(ranks), share=1 / len(places)) for ranks in places]
        return Traffic(world_size=world_size, steps=((*inside, *between),))

    def engine(self, replica: Replica[Options]) -> BlockEngine:
        return BlockEngine(replica)


class BlockEngine(GradientEngine[Hierarchical.Options]):
    """Engine that averages a group of gradients when all of them have arrived."""

    def __init__(self, replica: Replica[Hierarchical.Options]) -> None:
        options, communicator = replica.options, replica.communicator
        local_size = options.local_size or ranks_per_machine(communicator)
        self._averaging = in_blocks(communicator, local_size)
        groups = fuse([[param] for param in replica.params], options.threshold_mb * MIB)
        self._exchanges = [Exchange(group, self._averaging, options) for group in groups]
        super().__init__(replica, groups, learn=True)

    def ready(self, unit: int) -> None:
        self._exchanges[unit].start()

    def passed(self) -> None:
        for exchange in self._exchanges:
            exchange.finish()

    def drop(self) -> None:
        for exchange in self._exchanges:
            exchange.drop()

    def sender(self) -> LegsSender | None:
        if self._averaging is self.communicator:
            return None
        param = self.params[0]
        return LegsSender(self._averaging, self.options.wire or param.dtype, param.device)

    def close(self) -> None:
        super().close()
        if self._averaging is not self.communicator:
            self._averaging.close()


class LegsSender:
    """Measures all-reduces in three phases (a `dear.cost.foreign.Sender`)."""

    name, fusion_bytes = "three legs", 0.0

    def __init__(self, averaging: Communicator, dtype: torch.dtype, device: torch.device) -> None:
        self._averaging, self._dtype, self._device = averaging, dtype, device

    def timed(self, nbytes: int, tensors: int) -> Callable[[], float]:
        count = nbytes // self._dtype.itemsize // tensors
        parts = [torch.zeros(count, dtype=self._dtype, device=self._device) for _ in range(tensors)]
        return lambda: self._timed(parts)

    def _timed(self, parts: Sequence[torch.Tensor]) -> float:
        began_s = self._averaging.clock()
        for work in [self._averaging.all_reduce(part, op="sum") for part in parts]:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._averaging.clock() - began_s
