"""Does a replayed step take as long as its profile says; see bench/fidelity.py."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench import session
from bench.fidelity_report import Report, verdict
from bench.output import Output
from bench.table import digits, layout
from common.models import pace, registry
from common.models import profile as profiles

BAR_PERCENT = 2.0
_SCALES = (4.0, 1.0)
_JUDGED_FROM = 4.0
# A step that takes less in wall time is mostly Python; real trials of such models scale more.
_SHORTEST_STEP_S = 0.05
# The first steps touch new memory.
_WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A profile at a time scale. Seconds are emulated ones."""

    model: str
    batch_size: int
    time_scale: float
    profile_s: float
    """Forward and backward."""
    steps_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds per step, not emulated."""

    @property
    def judged(self) -> bool:
        return self.time_scale >= _JUDGED_FROM

    def off_percent(self) -> float:
        """The deviation of the median step."""
        return 100 * (statistics.median(self.steps_s) / self.profile_s - 1)


def cases() -> list[Case]:
    """Every profile there is, dilated and at full speed."""
    made = []
    for model, sizes in profiles.batch_sizes().items():
        for batch_size in sizes:
            step_s = registry.profile_of(model, batch_size).step_s
            for scale in _SCALES:
                if scale < _JUDGED_FROM and step_s * scale < _SHORTEST_STEP_S:
                    continue
                k = max(scale, _SHORTEST_STEP_S / step_s)
                made.append(
                    Case(model=model, batch_size=batch_size, time_scale=k, profile_s=step_s)
                )
    return made


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table; 0 if all judged steps are within the bar."""
    output, report, todo = Output(args.json), Report(args), cases()
    torch.set_num_threads(1)
    try:
        for case in todo:
            _measure(case, args.repeats)
            session.note(f"{case.model} bs={case.batch_size} at {case.time_scale:g}")
            output.save(report.record(cases=[vars(case) for case in todo]))
    finally:
        output.close()
        pace.set_pace(pace.Pace(1.0, None))
    print("\n".join([*report.header(), table(todo)]))
    return int(any(c.judged and verdict(c.off_percent(), BAR_PERCENT) != "ok" for c in todo))


def table(todo: Sequence[Case]) -> str:
    """A row per case."""
    header = [
        *("profile", "batch", "time scale", "wanted ms", "median ms", "lowest", "highest"),
        *("CPU ms per step", "off", f"bar {BAR_PERCENT:g} %"),
    ]
    rows = []
    for case in todo:
        off = case.off_percent()
        rows.append(
            [
                *(case.model, str(case.batch_size), f"{case.time_scale:.4g}"),
                digits(case.profile_s * 1e3, 4),
                digits(statistics.median(case.steps_s) * 1e3, 4),
                digits(min(case.steps_s) * 1e3, 4),
                digits(max(case.steps_s) * 1e3, 4),
                digits(statistics.median(case.cpu_s) * 1e3),
                f"{off:+.2f} %",
                verdict(off, BAR_PERCENT) if case.judged else "not judged",
            ]
        )
    return layout(header, rows)


def _measure(case: Case, repeats: int) -> None:
    generator = torch.Generator().manual_seed(1)
    workload = registry.build(case.model, case.batch_size, None, generator)
    pace.set_pace(pace.Pace(case.time_scale, None))
    for index in range(_WARMUP_STEPS + repeats):
        workload.model.zero_grad()
        began, cpu = time.perf_counter(), time.process_time()
        workload.loss().backward()
        if index >= _WARMUP_STEPS:
            case.steps_s.append((time.perf_counter() - began) / case.time_scale)
            case.cpu_s.append(time.process_time() - cpu)
    # Copies of the parameters and gradients of all models would not fit beside each other.
    del workload
    gc.collect()
