"""Batches of each rank; their order depends only on the seed and the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count, repeat
from typing import Literal

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from common.models.datasets.sources import Samples
from dear.errors import UserError
from dear.training.pace import LocalStepRandomBatchSampler


class Batches:
    """Endless iterator over batches; an incomplete batch at the end of an epoch is dropped.

    Args:
        train: training set, the same on all ranks.
        sampler: `shared`: in each epoch, the ranks share one shuffled list of all samples; `own`:
            each rank shuffles all samples differently and goes through all of them.
        size: number of ranks.
        workers: processes that read batches in advance; 0: a batch is read when it is requested.

    Raises:
        UserError: an epoch is shorter than one batch.
    """

    def __init__(
        self,
        train: Samples,
        *,
        batch_size: int,
        sampler: Literal["shared", "own"],
        seed: int,
        rank: int,
        size: int,
        workers: int = 0,
    ) -> None:
        sharing = size if sampler == "shared" else 1
        self.per_round = len(train) // sharing // batch_size
        """Batches of each rank per epoch."""
        if not self.per_round:
            raise UserError(
                f"batch_size: {batch_size} is more than the {len(train) // sharing} samples that "
                "a worker gets in an epoch"
            )
        indices = range(len(train))
        if sampler == "own":
            local = LocalStepRandomBatchSampler(
                indices, batch_size, seed, rank=rank, drop_last=True
            )
            orders: Iterator[list[int]] = chain.from_iterable(repeat(local))  # shuffles each epoch
        else:
            distributed = DistributedSampler(indices, size, rank, seed=seed, drop_last=True)
            orders = _in_batches(distributed, batch_size)
        self._next: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(
            DataLoader(
                _Whole(train, seed=seed, rank=rank),
                batch_sampler=_numbered(orders),
                num_workers=workers,
                collate_fn=_same,
            )
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the inputs and targets of the next batch."""
        return next(self._next)

    def close(self) -> None:
        """Ends the processes that read in advance; do not request a batch afterwards."""
        self._next = iter(())


class _Whole(Dataset):
    """Dataset that returns whole batches; the number of a batch seeds its random augmentation."""

    def __init__(self, samples: Samples, *, seed: int, rank: int) -> None:
        self._samples, self._seed, self._rank = samples, seed, rank

    def __getitems__(self, numbered: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        number, *indices = numbered
        generator = torch.Generator()
        generator.manual_seed(hash((self._seed, self._rank, number)) & (2**63 - 1))
        return self._samples.batch(indices, generator)


def _same(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch


def _numbered(orders: Iterable[list[int]]) -> Iterator[list[int]]:
    for number, order in enumerate(orders):
        yield [number, *order]


def _in_batches(sampler: DistributedSampler, batch_size: int) -> Iterator[list[int]]:
    for epoch in count():
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
