"""Compute and messages of a training step, from a layer profile and the sizes of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.models.profile import Profile


class UnmodelledError(Exception):
    """Reason why the event model cannot compute a step; a sentence without its full stop."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Gradient of the backward pass."""

    name: str
    nbytes: int
    ready_s: float
    """Seconds from the start of the backward pass."""
    layer: int
    """Index of the first stretch of the forward pass that reads the parameter."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Compute of one rank in a step."""

    forward_s: tuple[float, ...]
    """Stretches of the forward pass, one per layer."""
    backward_s: float
    update_s: float
    """Time of the optimizer's step for all parameters."""
    gradients: tuple[Gradient, ...]
    """Gradients in the order in which they become ready."""

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Gradients that are sent together."""

    members: tuple[int, ...]
    """Indices in `Passes.gradients`."""
    nbytes: float
    """Bytes on the wire."""
    some: bool | None = None
    """True for a message with the transfers that only some messages have; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Message in a recorded plan."""

    nbytes: int
    tensors: int = 0
    """Number of tensors; 0: not known."""
    names: tuple[str, ...] = ()
    """Names of its first and last parameter, if they are known."""
    some: bool | None = None
    """Same as `Message.some`."""


def passes_of(profile: Profile, update_s: float) -> Passes:
    """Returns the passes of a profile.

    Args:
        update_s: seconds of the optimizer's step for all parameters (`update_s_of`, or measured).
    """
    return Passes(
        forward_s=tuple(call.forward_s for call in profile.calls),
        backward_s=profile.backward_s,
        update_s=update_s,
        gradients=tuple(
            Gradient(
                name=param.name,
                nbytes=4 * math.prod(param.shape),
                ready_s=param.ready_s,
                layer=profile.first_calls[param.name],
            )
            for param in profile.gradients()
        ),
    )


def update_s_of(profile: Profile, tensors: int = 5) -> float:
    """Returns the seconds of an update that reads or writes `tensors` values per parameter.

    The value is 5 for SGD with momentum, which reads parameter, gradient and momentum and writes
    parameter and momentum. It is 7 for Adam.
    """
    nbytes = sum(4 * math.prod(param.shape) for param in profile.gradients())
    return tensors * nbytes / profile.memory_bytes_per_s


def messages_of(passes: Passes, plan: Sequence[Bundle], share: float = 1.0) -> tuple[Message, ...]:
    """Returns the messages of a recorded plan, in the plan's order.

    A plan has sizes, and usually the first and last name of each message. Gradients of a message
    become ready one after the other, so each message is a contiguous part of the remaining ones.

    Args:
        share: bytes on the wire per byte of gradients.

    Raises:
        UnmodelledError: the plan does not match the gradients.
    """
    left = list(range(len(passes.gradients)))
    messages = []
    for bundle in plan:
        stretch = _stretch(passes, left, bundle)
        if stretch is None:
            raise UnmodelledError("its plan does not fit the gradients of its profile")
        members = tuple(left[stretch])
        del left[stretch]
        messages.append(Message(members=members, nbytes=bundle.nbytes * share, some=bundle.some))
    if left:
        raise UnmodelledError(f"its plan lacks {len(left)} of {len(passes.gradients)} gradients")
    return tuple(messages)


def _stretch(passes: Passes, left: Sequence[int], bundle: Bundle) -> slice | None:
    gradients = passes.gradients
    known_names = set(bundle.names)
    starts = range(len(left)) if known_names else range(1)
    for start in starts:
        total, stop = 0, start
        names = set()
        while stop < len(left) and total < bundle.nbytes:
            total += gradients[left[stop]].nbytes
            names.add(gradients[left[stop]].name)
            stop += 1
        matches = bundle.tensors in (0, stop - start) and known_names <= names
        if total == bundle.nbytes and matches:
            return slice(start, stop)
    return None


def grouped(
    passes: Passes, groups: Sequence[Sequence[int]], share: float = 1.0
) -> tuple[Message, ...]:
    """Returns the messages of groups of gradients.

    Args:
        groups: indices in `passes.gradients`, as from the rules of `dear.buckets.grouping`.
    """
    return tuple(
        Message(
            members=tuple(group),
            nbytes=share * sum(passes.gradients[index].nbytes for index in group),
        )
        for group in groups
    )
