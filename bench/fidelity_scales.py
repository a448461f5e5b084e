"""Do two time scales give the same emulated step time; see bench/fidelity.py."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench import session
from bench.fidelity_report import Report, verdict
from bench.output import Output
from bench.table import Ratio, digits, layout
from dear.errors import UserError
from dear.options import positive

BAR_PERCENT = 3.0
_ROOT = Path(__file__).parents[1]
_TRIAL_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """An algorithm: the median emulated step time of every round at k and at 2k."""

    algorithm: str
    at_k_s: list[float] = field(default_factory=list)
    at_2k_s: list[float] = field(default_factory=list)

    @property
    def off_percent(self) -> float:
        """How much longer a step is at k than at 2k."""
        return 100 * (statistics.median(self.at_k_s) / statistics.median(self.at_2k_s) - 1)

    @property
    def ratio(self) -> Ratio:
        """At k over at 2k, of the rounds that have both; either may come first in a round."""
        rounds = min(len(self.at_k_s), len(self.at_2k_s))
        return Ratio.of(self.at_k_s[:rounds], self.at_2k_s[:rounds])


class SweepError(Exception):
    """A sweep gave no step times; the message is one line."""


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table; 0 if all algorithms are within the bar."""
    positive("--time-scale", args.time_scale)
    if len(set(args.algorithms)) != len(args.algorithms):
        raise UserError(f"--algorithms names one twice: {' '.join(args.algorithms)}")
    cases = [Case(algorithm=name) for name in args.algorithms]
    records: list[dict[str, Any]] = []
    output, report = Output(args.json), Report(args)
    failure = None
    try:
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
            for index in range(args.repeats):
                # The scale that goes first alternates, as does whatever disturbs the machine.
                scales = (args.time_scale, 2 * args.time_scale)
                for scale in scales if index % 2 == 0 else reversed(scales):
                    found = _sweep(args, scale, index, Path(folder))
                    records += found
                    for case, record in itertools.product(cases, found):
                        if record["trial"]["algorithm"] == case.algorithm:
                            _take(case, record, scale == args.time_scale, index)
                    output.save(report.record(cases=[vars(case) for case in cases], sweeps=records))
    except SweepError as error:
        failure = str(error)
    finally:
        output.close()
    print("\n".join(report.header()))
    print(
        f"# {args.model} bs={args.batch_size}, {args.hosts} hosts, {args.network}, "
        f"time scales {args.time_scale:g} and {2 * args.time_scale:g}"
    )
    print(table([case for case in cases if case.at_k_s and case.at_2k_s]))
    if failure is not None:
        print(failure)
        return 1
    return int(any(verdict(case.off_percent, BAR_PERCENT) != "ok" for case in cases))


def table(cases: list[Case]) -> str:
    """A row per algorithm."""
    header = ["algorithm", "n", "step at k", "step at 2k", "k / 2k by round", "off"]
    header += [f"bar {BAR_PERCENT:g} %"]
    rows = [
        [
            case.algorithm,
            str(len(case.at_2k_s)),
            f"{digits(statistics.median(case.at_k_s), 4)} s",
            f"{digits(statistics.median(case.at_2k_s), 4)} s",
            case.ratio.spread(),
            f"{case.off_percent:+.2f} %",
            verdict(case.off_percent, BAR_PERCENT),
        ]
        for case in cases
    ]
    return layout(header, rows)


def experiment(args: argparse.Namespace, scale: float, name: str) -> dict[str, Any]:
    """The keys of the experiment file of one sweep."""
    return {
        "name": name,
        "algorithms": list(args.algorithms),
        "models": [{"name": args.model, "batch_size": args.batch_size}],
        "world_sizes": [args.hosts],
        "baseline": False,
        "cluster": {"hosts": args.hosts, "network": args.network, "time_scale": scale},
        "measure": {
            "repeats": 1,
            "warmup_steps": 2,
            "steps_per_iter": args.steps,
            "check_steps": 1,
        },
        "timeout_s": _TRIAL_LIMIT_S,
    }


def _sweep(
    args: argparse.Namespace, scale: float, index: int, folder: Path
) -> list[dict[str, Any]]:
    """The records of one run of the driver."""
    name = f"scale-{scale:g}-round-{index}"
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(experiment(args, scale, name)))
    command = [sys.executable, str(_ROOT / "benchmarks.py"), "run", str(path), "--json", "--quiet"]
    command += ["--no-plot", "--logs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 2:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise SweepError(f"the sweep at scale {scale:g} failed: {last}")
    return json.loads(done.stdout)


def _take(case: Case, record: dict[str, Any], at_k: bool, index: int) -> None:
    title = f"{case.algorithm} at {record.get('time_scale')}"
    if record["status"] != "ok":
        raise SweepError(f"{title}: {record['status']}: {(record['error'] or {}).get('message')}")
    step = statistics.median(step for repeat in record["repeats"] for step in repeat)
    (case.at_k_s if at_k else case.at_2k_s).append(step)
    notes = "; ".join(record["notes"])
    session.note(f"round {index + 1}: {title}: {step:.4f} s a step  {notes}".rstrip())
