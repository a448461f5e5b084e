"""Why a row of a comparison stands out: a sentence from its plan, its costs and its compute.

A step is what a rank computes and what communication adds to that. How much it adds follows from
the messages of the plan, from what they cost on this network, and from what they may run behind
(the kind of the trial's bound). Where that does not come to what was measured nobody knows why the
row stands out, and there is no sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.results.records import Record, Result
from common.results.tables.cells import significant
from common.results.timed.rows import Row

FAR = 0.9
"""Below this share of its bound a row stands out."""
APART = 1.05
"""The slowest row does if its step is so many times that of the fastest."""
_OFF = 0.25
"""An account may be wrong by this share of what it explains, or by a hundredth of a step."""
_LITTLE = 0.03
"""Communication that adds no more to a step is hidden."""
_WHOLE = 0.98
"""A plan that has less of the gradients does not tell what was sent."""

_NAMES = {"all_reduce": "all-reduces", "reduce_scatter": "reduce-scatters"}
_NAMES |= {"all_gather": "all-gathers"}
_BACKWARD, _FORWARD = "the backward pass", "the next forward pass"
_EVERYTHING = "all that a rank computes"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """All messages of one kind, and what they may run behind."""

    operation: str
    window: str | None
    """None: nothing."""
    window_s: float
    total_s: float
    """Of all messages one after the other."""
    start_up_s: float
    """Of that, what the same bytes in one message would not take."""
    last_s: float
    """Of the message that starts last."""

    @property
    def left_s(self) -> float:
        """What the window cannot hide."""
        return max(0.0, self.total_s - self.window_s)

    @property
    def text(self) -> str:
        name, total = _NAMES[self.operation], _ms(self.total_s)
        hidden = min(self.total_s, self.window_s)
        return f"its {name}, {total} in all, run behind {self.window}, which hides {_ms(hidden)}"


@dataclass(frozen=True, kw_only=True)
class Account:
    """What communication adds to a step: as measured, and as its messages would have it."""

    step_s: float
    added_s: float
    """The step without what a rank computes; with all of the update, as the next has it not."""
    added_shared_s: float
    """The same if each rank makes its share of the update."""
    exposed_s: float | None
    messages: Sequence[int]
    """Bytes, in the order in which they start."""
    legs: Sequence[Leg]
    sharers: int
    """Ranks that may share the update; 1: they do not."""

    @property
    def left_s(self) -> float:
        """What the windows cannot hide."""
        return sum(leg.left_s for leg in self.legs)

    @property
    def last_s(self) -> float:
        """Of the message that starts last, on all legs but those that run behind everything."""
        return sum(leg.last_s for leg in self.legs if leg.window != _EVERYTHING)

    def explains(self, seconds: float, added_s: float | None = None) -> bool:
        """Whether so much time comes to what was measured, and was waited where waiting is seen."""
        added = self.added_s if added_s is None else added_s
        if self.exposed_s is not None and self.exposed_s < seconds / 2:
            return False
        return abs(seconds - added) <= max(_OFF * added, self.step_s / 100)


def sentences(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """A line for the fastest and the slowest row of each place and for those far from their bound.

    Args:
        records: those of the rows.
    """
    places: dict[object, list[tuple[Row, Record]]] = {}
    for row, record in zip(rows, records, strict=True):
        if row.status == "ok" and not row.flag and row.world_size > 1:
            places.setdefault(row.place, []).append((row, record))
    lines = []
    for pairs in places.values():
        for row, record, role in _standing_out(pairs):
            text = reason(record, hidden=role == "fastest")
            if text is not None:
                lines.append(f"{row.where}: {row.algorithm} ({role}): {text}")
    return [*dict.fromkeys(lines)]


def _standing_out(pairs: Sequence[tuple[Row, Record]]) -> Iterable[tuple[Row, Record, str]]:
    ordered = sorted(pairs, key=lambda pair: pair[1].step_s)
    (best, first), (worst, last) = ordered[0], ordered[-1]
    several = last.step_s >= APART * first.step_s
    if several:
        yield best, first, "fastest"
        yield worst, last, "slowest"
    for row, record in ordered:
        extreme = several and (row is best or row is worst)
        if not extreme and row.of_bound is not None and row.of_bound < FAR:
            yield row, record, f"{row.of_bound:.0%} of its bound"


def reason(record: Record, *, hidden: bool) -> str | None:
    """Why its step takes as long as it does; None where its data do not say.

    Args:
        hidden: whether to say so where communication adds next to nothing.
    """
    account = account_of(record)
    if account is None:
        return None
    if account.added_s <= _LITTLE * account.step_s:
        return _hidden(account) if hidden else None
    return _late(account) or _long(account) or _start_ups(account)


def account_of(record: Record) -> Account | None:
    """None where something is not known of it, or its gradients did not travel as planned."""
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
    legs = windows.get(bound.kind or "")
    if legs is None or any(operation not in costs for operation, *_ in legs):
        return None
    sharers = record.trial["world_size"] if bound.kind == "dear" else 1
    step_s = record.step_s
    return Account(
        step_s=step_s,
        added_s=step_s - everything,
        added_shared_s=step_s - computed - compute.update_s / sharers,
        exposed_s=record.breakdown and record.breakdown.exposed_comm_s,
        messages=messages,
        legs=[_leg(costs[leg[0]], messages, *leg) for leg in legs],
        sharers=sharers,
    )


def _all_travels(result: Result, planned: int) -> bool:
    """Whether the plan has all gradients, and no fewer bytes were sent."""
    gradients, sent = result.gradient_bytes, result.bytes_per_step
    if not gradients or planned < _WHOLE * gradients:
        return False
    return sent is None or sent >= _WHOLE * gradients


def _leg(
    cost: Any, messages: Sequence[int], operation: str, window: str | None, window_s: float
) -> Leg:
    total_s = sum(map(cost, messages))
    return Leg(
        operation=operation,
        window=window,
        window_s=window_s,
        total_s=total_s,
        start_up_s=max(0.0, total_s - cost(sum(messages))),
        last_s=cost(messages[-1]),
    )


def _hidden(account: Account) -> str | None:
    """Nothing is left of it, and the messages, the last one too, could be hidden so well."""
    if any(leg.window is None or leg.left_s > _LITTLE * account.step_s for leg in account.legs):
        return None
    if account.last_s > max(0.0, account.added_s) + account.step_s / 100:
        return None
    parts = [f"its {_NAMES[leg.operation]}, {_ms(leg.total_s)}, behind {leg.window}"
             for leg in account.legs]  # fmt: skip
    added = max(0.0, account.added_s)
    return f"it hides all but {_ms(added)} of its communication: {'; '.join(parts)}"


def _late(account: Account) -> str | None:
    """The message that starts last, or the only one, outlasts what the others leave over.

    It starts when the backward pass has ended, and has what the next forward pass reads first.
    """
    if account.left_s > account.last_s or not account.explains(account.last_s):
        return None
    whole, last = sum(account.messages), account.messages[-1]
    if len(account.messages) == 1:
        what = f"it sends all {_mb(whole)} in one message"
    else:
        what = f"it sends the last {_mb(last)} of {_mb(whole)} in one message"
    what += ", when the backward pass has ended"
    if len(account.legs) > 1:
        what += ", and needs it before the next forward pass"
    return f"{what}: {_ms(account.last_s)} that nothing hides"


def _long(account: Account) -> str | None:
    """Its bytes take longer than what they run behind."""
    left = account.left_s
    if any(leg.window is None for leg in account.legs) or left <= account.last_s:
        return None
    if sum(leg.start_up_s for leg in account.legs) > left / 2:
        return None
    shared = account.sharers > 1 and account.explains(left, account.added_shared_s)
    whole = account.explains(left)
    if not (shared or whole):
        return None
    text = "; ".join(leg.text for leg in account.legs)
    if shared and not whole:
        saved = account.added_shared_s - account.added_s
        text += f"; each rank makes 1/{account.sharers} of the update, which saves {_ms(saved)}"
    return text


def _start_ups(account: Account) -> str | None:
    """In one message its bytes would be hidden; the start-ups of many are more than is lost."""
    start_ups = sum(leg.start_up_s for leg in account.legs)
    left = sum(max(0.0, leg.left_s - leg.start_up_s) for leg in account.legs)
    if any(leg.window is None for leg in account.legs) or left > account.added_s / 2:
        return None
    lost = account.added_s if account.exposed_s is None else account.exposed_s
    if start_ups < account.added_s or lost < account.added_s / 2:
        return None
    leg = account.legs[0]
    return (
        f"it sends {len(account.messages)} messages, whose start-ups take up to {_ms(start_ups)}; "
        f"its {_mb(sum(account.messages))} alone would take {_ms(leg.total_s - leg.start_up_s)} "
        f"behind {leg.window} of {_ms(leg.window_s)}"
    )


def _ms(seconds: float) -> str:
    return f"{significant(1e3 * seconds)} ms" if seconds >= 5e-5 else "0 ms"


def _mb(nbytes: int) -> str:
    return f"{significant(nbytes / 1e6)} MB"
