"""Explanation of the fastest and slowest rows, from their messages, costs and compute.

A step takes the time of its compute, plus the time that communication adds. The added time is
computed from the messages, from their costs on this network, and from the window (the part of the
compute that may hide them). If the result does not match the measured step, there is no
explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.results.records import Record, Result, grouped
from common.results.tables.cells import significant
from common.results.timed.rows import Row

Cost = Callable[[int], float]
"""Function from the bytes of a message to its seconds."""
FAR = 0.9
"""Share (lower bound / step time) below which a row is explained."""
APART = 1.05
"""Ratio of the slowest step to the fastest from which both rows are explained."""
_OFF = 0.25
"""Allowed relative error of the computed time; an error of 1 % of a step is always allowed."""
_LITTLE = 0.03
"""Largest share of a step that communication may add and still count as hidden."""
_WHOLE = 0.98
"""Smallest share of the gradients that a complete plan has."""

_FASTEST = "is fastest"
_NAMES = {"all_reduce": "all-reduces", "reduce_scatter": "reduce-scatters"}
_NAMES |= {"all_gather": "all-gathers"}
_BACKWARD, _FORWARD = "the backward pass", "the next forward pass"
_EVERYTHING = "the computation of a step"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Messages of one collective operation, and the window that may hide them."""

    operation: str
    window: str | None
    """Name of the window; None: no window hides the messages."""
    window_s: float
    total_s: float
    """Time of all messages, one after the other."""
    start_up_s: float
    """Part of `total_s` that the same bytes in one message would not take."""
    last_s: float
    """Time of the message that starts last."""

    @property
    def left_s(self) -> float:
        """Time that the window cannot hide."""
        return max(0.0, self.total_s - self.window_s)

    @property
    def text(self) -> str:
        hidden = _ms(min(self.total_s, self.window_s))
        return (
            f"Its {_NAMES[self.operation]} take {_ms(self.total_s)} per step, of which "
            f"{self.window} hides {hidden}."
        )


@dataclass(frozen=True, kw_only=True)
class Account:
    """Time that communication adds to a step: measured, and computed from its messages."""

    step_s: float
    added_s: float
    """Measured step time minus compute and update."""
    added_shared_s: float
    """Same as `added_s` if each rank does only its share of the update."""
    exposed_s: float | None
    messages: Sequence[int]
    """Bytes of the messages, in the order of their starts."""
    phases: Sequence[Phase]
    sharers: int
    """Number of ranks that may share the update; 1: they do not."""

    @property
    def left_s(self) -> float:
        """Time that the windows cannot hide."""
        return sum(phase.left_s for phase in self.phases)

    @property
    def last_s(self) -> float:
        """Time of the last message of each phase, without phases that all compute may hide."""
        return sum(phase.last_s for phase in self.phases if phase.window != _EVERYTHING)

    def explains(self, seconds: float, added_s: float | None = None) -> bool:
        """Returns True if a time matches the measured added time, and the wait if it is known."""
        added = self.added_s if added_s is None else added_s
        if self.exposed_s is not None and self.exposed_s < seconds / 2:
            return False
        return abs(seconds - added) <= max(_OFF * added, self.step_s / 100)


def sentences(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Explains the fastest and the slowest row of each cell, and rows far from their bound.
    `records` are records of the rows."""
    valid = [
        (row, record)
        for row, record in zip(rows, records, strict=True)
        if row.status == "ok" and not row.flag and row.world_size > 1
    ]
    lines = []
    for pairs in grouped(valid, lambda pair: pair[0].place).values():
        for row, record, role in _standing_out(pairs):
            text = reason(record, hidden=role == _FASTEST)
            if text is not None:
                lines.append(f"{row.where}: {row.algorithm} {role}. {text}")
    return [*dict.fromkeys(lines)]


def _standing_out(pairs: Sequence[tuple[Row, Record]]) -> Iterable[tuple[Row, Record, str]]:
    ordered = sorted(pairs, key=lambda pair: pair[1].step_s)
    (best, first), (worst, last) = ordered[0], ordered[-1]
    several = last.step_s >= APART * first.step_s
    if several:
        yield best, first, _FASTEST
        yield worst, last, "is slowest"
    for row, record in ordered:
        extreme = several and (row is best or row is worst)
        if not extreme and row.of_bound is not None and row.of_bound < FAR:
            yield row, record, f"reaches {row.of_bound:.0%} of its bound"


def reason(record: Record, *, hidden: bool) -> str | None:
    """Returns the explanation of a step's length; None if the data are not sufficient. If `hidden`
    is True, a step to which communication adds almost nothing is explained, too."""
    account = account_of(record)
    if account is None:
        return None
    if account.added_s <= _LITTLE * account.step_s:
        return _hidden(account) if hidden else None
    return _late(account) or _long(account) or _start_ups(account)


def account_of(record: Record) -> Account | None:
    """Returns the account of a step; None if the record lacks data, or its plan is incomplete."""
    result, bound, costs = record.first, record.bound, record.sending_costs
    if result is None or bound is None or not costs:
        return None
    compute, plan = result.compute, result.plan
    if compute is None or plan is None:
        return None
    messages = [group.bytes for group in plan.groups]
    if not messages or not _all_travels(result, sum(messages)):
        return None
    computed = compute.forward_s + compute.backward_s
    everything = computed + compute.update_s
    windows: dict[str, list[tuple[str, str | None, float]]] = {
        "sequential": [("all_reduce", None, 0.0)],
        "wfbp": [("all_reduce", _BACKWARD, compute.backward_s)],
        "cross_iteration": [("all_reduce", _EVERYTHING, everything)],
        "delayed": [("all_reduce", _EVERYTHING, everything)],
        "dear": [
            ("reduce_scatter", _BACKWARD, compute.backward_s),
            ("all_gather", _FORWARD, compute.forward_s),
        ],
    }
    phases = windows.get(bound.kind or "")
    if phases is None or any(operation not in costs for operation, *_ in phases):
        return None
    sharers = record.trial["world_size"] if bound.kind == "dear" else 1
    step_s = record.step_s
    return Account(
        step_s=step_s,
        added_s=step_s - everything,
        added_shared_s=step_s - computed - compute.update_s / sharers,
        exposed_s=record.breakdown and record.breakdown.exposed_comm_s,
        messages=messages,
        phases=[_phase(costs[phase[0]], messages, *phase) for phase in phases],
        sharers=sharers,
    )


def _all_travels(result: Result, planned: int) -> bool:
    """Returns True if the plan has all gradients, and rank 0 sent at least as many bytes."""
    gradients, sent = result.gradient_bytes, result.bytes_per_step
    if not gradients or planned < _WHOLE * gradients:
        return False
    return sent is None or sent >= _WHOLE * gradients


def _phase(
    cost: Cost, messages: Sequence[int], operation: str, window: str | None, window_s: float
) -> Phase:
    total_s = sum(map(cost, messages))
    return Phase(
        operation=operation,
        window=window,
        window_s=window_s,
        total_s=total_s,
        start_up_s=max(0.0, total_s - cost(sum(messages))),
        last_s=cost(messages[-1]),
    )


def _hidden(account: Account) -> str | None:
    """Returns the explanation of hidden communication; None if the windows are too short."""
    if any(
        phase.window is None or phase.left_s > _LITTLE * account.step_s for phase in account.phases
    ):
        return None
    if account.last_s > max(0.0, account.added_s) + account.step_s / 100:
        return None
    text = f"It hides all but {_ms(max(0.0, account.added_s))} of its communication."
    for phase in account.phases:
        window, what = (phase.window or "").capitalize(), _NAMES[phase.operation]
        text += f" {window} hides its {what} ({_ms(phase.total_s)})."
    return text


def _late(account: Account) -> str | None:
    """Returns the explanation by the last message, if this alone adds the measured time. The
    message starts at the end of the backward pass, and the next forward pass reads it first."""
    if account.left_s > account.last_s or not account.explains(account.last_s):
        return None
    whole, last = sum(account.messages), account.messages[-1]
    if len(account.messages) == 1:
        what = f"It sends all {_mb(whole)} in one message"
    else:
        what = f"It sends the last {_mb(last)} of {_mb(whole)} in one message"
    what += " after the backward pass"
    if len(account.phases) > 1:
        what += ", and needs the result before the next forward pass"
    return f"{what}. Nothing hides the {_ms(account.last_s)} that this takes."


def _long(account: Account) -> str | None:
    """Returns the explanation by messages that take longer than their windows."""
    left = account.left_s
    if any(phase.window is None for phase in account.phases) or left <= account.last_s:
        return None
    if sum(phase.start_up_s for phase in account.phases) > left / 2:
        return None
    shared = account.sharers > 1 and account.explains(left, account.added_shared_s)
    whole = account.explains(left)
    if not (shared or whole):
        return None
    text = " ".join(phase.text for phase in account.phases)
    if shared and not whole:
        saved = account.added_shared_s - account.added_s
        text += f" Each rank makes 1/{account.sharers} of the update, which saves {_ms(saved)}."
    return text


def _start_ups(account: Account) -> str | None:
    """Returns the explanation by start-ups, if one message of the same bytes would be hidden."""
    start_ups = sum(phase.start_up_s for phase in account.phases)
    left = sum(max(0.0, phase.left_s - phase.start_up_s) for phase in account.phases)
    if any(phase.window is None for phase in account.phases) or left > account.added_s / 2:
        return None
    lost = account.added_s if account.exposed_s is None else account.exposed_s
    if start_ups < account.added_s or lost < account.added_s / 2:
        return None
    phase = account.phases[0]
    return (
        f"It sends {len(account.messages)} messages, whose start-ups take up to {_ms(start_ups)}. "
        f"One message of the same {_mb(sum(account.messages))} would take "
        f"{_ms(phase.total_s - phase.start_up_s)}, and {phase.window} takes {_ms(phase.window_s)}."
    )


def _ms(seconds: float) -> str:
    return f"{significant(1e3 * seconds)} ms" if seconds >= 5e-5 else "0 ms"


def _mb(nbytes: int) -> str:
    return f"{significant(nbytes / 1e6)} MB"
