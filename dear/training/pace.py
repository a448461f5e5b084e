"""Runs of a given time in which each rank has its own pace, and a sampler of a rank's batches."""

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
    """Steps that one rank made in its time."""

    steps: int
    samples: int
    elapsed_s: float
    """Seconds from the start to the end of the last step."""


def run_for(
    budget_s: float,
    step: Callable[[], int],
    communicator: Communicator,
    clock: Callable[[], float] | None = None,
) -> Pace:
    """Calls `step` until `budget_s` seconds are over, at least once.

    Ranks start together (a barrier) and make different numbers of steps. So a step must not wait
    for other ranks; steps of asynchronous algorithms do not. Afterwards `optimizer.close()` waits
    for ranks that are still in their last step.

    Args:
        step: makes one step and returns its number of samples.
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
    """Sampler that goes through the whole data in rounds, each in a new order of this rank.

    A new iterator continues the round of the previous iterator. A `DataLoader` with workers draws
    batches before it needs them, so `local_step` is then ahead of training.

    Args:
        dataset: any object with a length of at least 1.
        batch_size: samples per batch.
        base_seed: the order of round k is drawn with `base_seed + 10000 * rank + k`.
        drop_last: leave out a smaller batch at the end of a round.

    Raises:
        UserError: `batch_size` or the data size is below 1, or `drop_last` with less data than one
            batch.
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
        """Number of batches yielded so far; set it to continue from a checkpoint."""

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
