"""What a device computes in a step, and what is sent of it: from a profile and a plan's sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.models.profile import Profile


class UnmodelledError(Exception):
    """What the event model cannot compute, and why; a sentence without its full stop."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One gradient of the backward pass."""

    name: str
    nbytes: int
    ready_s: float
    """From the start of the backward pass."""
    layer: int
    """Before which stretch of the forward pass its parameter must be current."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """One rank's compute in a step."""

    forward_s: tuple[float, ...]
    """By layer: the stretches of the forward pass."""
    backward_s: float
    update_s: float
    """The optimizer's step for all parameters."""
    gradients: tuple[Gradient, ...]
    """As they arrive."""

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Gradients that travel together."""

    members: tuple[int, ...]
    """Their places in `Passes.gradients`."""
    nbytes: float
    """On the wire."""
    some: bool | None = None
    """Whether it has the transfers that are stated of some messages only; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a recorded plan says of a message."""

    nbytes: int
    tensors: int = 0
    """0: not known."""
    names: tuple[str, ...] = ()
    """Of its first and its last parameter, where they are known."""
    some: bool | None = None
    """Whether it has the transfers that only some messages have; None: not known."""


def passes_of(profile: Profile, update_s: float) -> Passes:
    """The passes that a profile tells of.

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
    """Seconds of an update that reads and writes each parameter so many times.

    5: SGD with momentum reads parameter, gradient and momentum, and writes two of them; 7: Adam.
    """
    nbytes = sum(4 * math.prod(param.shape) for param in profile.gradients())
    return tensors * nbytes / profile.memory_bytes_per_s


def messages_of(passes: Passes, plan: Sequence[Bundle], share: float = 1.0) -> tuple[Message, ...]:
    """The messages of a recorded plan, in its order.

    A plan tells sizes, and mostly the names at both ends. What travels together arrives together:
    each message is a stretch of what is left of the gradients as they arrive.

    Args:
        share: bytes on the wire per byte of gradients.

    Raises:
        UnmodelledError: the plan is not one of these gradients.
    """
    left = list(range(len(passes.gradients)))
    found = []
    for bundle in plan:
        stretch = _stretch(passes, left, bundle)
        if stretch is None:
            raise UnmodelledError("its plan does not fit the gradients of its profile")
        members = tuple(left[stretch])
        del left[stretch]
        found.append(Message(members=members, nbytes=bundle.nbytes * share, some=bundle.some))
    if left:
        raise UnmodelledError(f"its plan lacks {len(left)} of {len(passes.gradients)} gradients")
    return tuple(found)


def _stretch(passes: Passes, left: Sequence[int], bundle: Bundle) -> slice | None:
    gradients = passes.gradients
    wanted = set(bundle.names)
    starts = range(len(left)) if wanted else range(1)
    for start in starts:
        total, stop = 0, start
        names = set()
        while stop < len(left) and total < bundle.nbytes:
            total += gradients[left[stop]].nbytes
            names.add(gradients[left[stop]].name)
            stop += 1
        alike = bundle.tensors in (0, stop - start) and wanted <= names
        if total == bundle.nbytes and alike:
            return slice(start, stop)
    return None


def grouped(
    passes: Passes, groups: Sequence[Sequence[int]], share: float = 1.0
) -> tuple[Message, ...]:
    """Messages of groups of gradients, given by their places as they arrive (as the rules of
    `dear.buckets.grouping` give them)."""
    return tuple(
        Message(
            members=tuple(group),
            nbytes=share * sum(passes.gradients[place].nbytes for place in group),
        )
        for group in groups
    )
