#!/usr/bin/env python3
"""Prediction error of the collective costs that a sweep has measured.

  python bench/costs.py logs/NAME [logs/OTHER ...] [--json FILE]

A cell is the trials that are compared with each other. The first trial of a cell times every
collective for some ten sizes. The cost model is fitted to one half of the repeats and compared with
the other half. From 32 KiB on, the error (root of the mean square over sizes) may be at most 1.3
times the difference of the halves. From 1 MiB on, no size may be off by more than 3 %. Exit status:
0; 1 if an operation misses a requirement; 2 for a user error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import program, table
from bench.rig.output import Output
from common.results.exports import traces
from common.results.records import Record, typed
from common.results.store import Comparison
from dear.cost.fit import CollectiveCost
from dear.cost.measurement import Agreement, Measurement
from dear.errors import UserError

FROM_BYTES, LARGE_BYTES, MOST = 32 << 10, 1 << 20, 0.03
CHANCE = 1.3
ROUNDING = 0.01
"""Error that is always accepted, because the halves may agree by chance."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Cost model of one operation in one cell; errors are shares of the predicted times."""

    trial: str
    world_size: int
    network: str | None
    time_scale: float
    operation: str
    sizes: int
    fit: CollectiveCost
    """Cost model, in emulated seconds."""
    small: Agreement
    """Error from `FROM_BYTES` on."""
    large: Agreement | None
    """Error from `LARGE_BYTES` on; None if no size is so large."""

    @property
    def met(self) -> bool:
        """True if both errors meet their requirement."""
        near = self.small.error <= max(CHANCE * self.small.noise, ROUNDING)
        return near and (self.large is None or self.large.worst <= MOST)

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        alphas = [part.alpha_s for part in (*self.fit.smaller, self.fit)]
        place = [str(self.world_size), self.network or "", self.operation, str(self.sizes)]
        errors = [f"{self.small.error:.1%}", f"{self.small.noise:.1%}"]
        errors.append("" if self.large is None else f"{self.large.worst:.1%}")
        start_ups = " ".join(f"{1e6 * alpha:.0f}" for alpha in alphas)
        return [*place, start_ups, *errors, "yes" if self.met else "NO"]


def predictions(folder: Path, record: Record) -> Iterator[Prediction]:
    """Yields a prediction for each operation that a trial has timed."""
    evidence = traces.evidence(folder, record) or {}
    for values in evidence.get("collectives", ()):
        measurement = typed(Measurement, values)
        largest = measurement.nbytes[-1]
        if values["when"] != "begin" or largest < FROM_BYTES:
            continue
        yield Prediction(
            trial=record.id,
            world_size=record.trial["world_size"],
            network=record.trial.get("network"),
            time_scale=values["time_scale"],
            operation=measurement.operation,
            sizes=len(measurement.nbytes),
            fit=measurement.fit().divided(values["time_scale"]),
            small=measurement.agreement(FROM_BYTES),
            large=measurement.agreement(LARGE_BYTES) if largest >= LARGE_BYTES else None,
        )


def main(argv: list[str]) -> int:
    parser = program.parser(__doc__)
    parser.add_argument("sweep", nargs="+", type=Path, help="folders of results")
    args = parser.parse_args(argv)
    cases = [
        case
        for folder in args.sweep
        for record in Comparison.load(folder).results(folder)
        for case in predictions(folder, record)
    ]
    if not cases:
        raise UserError("no trial of these sweeps has timed collectives")
    header = ["ranks", "network", "operation", "sizes", "start-ups us", "error", "noise"]
    header += ["worst from 1 MiB", "met"]
    print(table.layout(header, [case.cells() for case in cases]))
    with Output(args.json) as output:
        kept = [{**dataclasses.asdict(case), "met": case.met} for case in cases]
        output.save("bench/costs", {"cases": kept})
    return 0 if all(case.met for case in cases) else 1


if __name__ == "__main__":
    program.run(main)
