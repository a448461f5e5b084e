"""What a rank does with its neighbours between local updates: the part that algorithms differ in.

Parameters lie in flat buckets. Around each local update of a bucket stand `mix`, which brings in
what neighbours have sent, and `share`, which sends them the outcome.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dear.buckets.flat_parameters import FlatParameters
from dear.buckets.grouping import fuse

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator


class Neighborhood(ABC):
    """The neighbours of one rank, and what is under way between them.

    A step is `begin_step()`, then for each bucket in turn `mix`, the update, `share`. All ranks lay
    out the same buckets.

    Args:
        views: parameters are views of their buckets.
    """

    def __init__(self, communicator: Communicator, *, views: bool = True) -> None:
        self.communicator = communicator
        self.buckets: list[FlatParameters] = []
        self.steps = 0
        """Steps begun so far; checkpoints keep it, since schedules go by it."""
        self._views = views

    @property
    def laid_out(self) -> bool:
        """True between `lay_out` and `close`."""
        return bool(self.buckets)

    def lay_out(self, members: Sequence[Sequence[Parameter]]) -> None:
        """Makes the buckets; a collective call."""
        shared = self._shared_memory()
        self.buckets = [
            FlatParameters(params, self.communicator, viewed=self._views, shared=shared)
            for params in members
        ]

    def begin_step(self) -> None:
        """Local updates of one more step follow.

        Raises:
            UserError: parameters are on another device or of another type than at first.
        """
        for bucket in self.buckets:
            bucket.reclaim()
        self.steps += 1

    @abstractmethod
    def mix(self, index: int) -> None:
        """Averages bucket `index` with what the neighbours sent; under `no_grad`."""

    @abstractmethod
    def share(self, index: int) -> None:
        """Starts to send bucket `index` as it is now; under `no_grad`."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when nothing of this rank's buckets is being read any more."""

    @abstractmethod
    def forget(self) -> None:
        """The parameters were replaced: what neighbours sent before is not mixed in any more."""

    @abstractmethod
    def resume(self, steps: int) -> None:
        """Goes on after `steps` steps, with parameters as they will be in the next step."""

    def statistics(self) -> dict[str, Any]:
        """What was counted so far; empty where there is nothing to count."""
        return {}

    def release(self) -> None:
        """Ends what is under way and gives the parameters memory of their own."""
        self.wait()
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []

    def close(self) -> None:
        """Releases, and lets go of all else that was made for the neighbours."""
        self.release()

    def _shared_memory(self) -> bool:
        return False


def bucketed(
    params: Sequence[Parameter],
    arrived: Sequence[Parameter],
    nbytes: float,
    communicator: Communicator,
) -> list[list[Parameter]]:
    """Groups of less than `nbytes` (or one parameter) in the order in which gradients came.

    A collective call: rank 0's order holds on all ranks. Those without a gradient come last.
    """
    place = {param: i for i, param in enumerate(params)}
    seen = dict.fromkeys(arrived)
    seen.update(dict.fromkeys(reversed(params)))
    order = communicator.broadcast_object([place[param] for param in seen])
    return fuse([[params[i]] for i in order], nbytes)
