"""Trials at several time scales: what waiting for cores costs.

A trial at a time scale is a sweep of its own, whose record is kept when it has ended, so that what
was stopped goes on there, and parts of it can be measured one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.rig.cases import Case, status, table
from bench.rig.output import Output, note
from bench.rig.table import digits
from common.harness.notes import UNFAITHFUL_WAIT
from common.models import registry
from common.results import stats
from common.results.faith import doubt
from common.results.records import Record
from dear.errors import UserError
from dear.options import positive

MODELS = tuple(f"{name}@rtx2080ti-modelled" for name in ("resnet50", "densenet201", "bert_base"))
FAITH_SCALES = (4.0, 6.0, 8.0, 12.0, 16.0)
_DEVICE = "@rtx2080ti-modelled"


class SweepError(Exception):
    """A sweep gave no record; the message is one line."""


def add_options(add: Any) -> None:
    """Those of `faith`, by an argument parser's `add_argument`."""
    many = {"nargs": "+", "metavar": "NAME"}
    add("--time-scales", type=float, nargs="+", default=FAITH_SCALES, metavar="K", help="k")
    add("--algorithms", default=("ddp", "horovod", "dear"), help="or with commas", **many)
    add("--models", default=MODELS, help="replayed models, e.g. resnet50", **many)
    add("--hosts", type=int, default=4, help="virtual hosts, one rank each")
    add("--network", default="10gbe", help="network profile or bandwidth")
    add("--steps", type=int, default=3, help="timed steps in each launch")


def check_options(args: argparse.Namespace) -> None:
    """Completes names, and refuses what cannot be measured."""
    args.algorithms, args.models = (
        [one for name in names for one in name.split(",") if one]
        for names in (args.algorithms, args.models)
    )
    for option, names in (("--algorithms", args.algorithms), ("--models", args.models)):
        if len(set(names)) != len(names):
            raise UserError(f"{option} names one twice: {' '.join(names)}")
    args.models = [name if "@" in name else name + _DEVICE for name in args.models]
    for model in args.models:
        registry.model_entry(model)  # an unknown one is named
    for k in args.time_scales:
        positive("--time-scales", k)
    if len(set(args.time_scales)) < 2:
        raise UserError("--time-scales: must be two at least, since the largest is the truth")


class Measured:
    """Records of trials at time scales; kept in a file, where they are looked up first.

    Args:
        args: the options.
        output: its file may hold what an earlier run at the same commit has measured.
    """

    def __init__(self, args: argparse.Namespace, output: Output) -> None:
        self._args, self._output = args, output
        self._about = output.about(f"bench/fidelity {args.what}")
        same = ("hosts", "network", "steps", "repeats")
        self._settings = {name: getattr(args, name) for name in same}
        kept = output.earlier or {}
        self.records: list[dict[str, Any]] = [
            one
            for one in kept.get("records", [])
            if not any(said.startswith("disturbed") for said in one["notes"])
        ]
        if not kept:
            return
        commits = kept["machine"]["commit"], self._about["machine"]["commit"]
        if kept["tool"] != self._about["tool"] or commits[0] != commits[1]:
            raise UserError(
                f"--json {args.json} is of `{kept['tool']}` at commit {commits[0]}, and this is "
                f"`{self._about['tool']}` at {commits[1]}: name another file"
            )
        if kept["settings"] != self._settings:
            raise UserError(f"--json {args.json} was measured with {kept['settings']}")

    def get(self, model: str, algorithm: str, time_scale: float) -> Record:
        """The trial's record, measured now if it is not kept; also one that has failed.

        What an earlier run has kept of a disturbed machine is measured again.
        """
        for values in self.records:
            trial = values["trial"]
            known = (trial["model"], trial["algorithm"], values["time_scale"])
            if known == (model, algorithm, time_scale):
                return Record.from_json(values)
        began = time.monotonic()
        (values,) = self._sweep(model, [algorithm], time_scale, self._args.repeats)
        record = Record.from_json(values)
        if record.ok:
            self.records.append(values)
            self._save()
        said = f"{1e3 * record.step_s:.1f} ms" if record.ok else record.status
        if record.ok and doubt(record):
            said += f" ({doubt(record)})"
        where = f"{short(model)} {algorithm} k={time_scale:g}"
        note(f"{where}: {said}, in {time.monotonic() - began:.0f} s")
        return record

    def _save(self) -> None:
        measured = {"settings": self._settings, "records": self.records}
        self._output.save(self._about | measured)

    def _sweep(
        self, model: str, algorithms: Sequence[str], time_scale: float | None, repeats: int
    ) -> list[dict[str, Any]]:
        """The records of one run of the driver."""
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
            path = Path(folder) / "scales.yaml"
            wanted = experiment(self._args, model, algorithms, time_scale, repeats)
            path.write_text(yaml.safe_dump(wanted))
            driver = str(Path(__file__).parents[2] / "benchmarks.py")
            command = [sys.executable, driver, "run", str(path), "--json", "--quiet"]
            command += ["--no-plot", "--logs", folder]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 2:
            raise UserError(done.stderr.strip().removeprefix("error: "))
        if not done.stdout.strip():
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise SweepError(f"the sweep of {short(model)} failed: {last}")
        return json.loads(done.stdout)


def experiment(
    args: argparse.Namespace,
    model: str,
    algorithms: Sequence[str],
    time_scale: float | None,
    repeats: int,
) -> dict[str, Any]:
    """The keys of the experiment file of one sweep; without a time scale it finds one."""
    cluster = {"hosts": args.hosts, "network": args.network}
    if time_scale is not None:
        cluster["time_scale"] = time_scale
    measure = {"repeats": repeats, "check_steps": 1, "warmup_steps": 1}
    return {
        "name": "scales",
        "algorithms": list(algorithms),
        "models": [{"name": model, "batch_size": registry.model_entry(model).batch_size}],
        "world_sizes": [args.hosts],
        "baseline": False,
        "cluster": cluster,
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        "measure": measure | {"steps_per_iter": args.steps},
        "timeout_s": 1800.0,
    }


def short(model: str) -> str:
    """Its name without the device."""
    return model.partition("@")[0]


def _compared(one: Record, other: Record) -> stats.Difference:
    """How much longer a step of `one` takes than of the other; launches did not take turns."""
    return stats.compare(other.repeats, one.repeats, paired=False)


def _with_chance(off_percent: float, half_width: float) -> str:
    """With what chance alone would do to it (95 %, on the log scale); unknown with one launch."""
    wide = f" +-{100 * math.expm1(half_width):.2f}" if math.isfinite(half_width) else ""
    return f"{off_percent:+.2f}{wide} %"


@dataclass(frozen=True, kw_only=True)
class Faith(Case):
    """A trial at a time scale beside the same at the largest, and how long it waited for cores.

    What is called unfaithful is not judged: it may be off as it likes.
    """

    bar_percent = 3.0
    header = ("model", "algorithm", "k", "n", "core wait s/s", "step", "beside the largest k")

    record: Record
    largest: Record

    @property
    def core_wait(self) -> float:
        """Seconds per second that the threads of one rank waited for a core, all together."""
        return max(one.core_wait or 0.0 for one in self.record.strain)

    @property
    def judged(self) -> bool:
        return self.core_wait <= UNFAITHFUL_WAIT and self.record is not self.largest

    @property
    def off_percent(self) -> float:
        """By how much its step is longer than at the largest time scale."""
        return 100 * (self.record.step_s / self.largest.step_s - 1)

    @property
    def verdict(self) -> str:
        if self.record is self.largest:
            return "the truth"
        return super().verdict if self.judged else "unfaithful"

    def cells(self) -> list[str]:
        record, largest = self.record, self.largest
        off = _with_chance(self.off_percent, _compared(record, largest).half_width)
        return [
            *(short(record.trial["model"]), record.label, f"{record.time_scale:g}"),
            *(str(len(record.iters)), f"{self.core_wait:.2f}"),
            f"{digits(record.step_s * 1e3, 4)} ms",
            "" if record is largest else off,
        ]


def faith(args: argparse.Namespace, output: Output) -> int:
    """Does what ranks wait for cores tell when a step is too long?"""
    measured, cases, left_out = Measured(args, output), [], []
    failed = False
    largest_first = sorted(set(args.time_scales), reverse=True)
    for model in args.models:
        for algorithm in args.algorithms:
            records = []
            for k in largest_first:
                try:
                    record = measured.get(model, algorithm, k)
                except SweepError as error:
                    failed = True
                    left_out.append(str(error))
                    break
                why = _other_doubt(record) if k != largest_first[0] else doubt(record)
                if why:
                    left_out.append(f"not judged: {short(model)} {algorithm} at k={k:g}: {why}")
                    if k == largest_first[0]:
                        break
                    continue
                records.append(record)
            cases += [Faith(record=one, largest=records[0]) for one in records]
    cases.sort(key=lambda case: case.core_wait)
    remark = f"# {args.hosts} hosts, {args.network}; unfaithful above {UNFAITHFUL_WAIT:g} s/s"
    lines = [*output.heading(), remark, table(Faith, cases), *_limits(cases), *left_out]
    print("\n".join(lines))
    return 1 if failed or not any(case.judged for case in cases) else status(cases)


def _other_doubt(record: Record) -> str | None:
    """Why not to believe a record, but for being unfaithful."""
    if not record.ok:
        return doubt(record)
    rest = [one for one in record.notes if not one.startswith("unfaithful")]
    found = doubt(dataclasses.replace(record, notes=rest, unfaithful=False))
    if found is None and any(one.core_wait is None for one in record.strain):
        return "the kernel does not tell what threads wait"
    return found


def _limits(cases: Sequence[Faith]) -> list[str]:
    """Between which waits the limit may lie by these cases."""
    others = [case for case in cases if case.record is not case.largest]
    near = [one.core_wait for one in others if abs(one.off_percent) <= one.bar_percent]
    far = [one.core_wait for one in others if abs(one.off_percent) > one.bar_percent]
    lines = []
    if near:
        lines.append(f"within {Faith.bar_percent:g} %: waits up to {max(near):.2f} s/s")
    if far:
        lines.append(f"further off: waits from {min(far):.2f} s/s")
    return lines
