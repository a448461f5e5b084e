"""Base of the engines that update locally and average parameters.

An engine decides when buckets of parameters are shared, mixed and adapted. To *share* a bucket
means that an exchange starts to send it. To *mix* it means to average in the values that arrived
from other ranks. To *adapt* it means to update it by this rank's own gradients. Orders:

    CombineThenAdapt   share before a training forward; mix, then adapt in `step()`
    AdaptThenCombine   adapt, then share in `step()`; mix before a module reads the parameters
    AdaptAndCombine    adapt, share and mix in `step()`
    Overlapped         mix, adapt and share each bucket as soon as its gradients are ready

An exchange (`dear.training.parameters.exchange`) moves the bytes. An algorithm combines an engine
and an exchange, e.g. `CombineThenAdapt(replica, GraphExchange(rounds))`. A new kind of algorithm
overrides methods of the exchange, not of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from dear.buckets.flat import Bucket
from dear.comm import runtime
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import (
    Engine,
    GradScaling,
    Replica,
    Update,
    grouped,
    refuse_lbfgs,
    scaled,
    step_after_closure,
)
from dear.training.parameters.exchange import BucketExchange
from dear.training.parameters.options import LocalOptions

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

STATE_KEY = "replica"
"""Key in a state dict's first parameter group, for what else a rank needs to continue."""


def for_all_ranks(state: StateDict) -> StateDict:
    """Returns an optimizer state without what only the rank that has saved it may continue from.

    Exchanges then begin anew on all ranks that load it. The number of steps stays.
    """
    groups = [dict(group) for group in state["param_groups"]]
    for group in groups:
        if STATE_KEY in group:
            group[STATE_KEY] = {"steps": group[STATE_KEY]["steps"]}
    return {**state, "param_groups": groups}


def refuse_writers(model: torch.nn.Module) -> None:
    """Raises `UserError` if a module writes parameters in a forward pass, while they are sent."""
    if any(getattr(module, "max_norm", None) is not None for module in model.modules()):
        raise UserError(
            "an embedding with max_norm changes its weights in the forward pass, while the weights "
            "are being sent to other ranks; use max_norm=None, or algorithm='allreduce'"
        )


def _refuse_written(advice: str) -> NoReturn:
    raise UserError(
        "parameters were changed while they were being sent, so other ranks get the values from "
        f"before; {advice}"
    )


class ParameterEngine(Engine[LocalOptions], ABC):
    """Base of the engines that update locally and average parameters.

    Args:
        replica: model and optimizer; without an optimizer, the owner of the engine must update.
        every: period of the averaging in steps; the last step of each period averages.

    Raises:
        UserError: the engine cannot step this optimizer, or it has loaded another rank's state.
    """

    when_to_write = "change them after step()"
    """Advice to scripts that change parameters while they are being sent."""

    def __init__(
        self, replica: Replica[LocalOptions], exchange: BucketExchange, *, every: int = 1
    ) -> None:
        super().__init__(replica)
        if replica.has_optimizer:
            refuse_lbfgs(self.optimizer, "averaging parameters step by step")
        self.exchange = exchange
        self.every = every
        self.steps = 0
        """Number of steps so far; schedules depend on it."""
        self._sent: dict[Bucket, list[tuple[int, int]]] = {}
        """Version counters of parameters that neighbours read in place, by bucket."""
        runtime.at_end(exchange.leave)
        exchange.open(self.communicator, self.params[0].device)
        self.prepare()
        if replica.has_optimizer:
            self.scaling = GradScaling(self.optimizer)
            try:
                self.check_state({"param_groups": self.optimizer.param_groups})
            except UserError:
                self.close()
                raise
            self.resume({})

    @abstractmethod
    def prepare(self) -> None:
        """Lays out buckets and sets hooks; the constructor calls it."""

    @abstractmethod
    def advance(self, update: Update) -> object:
        """Makes a step; `update` is the optimizer's own step."""

    @property
    def buckets(self) -> list[Bucket]:
        return self.exchange.buckets

    def begin(self) -> None:
        """Prepares the buckets for a step that shares or mixes."""
        written = self._written(self._sent)  # before `reclaim`, which copies moved parameters
        if not all(bucket.reclaim() for bucket in self.buckets):
            raise UserError(
                "the model was moved or converted after it was distributed; close() the optimizer "
                "first, and wrap it again afterwards"
            )
        if written:
            _refuse_written(self.when_to_write)
        self.exchange.begin(self.steps)

    def note_sent(self, buckets: Iterable[Bucket]) -> None:
        """Records that `buckets` are being sent as they are now."""
        if self.exchange.sends_in_place:
            self._sent.update({bucket: bucket.versions() for bucket in buckets})

    def _written(self, buckets: Iterable[Bucket]) -> bool:
        return any(b in self._sent and self._sent[b] != b.versions() for b in buckets)

    def arrived(self, buckets: Sequence[Bucket]) -> None:
        """Notes that the exchange of `buckets` has ended; call it before the averages are written.

        Raises:
            UserError: parameters have changed meanwhile.
        """
        if self._written(buckets):
            _refuse_written(self.when_to_write)
        for bucket in buckets:
            self._sent.pop(bucket, None)

    def drop(self) -> None:
        """Forgets the values that were sent, because the parameters are being replaced."""
        self.exchange.drop()
        self._sent.clear()

    def step(self, update: Update) -> object:
        if not self.exchange.takes_scaler and scaled(self.optimizer):
            raise UserError(
                "this algorithm keeps sums of gradients, but a GradScaler may skip a step on a "
                "single rank, which would break the sums; train in bfloat16 or float32 without a "
                "scaler"
            )
        return self.advance(update)

    step_closure = step_after_closure

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clips this rank's own gradients; returns their norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def synchronize(self) -> None:
        self.settle()
        self.exchange.wait()

    def state_dict(self, plain: Callable[[], StateDict]) -> StateDict:
        self.settle()
        state = plain()
        state["param_groups"][0][STATE_KEY] = self.saved()
        return state

    def check_state(self, state: StateDict) -> None:
        for group in state.get("param_groups", [])[:1]:
            self.exchange.check(group.get(STATE_KEY))

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        self.synchronize()
        plain()

    def resume(self, state: StateDict) -> None:
        # A plain optimizer keeps unknown keys of a parameter group. So the key is here even if the
        # state was loaded before the optimizer was wrapped.
        self.restore(self.optimizer.param_groups[0].pop(STATE_KEY, None))

    def saved(self) -> StateDict:
        """Returns this rank's state for a checkpoint, besides the optimizer's own state."""
        return {"steps": self.steps, **self.exchange.saved()}

    def restore(self, saved: StateDict | None) -> None:
        """Continues from a result of `saved`; None: there is none, so only parameters count."""
        self.steps = 0 if saved is None else saved["steps"]
        self.exchange.restore(saved)

    def close(self) -> None:
        runtime.forget(self.exchange)
        super().close()
        if self.replica.has_optimizer:
            self.scaling.close()
        self.exchange.take_down()
        self.exchange.release()

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        return grouped(bucket.params for bucket in self.buckets)

    def statistics(self) -> dict[str, object]:
        return self.exchange.statistics()
