"""Statements of order: when each transfer of a step starts, and what waits for it.

An algorithm declares its order as data (`Algorithm.overlap`). `tests/contract/test_order.py` checks
it on a network whose transfers end only when the test ends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Moment = Literal["model", "layer", "ahead", "gradient", "pass", "step"]
"""Moments of a training step, in order:

- `model`: before a training forward pass.
- `layer`: before a layer that reads the message's values, and after the layer before it.
- `ahead`: before the backward pass of the layer whose gradients come just before the message's.
- `gradient`: after the last gradient of the message's parameters, and before the next gradient.
- `pass`: after the last gradient of the backward pass, and before `backward()` returns.
- `step`: inside `step()`.
"""

Kind = Literal["average", "reduce", "gather", "exchange", "put", "get"]
"""Kinds of transfers:

- `average`: all ranks get the mean of all (an all-reduce, or an all-gather of compressed values).
- `reduce`, `gather`: the halves of an average: sums to owners, and from owners to all ranks.
- `exchange`: neighbours send to each other, or average in groups.
- `put`, `get`: one-sided writes into a neighbour's memory, and reads from it.
"""

Content = Literal["gradients", "parameters"]
"""Values of a transfer. Estimates of the mean gradient count as gradients."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Course of all messages of one kind; a message is a bucket, or a part of it."""

    kind: Kind
    carries: tuple[Content, ...] = ("gradients",)
    starts: Moment
    awaited: Moment | None
    """Moment that waits for the transfer. `layer`: only its own layers wait; `gradient`: only the
    update of its own bucket waits; None: nothing waits."""
    steps_later: int = 0
    """Calls of `step()` between start and wait. The step of the start ends with `step()`."""
    urgent: bool = False
    """True if messages that the next forward pass needs first overtake the others."""

    buckets: Literal["all", "some", "instead"] = "all"
    """`some`: only some buckets have it; `instead`: buckets that have it lack the other kinds."""
    up_to_bytes: float | None = None
    """Largest size on the wire of a bucket that has it, with `instead`."""
    part_bytes: float | None = None
    """Largest size on the wire of the equal parts of a bucket; None: a bucket is one message."""

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
    """Statement of an algorithm about its steps, once it has settled (`Options.settling_steps`)."""

    transfers: tuple[Transfer, ...]
    """Kinds of messages. Together they carry every layer in each step that communicates; there are
    no other messages."""
    updates: Literal["gradient", "step", "layer"] = "step"
    """Moment of a bucket's update: with its last gradient, in `step()`, or before its layers run
    again."""
    meetings: tuple[Moment, ...] = ()
    """Additional barriers of all ranks."""

    def __str__(self) -> str:
        parts = [str(transfer) for transfer in self.transfers]
        if self.updates != "step":
            parts.append(f"updated {_WAITING[self.updates]}")
        parts += [f"all ranks meet {_WAITING[moment]}" for moment in self.meetings]
        return ". ".join(part[0].upper() + part[1:] for part in parts)


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Rule of an engine with a thread that sends gradients in cycles; the pass waits for its end.

    In each cycle the ranks agree by a small all-reduce on the tensors that all of them have. They
    fuse these tensors in the order of arrival and all-reduce one buffer after the other. Then they
    rest.
    """

    cycle_s: float
    """Least time from the begin of a cycle to the next, in seconds."""
    fusion_bytes: float
    """Largest size of a buffer with several tensors."""
    agreement_bytes: float
    """Size of the small all-reduce."""
    marks_bytes: float = 0.0
    """Extra bytes per tensor that are all-reduced after the pass."""


@dataclass(frozen=True)
class Unstated:
    """Missing statement of an algorithm whose order cannot be observed, with the reason."""

    reason: str
    cycles: Cycles | None = None
    """Rule of its order, if it is known."""

    def __str__(self) -> str:
        return f"Not stated: {self.reason}"
