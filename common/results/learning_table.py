"""Trials that train for a time, as tables for terminals, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common.results.learning import LearnRow
from common.results.tables import markdown_lines, significant

HEADINGS = (
    "model",
    "batch",
    "workers",
    "network",
    "fault",
    "algorithm",
    "to target",
    "steps to target",
    "accuracy",
    "of single ranks",
    "loss",
    "throughput",
    "steps/s",
    "on the slow host",
    "kept",
    "consensus",
    "staleness",
    "lost",
    "notes",
)
"""Terminals and Markdown leave out columns without anything in them."""
NUMERIC = ("batch", "workers", *HEADINGS[6:17])


def cells(row: LearnRow) -> list[str]:
    """The row as text, in the order of `HEADINGS`."""
    name = [row.model, row.batch, str(row.world_size)]
    name += [row.network or "", row.fault or "", row.algorithm]
    if row.status != "ok":
        return [*name, row.status, *[""] * (len(HEADINGS) - len(name) - 2), _plain(row.reason)]
    target = ""
    if row.target is not None:
        target = "not reached" if row.to_target_s is None else f"{row.to_target_s:.1f} s"
    spread = ""
    if row.accuracy is not None and row.accuracy_min != row.accuracy_max:
        spread = f"{row.accuracy_min:.2%}-{row.accuracy_max:.2%}"
    stale = ""
    if row.staleness_mean is not None:
        stale = f"{row.staleness_mean:.1f}, max {row.staleness_max:g}"
    return [
        *name,
        target,
        "" if row.steps_to_target is None else f"{row.steps_to_target:.0f}",
        "" if row.accuracy is None else f"{row.accuracy:.2%}",
        spread,
        significant(row.loss),
        f"{significant(row.samples_per_s)} {row.unit}",
        significant(row.steps_per_s),
        significant(row.slowed_steps_per_s),
        "" if row.kept is None else f"{row.kept:.2f}",
        "" if not row.consensus_distance else f"{row.consensus_distance:.1e}",
        stale,
        row.lost_ranks or "",
        _plain(row.reason),
    ]


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def markdown(table: Sequence[LearnRow]) -> str:
    """For a README or a pull request."""
    body = [cells(row) for row in table]
    used = [i for i in range(len(HEADINGS)) if any(line[i] for line in body)]
    titles = [HEADINGS[i] for i in used]
    return markdown_lines(titles, [[line[i] for i in used] for line in body], NUMERIC)


def csv_text(table: Sequence[LearnRow]) -> str:
    """All fields of all rows, full precision; None is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(LearnRow.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table)
    return out.getvalue()


def summary(table: Sequence[LearnRow]) -> list[str]:
    """Which algorithm is first at the target, in a sentence per model, world and fault."""
    lines = []
    places = dict.fromkeys(_place(row) for row in table)
    for place in places:
        rivals = [row for row in table if _place(row) == place and row.status == "ok"]
        there = [row for row in rivals if row.to_target_s is not None]
        if len(rivals) < 2 or rivals[0].target is None:
            continue
        where = "".join(f", {name}" for name in place[3:] if name)
        text = f"{place[0]}, {place[2]} workers{where}: "
        if there:
            first = min(there, key=lambda row: row.to_target_s or 0.0)
            text += f"{first.algorithm} is the first at {first.target:.0%}, after "
            text += f"{first.to_target_s:.1f} s; {len(there)} of {len(rivals)} get there"
        else:
            text += f"none reaches {rivals[0].target:.0%} in {rivals[0].budget_s:g} s"
        lines.append(text)
    return lines


def _place(row: LearnRow) -> tuple[Any, ...]:
    return (row.model, row.batch, row.world_size, row.network, row.fault)
