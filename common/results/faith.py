"""Whether the number of a record may be believed, and why not.

What may not is shown in grey with the reason; it gets no word, and nothing is compared with it.
"""

from __future__ import annotations

from common.results.records import IMPORTED, Record

# Notes of a record that begin with one of these say that its number is of something else than
# the trial; all others are only to be kept in mind.
_DOUBTS = ("unfaithful", "disturbed", "not stationary", "stopped")

APART = 0.05
"""Methods that differ by more contradict each other, as a share of what the model says."""
OVERSUBSCRIBED = 0.1
"""Share of the time for which a training thread may wait for a core where nothing is emulated."""


def doubt(record: Record) -> str | None:
    """Why the record's number may not be believed, in a few words; None if it may.

    It has failed, it is not the right training (or nobody knows), or it has measured something
    else: a machine too busy for the cluster that it emulates, other processes, a start, or what
    a second method does not find.
    """
    return flaw(record) or _contradicted(record) or _short_of_cores(record) or _unchecked(record)


def flaw(record: Record) -> str | None:
    """The same of what measuring it again may mend: not that nothing is there to check it by."""
    if not record.ok:
        return record.error.message if record.error else record.status
    if incorrect(record):
        return _what_is_wrong(record)
    for kind in _DOUBTS:
        for note in record.notes:
            if note.startswith(kind):
                return note
    if record.unfaithful:
        return "unfaithful: the machine was too busy to be the cluster"
    return None


def _contradicted(record: Record) -> str | None:
    """The number of one method is none: both must come to it."""
    model = record.modelled
    if model is None or model.step_s is None or not record.iters:
        return None
    if abs(model.off(record.step_s)) <= APART:
        return None
    computed, measured = (f"{1e3 * seconds:.1f} ms" for seconds in (model.step_s, record.step_s))
    return f"off the model: the event model computes {computed}, measured {measured}"


def _short_of_cores(record: Record) -> str | None:
    """On real machines: whoever has no core says nothing of its algorithm."""
    waits = [one.main_wait for one in record.strain if one.main_wait is not None]
    if record.fabric != "real" or max(waits, default=0.0) <= OVERSUBSCRIBED:
        return None
    waited = f"{max(waits):.0%} of the time"
    return f"short of cores: a rank's training thread waited {waited} for one"


def _unchecked(record: Record) -> str | None:
    if record.fabric == IMPORTED:  # nothing of its kind is checked: they compare with each other
        return None
    if record.check is None or record.check.verdict == "unchecked":
        finding = record.check and record.check.finding
        return f"unchecked: {finding or 'it was not compared with plain training'}"
    return None


def incorrect(record: Record) -> bool:
    """Whether it is known not to be the right training."""
    return record.ok and record.check is not None and record.check.verdict == "NO"


def _what_is_wrong(record: Record) -> str:
    check = record.check
    if check.finding:
        return f"incorrect: {check.finding}"
    if check.matches_reference is False:
        error = check.reference_error
        return f"incorrect: {'infinitely' if error is None else f'{error:.2g}'} off plain training"
    return "incorrect: replicas differ"
