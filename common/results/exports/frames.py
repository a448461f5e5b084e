"""Records as pandas' tables, for notebooks and plots of one's own; imports no torch."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.results.learning import summary
from common.results.records import Record, is_learning
from common.results.store import Comparison
from common.results.timed import rows
from dear.errors import UserError


def frame(folder: str | Path) -> pd.DataFrame:
    """A sweep, one row per trial in the order of its experiment.

    The columns are those of `table.csv` with their types (texts, whole numbers, numbers, booleans;
    missing values are `pd.NA`), seconds and samples per second as there, and besides `id`, `hash`,
    `fabric`, `time_scale` and `started`, and the options of the algorithm as `option_NAME`.

    Args:
        folder: with the sweep's records, such as `logs/emulated-quick`.

    Raises:
        UserError: there are none.
    """
    records, compare_to = _read(folder)
    make = summary.make_rows if is_learning(records) else rows.make_rows
    found = []
    for record, row in zip(records, make(records, compare_to), strict=True):
        about = {
            "id": record.id,
            "hash": record.hash,
            "fabric": record.fabric.kind,
            "time_scale": record.fabric.time_scale,
            "started": pd.Timestamp(record.started) if record.started else pd.NaT,
        }
        options = {f"option_{key}": value for key, value in record.trial["options"].items()}
        found.append({**vars(row), **about, **options})
    return pd.DataFrame(found).convert_dtypes()


def steps(folder: str | Path) -> pd.DataFrame:
    """The same, one row per timed step: `id`, `algorithm`, `repeat`, `block` and `step` (from 0),
    `step_s`; none of trials that learn or failed."""
    records, _ = _read(folder)
    found = [
        {
            "id": record.id,
            "model": record.trial["model"],
            "world_size": record.trial["world_size"],
            "algorithm": record.label,
            "repeat": repeat,
            "block": block,
            "step": step,
            "step_s": seconds,
        }
        for record in records
        for repeat, blocks in enumerate(record.iters)
        for block, times in enumerate(blocks)
        for step, seconds in enumerate(times)
    ]
    columns = ["id", "model", "world_size", "algorithm", "repeat", "block", "step", "step_s"]
    return pd.DataFrame(found, columns=columns).convert_dtypes()


def _read(folder: str | Path) -> tuple[list[Record], str]:
    comparison = Comparison.load(Path(folder))
    records = comparison.results(Path(folder))
    if not records:
        raise UserError(f"{folder}: no trial has ended yet")
    return records, comparison.compare_to
