"""Passes and messages of a training step, from a layer profile and a plan.

A plan is the list of the messages of a step: the record of a trial has the size and the first and
last gradient of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.models.profile import Profile
from dear.cost.event_model.passes import Gradient, Message, Passes, UnmodelledError


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Message of a step, as a trial's record describes it."""

    nbytes: int
    tensors: int = 0
    """Number of tensors; 0: not known."""
    names: tuple[str, ...] = ()
    """Names of the message's first and last parameter; empty: not known."""
    some: bool | None = None
    """Same as `Message.some`."""


def passes_of(profile: Profile, update_s: float) -> Passes:
    """Returns the passes of a profile.

    Args:
        update_s: seconds of the optimizer's step for all parameters: measured, or `update_s_of`.
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
    """Returns the messages of a plan, in the plan's order, each with its gradients.

    A plan does not list all gradients of a message. But they become ready one after the other, so a
    message is a contiguous part of the gradients that are not yet in another message.

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
            raise UnmodelledError("the recorded messages do not fit the gradients of the profile")
        members = tuple(left[stretch])
        del left[stretch]
        messages.append(Message(members=members, nbytes=bundle.nbytes * share, some=bundle.some))
    if left:
        lacking = f"{len(left)} of {len(passes.gradients)} gradients"
        raise UnmodelledError(f"the recorded messages lack {lacking}")
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
