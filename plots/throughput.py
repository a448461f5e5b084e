"""Throughput of every algorithm, a panel per model and world size: `python -m plots.throughput`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from common.results import rows
from common.results.records import Comparison, Record
from common.results.rows import Row
from common.results.table import csv_text, significant
from plots import style


def draw(folder: Path, out: Path) -> list[Path]:
    """Reads `folder/records.jsonl`; writes throughput.{png,pdf,csv} to `out`, returns the paths."""
    comparison = Comparison.load(folder)
    good = [record for record in comparison.results(folder) if record.ok]
    good.sort(key=lambda record: style.order(record.trial["algorithm"]))
    table = rows.make_rows(good, comparison.compare_to)
    names = [record.trial["algorithm"] for record in good]
    colour = style.colours(sorted(set(names), key=style.order))

    style.setup()
    panels: dict[tuple[Any, ...], list[tuple[Row, str]]] = {}
    singles = [row for row, name in zip(table, names, strict=True) if name == "none"]
    for row, name in zip(table, names, strict=True):
        if name != "none":
            panels.setdefault(row.place, []).append((row, name))
    for row in singles:  # an experiment of single workers only has panels too
        if not any(key[:2] == (row.model, row.batch_size) for key in panels):
            panels[row.place] = [(row, "none")]
    figure, axes = style.stacked([len(panel) for panel in panels.values()], 6.4, 0.34)
    for axis, panel in zip(axes, panels.values(), strict=True):
        # The single worker that the panel's efficiency is relative to.
        own = [row for row in singles if _task(row) == _task(panel[0][0])]
        _panel(axis, panel, colour, own[0] if own else None)
    style.caption(figure, _about(good, table), good, 115)

    out.mkdir(parents=True, exist_ok=True)
    data = out / "throughput.csv"
    data.write_text(csv_text(Row, table))
    return [*style.save(figure, out / "throughput"), data]


def _task(row: Row) -> tuple[Any, ...]:
    return (row.model, row.batch_size, row.network, row.fault)


def _panel(
    axis: Axes, rows: list[tuple[Row, str]], colour: dict[str, str], single: Row | None
) -> None:
    first = rows[0][0]
    for place, (row, name) in enumerate(rows):
        error = [[row.throughput - row.ci_low], [row.ci_high - row.throughput]]
        axis.barh(place, row.throughput, color=colour[name], height=0.72)
        axis.errorbar(row.throughput, place, xerr=error, color="#222222", capsize=2.5, lw=1)
        text = f" {significant(row.throughput)}" + ("" if row.correct else "  INCORRECT")
        axis.annotate(
            text, (row.ci_high, place), xytext=(3, 0), textcoords="offset points", va="center"
        )
    axis.set_yticks(range(len(rows)), [row.algorithm for row, _ in rows])
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    most = max(row.ci_high for row, _ in rows)
    if single is not None and single.world_size != first.world_size:
        ideal = single.throughput * first.world_size
        axis.axvline(ideal, color="#777777", lw=1, ls="--")
        axis.annotate(
            f"{first.world_size} x single worker",
            (ideal, -0.62),
            ha="right",
            va="bottom",
            xytext=(-3, 0),
            textcoords="offset points",
            fontsize=7,
            color="#555555",
        )
        most = max(most, ideal)
    axis.set_xlim(0, most * 1.13)
    axis.set_ylim(len(rows) - 0.5, -1.0)
    where = "".join(f", {name}" for name in (first.network, first.fault) if name)
    feed = f"batch {first.batch_size} per worker, {first.world_size} workers"
    style.title(axis, f"{first.model}, {feed}{where}")
    axis.set_xlabel(f"{first.unit}, all workers together", fontsize=8)


def _about(good: list[Record], table: list[Row]) -> str:
    counts = sorted({row.n for row in table})
    steps = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    count = len(good[0].iters)
    repeats = "1 repeat" if count == 1 else f"{count} interleaved repeats"
    return f"Medians of n = {steps} steps in {repeats}; bars: 95 % bootstrap CI"


if __name__ == "__main__":
    style.program(draw, "logs/quick")
