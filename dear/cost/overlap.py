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

    def __str__(self) -> str:
        started = _STARTED[self.starts]
        if self.awaited is None:
            waits = "nothing waits for them"
        else:
            when = {0: "", 1: "the next "}.get(self.steps_later, f"{self.steps_later} steps later ")
            who = _WAITING[self.awaited]
            waits = f"{when or 'the same '}{who} waits" if when or who[0] != "`" else f"{who} waits"
        first = ", what runs first goes first" if self.urgent else ""
        return f"{self.kind} {' and '.join(self.carries)} {started}{first}; {waits}"


_STARTED = {
    "model": "before a training forward",
    "layer": "before their layer runs",
    "ahead": "one layer ahead of the backward pass",
    "gradient": "as soon as the bucket's last gradient is there",
    "pass": "when the backward pass is over",
    "step": "in `step()`",
}
_WAITING = {
    "model": "forward",
    "layer": "run of their layer",
    "ahead": "backward pass",
    "gradient": "update of their bucket",
    "pass": "`backward()`",
    "step": "`step()`",
}


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


@dataclass(frozen=True)
class Unstated:
    """An algorithm that states nothing, and why: its order is made where nobody can look."""

    reason: str
