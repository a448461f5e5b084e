"""Step rates of ranks at their own pace, a panel per fault; part of `plots.learning`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.results import learning
from common.results.records import Record
from common.results.tables import significant


def title(place: Sequence[Any]) -> str:
    """Of the panel for model, world size, network and fault; two lines."""
    model, world, network, fault = place
    where = f" on {network}" if network else ""
    return f"{model}, {world} workers{where}\n{fault or 'undisturbed'}"


def draw(columns: dict[tuple[Any, ...], list[Record]], colour: dict[str, str]) -> Figure:
    """Steps per second where nothing is learned: of undisturbed ranks, and of the slowed host."""
    heights = [len(records) + 1.2 for records in columns.values()]
    figure, axes = plt.subplots(
        len(columns),
        1,
        figsize=(6.8, 0.42 * sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    table = {id(r): row for r, row in _with_rows([r for rs in columns.values() for r in rs])}
    for axis, (place, records) in zip(axes[:, 0], columns.items(), strict=True):
        for at, record in enumerate(records):
            row, label = table[id(record)], record["trial"]["label"]
            text = significant(row.steps_per_s)
            text += "" if row.kept is None else f" ({row.kept:.2f} of undisturbed)"
            axis.barh(at, row.steps_per_s, color=colour[label], height=0.7)
            axis.annotate(
                text, (row.steps_per_s, at), xytext=(8, 0), textcoords="offset points", va="center"
            )
            if row.slowed_steps_per_s is not None:
                axis.plot([row.slowed_steps_per_s], [at], marker="D", color="#222222", ms=5)
        axis.set_yticks(range(len(records)), [record["trial"]["label"] for record in records])
        axis.invert_yaxis()
        axis.set_title(title(place).replace("\n", ", "), loc="left", fontsize=9, weight="bold")
    axes[0, 0].set_xlim(0, axes[0, 0].get_xlim()[1] * 1.25)
    axes[-1, 0].set_xlabel(
        "steps per second of the slowest rank that is not slowed; diamonds: of the slowed host",
        fontsize=8,
    )
    return figure


def _with_rows(records: Sequence[Record]) -> list[tuple[Record, learning.LearnRow]]:
    return list(zip(records, learning.rows(records), strict=True))
