"""Thousands of records are read and shown in time that grows as they do, and no faster."""

from __future__ import annotations

import cProfile
import dataclasses
import json
import pstats

from common.results import store
from common.results.tables.terminal import MANY
from common.results.timed import rows
from tests.unit.made_record import record


def calls(count: int, folder) -> int:
    """Limit of function calls to read this many records, make their table and print it."""
    folder.mkdir()
    base = record("ddp", 0.1, 2, batch_size=8)
    built = [
        dataclasses.replace(
            base,
            hash=str(i),
            trial={**base.trial, "batch_size": i // 2, "label": ("ddp", "dear")[i % 2]},
        )
        for i in range(count)
    ]
    lines = "".join(json.dumps(item.to_json()) + "\n" for item in built)
    (folder / "records.jsonl").write_text(lines)
    profile = cProfile.Profile()
    with profile:
        result = store.load(folder / "records.jsonl")
        rows.comparison(rows.make_rows(result, "ddp"), "ddp").print("many")
    return pstats.Stats(profile).total_calls


def test_twice_as_many_records_are_twice_the_work(tmp_path, capsys):
    few, many = (calls(count, tmp_path / str(count)) for count in (MANY + 50, 2 * MANY + 100))
    assert many < 2.2 * few
    assert capsys.readouterr().out.count("\n| mnist_cnn ") == 3 * MANY + 150


def test_a_small_table_is_drawn_and_a_large_one_is_markdown(capsys):
    result = rows.make_rows([record("ddp", 0.1, 2), record("dear", 0.1, 2)], "ddp")
    rows.comparison(result, "ddp").print("few")
    assert "| mnist_cnn |" not in capsys.readouterr().out
