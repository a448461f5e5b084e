"""The batches of real data that a rank trains on, round after round."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data.distributed import DistributedSampler

from common.harness.learning_config import LearnConfig
from common.models.datasets import Split
from common.models.workload import Workload
from dear.errors import UserError
from dear.pace import LocalStepRandomBatchSampler


class Batches:
    """Endless; smaller batches at the end of a round are left out.

    Args:
        train: all images and labels, the same on all ranks.
        size: number of ranks.

    Raises:
        UserError: a round has no whole batch.
    """

    def __init__(
        self, learn: LearnConfig, train: Split, *, batch_size: int, seed: int, rank: int, size: int
    ) -> None:
        self._images, self._labels = train
        sharing = size if learn.sampler == "shared" else 1
        if batch_size > len(self._labels) // sharing:
            raise UserError(
                f"batch_size: {batch_size} is more than the {len(self._labels) // sharing} images "
                "that a worker gets in a round"
            )
        if learn.sampler == "own":
            own = LocalStepRandomBatchSampler(
                self._labels, batch_size, seed, rank=rank, drop_last=True
            )
            self._orders = _endless(own)
        else:
            shared = DistributedSampler(self._labels, size, rank, seed=seed, drop_last=True)
            self._orders = _in_batches(shared, batch_size)

    def feed(self, workload: Workload) -> int:
        """Makes the next batch the workload's; returns its number of samples."""
        order = torch.tensor(next(self._orders))
        (before,) = workload.inputs
        workload.inputs = (self._images[order].to(before.device, before.dtype),)
        workload.targets = (self._labels[order].to(before.device),)
        return len(order)


def _endless(sampler: LocalStepRandomBatchSampler) -> Iterator[list[int]]:
    while True:
        yield from sampler


def _in_batches(sampler: DistributedSampler, batch_size: int) -> Iterator[list[int]]:
    round_ = 0
    while True:
        sampler.set_epoch(round_)
        order = list(sampler)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
        round_ += 1
