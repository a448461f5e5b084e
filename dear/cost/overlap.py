"""What runs beside what: when each transfer of a step starts, and what waits for it.

An algorithm states it as data (`Algorithm.overlap`). `tests/contract/test_order.py` holds the
program to the statement, on a network whose transfers end when the test says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Moment = Literal["model", "layer", "ahead", "gradient", "pass", "step"]
"""The moments of a training step, in their order:

- `model`: a training forward pass is about to begin.
- `layer`: a layer is about to run that reads what the message carries, and the one before has run.
- `ahead`: the backward pass is about to go through the layer that it reaches just before its own.
- `gradient`: the last gradient of the message's parameters is there, and the next one is not.
- `pass`: the backward pass has computed all gradients, and `backward()` has not returned.
- `step`: inside `step()`.
"""

Kind = Literal["average", "reduce", "gather", "exchange", "put", "get"]
"""What a transfer does:

- `average`: everybody's values become one on all ranks (an all-reduce, or an all-gather of
  payloads).
- `reduce`, `gather`: its two halves: sums to owners, and from owners to everybody.
- `exchange`: neighbours send to each other, or average in groups.
- `put`, `get`: one-sided: writes into a neighbour's memory, reads from it.
"""

Content = Literal["gradients", "parameters"]
"""Estimates of the mean gradient count as gradients."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What becomes of each message of one kind; a message is a bucket, or a part of it."""

    kind: Kind
    carries: tuple[Content, ...] = ("gradients",)
    starts: Moment
    awaited: Moment | None
    """What does not go on before it has ended: `layer` its own layers only, `gradient` the update
    of its own bucket only. None: nothing waits."""
    steps_later: int = 0
    """How many calls of `step()` later than the start that is; the step in which it starts ends
    with `step()`."""
    urgent: bool = False
    """What the next forward pass reads first goes first, of all that could start or is under
    way."""

    buckets: Literal["all", "some", "instead"] = "all"
    """`some`: not every bucket has it; `instead`: those that have it lack the others."""
    up_to_bytes: float | None = None
    """With `instead`, which buckets have it: those of at most so many bytes on the wire."""
    part_bytes: float | None = None
    """A bucket travels in equal parts of at most so many bytes on the wire; None: whole."""

    def __str__(self) -> str:
        what = f"{self.kind} of {' and '.join(self.carries)}"
        sent = f"{_WHICH[self.buckets]}{what} {_STARTED[self.starts]}"
        first = ", what runs first goes first" if self.urgent else ""
        if self.awaited is None:
            return f"{sent}{first}; nobody waits"
        later = f", {_steps(self.steps_later)} later" if self.steps_later else ""
        return f"{sent}{first}; awaited {_WAITING[self.awaited]}{later}"


_WHICH = {"all": "", "some": "for some buckets: ", "instead": "for some buckets instead: "}
_STARTED = {
    "model": "before the forward pass",
    "layer": "before their layer runs",
    "ahead": "one layer ahead of the backward pass",
    "gradient": "with the bucket's last gradient",
    "pass": "when the backward pass is over",
    "step": "in `step()`",
}
_WAITING = {
    "model": "before the forward pass",
    "layer": "before their layer runs",
    "ahead": "at once",
    "gradient": "with the bucket's last gradient",
    "pass": "before `backward()` returns",
    "step": "in `step()`",
}


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What an algorithm states of a step, once it has settled (`Options.settling_steps`)."""

    transfers: tuple[Transfer, ...]
    """One for each kind of message; together they carry every layer in each step that
    communicates, and there are no others."""
    updates: Literal["gradient", "step", "layer"] = "step"
    """When a bucket is updated: in the backward pass with its last gradient, in `step()`, or just
    before its layers run again."""
    meetings: tuple[Moment, ...] = ()
    """Where all ranks wait for each other besides (barriers)."""

    def __str__(self) -> str:
        parts = [str(one) for one in self.transfers]
        if self.updates != "step":
            parts.append(f"updated {_WAITING[self.updates]}")
        parts += [f"all ranks meet {_WAITING[moment]}" for moment in self.meetings]
        return ". ".join(part[0].upper() + part[1:] for part in parts)


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """A thread of its own sends in cycles what the backward pass has left; its end waits for all.

    In each cycle ranks agree on what all of them have (one small all-reduce), fuse that in the
    order of its arrival, and all-reduce one buffer after the other; then they rest.
    """

    cycle_s: float
    """From the begin of one cycle to the next, unless it takes longer."""
    fusion_bytes: float
    """No buffer is larger, but for a single tensor that is."""
    agreement_bytes: float
    marks_bytes: float = 0.0
    """Per tensor: what is all-reduced besides when the pass has ended."""


@dataclass(frozen=True)
class Unstated:
    """An algorithm that states nothing, and why: its order is made where nobody can look."""

    reason: str
    cycles: Cycles | None = None
    """By which rule it is made, where that is known."""

    def __str__(self) -> str:
        return f"Not stated: {self.reason}"
