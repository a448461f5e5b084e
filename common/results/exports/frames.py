"""Records as pandas DataFrames, for notebooks and other figures; imports no torch."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.results.learning import summary
from common.results.records import Record, is_learning
from common.results.store import Comparison
from common.results.timed import rows
from dear.errors import UserError


def frame(folder: str | Path) -> pd.DataFrame:
    """Returns a sweep with one row per trial, in the order of its experiment.

    The columns are those of `table.csv`, with the same units, typed (texts, integers, floats,
    booleans); missing values are `pd.NA`. Further columns are `id`, `hash`, `fabric`, `time_scale`,
    `started`, and `option_NAME` for each option of the algorithms. `folder` has the sweep's
    records, such as `logs/emulated-quick`. Raises `UserError` if the folder has no records."""
    records, compare_to = _read(folder)
    make = summary.make_rows if is_learning(records) else rows.make_rows
    lines = []
    for record, row in zip(records, make(records, compare_to), strict=True):
        facts = {
            "id": record.id,
            "hash": record.hash,
            "fabric": record.fabric.kind,
            "time_scale": record.fabric.time_scale,
            "started": pd.Timestamp(record.started) if record.started else pd.NaT,
        }
        options = {f"option_{key}": value for key, value in record.trial["options"].items()}
        lines.append({**vars(row), **facts, **options})
    return pd.DataFrame(lines).convert_dtypes()


def steps(folder: str | Path) -> pd.DataFrame:
    """Returns a sweep with one row per timed step. Training trials have no rows. The columns
    are `id`, `model`, `world_size`, `algorithm`, `repeat`, `block` (of steps timed together),
    `step` (from 0) and `step_s`. Raises `UserError` if the folder has no records."""
    records, _ = _read(folder)
    trials = [(r.id, r.trial["model"], r.trial["world_size"], r.label) for r in records]
    lines = [
        (*trial, repeat, block, step, seconds)
        for record, trial in zip(records, trials, strict=True)
        for repeat, blocks in enumerate(record.iters)
        for block, times in enumerate(blocks)
        for step, seconds in enumerate(times)
    ]
    columns = ["id", "model", "world_size", "algorithm", "repeat", "block", "step", "step_s"]
    return pd.DataFrame(lines, columns=columns).convert_dtypes()


def _read(folder: str | Path) -> tuple[list[Record], str]:
    comparison = Comparison.load(Path(folder))
    records = comparison.results(Path(folder))
    if not records:
        raise UserError(f"{folder}: no trial has ended yet")
    return records, comparison.compare_to
