"""Progress line of a sweep, and the lines of each trial's log.

The log has the lines that the reference suites print, so that scripts which read those logs work.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from common.harness.trial import Trial
from common.models.registry import model_entry
from common.results.records import Plan

_LONG_UNITS = {"img": "img", "sen": "sentences", "sample": "samples"}


@dataclass(frozen=True)
class Planned:
    """Planned launch of a trial; `slower` is a factor of its duration (2 at time scale 2k)."""

    trial: Trial
    slower: float = 1.0


@dataclass
class Progress:
    """State of a sweep for the progress line; `total` and `done` are numbers of launches."""

    total: int
    done: int = 0
    title: str = ""
    label: str = ""
    """Label of the running algorithm."""
    why: str = ""
    """Reason why the planned launches have changed."""
    best: str = ""
    """Text that names the fastest trial so far."""
    spent_s: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)
    """Duration of launches by cell, in seconds without the cell's slowdown."""
    left: list[Planned] = field(default_factory=list)

    def end(self, launch: Planned, spent_s: float) -> None:
        """Records the end of a launch."""
        self.spent_s.setdefault(launch.trial.cell, []).append(spent_s / launch.slower)
        self.done += 1
        self.left.remove(launch)

    def forget(self, cell: tuple[Any, ...]) -> None:
        """Discards the durations of the cell's launches, because later ones will take longer."""
        self.spent_s.pop(cell, None)

    def eta_s(self) -> float | None:
        """Seconds that the remaining launches will take; None before the first has ended."""
        known = [seconds for spent in self.spent_s.values() for seconds in spent]
        if not known:
            return None
        means = {cell: statistics.fmean(spent) for cell, spent in self.spent_s.items()}
        other = statistics.fmean(known)
        return sum(launch.slower * means.get(launch.trial.cell, other) for launch in self.left)


class ProgressLine:
    """Output of the progress: the running trial, the number of launches, the best, the time left.

    On a terminal, it is one line that changes; elsewhere, it is a line per launch. If the reader
    of a pipe ends (`2>&1 | head`), the sweep goes on without it.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        # A default of the parameter would be the value of sys.stderr at import.
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = self._stream.isatty()
        self._last = ""
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._quiet:
            return
        try:
            self._show(progress)
        except BrokenPipeError:
            self._quiet = True

    def _show(self, progress: Progress) -> None:
        if self._live:
            self._draw(progress)
            return
        parts = [f"[{_now_at(progress)}/{progress.total}] {progress.title}"]
        parts += [*_reasons(progress), *_promises(progress)]
        text = "  ".join(parts)
        if text != self._last:
            self._stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            self._stream.flush()
        self._last = text

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = _Bar(self._stream)
        self._bar.show(progress)

    def clear(self) -> None:
        """Removes the bar from a terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _now_at(progress: Progress) -> int:
    return min(progress.done + 1, progress.total)


def _reasons(progress: Progress) -> list[str]:
    return [f"({progress.why})"] if progress.why else []


def _promises(progress: Progress) -> list[str]:
    parts = [f"best: {progress.best}"] if progress.best else []
    eta_s = progress.eta_s()
    return parts if eta_s is None else [*parts, f"ETA {duration(eta_s)}"]


class _Bar:
    """Bar in one line of a terminal; if it is too long, the name of the running trial is cut."""

    def __init__(self, stream: TextIO) -> None:
        # The import is here, because rich would slow down commands without a bar.
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        last = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._rich = progress.Progress(
            progress.BarColumn(bar_width=10, table_column=Column(min_width=10)),
            progress.TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
            progress.TextColumn("{task.description}", table_column=last),
            console=Console(file=stream),
            transient=True,
            refresh_per_second=1,  # its thread shares the machine with what is measured
            expand=True,
        )
        self._task = self._rich.add_task("")
        self._rich.start()

    def show(self, progress: Progress) -> None:
        parts = [f"{_now_at(progress)}/{progress.total}", *_reasons(progress)]
        parts += reversed(_promises(progress))
        parts += [f"now {progress.label}" if progress.label else "", progress.title]
        self._rich.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            description="  ".join(filter(None, parts)),
            refresh=True,
        )

    def close(self) -> None:
        self._rich.stop()


def duration(seconds: float) -> str:
    """Returns a duration as `45 s`, `3 min 20 s` or `2 h 05 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def log_header(trial: Trial, parameters: int, command: str, began: datetime.datetime) -> list[str]:
    """Returns the lines that rank 0 prints before the warm-up."""
    device = _device(trial)
    first = f"Model: {trial.model}"
    if trial.model.startswith("bert"):
        size = {"bert": "Large ", "bert_base": "Base "}.get(trial.model, "")
        first = f"BERT {size}Pretraining, Sentence len: {trial.sentence_len}"
    return [
        f"#Date: {began:%b %d %Y %H:%M:%S}",
        f"#CMD: {command}",
        first,
        f"FP16: {trial.dtype in ('float16', 'bfloat16')}",
        f"Batch size: {trial.batch}",
        f"Number of {device}s: {trial.world_size}",
        f"# of parameters:  {parameters}",
        "Running warmup...",
    ]


def log_results(trial: Trial, iters: Sequence[Sequence[float]]) -> list[str]:
    """Returns the lines with the results, as the reference suites print them.

    Rates are per worker; `+-` is 1.96 population standard deviations over the iterations; the total
    is the mean times the number of workers.

    Args:
        iters: step times in seconds, a list per iteration (block of steps).
    """
    device = _device(trial)
    unit = model_entry(trial.model).sample_unit
    rates = [trial.batch_size * len(steps) / sum(steps) for steps in iters]
    lines = [
        f"Iter #{index}: {rate:.1f} {_LONG_UNITS[unit]}/sec per {device}"
        for index, rate in enumerate(rates)
    ]
    per_step = [sum(steps) / len(steps) for steps in iters]
    lines.append(
        f"Iteraction time: {statistics.fmean(per_step):.3f} "
        f"+-{1.96 * statistics.pstdev(per_step):.3f}"
    )
    return lines + rate_lines(rates, trial.world_size, unit, device)


def log_plan(plan: Plan | None) -> list[str]:
    """Returns the lines about tensor fusion and the tuner, as DeAR and MG-WFBP print them.

    MB are 2^20 bytes; merged sizes are numbers of 4-byte elements.
    """
    if plan is None:
        return []
    sizes = [group.bytes for group in plan.groups]
    lines = []
    if sizes:
        lines += [
            f"#Tensor fusion groups: {len(sizes)}",
            "Buffer sizes (MB): " + ", ".join(f"{size / 2**20:.2f}" for size in sizes),
            f"Merged sizes:  {[size // 4 for size in sizes]}",
            f"Total number of tensors: {sum(group.tensors for group in plan.groups)}",
            f"Merged Number of groups: {len(sizes)}",
        ]
    tuner = plan.found.get("tuner") or {"tried": []}
    names = [name for name in tuner if name.endswith("_mb")]
    for index, tried in enumerate(tuner["tried"]):
        param = ", ".join(f"{tried[name]:.4f}" for name in names)
        lines.append(
            f"BO Tuning step [{index}], param: {param}, iteration time: {tried['step_s']:.4f}"
        )
    if tuner["tried"] and all(tuner[name] is not None for name in names):
        param = ", ".join(f"{tuner[name]:.4f}" for name in names)
        best = min(tuner["tried"], key=lambda tried: tried["step_s"])
        lines.append(
            f"BO Tuning optimal param: {param}, optimal iteration time {best['step_s']:.4f}"
        )
        lines.append(f"BO Tuning cost: {tuner['wall_s']:.4f}")
    return lines


def rate_lines(rates: Sequence[float], world_size: int, unit: str, device: str) -> list[str]:
    """Returns the last two lines; `rates` are samples per second and worker, by iteration."""
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    return [
        f"{unit.capitalize()}/sec per {device}: {mean:.1f} +-{spread:.1f}",
        f"Total {unit}/sec on {world_size} {device}(s): "
        f"{world_size * mean:.1f} +-{world_size * spread:.1f}",
    ]


def _device(trial: Trial) -> str:
    return {"cpu": "CPU", "cuda": "GPU"}[trial.device]
