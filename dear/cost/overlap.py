"""Declared order of transfers: when each transfer of a step starts, and what waits for it.

An algorithm declares its order as data (`Algorithm.overlap`). `tests/contract/test_order.py` checks
it on a network in which the test decides when each transfer ends. A pass is a backward pass; a
message is a bucket, or a part of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Moment = Literal["model", "layer", "ahead", "gradient", "pass", "step"]
"""Moments of a training step, in order:

- `model`: before a training forward pass.
- `layer`: before the layer that reads the message's values runs, after the layer before it has run.
- `ahead`: before the backward pass of the layer whose gradients come just before the message's.
- `gradient`: after the last gradient of the message's parameters, and before the next gradient.
- `pass`: after the last gradient of the backward pass, and before `backward()` returns.
- `step`: inside `step()`.
"""

Kind = Literal["average", "reduce", "gather", "exchange", "put", "get"]
"""Kinds of transfers:

- `average`: all ranks get the mean of all (an all-reduce, or an all-gather of compressed values).
- `reduce`, `gather`: the halves of an average: sums to owners, then from owners to all ranks.
- `exchange`: neighbours send to each other, or average in groups.
- `put`, `get`: one-sided writes into a neighbour's memory, and reads from it.
"""

Content = Literal["gradients", "parameters"]
"""Values that a transfer carries. Estimates of the mean gradient count as gradients."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Order of all messages of one kind."""

    kind: Kind
    carries: tuple[Content, ...] = ("gradients",)
    starts: Moment
    awaited: Moment | None
    """Moment at which something waits for the transfer. `layer`: only the layers of the message
    wait; `gradient`: only the update of its own bucket waits; None: nothing waits."""
    steps_later: int = 0
    """Number of `step()` calls that end between the start of the transfer and the wait for it."""
    urgent: bool = False
    """True if messages that the next forward pass needs first overtake other messages."""
    levels: int | None = None
    """Number of queues of urgent messages (`shared_out`). Messages of one queue do not overtake
    each other. None: each layer has its own queue."""

    buckets: Literal["all", "some", "instead"] = "all"
    """`some`: only some buckets have it. `instead`: these buckets have none of the other kinds."""
    up_to_bytes: float | None = None
    """Largest bucket that has this kind, in bytes on the wire; only with `instead`."""
    part_bytes: float | None = None
    """Largest part of a bucket, in bytes on the wire; None: a bucket is one message."""

    def __str__(self) -> str:
        what = f"a{'n' * (self.kind[0] in 'ae')} {self.kind} of {' and '.join(self.carries)}"
        sent = f"{_WHICH[self.buckets]}{what} starts {_STARTED[self.starts]}"
        first = ", in the order in which layers run" if self.urgent else ""
        if self.awaited is None:
            return f"{sent}{first}; no rank waits for it"
        later = f", {_steps(self.steps_later)} later" if self.steps_later else ""
        return f"{sent}{first}; the rank waits for it {_WAITING[self.awaited]}{later}"


_WHICH = {"all": "", "some": "for some buckets: ", "instead": "for some buckets instead: "}
_STARTED = {
    "model": "before the forward pass",
    "layer": "before the layer runs",
    "ahead": "one layer ahead of the backward pass",
    "gradient": "when the bucket's last gradient is ready",
    "pass": "after the backward pass",
    "step": "in `step()`",
}
_WAITING = {
    "model": "before the forward pass",
    "layer": "before the layer runs",
    "ahead": "at once",
    "gradient": "when the bucket's last gradient is ready",
    "pass": "before `backward()` returns",
    "step": "in `step()`",
}


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


def shared_out(sizes: Iterable[float], levels: int) -> list[int]:
    """Returns the queue of each message; 0 is the most urgent.

    Messages that are needed one after another share a queue, and all queues have about equal bytes.

    Args:
        sizes: bytes, in the order in which the next forward pass needs the messages.
        levels: number of queues.
    """
    sizes = list(sizes)
    total, before, queues = sum(sizes), 0.0, []
    for size in sizes:
        queues.append(min(int((before + size / 2) / total * levels), levels - 1))
        before += size
    return queues


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Order that an algorithm declares for the steps after the first `Options.settling_steps`."""

    transfers: tuple[Transfer, ...]
    """All kinds of messages. Together they carry every layer in each step that communicates."""
    updates: Literal["gradient", "step", "layer"] = "step"
    """Moment of a bucket's update: with its last gradient, in `step()`, or before its layers run
    again."""
    meetings: tuple[Moment, ...] = ()
    """Moments at which, in addition, all ranks wait for each other."""

    def __str__(self) -> str:
        parts = [str(transfer) for transfer in self.transfers]
        if self.updates != "step":
            parts.append(f"parameters are updated {_WAITING[self.updates]}")
        parts += [f"all ranks wait for each other {_WAITING[at]}" for at in self.meetings]
        return ". ".join(part[0].upper() + part[1:] for part in parts)


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Rule of an engine whose thread sends gradients in cycles; a backward pass waits for the end.

    In each cycle a small all-reduce tells the ranks which tensors all of them have. They fuse these
    tensors in the order of arrival, all-reduce one buffer after the other, and rest until the next
    cycle.
    """

    cycle_s: float
    """Least time between the starts of two cycles, in seconds."""
    fusion_bytes: float
    """Largest size of a buffer with several tensors."""
    agreement_bytes: float
    """Size of the small all-reduce."""
    marks_bytes: float = 0.0
    """Extra bytes per tensor that are all-reduced after the pass."""


@dataclass(frozen=True)
class Unstated:
    """Reason why an algorithm declares no order: it cannot be observed."""

    reason: str
    cycles: Cycles | None = None
    """Rule of the order, if it is known."""

    def __str__(self) -> str:
        return f"Not stated: {self.reason}"
