#!/usr/bin/env python3
"""Is a throughput the elapsed time of training, also where steps differ by a schedule?

  python bench/elapsed.py        neighbor averaging in each fourth step: the throughput that the
                                 harness finds with blocks of 8 steps, and that of a plain training
                                 script by a stopwatch around 40 steps; bar 1 %

The script is started on the same virtual hosts, in turn with the harness's launches, and nothing of
the harness times it. The interval says what launches differ by.

Exit status: 0 within the bar, 3 not, 1 something failed or is to be doubted, 2 a mistake in the
options.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from bench.rig import session, stopwatch
from bench.rig.output import Output, note
from common.emulation import sandbox
from common.harness import notes
from common.harness.experiment import load
from common.harness.fabric import WORKER, Fabric, check_fit, make_fabric
from common.harness.record import Result
from common.harness.trial import Trial
from common.launch.job import Job
from common.results.records import typed
from common.results.shipped import MISSED
from dear.errors import UserError
from dear.options import at_least, positive

if TYPE_CHECKING:
    from common.results.stats import Difference

BAR_PERCENT = 1.0
EVERY = 4
BLOCK = 2 * EVERY
_TIMEOUT_S = 300.0


@dataclass
class Found:
    """Samples per second of all ranks, by round."""

    steps: int
    """Around which the stopwatch runs."""
    samples: int
    """Of all ranks in a step."""
    harness: list[list[float]] = field(default_factory=list)
    """Step times in seconds of what is emulated, by launch."""
    stopwatch: list[float] = field(default_factory=list)
    """Elapsed seconds of what is emulated per step, by launch."""
    doubts: list[str] = field(default_factory=list)
    """Of the harness's launches."""

    @property
    def difference(self) -> Difference:
        """By how many times the harness's throughput is larger."""
        # Ranks import this file, and then move to their hosts, which takes a process without
        # threads; SciPy starts some.
        from common.results import stats

        return stats.compare(self.harness, [[one] for one in self.stopwatch], paired=True)

    @property
    def off_percent(self) -> float:
        """The harness's throughput beside the stopwatch's."""
        return 100 * math.expm1(self.difference.log_ratio)

    @property
    def good(self) -> bool:
        """Whether nothing is to be doubted, and the harness is within the bar."""
        return not self.doubts and abs(self.off_percent) <= BAR_PERCENT

    def lines(self) -> list[str]:
        """Both throughputs, how far they are apart, and what to doubt."""
        median_s = statistics.median(step for steps in self.harness for step in steps)
        rates = {
            f"harness, blocks of {len(self.harness[0])} steps": [
                len(steps) / math.fsum(steps) for steps in self.harness
            ],
            f"stopwatch around {self.steps} steps": [1 / step_s for step_s in self.stopwatch],
        }
        lines = []
        for what, found in rates.items():
            values = [self.samples * rate for rate in found]
            low, high = min(values), max(values)
            lines.append(
                f"{what}: {statistics.fmean(values):.2f} samples/s (n {len(values)}, "
                f"{low:.2f} to {high:.2f})"
            )
        wide = self.difference.half_width
        interval = f", 95 % interval +-{100 * math.expm1(wide):.2f}" if math.isfinite(wide) else ""
        lines.append(
            f"harness beside stopwatch: {self.off_percent:+.2f} %{interval}; bar {BAR_PERCENT:g} "
            f"%: {'ok' if self.good else 'MISSED'}"
        )
        beside = 100 * (statistics.fmean(self.stopwatch) / median_s - 1)
        lines.append(f"(a throughput by the median step would be {beside:+.0f} % off)")
        return lines + [f"# {doubt}" for doubt in self.doubts]


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the experiment file: blocks as the harness chooses them, of two periods."""
    return {
        "name": "elapsed",
        "algorithms": [{"name": "neighbor", "options": {"every": EVERY}}],
        "models": [{"name": "resnet50@rtx2080ti-modelled", "batch_size": 64}],
        "world_sizes": [args.hosts],
        "cluster": {"hosts": args.hosts, "network": "2.5gbit", "time_scale": args.time_scale},
        "baseline": False,
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "measure": {"repeats": 1, "warmup_steps": 2, "check_steps": 1, "steps_per_iter": BLOCK},
    }


def measure(args: argparse.Namespace, folder: Path, output: Output) -> Found:
    """Launches of the harness and of the script in turn, on the same hosts."""
    path = folder / "elapsed.yaml"
    path.write_text(yaml.safe_dump(experiment(args)))
    wanted = load(path)
    (trial,) = wanted.trials()
    check_fit([trial])
    found = Found(steps=args.steps, samples=sum(trial.rank_batches))
    trial.save(folder)
    (folder / stopwatch.STEPS).write_text(json.dumps([BLOCK, args.steps]))
    with make_fabric(wanted, [trial]) as fabric:
        fabric.enter_cell([trial])
        fabric.briefing(trial, folder).save()
        for index in range(args.repeats):
            result = typed(Result, _launched(fabric, trial, folder, index, WORKER))
            found.harness.append(result.steps)
            if (reason := notes.invalid(result.strain, emulated=True)) is not None:
                found.doubts.append(reason)
            told = _launched(fabric, trial, folder, args.repeats + index, stopwatch.__name__)
            found.stopwatch.append(told["elapsed_s"] / args.steps / fabric.time_scale)
            output.save(output.about("bench/elapsed") | vars(found))
            step_s = statistics.fmean(result.steps)
            note(f"round {index + 1}: {1e3 * step_s:.1f} and {1e3 * found.stopwatch[-1]:.1f} ms")
    return found


def _launched(
    fabric: Fabric, trial: Trial, folder: Path, repeat: int, module: str
) -> dict[str, Any]:
    job = Job(
        folder=folder,
        repeat=repeat,
        world_size=trial.world_size,
        timeout_s=_TIMEOUT_S,
        worker_module=module,
    )
    outcome = fabric.run(trial, job)
    if outcome.result is None:
        raise RuntimeError(f"{module}: {outcome.status}: {(outcome.error or {}).get('message')}")
    return outcome.result


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    shape = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=shape)
    add = parser.add_argument
    add("--steps", type=int, default=40, help="around which the stopwatch runs")
    add("--repeats", type=int, default=5, help="launches of each")
    add("--hosts", type=int, default=4, help="virtual hosts, one rank each")
    add("--time-scale", type=float, default=3.0, help="of the emulated cluster")
    add("--json", type=Path, default=None, help="keep raw numbers in this new file")
    args = parser.parse_args(argv)
    at_least("--repeats", args.repeats, 1)
    at_least("--hosts", args.hosts, 2)
    positive("--time-scale", args.time_scale)
    if args.steps < EVERY or args.steps % EVERY:
        raise UserError(f"--steps {args.steps}: must be a multiple of {EVERY}, a period")
    return args


def main(argv: list[str]) -> int:
    args = _parse(argv)
    if not sandbox.inside():
        raise session.NeedsSandbox
    with Output(args.json) as output, tempfile.TemporaryDirectory(prefix="elapsed-") as folder:
        try:
            found = measure(args, Path(folder), output)
        except RuntimeError as error:  # a launch has failed
            print(error, file=sys.stderr)
            return 1
        print("\n".join([*output.heading(), *found.lines()]))
    if found.doubts:
        return 1
    return 0 if found.good else MISSED


if __name__ == "__main__":
    session.program(main)
