#!/usr/bin/env python3
"""What tracing costs: the traced steps of a sweep's trials beside their timed ones.

  python bench/trace_cost.py logs/emulated-quick

The first launch of each trial traces three steps after its timed ones; nothing is traced while
steps are timed. The first traced step begins with nothing under way and is left out. Exit status:
0, or 2 if the sweep has no trace.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import table
from common.results import traces
from common.results.records import Record
from common.results.store import Comparison
from dear.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one trial's first launch; seconds of what the fabric stands for."""

    trial: str
    timed_s: list[float]
    traced_s: list[float]

    @property
    def ratio(self) -> float:
        """Mean traced step over mean timed step."""
        return statistics.fmean(self.traced_s) / statistics.fmean(self.timed_s)


def cost_of(folder: Path, record: Record) -> Cost | None:
    """None without a trace, or where no steps were timed."""
    told = traces.evidence(folder, record)
    if told is None or not record.repeats:
        return None
    ends = [
        max(moments) for moments in zip(*(one["marks_s"] for one in told["traces"]), strict=True)
    ]
    traced_s = [(b - a) / told["time_scale"] for a, b in pairwise(ends)][1:]
    return Cost(trial=record.id, timed_s=record.repeats[0], traced_s=traced_s)


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 2
    folder = Path(argv[0])
    try:
        records = Comparison.load(folder).results(folder)
        found = [cost for one in records if (cost := cost_of(folder, one)) is not None]
        if not found:
            raise UserError(f"{folder}: no trial has a trace")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    header = ["trial", "timed ms", "n", "traced ms", "n", "traced / timed"]
    rows = [
        [
            *(cost.trial, table.digits(1e3 * statistics.fmean(cost.timed_s))),
            *(str(len(cost.timed_s)), table.digits(1e3 * statistics.fmean(cost.traced_s))),
            *(str(len(cost.traced_s)), f"{cost.ratio:.3f}"),
        ]
        for cost in found
    ]
    print(table.layout(header, rows))
    ratios = sorted(cost.ratio for cost in found)
    spread = f"median of {len(ratios)} trials, {ratios[0]:.3f} to {ratios[-1]:.3f}"
    print(f"a traced step takes {statistics.median(ratios):.3f} of a timed one ({spread})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
