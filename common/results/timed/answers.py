"""Sentences below the table of a comparison: the answer, and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from common.results.records import Record, grouped
from common.results.stats import MIN_REPEATS
from common.results.tables.fields import Compared, Validity
from common.results.timed.rows import Row

R = TypeVar("R", bound=Compared)


def summary(rows: Sequence[Row], compare_to: str) -> list[str]:
    """Returns a sentence per cell about the fastest trial, and trials not distinguishable from it.
    A cell, or place, is the trials that are compared with each other."""
    lines = []
    for peers in grouped(rows, lambda row: row.place).values():
        leaders = sorted((row for row in peers if row.leads), key=lambda row: row.step_s or 0.0)
        if not leaders:
            continue
        best, *others = leaders
        text = f"{best.where}: {best.algorithm} has the highest throughput"
        if best.speedup is not None:
            ends = ""
            if best.speedup_low is not None:
                ends = f"95 % CI {best.speedup_low:.2f}-{best.speedup_high:.2f}: "
            text += f", {best.speedup:.2f}x {best.compared_to} ({ends}{best.verdict})"
        elif not any(row.compared_to for row in peers):
            text += f" (no {compare_to} to compare with)"
        if others:
            text += f"; not distinguishable from it: {', '.join(row.algorithm for row in others)}"
        lines.append(text)
    return lines


def remarks(rows: Sequence[Row], records: Iterable[Record]) -> list[str]:
    """Returns remarks on the table of timed trials."""
    lines = general_remarks(rows, records)
    if any(row.systematic is not None for row in rows):
        lines.append(
            "systematic: the emulation runs k times slower than real time. This column says by how "
            "much the step time T changes if it runs 2k times slower: |T(k) - T(2k)| / T(k). Its "
            "interval starts at 0 if sampling error alone can explain the change. The column "
            "'95 % CI, this run' does not include this error."
        )
    if any(row.off_model is not None for row in rows):
        lines.append(
            "event model: how much longer the measured step is than the simulated step. The "
            "simulation uses the layer times, the buckets and the costs of the collectives. "
            "'-': not simulated; the notes say why."
        )
    if any(row.predicted_ratio is not None for row in rows):
        costs = {r.foreseen.costs_of for r in records if r.foreseen is not None} - {None}
        lines.append(
            "predicted / measured: step on the virtual cluster (docs/prediction.md), with costs of "
            f"collectives from trials of {' and '.join(sorted(costs))}, / measured step."
        )
    wrong = [row.algorithm for row in rows if row.bound_note == "wrong bound"]
    if wrong:
        lines.append(
            f"WRONG BOUND: {', '.join(dict.fromkeys(wrong))}: no step can be shorter than its "
            "bound. Costs or compute were measured wrong, or fewer bytes travel than the bound "
            "assumes."
        )
    return lines


def general_remarks(rows: Sequence[R], records: Iterable[Record]) -> list[str]:
    """Returns remarks on a table of any kind: on networks, baselines, and missing repeats."""
    lines = [
        f"{record.trial['network']}: {note}"
        for record in records
        for note in record.fabric.network.notes
    ]
    for peers in grouped(rows, lambda row: row.place).values():
        lines += filter(None, (_flagged_baseline(peers), _power(peers), _wide(peers)))
    return [*dict.fromkeys(lines)]


def _flagged_baseline(rows: Sequence[Compared]) -> str | None:
    """Returns the sentence that a cell has no verdicts, if its baseline is not valid."""
    names = {row.compared_to for row in rows if row.compared_to}
    for base in rows:
        flag = base.flag if isinstance(base, Validity) else None
        if base.algorithm in names and (flag or base.status != "ok"):
            return (
                f"{base.where}: no speed-ups or verdicts: the baseline {base.algorithm} is not "
                f"valid ({flag or base.status})"
            )
    return None


def _power(rows: Sequence[Compared]) -> str | None:
    """Returns the sentence that says which differences the repeats of a cell could detect."""
    compared = [row for row in rows if row.verdict]
    if not compared:
        return None
    known = [row for row in compared if row.detectable is not None]
    if not known:
        if any(row.one_sided for row in compared):
            return f"{compared[0].where}: runs missed the target, so no difference is detectable"
        return f"{compared[0].where}: fewer than {MIN_REPEATS} repeats detect no difference"
    parts = ", ".join(f"{row.detectable:.1%} for {row.algorithm}" for row in known)
    return (
        f"{known[0].where}: with 80 % probability, this run detects a difference from "
        f"{known[0].compared_to} of at least {parts} (with Holm's correction for {len(compared)} "
        "comparisons)"
    )


def _wide(rows: Sequence[Compared]) -> str | None:
    """Returns the sentence that says how many more repeats the requested precision needs."""
    parts = []
    wide = [r for r in rows if r.precision and r.speedup_low and r.more_repeats != 0]
    if not wide:
        return None
    for row in wide:
        half = (row.speedup_high - row.speedup_low) / 2
        count = "more than 1000" if row.more_repeats is None else f"about {row.more_repeats}"
        parts.append(f"{row.algorithm} {row.speedup:.2f} +- {half:.2f} ({count})")
    return (
        f"{wide[0].where}: these intervals are wider than +- {100 * wide[0].precision:g} % (in "
        f"parentheses: how many more repeats they probably need): {', '.join(parts)}"
    )
