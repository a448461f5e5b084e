"""Validity of a record: is there a reason (a flag) why its result may not be used?

A flagged result is shown in grey with its reason. It gets no verdict and is compared with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.results.records import Record

APART = 0.05
"""Largest relative difference that is not flagged, between the measured step and that of the event
model, and between the steps at time scales k and 2k."""
BEYOND = 1.1
"""Largest ratio of lower bound to step time that is not flagged. Measured costs have errors of some
per cent. A larger ratio means that compute, costs, bytes or the step are wrong."""
OVERSUBSCRIBED = 0.1
"""Largest share of the time for which a training thread may wait for a core on a real machine."""

FlagKind = Literal[
    "failed",
    "incorrect",
    "unfaithful",
    "disturbed",
    "not stationary",
    "stopped",
    "off the model",
    "depends on the time scale",
    "beyond the bound",
    "short of cores",
    "unchecked",
    "diverged",
]
_NOTES: tuple[FlagKind, ...] = ("unfaithful", "disturbed", "not stationary", "stopped")
"""Kinds of notes that make a result invalid: it is not a result of the trial as requested. Notes of
other kinds do not."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Reason why a record's number is not valid."""

    kind: FlagKind
    text: str
    """Text for readers, in a few words. Code asks for the kind."""


def flag_text(record: Record) -> str | None:
    """Returns the text of the record's flag; None for a valid record."""
    reason = flag(record)
    return reason and reason.text


def flag(record: Record) -> Flag | None:
    """Returns the reason why the record's number is not valid; None for a valid record."""
    return (
        passing_flag(record)
        or _off_the_model(record)
        or _depends_on_the_time_scale(record)
        or _beyond_the_bound(record)
        or _short_of_cores(record)
        or _unchecked(record)
        or _diverged(record)
    )


def passing_flag(record: Record) -> Flag | None:
    """Returns the record's flag if a new measurement could be without it; else None."""
    if not record.ok:
        text = record.error.message if record.error else record.status
        if record.throughput is not None:
            text = f"provisional, repeats so far: {len(record.results)} ({text})"
        return Flag(kind="failed", text=text)
    if incorrect(record):
        return _flag("incorrect", _what_is_wrong(record))
    for kind in _NOTES:
        for note in record.notes:
            if note.kind == kind:
                return Flag(kind=kind, text=note.text)
    return None


def _off_the_model(record: Record) -> Flag | None:
    model = record.modelled
    if model is None or model.step_s is None or not record.timed:
        return None
    if abs(model.off(record.step_s)) <= APART:
        return None
    computed, measured = (f"{1e3 * seconds:.1f} ms" for seconds in (model.step_s, record.step_s))
    return _flag("off the model", f"the event model computes {computed}, measured {measured}")


def _depends_on_the_time_scale(record: Record) -> Flag | None:
    twice = record.systematic
    if twice is None or not record.timed:
        return None
    from common.results.stats import shift  # numpy: slow, and not for dry runs

    change = shift(record.repeats, twice.repeats)
    if change.value <= APART or not change.low:  # low: 0 if chance explains it, None if unknown
        return None
    text = f"the step takes {1e3 * record.step_s:.3g} ms at k = {twice.time_scale / 2:g}, "
    text += f"{1e3 * twice.step_2k_s:.3g} ms at k = {twice.time_scale:g}"
    return _flag("depends on the time scale", text)


def _beyond_the_bound(record: Record) -> Flag | None:
    bound = record.bound and record.bound.step_s
    if bound is None or not record.timed or bound / record.step_s <= BEYOND:
        return None
    text = f"the step takes {1e3 * record.step_s:.3g} ms, and none can take less than "
    text += f"{1e3 * bound:.3g} ms ({bound / record.step_s:.0%})"
    return _flag("beyond the bound", text)


def _short_of_cores(record: Record) -> Flag | None:
    waits = [strain.main_wait for strain in record.strain if strain.main_wait is not None]
    if record.fabric.kind != "real" or max(waits, default=0.0) <= OVERSUBSCRIBED:
        return None
    text = f"a rank's training thread waited {max(waits):.0%} of the time for one"
    return _flag("short of cores", text)


def _unchecked(record: Record) -> Flag | None:
    if record.check is not None and record.check.verdict != "unchecked":
        return None
    reason = record.check and record.check.finding
    return _flag("unchecked", reason or "it was not compared with plain training")


def _diverged(record: Record) -> Flag | None:
    texts = (note.text for note in record.notes if note.kind == "diverged")
    return next((Flag(kind="diverged", text=text) for text in texts), None)


def _flag(kind: FlagKind, text: str) -> Flag:
    return Flag(kind=kind, text=f"{kind}: {text}")


def incorrect(record: Record) -> bool:
    """Returns True if the comparison with plain training found an error."""
    return record.ok and record.check is not None and record.check.verdict == "NO"


def _what_is_wrong(record: Record) -> str:
    check = record.check
    if check.finding or check.matches_reference is not False:
        return check.finding or "replicas differ"
    error = check.reference_error
    return f"{'infinitely' if error is None else f'{error:.2g}'} off plain training"
