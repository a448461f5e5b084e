#!/usr/bin/env python3
"""How well the costs that a sweep has measured foresee times that they were not fitted to.

  python bench/costs.py logs/NAME [logs/OTHER ...] [--json FILE]

The first trial of each cell times every collective by size. One half of the repeats is fitted, and
the fit is held against the other half: from 32 KiB on it may be off by no more than the halves are
off each other (roots of mean squares over some ten sizes, so a ratio of 1.3 is still chance), and
from 1 MiB on by no more than 3 % anywhere.
Exit status: 0, 1 if an operation is beyond that, 2 if no sweep has such times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import table
from common.results import traces
from common.results.records import Record, typed
from common.results.store import Comparison
from dear.cost.fit import CollectiveCost
from dear.cost.measurement import Agreement, Measurement
from dear.errors import UserError

FROM_BYTES, LARGE_BYTES, MOST = 32 << 10, 1 << 20, 0.03
CHANCE = 1.3
ROUNDING = 0.01
"""Halves that agree by chance are no nearer than this."""


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """One operation of one cell; shares of the times that were foreseen."""

    trial: str
    world_size: int
    network: str | None
    time_scale: float
    operation: str
    sizes: int
    fit: CollectiveCost
    """In seconds of what the fabric stands for."""
    small: Agreement
    """From `FROM_BYTES` on."""
    large: Agreement | None
    """From `LARGE_BYTES` on; None where none was so large."""

    @property
    def well(self) -> bool:
        """Whether the bars are met."""
        near = self.small.error <= max(CHANCE * self.small.noise, ROUNDING)
        return near and (self.large is None or self.large.worst <= MOST)


def foreseen(folder: Path, record: Record) -> Iterator[Foreseen]:
    """Of the trial of a cell that has timed the collectives; nothing of others."""
    told = traces.evidence(folder, record) or {}
    for values in told.get("collectives", ()):
        made = typed(Measurement, values)
        if values["when"] != "begin" or made.nbytes[-1] < FROM_BYTES:
            continue
        large = made.nbytes[-1] >= LARGE_BYTES
        yield Foreseen(
            trial=record.id,
            world_size=record.trial["world_size"],
            network=record.trial.get("network"),
            time_scale=values["time_scale"],
            operation=made.operation,
            sizes=len(made.nbytes),
            fit=made.fit().divided(values["time_scale"]),
            small=made.agreement(FROM_BYTES),
            large=made.agreement(LARGE_BYTES) if large else None,
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/costs.py", description=__doc__.split("\n")[0])
    parser.add_argument("sweep", nargs="+", type=Path, help="folders of results")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(argv)
    try:
        found = [
            one
            for folder in args.sweep
            for record in Comparison.load(folder).results(folder)
            for one in foreseen(folder, record)
        ]
        if not found:
            raise UserError("no trial of these sweeps has timed collectives")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    header = ["ranks", "network", "operation", "sizes", "start-ups us", "error", "noise"]
    rows = [_cells(one) for one in found]
    print(table.layout([*header, "worst from 1 MiB", "met"], rows))
    if args.json is not None:
        values = [{**dataclasses.asdict(one), "met": one.well} for one in found]
        args.json.write_text(json.dumps({"schema": 1, "tool": "bench/costs", "cases": values}))
    return 0 if all(one.well for one in found) else 1


def _cells(one: Foreseen) -> list[str]:
    alphas = [part.alpha_s for part in (*one.fit.smaller, one.fit)]
    return [
        *(str(one.world_size), one.network or "", one.operation, str(one.sizes)),
        " ".join(f"{1e6 * alpha:.0f}" for alpha in alphas),
        *(f"{one.small.error:.1%}", f"{one.small.noise:.1%}"),
        "" if one.large is None else f"{one.large.worst:.1%}",
        "yes" if one.well else "NO",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
