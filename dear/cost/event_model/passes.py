"""Compute and messages of a training step, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


class UnmodelledError(Exception):
    """Reason why the event model cannot compute a step, as a sentence without a full stop."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Gradient of the backward pass."""

    name: str
    nbytes: int
    ready_s: float
    """Seconds from the start of the backward pass."""
    layer: int
    """Index of the first layer of the forward pass that reads the parameter."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Compute of one rank in a step."""

    forward_s: tuple[float, ...]
    """Seconds of each layer in the forward pass."""
    backward_s: float
    update_s: float
    """Time of the optimizer's step for all parameters."""
    gradients: tuple[Gradient, ...]
    """Gradients in the order in which they become ready."""

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        ready_s: Sequence[float],
        reads_s: Sequence[float],
        *,
        forward_s: float,
        backward_s: float,
        update_s: float = 0.0,
    ) -> Passes:
        """Returns the passes of gradients that are given in the order in which they are ready.

        Args:
            sizes: bytes of each gradient.
            reads_s: seconds from the start of a forward pass until it reads each parameter.
        """
        starts_s = sorted({0.0, *reads_s})
        ends_s = [*starts_s[1:], max(forward_s, starts_s[-1])]
        layer = {at_s: index for index, at_s in enumerate(starts_s)}
        each = zip(sizes, ready_s, reads_s, strict=True)
        return cls(
            forward_s=tuple(end - start for start, end in zip(starts_s, ends_s, strict=True)),
            backward_s=backward_s,
            update_s=update_s,
            gradients=tuple(
                Gradient(name="", nbytes=nbytes, ready_s=at_s, layer=layer[read_s])
                for nbytes, at_s, read_s in each
            ),
        )

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    def reads_s(self) -> list[float]:
        """Returns the seconds from the start of a forward pass until it reads each gradient's
        parameter, if it waits for nothing."""
        starts_s = [0.0, *accumulate(self.forward_s)]
        return [starts_s[gradient.layer] for gradient in self.gradients]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Gradients that are sent together."""

    members: tuple[int, ...]
    """Indices in `Passes.gradients`."""
    nbytes: float
    """Bytes on the wire."""
    some: bool | None = None
    """True if the message has the transfers with `buckets="some"` (`dear.cost.overlap.Transfer`),
    such as a second all-gather; None: not known."""


def grouped(
    passes: Passes, groups: Sequence[Sequence[int]], share: float = 1.0
) -> tuple[Message, ...]:
    """Returns one message for each group of gradients.

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
