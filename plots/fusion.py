"""Step time over the size at which messages are closed, and where a tuner looked:
`python -m plots.fusion SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results import stats
from common.results.faith import doubt
from common.results.records import Record
from plots import style, sweep
from plots.sweep import Mark

TITLE = "Fusion thresholds, and the tuner's path"
NEEDS = "two fusion thresholds of one algorithm, or a tuner's path"
_SIZES = ("threshold_mb", "fusion_threshold_mb", "bucket_cap_mb", "bucket_mb")
"""Options that say how large a message is to be, in MB of 2^20 bytes."""


def fits(records: Sequence[Record]) -> bool:
    """Whether an algorithm ran with two thresholds in the same place, or has looked for one."""
    good = sweep.timed(records)
    places: dict[tuple[str, ...], set[float]] = {}
    for one in good:
        size = threshold_mb(one)
        if size is not None and doubt(one) is None:
            places.setdefault(_place(one), set()).add(size)
    return any(len(found) > 1 for found in places.values()) or any(map(tried, good))


def threshold_mb(record: Record) -> float | None:
    """The size of a trial that closes messages by it; None where something else does."""
    options = record.trial["options"]
    if options.get("fusion", "threshold") != "threshold":
        return None
    if options.get("merge", "threshold") != "threshold":
        return None
    return next((options[key] for key in _SIZES if options.get(key)), None)


def tried(record: Record) -> list[dict[str, Any]]:
    """What a tuner has tried, in turn: `threshold_mb` and `step_s`; none in older records."""
    found = record.plan.found if record.plan is not None else {}
    return (found.get("tuner") or {}).get("tried") or []


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes fusion.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "fusion")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Left step times over thresholds, right those that a tuner has tried, in turn."""
    every, _ = sweep.load(folder)
    fixed = [mark for mark in every if threshold_mb(mark.record) is not None]
    # A tuner of an older record has left no path, but its result.
    tuned = [m for m in every if m.record.trial["options"].get("fusion") == "tuned"]
    tuned += [m for m in every if tried(m.record) and m not in tuned]
    style.setup()
    marks = [mark for mark in every if mark in fixed or mark in tuned]
    panels: dict[tuple[str, ...], list[Mark]] = {}
    for mark in marks:
        panels.setdefault(_place(mark.record), []).append(mark)
    paths = any(tried(mark.record) for mark in tuned)
    drawn, axes = plt.subplots(
        *(len(panels), 1 + paths),
        figsize=(9.2 if paths else 6.4, 3.0 * len(panels) + 0.5),
        squeeze=False,
        layout="constrained",
    )
    for row, panel in zip(axes, panels.values(), strict=True):
        own = [mark for mark in panel if mark in tuned]
        _curve(row[0], [mark for mark in panel if mark in fixed], own)
        if paths:
            _path(row[1], own)
        style.title(row[0], f"{panel[0].algorithm}: {sweep.title(panel[0].row)}")
    records = [mark.record for mark in marks]
    text = f"{sweep.told(marks)}; whiskers and bands: 95 % t interval; a message is closed at its "
    text += "threshold (MB of 2^20 bytes); what a tuner tried was measured during its search, "
    text += "before the timed steps"
    style.caption(drawn, text + style.doubts(records), records, 150 if paths else 115)
    return drawn, style.data(_data(marks))


def _place(record: Record) -> tuple[str, ...]:
    keys = ("algorithm", "model", "batch_size", "world_size", "network", "fault")
    return tuple(str(record.trial.get(key)) for key in keys)


def _curve(axis: Axes, fixed: Sequence[Mark], tuned: Sequence[Mark]) -> None:
    fixed = sorted(fixed, key=lambda mark: threshold_mb(mark.record))
    good = [mark for mark in fixed if not mark.row.doubt]
    look = (fixed or tuned)[0].look
    x = [threshold_mb(mark.record) for mark in good]
    y = [1e3 * mark.row.step_s for mark in good]
    axis.plot(x, y, lw=1.3, **style.LOOKS.get((fixed or tuned)[0].algorithm, look).curve)
    for mark in fixed:
        size, step = threshold_mb(mark.record), stats.step_s(mark.record.repeats)
        if mark.row.doubt:
            axis.plot([size], [1e3 * step.value], "o", mfc="none", mec=style.GREY)
        elif step.low is not None:
            error = [[1e3 * (step.value - step.low)], [1e3 * (step.high - step.value)]]
            axis.errorbar(size, 1e3 * step.value, yerr=error, color=style.GREY, capsize=2, lw=0.9)
    said = ""
    for mark in tuned:
        step, grey = stats.step_s(mark.record.repeats), bool(mark.row.doubt)
        shade = style.GREY if grey else "#222222"
        axis.axhline(1e3 * step.value, color=shade, lw=1, ls="--")
        if step.low is not None and not grey:
            axis.axhspan(1e3 * step.low, 1e3 * step.high, color="#eeeeee", lw=0, zorder=0)
        said = f"\nbroken line, band: {mark.row.algorithm}, when its search had ended"
        said += "" if tried(mark.record) else " (its path is not on record)"
        found = tried(mark.record)
        if found:
            sizes = [one["threshold_mb"] for one in found]
            times = [1e3 * one["step_s"] for one in found]
            axis.plot(sizes, times, "x", color=shade, ms=5, mew=1.2)
    axis.set_xscale("log", base=2)
    sizes = [threshold_mb(m.record) for m in fixed]
    sizes += [one["threshold_mb"] for m in tuned for one in tried(m.record)]
    if sizes:
        style.plain_numbers(axis.xaxis)
        axis.set_xlim(min(sizes) / 1.5, max(sizes) * 1.5)
    said = ("; crosses: what the tuner tried" if any(tried(m.record) for m in tuned) else "") + said
    axis.set_xlabel(f"threshold in MB{said}", fontsize=8)
    axis.set_ylabel("milliseconds per step", fontsize=8)
    axis.grid(True, axis="both")


def _path(axis: Axes, tuned: Sequence[Mark]) -> None:
    """The thresholds in turn, the step time of each beside it, and the one that stayed."""
    for mark in tuned:
        found = tried(mark.record)
        numbers = range(1, len(found) + 1)
        sizes = [one["threshold_mb"] for one in found]
        axis.plot(numbers, sizes, color="#222222", lw=1, marker="x", ms=5, mew=1.2)
        for number, one in zip(numbers, found, strict=True):
            text, at = f"{1e3 * one['step_s']:.0f}", (number, one["threshold_mb"])
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
            near = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
            axis.annotate(text, at, fontsize=7, bbox=box, **near)
        stayed = mark.record.plan.found["tuner"]["threshold_mb"] if found else None
        if stayed is not None:
            axis.axhline(stayed, color="#777777", lw=1, ls="--")
            number = min(
                (n for n, size in zip(numbers, sizes, strict=True) if size == stayed), default=None
            )
            if number is not None:
                axis.plot([number], [stayed], "o", ms=11, mfc="none", mec="#222222")
    if not any(tried(mark.record) for mark in tuned):
        text = "no tuner's path on record"
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=8)
        axis.set_axis_off()
        return
    axis.set_yscale("log", base=2)
    style.plain_numbers(axis.yaxis)
    axis.margins(y=0.15)
    axis.set_ylabel("threshold in MB; numbers: ms per step", fontsize=8)
    axis.set_xlabel("try of the tuner; ring: the one that stayed", fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(True, axis="both")


def _data(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """A row for each timed trial, and one for each try."""
    found = []
    for mark in marks:
        known = {**mark.place, "doubt": mark.row.doubt}
        step = stats.step_s(mark.record.repeats)
        ends = {"step_s": step.value, "step_low_s": step.low, "step_high_s": step.high}
        size = threshold_mb(mark.record)
        found.append({**known, "kind": "timed", "threshold_mb": size, **ends})
        found += [
            {**known, "kind": "tried", "number": number, **one}
            for number, one in enumerate(tried(mark.record), start=1)
        ]
    return found


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/tuner")
