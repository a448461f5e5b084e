"""What replicas do to each other's parameters at a step: ways of averaging behind one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from dear.comm.neighbors import Exchange, Machines, Pending, Round
from dear.lazy import torch

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator

Rounds = Callable[[int], Round]
"""Step number -> this rank's part in that step's round."""

STREAMS = 2
"""Exchanges at the same time: while one is added up, the other uses the wire."""


class Mixer(ABC):
    """A way of averaging. All ranks must start the same rounds in the same order."""

    @abstractmethod
    def start(self, values: torch.Tensor, step: int) -> Pending:
        """Starts the round of `step` over flat `values`, which must stay until it is finished."""

    def close(self) -> None:
        """Waits for what is under way and lets go of everything."""
        return


class GraphMixer(Mixer):
    """Weighted sums over a rank's neighbours.

    Raises:
        Unavailable: the comm core is not built.
    """

    def __init__(self, communicator: Communicator, rounds: Rounds) -> None:
        self._exchange = Exchange(communicator, STREAMS)
        self._rounds = rounds

    def start(self, values: torch.Tensor, step: int) -> Pending:
        return self._exchange.start(values, self._rounds(step))

    def close(self) -> None:
        self._exchange.close()


class MachineMixer(Mixer):
    """Averages inside each machine, and weighted sums over neighbouring machines.

    Args:
        rounds: of machine numbers.
    """

    def __init__(self, machines: Machines, rounds: Rounds) -> None:
        self._machines = machines
        self._rounds = rounds

    def start(self, values: torch.Tensor, step: int) -> Pending:
        return self._machines.start(values, self._rounds(step))

    def close(self) -> None:
        self._machines.close()


class MeanMixer(Mixer):
    """The mean over all ranks, by an all-reduce."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def start(self, values: torch.Tensor, step: int) -> Pending:
        mixed = values.clone()
        work = self._communicator.all_reduce(mixed, op="mean")
        return Pending(work.wait, work.done, lambda target: target.copy_(mixed))


class NoMixer(Mixer):
    """Leaves every replica alone."""

    def start(self, values: torch.Tensor, step: int) -> Pending:
        return Pending()
