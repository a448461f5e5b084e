"""Runs of ranks at their own pace: they end after a time, and each rank draws its own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from dear.comm.communicator import Communicator
from dear.options import at_least, positive

SEED_PER_RANK = 10000


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Steps of one rank in its time."""

    steps: int
    samples: int
    elapsed_s: float
    """Seconds to the end of the last step."""


def run_for(
    budget_s: float,
    step: Callable[[], int],
    communicator: Communicator,
    clock: Callable[[], float] | None = None,
) -> Pace:
    """Calls `step`, which returns its number of samples, until the time is over; at least once.

    Ranks start together (a barrier) and make different numbers of steps, so steps must not wait for
    other ranks: it is for asynchronous algorithms. Afterwards `optimizer.close()` waits for the
    ranks that are still in their last step.

    Args:
        clock: returns the time in seconds; None: the communicator's clock.

    Raises:
        UserError: `budget_s` is not positive.
    """
    positive("budget_s", budget_s)
    clock = clock or communicator.clock
    communicator.barrier()
    began = clock()
    steps = samples = 0
    elapsed_s = 0.0
    while elapsed_s < budget_s:
        samples += step()
        steps += 1
        elapsed_s = clock() - began
    return Pace(steps=steps, samples=samples, elapsed_s=elapsed_s)


class LocalStepRandomBatchSampler(Sampler[list[int]]):
    """Sampler whose rounds go through the whole data, each in a new order of this rank.

    The next iterator continues the round of the last one. A `DataLoader` with workers takes batches
    ahead of their use.

    Args:
        dataset: any object with a length of at least 1.
        batch_size: samples per batch.
        base_seed: the order of round k is drawn with `base_seed + 10000 * rank + k`.
        drop_last: leave out a smaller batch at the end of a round.

    Raises:
        UserError: a size below 1, or `drop_last` with less than one batch of data.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        base_seed: int,
        rank: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._size = len(dataset)
        at_least("number of samples", self._size, batch_size if drop_last else 1)
        at_least("batch_size", batch_size, 1)
        self._batch_size = batch_size
        self._seed = base_seed + SEED_PER_RANK * rank
        self._drop_last = drop_last
        self.local_step = 0
        """Batches yielded so far; set it to continue from a checkpoint."""

    def __len__(self) -> int:
        """Returns the number of batches of a round."""
        whole, rest = divmod(self._size, self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        round_, done = divmod(self.local_step, len(self))
        generator = torch.Generator().manual_seed(self._seed + round_)
        order = torch.randperm(self._size, generator=generator).tolist()
        for batch in range(done, len(self)):
            self.local_step += 1
            yield order[batch * self._batch_size : (batch + 1) * self._batch_size]
