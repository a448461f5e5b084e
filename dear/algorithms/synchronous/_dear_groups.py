"""Groups of a DeAR engine: laid out once the order of the model is known, and laid out anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dear.buckets import sharded_state
from dear.buckets.dear_replicated import Replicated
from dear.buckets.dear_updates import Sharded, Update
from dear.buckets.flat import Bucket, flatten
from dear.buckets.gathered import Gathered
from dear.buckets.halves import AllReduced, Decoupled, ReduceBroadcast, ScatterGather
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dear.buckets.compression import CompressedOptions
    from dear.comm.communicator import Communicator


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How groups are carried and updated."""

    sharded: bool = True
    broadcast: bool = False
    """Reduce and broadcast instead of reduce-scatter and all-gather."""
    wire: str | None = None
    """Name of the torch type in which gradients travel; None: their own."""
    payloads: CompressedOptions | None = None
    """How gradients are made into payloads that are gathered; None: they are reduced as they are.
    Goes with replicated updates and without the other manners."""
    small_bytes: float = 0
    """Groups up to this size are all-reduced in the first half, unless `halves` says otherwise."""
    skip_reduce: bool = False
    skip_gather: bool = False

    @property
    def halves(self) -> bool:
        """Every group must be communicated in two halves."""
        return self.broadcast or self.skip_reduce or self.skip_gather


class Groups:
    """The groups in the order in which forward passes need them, and their optimizer state."""

    def __init__(self, optimizer: Optimizer, communicator: Communicator, manner: Manner) -> None:
        self._optimizer = optimizer
        self._plain = type(optimizer)
        self._communicator = communicator
        self._manner = manner
        self.sharded = manner.sharded
        self.parts: list[Decoupled] = []
        self.update: Update

    @property
    def lasting(self) -> bool:
        """True if a group's second half or update may go on when `step()` has returned."""
        return not self.sharded or not all(isinstance(part, AllReduced) for part in self.parts)

    def lay_out(self, members: Sequence[Sequence[Parameter]], last: int) -> None:
        """Puts parameters and gradients into these groups; nothing may be in flight.

        A collective call if there are groups already: their state moves.

        Args:
            last: the group that is complete last; if it is all-reduced, it has room for a mark per
                parameter of all groups.
        """
        for part in self.parts:
            part.finish_reduce()  # of a pass that no step followed
        before = self.parts, getattr(self, "update", None)
        flat = flatten(members, self._communicator, values=self._manner.sharded)
        marks = [0] * len(flat)
        marks[last] = sum(len(group.params) for group in flat)
        self.parts = [self._part(group, i, marks[i]) for i, group in enumerate(flat)]
        self._move_kept(before[0])
        kind = Sharded if self._manner.sharded else Replicated
        self.update = kind(
            self._optimizer,
            self._plain,
            self.parts,
            self._communicator,
            frozen=self._manner.skip_gather,
        )
        if isinstance(self.update, Sharded):
            if before[0]:
                self._move_state(before[0], before[1].update.segments)
            else:
                self.shard_state()

    def _part(self, group: Bucket, index: int, marks: int) -> Decoupled:
        if self._manner.payloads is not None and self._communicator.size > 1:
            return Gathered(group, self._communicator, self._manner.payloads)
        options = {
            "wire": getattr(torch, self._manner.wire) if self._manner.wire else None,
            "skip": self._manner.skip_reduce,
        }
        if self._manner.broadcast:
            owner = index % self._communicator.size
            return ReduceBroadcast(group, self._communicator, owner=owner, **options)
        small = 0 < group.gradients.nbytes <= self._manner.small_bytes
        if small and not self._manner.halves and self._communicator.size > 1:
            return AllReduced(group, self._communicator, marks=marks, **options)
        return ScatterGather(group, self._communicator, **options)

    def shard_state(self) -> None:
        """Keeps of the state of whole parameters what this rank needs."""
        if isinstance(self.update, Sharded):
            self._forget_segments()
            sharded_state.shard(self._optimizer, self.update.update.segments)
            for part in self.parts:
                for param in part.group.params:
                    self._optimizer.state.pop(param, None)

    def whole_state(self) -> dict[Parameter, Any]:
        """Everybody's state of whole parameters, on every rank; a collective call."""
        if not isinstance(self.update, Sharded):
            return {}
        try:
            return dict(
                sharded_state.gather(
                    self._optimizer, self.parts, self.update.update.segments, self._communicator
                )
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} (the optimizer's state is spread over the ranks: every rank must call "
                "its state_dict() or close(), not only the one that saves; or use "
                "update='replicated')"
            ) from error

    def release(self) -> None:
        """Gives model and optimizer back what plain torch would have; a collective call."""
        whole = self.whole_state()
        self._forget_segments()
        self._optimizer.state.update(whole)
        for part in self.parts:
            part.finish_reduce()  # of a pass that no step followed
            part.group.release()

    def _forget_segments(self) -> None:
        for segments in self.update.update.segments if isinstance(self.update, Sharded) else ():
            for segment in segments:
                self._optimizer.state.pop(segment.tensor, None)

    def _move_kept(self, parts: Sequence[Decoupled]) -> None:
        kept: dict[Parameter, Any] = {}
        for part in parts:
            if isinstance(part, Gathered):
                kept.update(part.kept())
        for part in self.parts:
            if isinstance(part, Gathered):
                part.keep(kept)

    def _move_state(self, parts: Sequence[Decoupled], segments: Any) -> None:
        state = self._optimizer.state
        new = {s.param: s for group in self.update.update.segments for s in group}
        moved = {}
        for param, whole in sharded_state.gather(
            self._optimizer, parts, segments, self._communicator
        ):
            if param in new:
                moved[new[param].tensor] = sharded_state.cut(whole, new[param])
        for segment in (segment for group in segments for segment in group):
            state.pop(segment.tensor, None)
        state.update(moved)
