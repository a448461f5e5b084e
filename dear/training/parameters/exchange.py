"""Exchanges: objects that move buckets of parameters between ranks for an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from dear.buckets.flat import Bucket, value_bucket
from dear.comm.communicator import Communicator
from dear.comm.neighbors import Exchange, Pending, Round
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import Update

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

STREAMS = 2
"""Number of exchanges in flight: the CPU sums one while the network sends another."""

Rounds = Callable[[int], Round]
"""Function from the number of steps to this rank's part in the next round."""

_SUMS = "sums"
"""Key in what a `SumExchange` saves."""


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
        adapt_alone(update)       the same in a step that does not average
        wait()                    returns when no transfer reads a bucket any more
        before_load()             the model is about to load a state dict; returns True if buckets
                                  that are shared must not be mixed
        drop()                    the parameters were replaced: values sent before are not mixed in
        saved(), restore(saved)   state of the exchange in a checkpoint; each rank saves its own
        check(saved)              raises `UserError` if `restore(saved)` would be wrong; it comes
                                  before anything is loaded
        take_down()               drops the buckets, and gives parameters their own memory
        release()                 ends all communication
        leave()                   the script ends without `take_down` and `release`

    Overlapped engines do not call `shared`, `meet`, `adapt`, `adapt_alone` and `before_load`.
    `share` and `mix` run under `torch.no_grad()`.
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

    def adapt_alone(self, update: Update) -> object:
        return update()

    def before_load(self) -> bool:
        return False

    def wait(self) -> None:
        return

    def drop(self) -> None:
        self.wait()

    def saved(self) -> StateDict:
        return {}

    def check(self, saved: StateDict | None) -> None:
        return

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


class SumExchange(GraphExchange):
    """Exchange that keeps tensors whose sums over all ranks must hold; averaging preserves errors.

    So either all ranks continue from their own saved tensors, or all begin anew, as at the start of
    training. A rank begins anew if a state is of another world size or of another algorithm, or has
    no such tensors (as after `dear.broadcast_optimizer_state`): then the same is true on all ranks.
    """

    takes_scaler = False
    _loaded = False
    """True if parameters were loaded since the last step."""

    @abstractmethod
    def kept(self) -> dict[str, list[torch.Tensor]]:
        """Returns views of what is kept, by name, and in the order of the parameters."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Resets what is kept to its content at the start of training."""

    def views(self, flat: Mapping[Bucket, torch.Tensor]) -> list[torch.Tensor]:
        """Returns the views of the buckets' flat tensors, one for each parameter."""
        return [view for bucket in self.buckets for view in bucket.views(flat[bucket])]

    def begin(self, steps: int) -> None:
        if not self._loaded:
            return
        for tensors in self.kept().values():
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                # Only some ranks may have loaded parameters. If these began anew alone, the sums
                # would not hold.
                raise UserError(
                    "parameters were loaded after a gradient that was not finite, from which sums "
                    "over steps remain: load the state of the optimizer, too, or close() the "
                    "optimizer and wrap it again"
                )
        self._loaded = False

    def before_load(self) -> bool:
        self._loaded = True
        return False

    def saved(self) -> StateDict:
        kept = {name: [t.clone() for t in tensors] for name, tensors in self.kept().items()}
        rank, world_size = self.communicator.rank, self.communicator.size
        return {_SUMS: {"rank": rank, "world_size": world_size, "kept": kept}}

    def check(self, saved: StateDict | None) -> None:
        sums = self._of_all(saved)
        if sums is None:
            return
        if sums["rank"] != self.communicator.rank:
            raise UserError(
                f"this rank is {self.communicator.rank}, but loads the optimizer state of rank "
                f"{sums['rank']}, with which sums over all ranks would be wrong: let each rank "
                "load its own state, or call dear.broadcast_optimizer_state() after one rank has "
                "loaded its own"
            )
        for name, tensors in self.kept().items():
            if [t.shape for t in sums["kept"][name]] != [t.shape for t in tensors]:
                raise UserError(
                    "the optimizer state is of other parameters than those that are trained; train "
                    "the same parameters as when it was saved"
                )

    def restore(self, saved: StateDict | None) -> None:
        self.drop()
        self.begin_anew()
        sums = self._of_all(saved)
        if sums is None:
            return
        with torch.no_grad():
            for name, tensors in self.kept().items():
                for tensor, value in zip(tensors, sums["kept"][name], strict=True):
                    tensor.copy_(value)

    def _of_all(self, saved: StateDict | None) -> StateDict | None:
        """Returns the saved sums, or None if all ranks begin anew."""
        sums: StateDict | None = (saved or {}).get(_SUMS)
        if sums is None or sums["world_size"] != self.communicator.size:
            return None
        return sums if sums["kept"].keys() == self.kept().keys() else None


def always(part: Round) -> Rounds:
    """Returns a function that gives the same `part` for every step."""
    return lambda steps: part
