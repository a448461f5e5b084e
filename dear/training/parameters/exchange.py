"""Exchanges: objects that move buckets of parameters between ranks for an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from dear.buckets.flat import Bucket, value_bucket
from dear.comm.communicator import Communicator
from dear.comm.neighbors import Exchange, Pending, Round
from dear.lazy import torch
from dear.training.engine import Update

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

STREAMS = 2
"""Number of exchanges in flight: the CPU sums one while the network sends another."""

Rounds = Callable[[int], Round]
"""Function from the number of steps to this rank's part in the next round."""


class BucketExchange(ABC):
    """Buckets of parameters, and their transfers between ranks.

    An engine (`dear.training.parameters.engine`) calls these methods; `steps` is its number of
    steps at the time of the call.

        open(communicator)        once, before all others; a collective call
        lay_out(members, steps)   makes one bucket per list of parameters; a collective call
        begin(steps)              a step is about to share or mix
        share(bucket, steps)      starts to send a bucket as it is now
        shared()                  all buckets are being sent
        meet()                    all buckets are about to be mixed, or were mixed
        mix(bucket, steps)        waits for the values sent to this rank, and averages them in
        adapt(update)             runs `update`, the optimizer's step, in a step that averages
        wait()                    returns when no transfer reads a bucket any more
        drop()                    the parameters were replaced: values sent before are not mixed in
        saved(), restore(saved)   state of the exchange in a checkpoint; each rank saves its own
        take_down()               drops the buckets, and gives parameters their own memory
        release()                 ends all communication
        leave()                   the script ends without `take_down` and `release`

    Overlapped engines do not call `shared`, `meet` and `adapt`. `share` and `mix` run under
    `torch.no_grad()`.
    """

    takes_scaler: ClassVar[bool] = True
    """False if a GradScaler that skips a step on single ranks would break sums of gradients."""
    sends_in_place: ClassVar[bool] = True
    """True if neighbours read the parameters in place, from `share` until `mix`."""

    communicator: Communicator

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []

    def open(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int) -> None:
        self.buckets = [value_bucket(params, self.communicator) for params in members]

    def begin(self, steps: int) -> None:
        return

    @abstractmethod
    def share(self, bucket: Bucket, steps: int) -> None: ...

    def shared(self) -> None:
        return

    def meet(self) -> None:
        return

    @abstractmethod
    def mix(self, bucket: Bucket, steps: int) -> None: ...

    def adapt(self, update: Update) -> object:
        return update()

    def wait(self) -> None:
        return

    def drop(self) -> None:
        self.wait()

    def saved(self) -> StateDict:
        return {}

    def restore(self, saved: StateDict | None) -> None:
        """Continues from a result of `saved`; None: there is none, so only parameters count."""
        return

    def statistics(self) -> dict[str, object]:
        """Returns counts of this rank's transfers, by name."""
        return {}

    def take_down(self) -> None:
        self.drop()
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []

    def release(self) -> None:
        return

    def leave(self) -> None:
        self.wait()
        self.release()


class Messages(Protocol):
    """Sender of rounds, e.g. `dear.comm.neighbors.Exchange` or `Machines`."""

    def start(self, values: torch.Tensor, part: Round, /) -> Pending: ...

    def close(self) -> None: ...


class GraphExchange(BucketExchange):
    """Weighted averages with the neighbours in a graph; all ranks take part in all rounds.

    Args:
        rounds: gives this rank's part by the number of steps.
        messages: sends the rounds; None: an `Exchange` along the edges.
    """

    messages: Messages

    def __init__(self, rounds: Rounds, messages: Messages | None = None) -> None:
        super().__init__()
        self.rounds = rounds
        self.pending: dict[Bucket, list[Pending]] = {}
        """Messages of `share` that `mix` has not taken yet."""
        self._sender = messages

    def open(self, communicator: Communicator, device: torch.device) -> None:
        super().open(communicator, device)
        self.messages = self._sender or Exchange(communicator, STREAMS)

    def carried(self, bucket: Bucket) -> Sequence[torch.Tensor]:
        """Returns the flat tensors of a bucket that travel and are averaged in place."""
        return [bucket.values]

    def share(self, bucket: Bucket, steps: int) -> None:
        part = self.rounds(steps)
        self.pending[bucket] = [self.messages.start(t, part) for t in self.carried(bucket)]

    def mix(self, bucket: Bucket, steps: int) -> None:
        transfers = self.pending.pop(bucket, None)
        if transfers is None:
            return  # in the first step of an overlapped engine, or after `drop`
        for transfer, tensor in zip(transfers, self.carried(bucket), strict=True):
            transfer.finish(tensor)
        bucket.touched()

    def wait(self) -> None:
        for transfers in self.pending.values():
            for transfer in transfers:
                transfer.wait()

    def drop(self) -> None:
        super().drop()
        self.pending.clear()

    def release(self) -> None:
        self.messages.close()


def always(part: Round) -> Rounds:
    """Returns a function that gives the same `part` for every step."""
    return lambda steps: part
