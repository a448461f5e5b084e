"""What is said below the table of a comparison: the answer, and what it does not say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from common.results.records import Record
from common.results.stats import MIN_REPEATS
from common.results.timed.rows import Row


def summary(rows: Sequence[Row], compare_to: str) -> list[str]:
    """Who is fastest, in a sentence per model and world size, and who cannot be told from it."""
    lines = []
    for found in _by_place(rows):
        leaders = sorted((row for row in found if row.leads), key=lambda row: row.step_s or 0.0)
        if not leaders:
            continue
        best, *others = leaders
        text = f"{where(best)}: {best.algorithm} has the highest throughput"
        if best.speedup is not None:
            text += f", {best.speedup:.2f}x {best.compared_to} ({_interval(best)}{best.verdict})"
        elif not any(row.compared_to for row in found):
            text += f" (no {compare_to} to compare with)"
        if others:
            text += f"; not distinguishable from it: {', '.join(row.algorithm for row in others)}"
        lines.append(text)
    return lines


def _interval(row: Row) -> str:
    if row.speedup_low is None:
        return ""
    return f"95 % CI {row.speedup_low:.2f}-{row.speedup_high:.2f}: "


def remarks(rows: Sequence[Row], records: Iterable[Record]) -> list[str]:
    """What is to be kept in mind, once for all rows."""
    found = of_any(rows, records)
    if any(row.systematic is not None for row in rows):
        found.append(
            "systematic: |T(k) - T(2k)| / T(k), how far the step time T depends on the time scale "
            "k, with its own 95 % interval, whose lower end is 0 where chance explains it; the "
            "interval of the run does not know of it"
        )
    if any(row.off_model is not None for row in rows):
        found.append(
            "event model: by how much the step is longer than the model computes from the layer "
            "profile, the plan and the costs of collectives; -: not computed, see the notes"
        )
    wrong = [row.algorithm for row in rows if row.reach == "wrong bound"]
    if wrong:
        found.append(
            f"WRONG BOUND: {', '.join(dict.fromkeys(wrong))}: no step can be shorter than its "
            "bound; costs or compute were measured wrong, or fewer bytes travel than it assumes "
            "(compression)"
        )
    return [*dict.fromkeys(found)]


def of_any(rows: Sequence[Any], records: Iterable[Record]) -> list[str]:
    """The same below tables of any kind: of networks, of bases, and of what repeats can show."""
    found = [
        f"{one.trial['network']}: {note}" for one in records for note in one.fabric.network.notes
    ]
    for place in _by_place(rows):
        lines = (_without_base(place), _power(place), _wide(place))
        found += [line for line in lines if line]
    return [*dict.fromkeys(found)]


def _without_base(rows: Sequence[Any]) -> str | None:
    """Why there are no words in a place, where what they would be relative to is not believed."""
    names = {row.compared_to for row in rows if row.compared_to}
    for base in (row for row in rows if row.algorithm in names):
        if base.flag or base.status != "ok":
            return (
                f"{where(base)}: no speed-ups and no verdicts, for what they would be relative to "
                f"is not believed: {base.algorithm} ({base.flag or base.status})"
            )
    return None


def _power(rows: Sequence[Any]) -> str | None:
    """What difference the repeats of a place could have shown."""
    compared = [row for row in rows if row.verdict]
    if not compared:
        return None
    known = [row for row in compared if row.detectable is not None]
    if not known:
        return f"{where(compared[0])}: fewer than {MIN_REPEATS} repeats detect no difference"
    parts = ", ".join(f"{row.algorithm} {row.detectable:.1%}" for row in known)
    return (
        f"{where(known[0])}: detectable differences (power 80 %, Holm over {len(compared)}): "
        f"{parts}"
    )


def _wide(rows: Sequence[Any]) -> str | None:
    """How many repeats it would take to know the ratios of a place as well as was asked for."""
    known = [row for row in rows if row.precision and row.speedup_low]
    wide = [row for row in known if row.more_repeats != 0]
    if not wide:
        return None
    asked = f"+- {100 * wide[0].precision:g} %"
    return (
        f"{where(wide[0])}: wider than {asked}, with how many more repeats would probably bring "
        f"it there: {'; '.join(map(_more, wide))}"
    )


def _more(row: Any) -> str:
    half = (row.speedup_high - row.speedup_low) / 2
    count = "more than 1000" if row.more_repeats is None else f"about {row.more_repeats}"
    return f"{row.algorithm} {row.speedup:.2f} +- {half:.2f}: {count}"


def _by_place(rows: Iterable[Any]) -> list[list[Any]]:
    places: dict[object, list[Any]] = {}
    for row in rows:
        places.setdefault(row.place, []).append(row)
    return list(places.values())


def where(row: Any) -> str:
    """The place of a row, in a sentence's words."""
    more = "".join(f", {name}" for name in (row.network, row.fault) if name)
    return f"{row.model}, {row.world_size} workers{more}"
